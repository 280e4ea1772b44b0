"""Read corpora in Megatron-LM's format; indexed_writer.py writes them.

PREFIX.bin holds token ids, document by document. PREFIX.idx is `MMIDIDX`, version 1, little-endian:

    9 bytes   b"MMIDIDX\\0\\0"
    uint64    1, the version
    uint8     code of the token type (`DTYPES`)
    uint64    S, the number of sequences
    uint64    D + 1, the number of document boundaries
    int32[S]      tokens in each sequence
    int64[S]      byte at which each sequence starts in PREFIX.bin
    int64[D+1]    sequence at which each document starts; the last entry is S

A document is one sequence unless a preprocessor split it into sentences.

PREFIX.content.json caches the hash and the range of the tokens, which saves reading PREFIX.bin. It
is valid while both files have the recorded sizes and times, and may be deleted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from zero_tp.base.errors import UserError, shown
from zero_tp.base.files import write_atomically
from zero_tp.base.strict_json import InvalidJson, read_object

REPORT = "report.json"
"""The report of `prepare`, with the checksum of each file of the output."""
MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {
    code: np.dtype(name)
    for code, name in {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}.items()
}
"""Megatron's codes 6 and 7 are floating-point types and never token ids."""
_MODEL_REMEDY = "raise zero_tp.model.vocab_size, or prepare the corpus with the model's tokenizer"
_UINT16_VOCABULARY = 65_500  # Megatron's own threshold
_HASHED_BLOCKS = 64
_HASHED_BYTES = 2**20
_PART = 2**24  # bytes that are hashed at once
_INDEX_BLOCK = 2**18  # entries
_WRITE_AGAIN = "copy it again, or prepare it again with zero-tp prepare --overwrite"
_OPENING_CHECKS = (
    64  # blocks of an index that are checked when it is opened; `content` checks all of it
)


class CorpusContent(NamedTuple):
    """The SHA-256 of PREFIX.bin, and its smallest and largest id.

    Without ids they are 0 and -1.
    """

    sha256: str
    smallest: int
    largest: int


def token_dtype(vocabulary_size: int) -> np.dtype:
    """Return Megatron's type for a vocabulary: uint16 below 65,500 tokens, else int32."""
    return DTYPES[8] if vocabulary_size < _UINT16_VOCABULARY else DTYPES[4]


def bin_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.idx")


def content_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.content.json")


class IndexedCorpus:
    """A memory-mapped corpus: documents by number, and all of them as one flat stream of tokens.

    Attributes:
        prefix: path without the ending.
        tokens: tokens in the flat stream.

    Raises:
        UserError: a file is missing, unreadable, truncated, or in another format.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        index = idx_path(prefix)
        data = bin_path(prefix)
        for path in (index, data):
            if not os.path.isfile(path):  # unlike Path.is_file, False for a path with a NUL
                raise UserError(
                    f"{path}: no such file; a corpus is named by its prefix, without .bin or .idx"
                )
        try:
            self._open(index, data)
        except OSError as error:
            raise UserError(
                f"{error.filename or index}: can't be read ({error.strerror or error})"
            ) from error

    def _open(self, index: Path, data: Path) -> None:
        """Map both files and check what can be checked without reading all of them."""
        with open(index, "rb") as file:
            header = file.read(HEADER.size)
        magic, version, code, sequences, boundaries = HEADER.unpack(header.ljust(HEADER.size))
        if magic != MAGIC or version != VERSION or code not in DTYPES:
            known = ", ".join(f"{key} {value.name}" for key, value in DTYPES.items())
            raise UserError(
                f"{index}: not a Megatron index: its header has {magic!r}, version {version} and "
                f"token type {code}; "
                f"needed are {MAGIC!r}, version {VERSION} and one of the types {known}"
            )
        self.dtype = DTYPES[code]
        expected = HEADER.size + 12 * sequences + 8 * boundaries
        size = index.stat().st_size
        # Megatron may append one byte a sequence (its modes).
        if size not in (expected, expected + sequences):
            problem = f"{expected:,} bytes expected for {sequences:,} sequences, found {size:,}"
            raise UserError(f"{index}: {problem}; {_WRITE_AGAIN}")
        # The header has 34 bytes, so the entries are not aligned: NumPy reads such views, but some
        # of its functions copy them.
        entries = np.memmap(index, mode="r", dtype=np.uint8)[HEADER.size :]
        self._sizes = entries[: 4 * sequences].view("<i4")
        self._pointers = entries[4 * sequences : 12 * sequences].view("<i8")
        self._documents = entries[12 * sequences : 12 * sequences + 8 * boundaries].view("<i8")
        # From the last entry, because summing a billion sizes takes seconds. `check_index` checks
        # the others.
        self.tokens = self._tokens_before(sequences)
        expected = self.tokens * self.dtype.itemsize
        size = data.stat().st_size
        if expected != size:
            raise UserError(
                f"{data}: {expected:,} bytes expected for {self.tokens:,} tokens of "
                f"{self.dtype.name}, found {size:,}; "
                f"{_WRITE_AGAIN}"
            )
        # A trillion tokens must open at once: every rank opens every corpus.
        self.check_index(_OPENING_CHECKS)
        self._data = (
            np.memmap(data, mode="r", dtype=self.dtype) if self.tokens else np.empty(0, self.dtype)
        )

    def _tokens_before(self, sequence: int) -> int:
        """Return the number of tokens in the sequences before `sequence`."""
        if not sequence:
            return 0
        return int(self._pointers[sequence - 1]) // self.dtype.itemsize + int(
            self._sizes[sequence - 1]
        )

    def check_index(self, max_blocks: int | None = None) -> None:
        """Check sequences and document boundaries.

        Args:
            max_blocks: how many blocks of the index to look at; None: all.
        """
        for block in _blocks(len(self._sizes), max_blocks):
            sizes = self._sizes[block].astype(np.int64)
            # The sum begins anew at each block, so blocks can be checked alone.
            ends = self._tokens_before(block.start) + np.cumsum(sizes)
            if (sizes < 0).any() or (
                self._pointers[block] != (ends - sizes) * self.dtype.itemsize
            ).any():
                problem = "sequences don't follow each other without gaps"
                raise UserError(f"{self.prefix}.idx: {problem}; {_WRITE_AGAIN}")
        bounds = self._documents
        is_complete = len(bounds) > 0 and bounds[0] == 0 and bounds[-1] == len(self._sizes)
        if not is_complete or any(
            (np.diff(bounds[block.start : block.stop + 1]) < 0).any()
            for block in _blocks(len(self), max_blocks)
        ):
            problem = (
                f"document boundaries don't rise from 0 to {len(self._sizes):,}, the number of "
                "sequences"
            )
            raise UserError(f"{self.prefix}.idx: {problem}; {_WRITE_AGAIN}")

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self._documents) - 1

    @property
    def has_one_sequence_a_document(self) -> bool:
        """Return whether no document is split into sentences, and none is without a sequence."""
        return len(self) == len(self._sizes)

    @cached_property
    def content(self) -> CorpusContent:
        """The content of PREFIX.bin.

        It is read from the cache, else by reading all of the file (a core hashes 1.8 GB/s).

        The cache does not notice damage by a disk, which changes no times.
        """
        # Before the reading; compared after it.
        stamp = self._stamp()
        path = bin_path(self.prefix)
        with contextlib.suppress(OSError, InvalidJson, KeyError, TypeError):
            cached = read_object(content_path(self.prefix))
            # The entry has a hash of itself: one that was cut or edited is not believed.
            if cached == _cache_entry(stamp, cached["content"]):
                return CorpusContent(**cached["content"])
        self.check_index()
        content = self._read_content()
        if self._stamp() != stamp:
            raise UserError(
                f"{path} was written to while it was read: start again after the writing has ended"
            )
        # Damage since `prepare` is found here, if the corpus still has its report.
        _check_report(path, content.sha256)
        self.store_content(content)
        return content

    def store_content(self, content: CorpusContent) -> None:
        """Cache the content of PREFIX.bin, as this process has read or written it."""
        with contextlib.suppress(OSError):  # the directory can't be written
            entry = _cache_entry(self._stamp(), content._asdict())
            write_atomically(content_path(self.prefix), json.dumps(entry) + "\n")

    def _stamp(self) -> list[int]:
        """Return the size and times of both files.

        Every write changes them, because no program can set the ctime.
        """
        files = [path.stat() for path in (bin_path(self.prefix), idx_path(self.prefix))]
        return [
            number
            for file in files
            for number in (file.st_size, file.st_mtime_ns, file.st_ctime_ns)
        ]

    def _read_content(self) -> CorpusContent:
        digest = hashlib.sha256()
        smallest = 0
        largest = -1
        count = _PART // self.dtype.itemsize
        for start in range(0, self.tokens, count):
            part = self._data[start : start + count]
            digest.update(part.data)
            low = int(part.min())
            high = int(part.max())
            # The first part sets both: with the initial values 0 and -1, a smallest id above 0
            # would be lost.
            smallest, largest = (min(smallest, low), max(largest, high)) if start else (low, high)
        return CorpusContent(digest.hexdigest(), smallest, largest)

    def check_vocabulary(
        self, size: int, owner: str = "model", remedy: str = _MODEL_REMEDY
    ) -> None:
        """Check that all token ids are below `size`, that of the owner's vocabulary.

        Raises:
            UserError: one is not.
        """
        wrong = self.content.smallest if self.content.smallest < 0 else self.content.largest
        if self.content.smallest < 0 or wrong >= size:
            raise UserError(
                f"{bin_path(self.prefix)} holds token id {wrong}, outside the {owner}'s vocabulary "
                f"of {size:,}: "
                f"{remedy}"
            )

    def identity(self, *, hash_tokens: bool = True) -> dict[str, Any]:
        """Return what identifies the corpus at any path.

        The keys are `documents`, `tokens`, `type`, `sha256` and `content`.

        `sha256` is of PREFIX.idx and of 64 evenly spread blocks of PREFIX.bin, so it may miss a
        change of a few tokens. `content` is the hash of all of PREFIX.bin; without `hash_tokens` it
        is left out, because it may take minutes.
        """
        digest = hashlib.sha256()
        with idx_path(self.prefix).open("rb") as index:
            while block := index.read(_HASHED_BYTES):
                digest.update(block)
        _check_report(idx_path(self.prefix), digest.hexdigest())
        count = _HASHED_BYTES // _HASHED_BLOCKS // self.dtype.itemsize
        for i in range(_HASHED_BLOCKS):
            # The first block begins at token 0, and the last one ends with the last token.
            start = max(0, self.tokens - count) * i // (_HASHED_BLOCKS - 1)
            digest.update(self._data[start : start + count].tobytes())
        facts = {
            "documents": len(self),
            "tokens": self.tokens,
            "type": self.dtype.name,
            "sha256": digest.hexdigest(),
        }
        return facts | ({"content": self.content.sha256} if hash_tokens else {})

    def document(self, i: int) -> npt.NDArray[np.int64]:
        """Return the token ids of document `i`, int64 [tokens of the document].

        Raises:
            IndexError: there is none.
        """
        return self.read(*self.extent(i))

    def extent(self, i: int) -> tuple[int, int]:
        """Return where document `i` begins in the flat stream, and its length [tokens].

        Raises:
            IndexError: there is none.
        """
        if not 0 <= i < len(self):
            raise IndexError(f"document {i} of {len(self)}")
        start, end = self.document_starts(i, i + 2).tolist()
        return start, end - start

    def sequence_starts(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """Return which tokens of `read(start, count)` begin a sequence.

        Indices into these tokens, ascending, int64.
        """
        first, last = (
            bisect_right(self._pointers, end * self.dtype.itemsize - 1)
            for end in (start, start + count)
        )
        # Empty sequences begin where the next one does; they are no starts.
        starts = self._pointers[first:last][self._sizes[first:last] > 0]
        return starts.astype(np.int64) // self.dtype.itemsize - start

    def document_starts(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """Return where documents `first` … `last` - 1 begin in the flat stream.

        int64 [last - first], in tokens.

        Document `len(self)` begins at the end of the stream. Not cached: a billion documents would
        take 8 GB.
        """
        sequences = self._documents[first:last]
        starts = np.full(len(sequences), self.tokens, np.int64)
        # The boundary after the last document, and empty documents at the end, have no sequence to
        # ask.
        is_inside = sequences < len(self._sizes)
        starts[is_inside] = self._pointers[sequences[is_inside]] // self.dtype.itemsize
        return starts

    def has_document_with(self, min_tokens: int) -> bool:
        """Return whether a document has at least so many tokens."""
        blocks = (self.document_starts(block.start, block.stop + 1) for block in _blocks(len(self)))
        return any((np.diff(starts) >= min_tokens).any() for starts in blocks)

    def document_ids(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """Return the document's number of each token of `read(start, count)`.

        int64 [count].
        """
        first, last = (self._document_of(token) for token in (start, start + count - 1))
        starts = self.document_starts(first, last + 1)
        # The first document may begin before these tokens.
        starts[0] = start
        return np.repeat(np.arange(first, last + 1), np.diff(starts, append=start + count))

    def _document_of(self, token: int) -> int:
        # np.searchsorted would copy all of an index, whose entries are not aligned.
        sequence = bisect_right(self._pointers, token * self.dtype.itemsize) - 1
        return bisect_right(self._documents, sequence) - 1

    def read(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """Copy tokens `start` … `start + count - 1` of the stream, int64 [count].

        Raises:
            IndexError: out of range.
        """
        if start < 0 or count < 0 or start + count > self.tokens:
            raise IndexError(f"tokens {start} to {start + count} of {self.tokens} in {self.prefix}")
        return self._data[start : start + count].astype(np.int64)


def _blocks(count: int, max_blocks: int | None = None) -> Iterator[slice]:
    """Yield slices of `count` entries of an index: all, or at most `max_blocks`, evenly spread."""
    step = max(_INDEX_BLOCK, -(-count // max_blocks) if max_blocks is not None else 0)
    for start in range(0, count, step):
        yield slice(start, min(start + _INDEX_BLOCK, count))


def _cache_entry(stamp: list[int], content: dict[str, Any]) -> dict[str, Any]:
    entry = {"stamp": stamp, "content": content}
    return {
        **entry,
        "sha256": hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest(),
    }


def _check_report(path: Path, sha256: str) -> None:
    """Compare a file's SHA-256 with that in `prepare`'s report, if there is one.

    Raises:
        UserError: they differ.
    """
    try:
        recorded = read_object(path.with_name(REPORT))["files"][path.name]["sha256"]
    except (OSError, InvalidJson, KeyError, TypeError):  # no report, or one without checksums
        return
    if recorded != sha256:
        raise UserError(
            f"{path} is damaged: its SHA-256 is {sha256[:12]}…, not {shown(recorded)[1:13]}… as in "
            f"{REPORT}; "
            f"{_WRITE_AGAIN}"
        )
