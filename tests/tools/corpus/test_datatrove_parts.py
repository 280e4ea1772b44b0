"""Parts of a corpus that are damaged, missing or of another corpus are refused when they are
merged.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.corpora import texts_of, trained_tokenizer, write_jsonl
from tests.support.corpus_parts import flip_byte, make_parts
from tests.support.launched import forked_zero_tp
from zero_tp.base.errors import UserError
from zero_tp.data import PrepareSettings, prepare
from zero_tp.tools.corpus.datatrove import Document, TokenizedCorpus
from zero_tp.tools.corpus.parts import merge
from zero_tp.tools.corpus.tokenizer_training import train_bpe


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return trained_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda parts: shutil.rmtree(parts / "00001"), r"part 00001 of 3 tasks is missing"),
    "first missing": (
        lambda parts: shutil.rmtree(parts / "00000"),
        r"part 00000 of 3 tasks is missing",
    ),
    "renamed": (
        lambda parts: (parts / "00002").rename(parts / "00003"),
        r"/00003: it is part 2 of 3",
    ),
    "twice": (
        lambda parts: shutil.copytree(parts / "00002", parts / "2"),
        r"/2: it is part 2 of 3",
    ),
    "no manifest": (
        lambda parts: (parts / "00001/part.json").unlink(),
        r"/00001/part.json: no such file",
    ),
    "cut manifest": (
        lambda parts: cut(parts / "00001/part.json"),
        r"/00001/part.json: not valid JSON",
    ),
    "truncated": (
        lambda parts: cut(parts / "00001/blocks"),
        r"/00001/blocks has [\d,]+ bytes instead of",
    ),
    "one bit": (
        lambda parts: flip_byte(parts / "00002/blocks"),
        r"/00002/blocks has SHA-256 \w+… instead of",
    ),
    "length": (lambda parts: (parts / "00002/committed").write_text("1"), r"/00002/committed has"),
    "no tokenizer": (
        lambda parts: shutil.rmtree(parts / "00000/tokenizer"),
        r"/00000/tokenizer/\S+ is missing",
    ),
    "nothing": (
        lambda parts: list(map(shutil.rmtree, parts.iterdir())),
        "there are no parts of a corpus",
    ),
}


@pytest.fixture(scope="module")
def whole_parts(tmp_path_factory: pytest.TempPathFactory, tokenizer: str) -> Path:
    directory = tmp_path_factory.mktemp("whole")
    inputs = [
        write_jsonl(directory / f"{i}.jsonl", texts_of(random.Random(i), 20)) for i in range(3)
    ]
    return make_parts(list(inputs), directory / "parts", tokenizer, 3)


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_missing_or_damaged_part_is_refused_by_name(
    tmp_path: Path, whole_parts: Path, kind: str
) -> None:
    damage, message = DAMAGE[kind]
    parts = shutil.copytree(whole_parts, tmp_path / "parts")
    damage(parts)
    with pytest.raises(UserError, match=message) as raised:
        merge(parts, tmp_path / "out")
    assert "\n" not in str(raised.value) and not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*"))


FOREIGN: list[tuple[dict[str, Any], str]] = [
    ({"seed": 7}, "seed"),
    ({"sentences": "en", "min_tokens": 3}, "min_tokens, sentences"),
    ({"settings": {"inputs": "others"}}, "inputs"),
    ({"tasks": 4}, "number of tasks"),
    ({"tokenizer": "bpe:310"}, "tokenizer"),
]


@pytest.mark.parametrize(("options", "different"), FOREIGN)
def test_a_part_of_another_corpus_is_refused(
    tmp_path: Path, whole_parts: Path, tokenizer: str, options: dict[str, Any], different: str
) -> None:
    options, parts = dict(options), shutil.copytree(whole_parts, tmp_path / "parts")
    source = write_jsonl(tmp_path / "a.jsonl", texts_of(random.Random(1), 20))
    if (trained := options.pop("tokenizer", None)) is not None:
        tokenizer = str(
            prepare([source], tmp_path / "trained", PrepareSettings(trained)).output / "tokenizer"
        )
    others = make_parts(
        [source], tmp_path / "others", tokenizer, options.pop("tasks", 3), **options
    )
    shutil.rmtree(parts / "00001")
    shutil.copytree(others / "00001", parts / "00001")
    with pytest.raises(UserError, match=rf"/00001: made with another {different} than 00000"):
        merge(parts, tmp_path / "out")


def test_a_part_whose_tokenizer_gives_other_ids_is_refused(
    tmp_path: Path, whole_parts: Path
) -> None:
    """The hash of the files alone would not show that another version of transformers opened
    them.
    """
    parts = shutil.copytree(whole_parts, tmp_path / "parts")

    def record_others(number: str) -> None:
        manifest = json.loads((parts / number / "part.json").read_text())
        text = next(iter(manifest["tokenizer"]["probes"]))
        manifest["tokenizer"]["parts"]["model"], manifest["tokenizer"]["probes"][text] = (
            "0" * 64,
            "1 2 3",
        )
        (parts / number / "part.json").write_text(json.dumps(manifest))

    record_others("00001")
    expected = (
        r"the tokenizer of .*/00001 differs from that of 00000: .* is 3 tokens \(1 2 3\) with .*; "
        "remove this part"
    )
    with pytest.raises(UserError, match=expected):
        merge(parts, tmp_path / "out")
    record_others("00000")
    record_others("00002")
    with pytest.raises(
        UserError, match=r"the tokenizer in .*/00000 differs from the one of its documents: "
    ):
        merge(parts, tmp_path / "out")


def test_a_tokenizer_that_was_replaced_since_the_start_is_refused(
    tmp_path: Path, tokenizer: str
) -> None:
    directory = Path(shutil.copytree(tokenizer, tmp_path / "tokenizer"))
    step = TokenizedCorpus(directory, tmp_path / "parts")
    train_bpe(iter(["other words"] * 9), 280).save_pretrained(str(directory))
    with pytest.raises(
        UserError, match=r"^the tokenizer .*/tokenizer differs from the one with which the pipeline"
    ):
        step.run(iter([Document(text="some words", id="0")]), 0, 1)


def test_the_command(tmp_path: Path, whole_parts: Path) -> None:
    def prepared(*words: object) -> subprocess.CompletedProcess[str]:
        return forked_zero_tp(tmp_path, "prepare", "--output", "out", *map(str, words))

    assert "wrote" in prepared("--merge", whole_parts, "--validation-fraction", "0.1").stdout
    for words, message in (
        (
            (whole_parts, "--repair-unicode", "--seed", "3"),
            "the parts as they are: leave out --seed, --repair-unicode",
        ),
        (
            (tmp_path / "nothing",),
            "there are no parts of a corpus; launch/prepare_cluster.py makes them",
        ),
    ):
        refused = prepared("--merge", *words)
        assert (refused.returncode, refused.stdout) == (2, "") and message in refused.stderr
        assert refused.stderr.count("\n") == 1
