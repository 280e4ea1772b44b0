"""Preparing a corpus: the split, the files, and every way in which the input can be wrong."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from tests.support.corpora import TEXTS, held_out, run, write_jsonl
from zero_tp.data import PrepareSettings, prepare
from zero_tp.data.documents import read_documents
from zero_tp.data.indexed import IndexedCorpus
from zero_tp.errors import UserError

ROOT = Path(__file__).parents[2]


def test_output(tmp_path: Path) -> None:
    prepared = run(tmp_path)
    output, report = prepared.output, prepared.report
    assert report == json.loads((output / "report.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(str(output / "tokenizer"))
    assert tokenizer.eos_token == tokenizer.bos_token == "<|endoftext|>"
    assert len(tokenizer) == report["vocabulary_size"] == 300

    validation = held_out(output)
    train = [text for text in TEXTS if text not in validation]
    assert (len(train), len(validation)) == (36, 4)
    for split, texts in (("train", train), ("validation", validation)):
        corpus = IndexedCorpus(output / split)
        assert len(corpus) == report["splits"][split]["documents"] == len(texts)
        assert corpus.tokens == report["splits"][split]["tokens"]
        assert report["splits"][split]["characters"] == sum(map(len, texts))
        assert report["splits"][split]["bytes"] == sum(len(text.encode()) for text in texts)
        for i, text in enumerate(texts):
            ids = corpus.document(i)
            assert ids[-1] == tokenizer.eos_token_id
            # The text spells the special token, which stays text: one eos a document.
            assert (ids == tokenizer.eos_token_id).sum() == 1
            assert tokenizer.decode(ids[:-1]) == text
            assert tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True) == ids[:-1].tolist()
    # Nothing is left beside the output.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.jsonl"]


def test_unigram_figures(tmp_path: Path) -> None:
    prepared = run(tmp_path)
    size = prepared.report["vocabulary_size"]
    train, validation = (
        np.bincount(
            IndexedCorpus(prepared.output / split).read(0, prepared.report["splits"][split]["tokens"]), None, size
        )
        for split in ("train", "validation")
    )
    p = train / train.sum()
    entropy = -sum(x * np.log(x) for x in p if x > 0)
    q = (train + 1) / (train + 1).sum()
    cross = -sum(n * np.log(x) for n, x in zip(validation, q, strict=True)) / validation.sum()
    assert prepared.report["unigram"]["train_entropy"] == pytest.approx(entropy, rel=1e-12)
    assert prepared.report["unigram"]["validation_cross_entropy"] == pytest.approx(cross, rel=1e-12)


def test_split_does_not_depend_on_order_and_keeps_copies_together(tmp_path: Path) -> None:
    forward, backward = run(tmp_path, "a"), run(tmp_path, "b", texts=TEXTS[::-1])
    assert sorted(held_out(forward.output)) == sorted(held_out(backward.output))
    other = run(tmp_path, "c", seed=5)
    assert sorted(held_out(other.output)) != sorted(held_out(forward.output))
    copies = run(tmp_path, "d", texts=TEXTS + TEXTS)
    out = held_out(copies.output)
    assert all(out.count(text) == 2 for text in out)
    assert len(held_out(run(tmp_path, "e", validation=7).output)) == 7


def test_kinds_of_input_agree(tmp_path: Path) -> None:
    plain = run(tmp_path, "plain", texts=[*TEXTS, "   "])
    zipped = write_jsonl(tmp_path / "z.jsonl.gz", TEXTS, key="body")
    settings = PrepareSettings("bpe:300", 0.1, text_key="body")
    assert prepare([zipped], tmp_path / "zipped", settings).report["splits"] == plain.report["splits"]
    files = []
    for i, text in enumerate(TEXTS):
        files.append(tmp_path / f"{i}.txt")
        files[-1].write_text(text, encoding="utf-8")
    texts = prepare(files, tmp_path / "texts", PrepareSettings("bpe:300", 0.1))
    assert texts.report["splits"] == plain.report["splits"]
    assert (texts.output / "train.bin").read_bytes() == (plain.output / "train.bin").read_bytes()


def test_reuse_overwrite_and_refusal(tmp_path: Path) -> None:
    first = run(tmp_path)
    stamp = (first.output / "train.bin").stat().st_mtime_ns
    again = run(tmp_path)
    assert again.reused and not first.reused
    assert again.report == first.report
    assert (first.output / "train.bin").stat().st_mtime_ns == stamp
    with pytest.raises(UserError, match=r"out was made with another seed: choose another --output, .*--overwrite"):
        run(tmp_path, seed=9)
    source = tmp_path / "out.jsonl"
    (first.output / "notes.md").write_text("mine")
    (first.output / "plots").mkdir()
    (first.output / "plots" / "lengths.png").touch()
    replaced = prepare([source], first.output, PrepareSettings("bpe:300", 0.1, 9), overwrite=True)
    assert not replaced.reused
    assert (first.output / "notes.md").read_text() == "mine" and (first.output / "plots" / "lengths.png").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.jsonl"]
    (first.output / "train.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"train\.bin has 0 bytes instead of .*--overwrite"):
        prepare([source], first.output, PrepareSettings("bpe:300", 0.1, 9))


def test_a_directory_of_someone_elses_is_never_replaced(tmp_path: Path) -> None:
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "chapter1.tex").write_text("years of work")
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    with pytest.raises(UserError, match="not the output of this command"):
        prepare([source], other, PrepareSettings("bpe:300"), overwrite=True)
    assert (other / "chapter1.tex").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', r"a\.jsonl:2: not valid JSON"),
        (
            "a.jsonl",
            b'{"text": "a"}\n\n{"body": "b", "id": 1}\n',
            r"a\.jsonl:3: no key 'text'.*'body', 'id'.*--text-key",
        ),
        ("a.jsonl", b'{"text": 3}\n', r"a\.jsonl:1: 'text' must be a string, found an integer"),
        ("a.jsonl", b'["text"]\n', r"a\.jsonl:1: a JSON object is needed, found an array"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', r"a\.jsonl:1: unpaired surrogate"),
        ("a.jsonl", b'{"text": "\xff"}\n', r"a\.jsonl:1: not UTF-8 at byte 10"),
        ("a.jsonl", b'{"text": "  "}\n', r"no text in .*a\.jsonl \(1 dropped, the first: .*a\.jsonl:1: an empty doc"),
        ("a.jsonl", b"", "no text in"),
        ("a.jsonl", b'{"text": "only one"}\n', "hold 1 document"),
        ("a.jsonl", b'{"text": "twin"}\n{"text": "twin"}\n', "copies"),
        ("a.txt", b"one file, one document", "hold 1 document"),
        ("a.jsonl.gz", b"plain", "not a whole .gz file"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 99)[:-9], "not a whole .gz file"),
        ("a.csv", b"text\n", "no text in"),
        ("a.doc", b"text\n", "unknown kind of file"),
    ],
)
def test_bad_input(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        prepare([path], tmp_path / "out", PrepareSettings("bpe:300"), strict="empty" not in message)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokenizer": "bpe:256"}, "at least 257 and"),
        ({"tokenizer": "bpe:many"}, "neither a directory nor bpe:SIZE"),
        ({"tokenizer": "wordpiece"}, "neither a directory nor bpe:SIZE"),
        ({"tokenizer": "wordpiece:5"}, "at least 6 and"),
        ({"tokenizer": "wordpiece:40"}, r"tokenizer wordpiece:40: the corpus' characters alone are \d+ tokens"),
        ({"sentences": "English"}, "sentences 'English': the ISO 639 code"),
        ({"tokenizer": str(ROOT / "zero_tp")}, "holds neither tokenizer.json"),
        ({"validation": 0}, "validation 0: a fraction"),
        ({"validation": 1.5}, "validation 1.5"),
        ({"validation": 40}, "leaves none to train on"),
        ({"seed": -1}, "seed -1"),
    ],
)
def test_bad_settings(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(tmp_path, **settings)
    assert not (tmp_path / "out").exists()


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "launch/prepare_data.py", *map(str, arguments)],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )


def test_the_command(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    arguments = ["--input", source, "--tokenizer", "bpe:300", "--output", tmp_path / "out"]
    first = command(*arguments)
    assert (first.returncode, first.stderr) == (0, "")
    assert "39 documents" in first.stdout and "1 documents" in first.stdout
    wrong = command(*arguments, "--seed", "1")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("error: ") and wrong.stderr.count("\n") == 1
    unknown = command(*arguments, "--sede", "1")
    assert unknown.returncode == 2
    assert "--sede" in unknown.stderr and unknown.stderr.count("\n") == 1


def test_the_shipped_corpus() -> None:
    texts = list(read_documents(ROOT / "launch/corpus/sotu.jsonl.gz"))
    assert (len(texts), sum(map(len, texts))) == (233, 10_760_041)


def test_a_changed_byte_is_no_output_that_is_up_to_date(tmp_path: Path) -> None:
    first = run(tmp_path)
    for name in ("train.bin", "validation.idx", "validation.jsonl", "tokenizer/tokenizer.json"):
        path = first.output / name
        content = path.read_bytes()
        path.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
        with pytest.raises(UserError, match=rf"{name} has SHA-256 \w+… instead of \w+…: make .* --overwrite"):
            run(tmp_path)
        path.write_bytes(content)
    assert run(tmp_path).reused, "restored, with other times"


@pytest.mark.parametrize(
    "damage",
    [
        {"files": {}},
        {"files": []},
        {"files": {"../out.jsonl": 5}},
        {"files": {"train.bin": 5}},
        {"files": {"train.bin": {"bytes": 1}}},
        {"identity": [1]},
        {"splits": {"train": None}},
        {"unigram": {"train_entropy": "much"}},
        {"vocabulary_size": None},
    ],
)
def test_an_odd_report_is_one_line(tmp_path: Path, damage: dict[str, Any]) -> None:
    first = run(tmp_path)
    report = json.loads((first.output / "report.json").read_text())
    (first.output / "report.json").write_text(json.dumps(report | damage))
    with pytest.raises(UserError, match=r"report\.json|out\.jsonl"):
        run(tmp_path)
    source, settings = tmp_path / "out.jsonl", PrepareSettings("bpe:300", 0.1)
    assert prepare([source], first.output, settings, overwrite=True).report["files"] == report["files"]


def test_what_is_no_file_is_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    for path, problem in (
        (tmp_path / "a.jsonl", "is not a regular file"),
        (Path("/dev/null"), "is not a regular file"),
        (tmp_path / ("a" * 300 + ".txt"), "File name too long"),
        (Path("a\0.txt"), "embedded null byte"),
    ):
        with pytest.raises(UserError, match=problem):
            prepare([path], tmp_path / "out", PrepareSettings("bpe:300"))
    source = write_jsonl(tmp_path / "b.jsonl", TEXTS)
    with pytest.raises(UserError, match="File name too long"):
        prepare([source], tmp_path / ("o" * 300), PrepareSettings("bpe:300"))
    for tokenizer in ("t" * 300, "bpe:" + "9" * 5000):
        with pytest.raises(UserError, match=r"^tokenizer "):
            prepare([source], tmp_path / "out", PrepareSettings(tokenizer))
    assert not prepare([source], tmp_path / ("o" * 250), PrepareSettings("bpe:300")).reused
    assert {path.name[:3] for path in tmp_path.iterdir()} == {"a.j", "b.j", "ooo"}
