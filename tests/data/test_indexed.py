"""Megatron's format: our writer's bytes, other writers' files, damaged files, indices of any
size.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.tiny_models import write_corpus
from tests.tiers import THOROUGH
from zero_tp.base.errors import UserError
from zero_tp.data import indexed
from zero_tp.data.indexed import DTYPES, HEADER, MAGIC, VERSION, IndexedCorpus
from zero_tp.data.indexed_writer import IndexedWriter
from zero_tp.data.samples import PackedSamples

DOCUMENTS = [[1, 2, 3], [4], [5, 6, 7, 8, 0], [9, 10]]


def write(prefix: Path, vocabulary_size: int = 100) -> Path:
    return write_corpus(prefix, DOCUMENTS, vocabulary_size)


@pytest.mark.parametrize(("vocabulary_size", "dtype"), [(65_499, "uint16"), (65_500, "int32")])
def test_what_is_written_is_read(tmp_path: Path, vocabulary_size: int, dtype: str) -> None:
    corpus = IndexedCorpus(write(tmp_path / "c", vocabulary_size))
    assert len(corpus) == 4
    assert corpus.tokens == 11
    assert corpus.dtype == np.dtype(dtype)
    assert [corpus.document(i).tolist() for i in range(4)] == DOCUMENTS
    assert corpus.read(2, 5).tolist() == [3, 4, 5, 6, 7]
    assert corpus.read(2, 5).dtype == np.int64
    with pytest.raises(IndexError):
        corpus.read(9, 3)
    with pytest.raises(IndexError):
        corpus.document(4)


def test_sentences_are_written_as_sequences(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "c", 100_000) as writer:
        writer.add_documents([70_000, 1, 2], [3, 0], [True, False, True])
        writer.add_documents([3, 4, 5], [3], [False, True, True])
    expected = (
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, 4, 6, 4)
        + struct.pack("<6i", 2, 1, 0, 1, 1, 1)
        + struct.pack("<6q", 0, 8, 12, 12, 16, 20)
        + struct.pack("<4q", 0, 2, 3, 6)
    )
    assert (tmp_path / "c.idx").read_bytes() == expected
    corpus = IndexedCorpus(tmp_path / "c")
    assert corpus.sequence_starts(0, 6).tolist() == [0, 2, 3, 4, 5] and corpus.extent(1) == (3, 0)


def test_an_index_of_several_sequences_a_document_and_modes_is_read(tmp_path: Path) -> None:
    """As Megatron writes with sentence splitting: 4 sequences in 3 documents, the second empty;
    a mode byte each.
    """
    (tmp_path / "c.bin").write_bytes(struct.pack("<6i", 70_000, 1, 2, 3, 4, 5))
    (tmp_path / "c.idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, 4, 4, 4)
        + struct.pack("<4i", 2, 1, 0, 3)
        + struct.pack("<4q", 0, 8, 12, 12)
        + struct.pack("<4q", 0, 2, 3, 4)
        + bytes(4)
    )
    corpus = IndexedCorpus(tmp_path / "c")
    assert [corpus.document(i).tolist() for i in range(3)] == [[70_000, 1, 2], [], [3, 4, 5]]
    assert [corpus.extent(i) for i in range(3)] == [(0, 3), (3, 0), (3, 3)]
    assert corpus.sequence_starts(0, 6).tolist() == [0, 2, 3] and corpus.sequence_starts(
        1, 2
    ).tolist() == [1]
    assert (
        corpus.sequence_starts(4, 2).tolist() == [] and corpus.sequence_starts(2, 0).tolist() == []
    )
    assert corpus.document_ids(0, 6).tolist() == [0, 0, 0, 2, 2, 2] and corpus.document_ids(
        2, 2
    ).tolist() == [0, 2]
    assert corpus.document_starts(0, 4).tolist() == [0, 3, 3, 6]


DAMAGE: list[tuple[str, Callable[[bytes], bytes], str]] = [
    ("bin", lambda b: b[:-2], r"c\.bin: 22 bytes expected for 11 tokens of uint16, found 20"),
    ("idx", lambda b: b[:-1], r"c\.idx: 122 bytes expected for 4 sequences, found 121"),
    ("idx", lambda b: b[:20], r"c\.idx: [\d,]+ bytes expected for [\d,]+ sequences, found 20"),
    ("idx", lambda b: b"PK\x03\x04" + b[4:], r"not a Megatron index: its header has b'PK"),
    ("idx", lambda b: b"", "not a Megatron index"),
    (
        "idx",
        lambda b: b[:9] + struct.pack("<Q", 2) + b[17:],
        "not a Megatron index: .* version 2 and",
    ),
    ("idx", lambda b: b[:17] + b"\x07" + b[18:], "not a Megatron index: .* token type 7;"),
    ("idx", lambda b: b[:-8] + struct.pack("<q", 3), "document boundaries"),
    ("idx", lambda b: b[:26] + struct.pack("<Q", 0) + b[34:-40], "document boundaries"),
    ("idx", lambda b: b[:50] + struct.pack("<q", 2) + b[58:], "without gaps"),
]


@pytest.mark.parametrize(("ending", "damage", "message"), DAMAGE)
def test_a_damaged_corpus_is_refused(
    tmp_path: Path, ending: str, damage: Callable[[bytes], bytes], message: str
) -> None:
    path = write(tmp_path / "c").with_suffix(f".{ending}")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=message) as caught:
        IndexedCorpus(tmp_path / "c")
    remedy = (
        "needed are"
        if message.startswith("not a Megatron index")
        else "; copy it again, or prepare it again with"
    )
    assert remedy in str(caught.value)


def test_a_missing_file_and_an_id_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nothing\.idx: no such file"):
        IndexedCorpus(tmp_path / "nothing")
    with (
        pytest.raises(UserError, match="token id 100 lies outside the vocabulary of 100"),
        IndexedWriter(tmp_path / "c", 100) as writer,
    ):
        writer.add_documents([1, 100], [2])
    assert not (tmp_path / "c.idx").exists()


def test_a_trillion_tokens_open_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sparse file of 2·10¹² bytes: opening it looks at 64 blocks of the index; the first and
    the last window.
    """
    sequences, size = 1_000_000, 1_000_000
    header = HEADER.pack(MAGIC, VERSION, 8, sequences, sequences + 1)
    with open(tmp_path / "c.idx", "wb") as file:
        file.write(header)
        file.write(np.full(sequences, size, "<i4").tobytes())
        file.write((np.arange(sequences, dtype="<i8") * size * 2).tobytes())
        file.write(np.arange(sequences + 1, dtype="<i8").tobytes())
    with open(tmp_path / "c.bin", "wb") as file:
        file.truncate(sequences * size * 2)
    checked = list[int]()
    blocks = indexed._blocks

    def counted(count: int, most: int | None = None) -> Iterator[slice]:
        for block in blocks(count, most):
            checked.append(block.stop - block.start)
            yield block

    monkeypatch.setattr(indexed, "_blocks", counted)
    monkeypatch.setattr(indexed, "_INDEX_BLOCK", 2**10)
    tracemalloc.start()
    try:
        corpus = IndexedCorpus(tmp_path / "c")
        assert tracemalloc.get_traced_memory()[1] < 1e6, "the index stays in its file"
    finally:
        tracemalloc.stop()
    assert corpus.tokens == 10**12 and len(corpus) == sequences
    assert sum(checked) <= 2 * 64 * 2**10
    assert corpus.document_ids(0, 3).tolist() == [0, 0, 0]
    assert corpus.document_ids(10**12 - size - 1, 3).tolist() == [
        sequences - 2,
        sequences - 1,
        sequences - 1,
    ]
    samples = PackedSamples({str(tmp_path / "c"): 1.0}, 2048, 1, separate=True)
    (batch,) = samples.batches_from(4 * 10**6, 4, 1, 0, 1)
    assert batch.input_ids.shape == (4, 2048) and not batch.input_ids.any()


def test_damage_between_the_blocks_is_found_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexed, "_INDEX_BLOCK", 4)
    monkeypatch.setattr(indexed, "_OPENING_CHECKS", 3)
    IndexedCorpus(write_corpus(tmp_path / "c", [range(5)] * 40, 1000)).check_vocabulary(1000)
    index = bytearray((tmp_path / "c.idx").read_bytes())
    index[34 + 4 * 6] += 1
    (tmp_path / "c.idx").write_bytes(index)
    corpus = IndexedCorpus(tmp_path / "c")
    with pytest.raises(UserError, match="don't follow each other without gaps"):
        corpus.check_vocabulary(1000)


MEGATRON = """
import sys, warnings
warnings.simplefilter("ignore")
import numpy as np
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder
folder, kind = sys.argv[1:]
documents = [[[1, 2, 3], [4]], [[5]], [[6, 7], [8, 9], [10]]]
if kind == "read":
    found = IndexedDataset(f"{folder}/ours")
    print([each.tolist() for each in found], found.document_indices.tolist(), found.index.dtype.__name__)
else:
    for name in ("uint8", "int8", "int16", "int32", "int64", "uint16"):
        for modes in (False, True):
            prefix = f"{folder}/{name}{'-modes' if modes else ''}"
            builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=getattr(np, name), multimodal=modes)
            for document in documents:
                tokens = [token for sentence in document for token in sentence]
                lengths = [len(sentence) for sentence in document]
                builder.add_document(tokens, lengths, [0] * len(lengths) if modes else None)
            builder.finalize(f"{prefix}.idx")
"""  # noqa: E501


def megatron(folder: Path, kind: str) -> str:
    environment = {
        **os.environ,
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        "PYTHONWARNINGS": "ignore",
    }
    done = subprocess.run(
        [sys.executable, "-c", MEGATRON, str(folder), kind],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@THOROUGH
def test_megatrons_files_are_read_and_ours_by_megatron(tmp_path: Path) -> None:
    """megatron-core's own builder and reader, in all integer types, with and without modes."""
    megatron(tmp_path, "write")
    for dtype in DTYPES.values():
        for modes in ("", "-modes"):
            corpus = IndexedCorpus(tmp_path / f"{dtype.name}{modes}")
            found = [corpus.document(i).tolist() for i in range(len(corpus))]
            assert found == [[1, 2, 3, 4], [5], [6, 7, 8, 9, 10]] and corpus.dtype == dtype, (
                dtype.name
            )
            assert corpus.document_ids(3, 4).tolist() == [0, 1, 2, 2]
            assert (corpus.content.smallest, corpus.content.largest) == (1, 10)
            with pytest.raises(
                UserError, match="holds token id 10, outside the model's vocabulary of 10"
            ):
                corpus.check_vocabulary(10)
    write_corpus(tmp_path / "ours", ([1, 2, 3], [], [999]), 1000)
    assert megatron(tmp_path, "read") == "[[1, 2, 3], [], [999]] [0, 1, 2, 3] uint16"
