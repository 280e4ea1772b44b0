"""Wrong answers, damaged and foreign files: one line each, and nothing is written."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.support.corpora import trained_tokenizer
from tests.support.launched import script
from tests.support.tiny_models import write_corpus
from tests.support.token_files import (
    import_tokens,
    join_after,
    join_before,
    write_datatrove,
    write_flat,
    write_litdata,
    write_llm_c,
    write_mds,
    write_rows,
)
from tests.tiers import THOROUGH
from zero_tp.base.errors import UserError
from zero_tp.data import PrepareSettings
from zero_tp.tools.corpus.tokens.show import show_token_files

EOS = 256
DOCUMENTS = [[number + 10, number + 11, 300 + number] for number in range(60)]
RAW: dict[str, Any] = {"format": "raw", "token_type": "uint16", "eos_id": EOS}
AFTER, BEFORE = RAW | {"eos_position": "after"}, RAW | {"eos_position": "before"}


def refusal(tmp_path: Path, path: Path, **settings: Any) -> str:
    """The message, which is one line; there is no output and no progress."""
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError) as caught:
        import_tokens([path], tmp_path / "out", **settings)
    assert sorted(tmp_path.rglob("*")) == before and "\n" not in str(caught.value)
    return str(caught.value)


ANSWERS: list[tuple[str, dict[str, Any], str]] = [
    ("<u2", AFTER | {"token_type": None}, "does not say the type of a token: give --token-type"),
    ("<u2", RAW, "does not say where documents end: give --eos-position before or after"),
    (
        "<u2",
        AFTER | {"eos_id": None},
        "does not say the end-of-text token: give --eos-id, or --tok",
    ),
    ("<u2", AFTER | {"token_type": "uint32"}, "no end-of-text token 256 in all 120 tokens"),
    (
        "<u4",
        AFTER,
        r"every second token is below 8, as if each were half of a wider one: as uint16",
    ),
    ("<u2", AFTER | {"token_type": "uint8"}, "the end-of-text token 256 is no uint8"),
    ("<i8", AFTER | {"token_type": "int32"}, "every second token is below 8"),
    ("<u2", BEFORE, "the last token is end-of-text, 256, and .*: give --eos-position after"),
    ("<u2", AFTER | {"eos_id": 299}, "no end-of-text token 299 in all 240 tokens: as uint16"),
    ("<u2", AFTER | {"max_document_tokens": 2}, "a document of 3 tokens, and --max-document-tok"),
    (
        "<u2",
        AFTER | {"vocab_size": 301},
        "token id 359 lies outside the vocabulary of 301: as uint",
    ),
    ("<u2", AFTER | {"vocab_size": 200}, "the end-of-text token 256 lies outside the vocabulary"),
    ("<u2", AFTER | {"deduplicate": "near"}, "--deduplicate near: exact; near duplicates are fou"),
    ("<u2", AFTER | {"tokenizer": "bpe:300"}, "--tokenizer bpe:300: token files have one already"),
    ("<u2", AFTER | {"text_key": "a"}, "--text-key is for texts: leave it out, because --format"),
    ("<u2", AFTER | {"eos": "</s>"}, "--eos </s>: a token's text; without --tokenizer give --eos"),
    ("<u2", AFTER | {"eos_id": -1}, "--eos-id -1: at least 0"),
    ("<u2", AFTER | {"format": "nano"}, "--format nano: one of raw, olmo-core,"),
    ("<u2", {"token_type": "uint16"}, "tokenizer: give one, because texts have none"),
]


@pytest.mark.parametrize(("dtype", "settings", "message"), ANSWERS)
def test_a_wrong_answer_shows_at_once(
    tmp_path: Path, dtype: str, settings: dict[str, Any], message: str
) -> None:
    path = write_flat(tmp_path / "a.bin", join_after(DOCUMENTS, EOS), dtype)
    assert re.search(message, refusal(tmp_path, path, **settings))


def test_the_eos_is_first(tmp_path: Path) -> None:
    path = write_flat(tmp_path / "a.bin", join_before(DOCUMENTS, EOS))
    assert "it stands before documents: give --eos-position before" in refusal(
        tmp_path, path, **AFTER
    )


def test_the_line_has_the_text_of_both_types(tmp_path: Path) -> None:
    """The right text is one of them."""
    from transformers import AutoTokenizer

    tokenizer = trained_tokenizer(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    ids = loaded.encode("word1 word2 word3")
    path = write_flat(tmp_path / "a.bin", join_after([ids] * 20, loaded.eos_token_id))
    settings = AFTER | {"token_type": "uint32", "eos_id": None, "tokenizer": tokenizer}
    text = refusal(tmp_path, path, **settings)
    assert "no end-of-text token 0 in all 70 tokens: as uint32 the first tokens are " in text
    assert 'ids that the tokenizer lacks; as uint16 they are "word1 word2 word3' in text
    line = refusal(tmp_path, path, **settings | {"tokenizer": None, "eos_id": 0})
    assert f"as uint16 they are {' '.join(map(str, ids))} 0 " in line and "the largest id" in line


def test_a_packed_row_is_no_document(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [[1, 2], [3, EOS, 4], [5]])
    message = refusal(tmp_path, path, format="ids", eos_id=EOS)
    assert message.startswith(f"{path}:2: the end-of-text token 256 stands inside, so it holds")
    assert "--eos-position before or after: the first tokens are 1 2 3 256 4 5" in message


def test_a_long_document_may_be_allowed(tmp_path: Path) -> None:
    stream = join_after([[1] * 1_000_001, [2], [3]], EOS)
    path = write_flat(tmp_path / "a.bin", stream)
    assert "a document of 1,000,001 tokens" in refusal(tmp_path, path, **AFTER)
    allowed = AFTER | {"max_document_tokens": 1_000_001}
    assert import_tokens([path], tmp_path / "out", **allowed).report["documents"]["kept"] == 3


def cut(path: Path, count: int) -> Path:
    path.write_bytes(path.read_bytes()[:-count])
    return path


def edit_json(path: Path, edit: Callable[[Any], object]) -> None:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def flipped(path: Path, offset: int) -> Path:
    data = bytearray(path.read_bytes())
    data[offset] ^= 255
    path.write_bytes(data)
    return path


def numpy_file(path: Path, values: Any) -> Path:
    np.save(path.with_suffix(".npy"), values)
    return path.with_suffix(".npy")


def foreign(path: Path) -> Path:
    path.write_bytes(random.Random(1).randbytes(5001))
    return path


def litdata(path: Path, **config: Any) -> Path:
    return write_litdata(path, DOCUMENTS, **config)


def changed_mds(path: Path, edit: Callable[[Any], object]) -> Path:
    edit_json(write_mds(path, DOCUMENTS) / "index.json", edit)
    return path


def changed_litdata(path: Path, data_format: Any) -> Path:
    folder = litdata(path)
    edit_json(folder / "index.json", lambda index: index["config"].update(data_format=data_format))
    return folder


DAMAGE: list[tuple[str, Callable[[Path], Path], str]] = [
    ("raw", lambda p: cut(write_flat(p, range(9)), 1), "17 bytes are no whole number of uint16"),
    ("raw", lambda p: numpy_file(p, np.zeros(4)), r"a \.npy file of <f8; integers are needed"),
    (
        "raw",
        lambda p: numpy_file(p, np.zeros(4, "<i4")),
        "its own header says int32: leave the opt",
    ),
    ("raw", lambda p: cut(numpy_file(p, np.zeros(40, "<u2")), 3), r"a damaged \.npy file"),
    ("raw", lambda p: p, "no such file"),
    ("llm.c", foreign, "not a shard of llm.c: it begins with"),
    ("llm.c", lambda p: cut(write_llm_c(p, [1] * 9), 2), "counts 9 tokens, and 8 are there"),
    ("llm.c", lambda p: write_flat(p, [20240522, 1, 5], "<i4"), "an evaluation set of llm.c"),
    ("llm.c", lambda p: write_flat(p, [20240520, 1, 5], "<i4"), "not a shard of llm.c"),
    ("datatrove", foreign, r"a\.index is missing beside it"),
    ("datatrove", lambda p: cut(write_datatrove(p, DOCUMENTS), 2), "one of the two is damaged"),
    (
        "datatrove",
        lambda p: flipped(write_datatrove(p, DOCUMENTS).with_name("a.index"), 6).with_name("a"),
        "the ends of its documents don't rise",
    ),
    ("megatron", foreign, r"a\.idx: no such file"),
    (
        "megatron",
        lambda p: flipped(write_corpus(p, DOCUMENTS, 400).with_suffix(".idx"), 40),
        "don't follow each other without gaps",
    ),
    ("litdata", foreign, "not an index of litdata"),
    ("litdata", lambda p: changed_litdata(p, None), "its data_format is null"),
    ("litdata", lambda p: changed_litdata(p, [1]), "its samples are 1: one 1-dimensional"),
    ("litdata", lambda p: litdata(p, form="tensor"), "its samples are tensor: one 1-dimensional"),
    ("litdata", lambda p: litdata(p, encryption={"a": 1}), "encrypted, or compressed with None"),
    ("litdata", lambda p: litdata(p, form="no_header_tensor:2"), "one 1-dimensional array of inte"),
    (
        "litdata",
        lambda p: cut(litdata(p) / "chunk-0-0.bin", 2).parent,
        r"chunk-0-0\.bin: damaged: its samples don't end at",
    ),
    (
        "litdata",
        lambda p: cut(litdata(p, compression="zstd") / "chunk-0-0.zstd.bin", 9).parent,
        r"chunk-0-0\.zstd\.bin: damaged",
    ),
    ("mds", lambda p: litdata(p), "not an index of MosaicML's streaming: no"),
    (
        "mds",
        lambda p: write_mds(p, DOCUMENTS, "pkl"),
        r"no column has lists of token ids; .*\(pkl\)",
    ),
    ("mds", lambda p: write_mds(p, DOCUMENTS, "bytes"), "does not say the type of a token"),
    ("mds", lambda p: write_mds(p, DOCUMENTS, "ndarray:float32"), "holds no integers"),
    (
        "mds",
        lambda p: changed_mds(
            p,
            lambda index: index["shards"][0].update(
                column_encodings=["ndarray:foo" for _ in index["shards"][0]["column_names"]]
            ),
        ),
        "streaming: data type 'foo' not understood",
    ),
    (
        "mds",
        lambda p: changed_mds(p, lambda index: index["shards"][0]["column_names"].append("a")),
        "not an index of MosaicML's streaming: zip",
    ),
    ("mds", lambda p: cut(write_mds(p, DOCUMENTS) / "shard.00000.mds", 1).parent, "it is damaged"),
    (
        "mds",
        lambda p: flipped(write_mds(p, DOCUMENTS) / "shard.00000.mds", 0).parent,
        r"shard\.00000\.mds: damaged \(",
    ),
    (
        "mds",
        lambda p: changed_mds(p, lambda index: index["shards"][0]["raw_data"].update(basename="b")),
        "its file b is missing",
    ),
    (
        "mds",
        lambda p: changed_mds(
            p,
            lambda index: (
                index["shards"][0].update(zip_data={}, compression="br")
                or index["shards"][0]["raw_data"].update(basename="b")
            ),
        ),
        "compressed with br, which can't be read here",
    ),
    ("ids", foreign, "unknown kind of file"),
    ("ids", lambda p: foreign(p.with_suffix(".parquet")), "not a whole parquet file"),
    ("ids", lambda p: foreign(p.with_suffix(".arrow")), "not a whole arrow file"),
    (
        "ids",
        lambda p: write_rows(p.with_suffix(".parquet"), DOCUMENTS, pa.list_(pa.float32())),
        r"no column has lists .*; the columns are input_ids \(list<.*float>\), number \(int64\)",
    ),
    (
        "ids",
        lambda p: write_rows(p.with_suffix(".jsonl"), DOCUMENTS, key="text"),
        "does not say the end-of-text token",
    ),
]


@pytest.mark.parametrize(("form", "write", "message"), DAMAGE)
def test_damaged_and_foreign_files(
    tmp_path: Path, form: str, write: Callable[[Path], Path], message: str
) -> None:
    settings: dict[str, Any] = {"format": form, "eos_id": None if "end-of" in message else EOS}
    if form == "raw":
        settings = AFTER
    path = write(tmp_path / "a")
    assert re.search(message, refusal(tmp_path, path, **settings))


def test_damage_is_shown_like_any_wrong_answer(tmp_path: Path) -> None:
    path = write_flat(tmp_path / "a.bin", join_after(DOCUMENTS, EOS), "<u4")
    settings = PrepareSettings(None, **AFTER)
    with pytest.raises(UserError, match="every second token is below 8"):
        list(show_token_files(path, settings, 3))
    path = write_flat(tmp_path / "b.bin", join_after(DOCUMENTS, EOS))
    assert list(show_token_files(path, settings, 2)) == [
        f"--- {path}:1: 3 tokens",
        "10 11 300",
        f"--- {path}:5: 3 tokens",
        "11 12 301",
    ]


@THOROUGH
def test_nothing_is_left(tmp_path: Path) -> None:
    path = write_flat(tmp_path / "a.bin", [5, 6, EOS, 7, EOS])
    with pytest.raises(UserError, match=r"no text in .*a\.bin \(dropped: 2 short\)$"):
        import_tokens([path], tmp_path / "out", **AFTER, min_tokens=9)
    empty = write_flat(tmp_path / "empty.bin", [])
    with pytest.raises(UserError, match=r"no documents in .*empty\.bin$"):
        list(show_token_files(empty, PrepareSettings(None, 1, **AFTER), 2))


def test_a_cluster_refuses_token_files(tmp_path: Path) -> None:
    words = ["--input", "a", "--tokenizer", "t", "--output", "o", "--tasks", "1", "--format", "raw"]
    done = script("launch/prepare_cluster.py", tmp_path, *words)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "--format: raw: datatrove has no reader of tokens: zero-tp prepare" in done.stderr
