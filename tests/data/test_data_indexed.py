"""The indexed corpus: our writer, Megatron's layout byte by byte, damaged files."""

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.tiers import THOROUGH
from zero_tp.data.indexed import IndexedCorpus, IndexedWriter
from zero_tp.errors import UserError

DOCUMENTS = [[1, 2, 3], [4], [5, 6, 7, 8, 0], [9, 10]]


def write(prefix: Path, vocabulary_size: int = 100) -> Path:
    with IndexedWriter(prefix, vocabulary_size) as writer:
        for document in DOCUMENTS:
            writer.add_document(document)
    return prefix


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


@THOROUGH
def test_a_large_index_stays_in_its_file(tmp_path: Path, seed: int) -> None:
    """2 million documents, some of them empty, some of several sequences: 44 MB of index, of which 20 would be kept."""
    chance, sequences = np.random.default_rng(seed), 2_000_000
    sizes = chance.integers(0, 4, sequences).astype("<i4")
    begins = np.concatenate([[0], np.cumsum(sizes)])
    bounds = np.unique(np.concatenate([[0, sequences], chance.integers(0, sequences, sequences // 2)])).astype("<i8")
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, sequences, len(bounds))
    (tmp_path / "c.idx").write_bytes(
        header + sizes.tobytes() + (begins[:-1] * 2).astype("<i8").tobytes() + bounds.tobytes()
    )
    with (tmp_path / "c.bin").open("wb") as file:
        file.truncate(2 * int(begins[-1]))
    firsts = begins[bounds]
    longest = np.diff(firsts).max()
    tracemalloc.start()
    try:
        corpus = IndexedCorpus(tmp_path / "c")
        for start in (0, corpus.tokens - 100, *chance.integers(0, corpus.tokens - 100, 50).tolist()):
            found = corpus.documents(start, 100)
            expected = np.searchsorted(firsts, np.arange(start, start + 100), side="right") - 1
            assert np.array_equal(found, expected), start
        assert corpus.has_document_of(longest) and not corpus.has_document_of(longest + 1)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 1e6 and peak < 20e6, (held, peak)


def test_the_bytes_are_megatrons(tmp_path: Path) -> None:
    write(tmp_path / "c")
    expected = (
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, 8, 4, 5)
        + struct.pack("<4i", 3, 1, 5, 2)
        + struct.pack("<4q", 0, 6, 8, 18)
        + struct.pack("<5q", 0, 1, 2, 3, 4)
    )
    assert (tmp_path / "c.idx").read_bytes() == expected
    assert (tmp_path / "c.bin").read_bytes() == struct.pack("<11H", 1, 2, 3, 4, 5, 6, 7, 8, 0, 9, 10)


def test_documents_of_several_sequences_and_modes(tmp_path: Path) -> None:
    """As Megatron writes with sentence splitting: 3 sequences in 2 documents, int32, one mode byte a sequence."""
    (tmp_path / "c.bin").write_bytes(struct.pack("<6i", 70_000, 1, 2, 3, 4, 5))
    (tmp_path / "c.idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, 4, 3, 3)
        + struct.pack("<3i", 2, 1, 3)
        + struct.pack("<3q", 0, 8, 12)
        + struct.pack("<3q", 0, 2, 3)
        + bytes(3)
    )
    corpus = IndexedCorpus(tmp_path / "c")
    assert [corpus.document(i).tolist() for i in range(len(corpus))] == [[70_000, 1, 2], [3, 4, 5]]
    assert [corpus.extent(i) for i in range(2)] == [(0, 3), (3, 3)]
    assert corpus.sequences(0, 6).tolist() == [0, 2, 3] and corpus.sequences(1, 2).tolist() == [1]
    assert corpus.sequences(4, 2).tolist() == [] and corpus.sequences(2, 0).tolist() == []


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
    assert corpus.sequences(0, 6).tolist() == [0, 2, 3, 4, 5] and corpus.extent(1) == (3, 0)


def test_a_truncated_bin_names_the_sizes(tmp_path: Path) -> None:
    prefix = write(tmp_path / "c")
    data = (tmp_path / "c.bin").read_bytes()
    (tmp_path / "c.bin").write_bytes(data[:-2])
    with pytest.raises(UserError, match=r"c\.bin: 22 bytes expected for 11 tokens of uint16, found 20"):
        IndexedCorpus(prefix)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda b: b[:-1], r"c\.idx: 122 bytes expected for 4 sequences, found 121"),
        (lambda b: b[:20], "34 bytes of header expected, found 20"),
        (lambda b: b"PK\x03\x04" + b[4:], "not a Megatron index"),
        (lambda b: b"", "not a Megatron index"),
        (lambda b: b[:9] + struct.pack("<Q", 2) + b[17:], "version 2"),
        (lambda b: b[:17] + b"\x07" + b[18:], "token type 7"),
        (lambda b: b[:-8] + struct.pack("<q", 3), "document boundaries"),
        (lambda b: b[:50] + struct.pack("<q", 2) + b[58:], "without gaps"),
    ],
)
def test_damaged_index(tmp_path: Path, damage: Callable[[bytes], bytes], message: str) -> None:
    prefix = write(tmp_path / "c")
    (tmp_path / "c.idx").write_bytes(damage((tmp_path / "c.idx").read_bytes()))
    with pytest.raises(UserError, match=message):
        IndexedCorpus(prefix)


def test_missing_and_out_of_range(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nothing\.idx: no such file"):
        IndexedCorpus(tmp_path / "nothing")
    with (
        pytest.raises(UserError, match="token id 100 lies outside the vocabulary of 100"),
        IndexedWriter(tmp_path / "c", 100) as writer,
    ):
        writer.add_document([1, 100])
    assert not (tmp_path / "c.idx").exists()
