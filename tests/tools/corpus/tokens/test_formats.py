"""Token files of each format, written by hand: the corpus is that of the same documents."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.support.tiny_models import write_corpus
from tests.support.token_files import (
    Documents,
    corpus_sha256,
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
from tests.tiers import in_tiers
from zero_tp.data.indexed import IndexedCorpus
from zero_tp.tools.corpus.tokens import cutting, files

EOS = 256
SETTINGS: dict[str, Any] = {"eos_id": EOS, "vocab_size": 70_000}


def draw_documents(chance: random.Random, count: int, largest: int = 60_000) -> Documents:
    """No token is the eos; lengths from 1 to 600; the type's largest id is among them."""
    lengths = chance.choices((1, 2, 7, 40, 255, 256, 600), k=count)
    drawn = [[chance.randrange(largest) for _ in range(length)] for length in lengths]
    drawn = [[token if token != EOS else 1 for token in document] for document in drawn]
    return [*drawn, [65_535 if largest > 2**15 else largest]]


def with_eos(documents: Documents) -> list[list[int]]:
    return [[*document, EOS] for document in documents]


def megatron(path: Path, documents: Documents) -> Path:
    return write_corpus(path, documents, 70_000)


def numpy_file(path: Path, documents: Documents) -> Path:
    np.save(path.with_suffix(".npy"), np.array(join_after(documents, EOS), np.int64))
    return path.with_suffix(".npy")


RAW: dict[str, Any] = {"format": "raw", "token_type": "uint16"}
CASES: dict[str, tuple[Callable[[Path, Documents], Path], dict[str, Any]]] = {
    "raw, after": (
        lambda path, documents: write_flat(path, join_after(documents, EOS)),
        RAW | {"eos_position": "after"},
    ),
    "raw, before": (
        lambda path, documents: write_flat(path, join_before(documents, EOS), "<u4"),
        {"format": "raw", "token_type": "uint32", "eos_position": "before"},
    ),
    "raw, no token after the last": (
        lambda path, documents: write_flat(path, join_before(documents, EOS), "<i8"),
        {"format": "raw", "token_type": "int64", "eos_position": "before"},
    ),
    "olmo-core": (
        lambda path, documents: write_flat(path, join_after(documents, EOS)),
        {"format": "olmo-core", "token_type": "uint16"},
    ),
    "a real .npy": (numpy_file, {"format": "olmo-core"}),
    "llm.c": (
        lambda path, documents: write_llm_c(path, join_before(documents, EOS)),
        {"format": "llm.c"},
    ),
    "llm.c of Llama 3": (
        lambda path, documents: write_llm_c(path, join_before(documents, EOS), llama=True),
        {"format": "llm.c"},
    ),
    "datatrove": (
        lambda path, documents: write_datatrove(path, with_eos(documents)),
        {"format": "datatrove"},
    ),
    "datatrove without eos": (
        lambda path, documents: write_datatrove(path, documents, "<u4"),
        {"format": "datatrove"},
    ),
    "megatron": (megatron, {"format": "megatron"}),
    "megatron with eos": (
        lambda path, documents: megatron(path, with_eos(documents)),
        {"format": "megatron"},
    ),
    "litdata": (
        lambda path, documents: write_litdata(path, with_eos(documents)),
        {"format": "litdata"},
    ),
    "litdata of NumPy": (
        lambda path, documents: write_litdata(path, documents, "<u2", "no_header_numpy:5"),
        {"format": "litdata"},
    ),
    "litdata with sizes": (
        lambda path, documents: write_litdata(
            path, documents, "<i8", "no_header_tensor:18", item_loader="PyTreeLoader"
        ),
        {"format": "litdata"},
    ),
    "litdata, compressed": (
        lambda path, documents: write_litdata(path, documents, compression="zstd:4"),
        {"format": "litdata"},
    ),
    "litdata, packed": (
        lambda path, documents: write_litdata(path, packed(documents)),
        {"format": "litdata", "eos_position": "after"},
    ),
    "mds": (write_mds, {"format": "mds"}),
    "mds, compressed": (
        lambda path, documents: write_mds(path, documents, "ndarray", "zstd:7"),
        {"format": "mds"},
    ),
    "mds of bytes": (
        lambda path, documents: write_mds(path, documents, "bytes"),
        {"format": "mds", "token_type": "uint16", "ids_key": "tokens"},
    ),
    "mds of int32": (
        lambda path, documents: write_mds(path, with_eos(documents), "ndarray:int32"),
        {"format": "mds"},
    ),
    "ids in Parquet": (
        lambda path, documents: write_rows(path.with_suffix(".parquet"), documents),
        {"format": "ids"},
    ),
    "ids in Arrow": (
        lambda path, documents: write_rows(
            path.with_suffix(".arrow"), with_eos(documents), pa.large_list(pa.uint16()), "ids"
        ),
        {"format": "ids"},
    ),
    "ids in JSON lines, eos first": (
        lambda path, documents: write_rows(
            path.with_suffix(".jsonl"), [[EOS, *document] for document in documents]
        ),
        {"format": "ids"},
    ),
    "ids, packed": (
        lambda path, documents: write_rows(path.with_suffix(".parquet"), packed(documents)),
        {"format": "ids", "eos_position": "after"},
    ),
}


FIRST = (
    *("raw, after", "raw, before", "a real .npy", "llm.c", "datatrove without eos", "megatron"),
    *("litdata", "mds, compressed", "ids in Arrow", "ids, packed"),
)


def packed(documents: Documents) -> Documents:
    """Rows of 100 tokens; a tail below that is kept."""
    stream = join_after(documents, EOS)
    return [stream[start : start + 100] for start in range(0, len(stream), 100)]


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch, chance: random.Random) -> None:
    monkeypatch.setattr(files, "WINDOW", chance.choice((500, 5000, 2**22)))
    monkeypatch.setattr(cutting, "_SEARCHED", chance.choice((1, 33, 2**16)))


@pytest.fixture
def chance(seed: int) -> random.Random:
    return random.Random(seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", in_tiers(list(CASES), FIRST))
def test_a_corpus_has_the_documents(tmp_path: Path, chance: random.Random, name: str) -> None:
    """In their order, eos last and once, whatever the windows; the split is that of raw files."""
    write, settings = CASES[name]
    documents = draw_documents(chance, 150)
    path = write(tmp_path / "input", documents)
    report = import_tokens([path], tmp_path / "out", **SETTINGS | settings).report
    counts = report["documents"]
    assert (counts["read"], counts["kept"], counts["dropped"]) == (151, 151, {})
    splits = [IndexedCorpus(tmp_path / "out" / name) for name in ("train", "validation")]
    read = [[split.document(i).tolist() for i in range(len(split))] for split in splits]
    expected = with_eos(documents)
    assert read[0] == [document for document in expected if document in read[0]]
    assert len(read[1]) == 15 and sorted(read[0] + read[1]) == sorted(expected)
    raw = write_flat(tmp_path / "raw", join_after(documents, EOS))
    import_tokens([raw], tmp_path / "raw out", **SETTINGS | RAW | {"eos_position": "after"})
    assert corpus_sha256(tmp_path / "out") == corpus_sha256(tmp_path / "raw out")


@pytest.mark.slow
@pytest.mark.parametrize("position", ["before", "after"])
def test_shards_may_cut_documents(tmp_path: Path, chance: random.Random, position: str) -> None:
    """Anywhere: some shards hold a part of a document, some begin or end with the eos."""
    documents = draw_documents(chance, 60)
    stream = (join_before if position == "before" else join_after)(documents, EOS)
    cuts = sorted(chance.sample(range(1, len(stream)), 30))
    shards = [
        write_flat(tmp_path / f"{number:02}.bin", stream[start:stop])
        for number, (start, stop) in enumerate(zip([0, *cuts], [*cuts, len(stream)], strict=True))
    ]
    settings = SETTINGS | RAW | {"eos_position": position}
    parts = import_tokens(shards, tmp_path / "parts", **settings)
    globbed = import_tokens([tmp_path / "*.bin"], tmp_path / "glob", **settings)
    import_tokens([write_flat(tmp_path / "one", stream)], tmp_path / "whole", **settings)
    assert parts.report["documents"]["kept"] == 61
    assert corpus_sha256(parts.output) == corpus_sha256(tmp_path / "whole")
    assert corpus_sha256(globbed.output) == corpus_sha256(tmp_path / "whole")


@pytest.mark.parametrize("position", ["before", "after"])
def test_empty_documents_are_counted_and_halves_dropped(tmp_path: Path, position: str) -> None:
    """What comes before the first or after the last eos has its other half elsewhere."""
    stream = {"before": [9, 8, EOS, 1, EOS, EOS, 2, 3], "after": [1, EOS, EOS, 2, 3, EOS, 9, 8]}
    path = write_flat(tmp_path / "a.bin", stream[position])
    settings = SETTINGS | RAW | {"eos_position": position, "validation": 1}
    counts = import_tokens([path], tmp_path / "out", **settings).report["documents"]
    assert (counts["read"], counts["kept"]) == (4, 2)
    assert counts["dropped"] == {"cut": 1, "empty": 1}
    where = {problem["reason"]: problem["where"] for problem in counts["problems"]}
    assert where["cut"] == f"{path}:{1 if position == 'before' else 7}"
    read = [IndexedCorpus(tmp_path / "out" / name) for name in ("train", "validation")]
    assert sorted(split.document(0).tolist() for split in read) == [[1, EOS], [2, 3, EOS]]


def test_rows_without_ids_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"input_ids": [1, 2]}\n{"input_ids": "1"}\n{"input_ids": [3]}\n[4]\n'
        '{"input_ids": [true]}\n{"input_ids": []}\n'
    )
    table = pa.table({"ids": pa.array([[1, 2], None, [3], []], pa.list_(pa.uint8()))})
    with (
        pa.OSFile(str(tmp_path / "b.arrow"), "wb") as file,
        pa.ipc.new_file(file, table.schema) as writer,
    ):
        writer.write_table(table)
    for name, dropped in (
        ("a.jsonl", {"empty": 1, "malformed": 1, "no token ids": 2}),
        ("b.arrow", {"empty": 1, "no token ids": 1}),
    ):
        settings = SETTINGS | {"format": "ids", "validation": 1}
        report = import_tokens([tmp_path / name], tmp_path / f"{name} out", **settings).report
        assert report["documents"]["dropped"] == dropped and report["documents"]["kept"] == 2


def test_sentences_of_megatron_are_kept(tmp_path: Path) -> None:
    from zero_tp.data.indexed_writer import IndexedWriter

    with IndexedWriter(tmp_path / "in", 300) as writer:
        writer.add_documents([1, 2, 3, 4, EOS, 5], [5, 1], [1, 0, 1, 0, 0, 1])
        writer.add_documents([6, 7], [2], [True, True])
    settings = {**SETTINGS, "format": "megatron", "validation": 1}
    import_tokens([tmp_path / "in"], tmp_path / "out", **settings)
    sentences = {}
    for name in ("train", "validation"):
        corpus = IndexedCorpus(tmp_path / "out" / name)
        for number in range(len(corpus)):
            start, length = corpus.extent(number)
            begins = corpus.sequence_starts(start, length).tolist()
            sentences[tuple(corpus.document(number).tolist())] = begins
    assert sentences == {(1, 2, 3, 4, EOS): [0, 2], (5, EOS): [0], (6, 7, EOS): [0, 1]}


def test_another_eos_becomes_the_tokenizers(tmp_path: Path) -> None:
    """The file's end-of-text token is not the one that our documents end with."""
    from tests.support.corpora import trained_tokenizer

    tokenizer = trained_tokenizer(tmp_path)
    path = write_flat(tmp_path / "a.bin", [7, 1, 2, 7, 3])
    settings = RAW | {"eos_position": "before", "eos_id": 7, "validation": 1}
    report = import_tokens([path], tmp_path / "out", tokenizer=tokenizer, **settings).report
    assert report["end_of_document"] == "<|endoftext|>" and report["vocabulary_size"] == 300
    read = [IndexedCorpus(tmp_path / "out" / name) for name in ("train", "validation")]
    assert sorted(split.document(0).tolist() for split in read) == [[1, 2, 0], [3, 0]]
    assert (tmp_path / "out/tokenizer/tokenizer.json").exists()
