"""Corpora are stored in the `.bin`/`.idx` format of Megatron-LM and Megatron-DeepSpeed (`MMIDIDX`, version 1).

`PREFIX.bin` is nothing but token ids, document after document. `PREFIX.idx`, all little-endian:

    9 bytes   b"MMIDIDX\\0\\0"
    uint64    1, the version
    uint8     code of the token type (`DTYPES`)
    uint64    S, the number of sequences
    uint64    D + 1, the number of document boundaries
    int32[S]      tokens in each sequence
    int64[S]      byte at which each sequence starts in PREFIX.bin
    int64[D+1]    sequence at which each document starts; the last entry is S

A document is one sequence unless a preprocessor split it into sentences.

`PREFIX.content.json` remembers what was found when all of PREFIX.bin was read, and at which size and times of the file:
it is read again once they differ. It may be deleted. What is read has the checksums of a `report.json` beside it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import struct
import time
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from zero_tp.errors import UserError, shown
from zero_tp.files import write_atomically
from zero_tp.strict_json import InvalidJson, read_object

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
REPORT = "report.json"
"""In a directory that `prepare` wrote: the checksum of each file, among others."""
_HEADER = struct.Struct("<9sQBQQ")
# Megatron's codes 6 and 7 are floating-point types and never token ids.
DTYPES: dict[int, np.dtype] = {
    code: np.dtype(name).newbyteorder("<")
    for code, name in {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}.items()
}
_HASHED_BLOCKS, _HASHED_BYTES = 64, 2**20
_PART = 2**24  # bytes that are hashed while the ids in them are compared
_INDEX_BLOCK = 2**18  # entries
_SPREAD = 64  # blocks of an index that are compared when it is opened; all are before a run trains on it
_CLOCK_TICK = 0.01  # seconds: a file system's times can be as coarse
_UINT16_VOCABULARY = 65_500  # Megatron's own threshold


def token_dtype(vocabulary_size: int) -> np.dtype:
    """Return the stored type: uint16 below a vocabulary of 65,500 tokens, else int32, as Megatron chooses."""
    return DTYPES[8] if vocabulary_size < _UINT16_VOCABULARY else DTYPES[4]


def bin_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.idx")


def content_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.content.json")


@dataclasses.dataclass(frozen=True)
class Content:
    """A content is the SHA-256 of PREFIX.bin, and the smallest and largest of its ids (0 and -1 where it has none)."""

    sha256: str
    smallest: int
    largest: int


def _stamp(data: Path) -> dict[str, int]:
    """Return what differs once a file was written to: also where its times were set back, as no one can set ctime."""
    status = data.stat()
    return {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns, "ctime_ns": status.st_ctime_ns}


def _remembered(prefix: str) -> Content | None:
    """Return the content that is remembered of PREFIX.bin; None where it was written to since, or nobody knows."""
    try:
        memory = read_object(content_path(prefix))
        if memory == _memory(_stamp(bin_path(prefix)), memory["content"]):
            return Content(**memory["content"])
    except (OSError, InvalidJson, KeyError, TypeError):  # nothing usable: all is read
        pass
    return None


def _remember(prefix: str, stamp: dict[str, int], content: Content) -> None:
    with contextlib.suppress(OSError):  # others' folder, a full disk: the next one reads all again
        memory = _memory(stamp, dataclasses.asdict(content))
        write_atomically(content_path(prefix), json.dumps(memory) + "\n")


def _memory(stamp: dict[str, int], content: dict[str, Any]) -> dict[str, Any]:
    memory = {"file": stamp, "content": content}
    return {**memory, "sha256": hashlib.sha256(json.dumps(memory, sort_keys=True).encode()).hexdigest()}


def _check_recorded(path: Path, sha256: str) -> None:
    """Compare a file's SHA-256 with that of the report beside it, where `prepare` wrote one.

    Raises:
        UserError: it is another one.
    """
    try:
        recorded = read_object(path.with_name(REPORT))["files"][path.name]["sha256"]
    except (OSError, InvalidJson, KeyError, TypeError):  # no report, or not one with checksums
        return
    if recorded != sha256:
        raise UserError(
            f"{path} is damaged: its SHA-256 is {sha256[:12]}…, not {shown(recorded)[1:13]}… as in {REPORT}; "
            "copy it again, or make it again with zero-tp prepare --overwrite"
        )


def _after_a_tick(data: Path) -> dict[str, int]:
    """Return the stamp of a file, once what is written from now on gets another time."""
    stamp = _stamp(data)
    if abs(time.time() - max(stamp["mtime_ns"], stamp["ctime_ns"]) / 1e9) < _CLOCK_TICK:
        time.sleep(_CLOCK_TICK)
    return stamp


class IndexedCorpus:
    """A memory-mapped corpus gives documents by number, and the whole as one flat stream of tokens.

    Attributes:
        prefix: path without the ending.
        tokens: tokens in the flat stream.

    Raises:
        UserError: a file is missing, foreign, truncated or cannot be read; says which, and sizes expected and found.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        index, data = idx_path(prefix), bin_path(prefix)
        for path in (index, data):
            if not os.path.isfile(path):  # also where there can be no such name
                raise UserError(f"{path}: no such file; a corpus is named by its prefix, without .bin or .idx")
        try:
            self._open(index, data)
        except OSError as error:
            raise UserError(f"{error.filename or index}: can't be read ({error.strerror or error})") from error

    def _open(self, index: Path, data: Path) -> None:
        self.dtype, sequences, boundaries = _read_header(index)
        needed = _HEADER.size + 12 * sequences + 8 * boundaries
        found = index.stat().st_size
        if found not in (needed, needed + sequences):  # Megatron may append one byte a sequence (its modes)
            raise UserError(f"{index}: {needed:,} bytes expected for {sequences:,} sequences, found {found:,}")
        whole = np.memmap(index, mode="r", dtype=np.uint8)
        at = _HEADER.size
        self._sizes = whole[at : at + 4 * sequences].view("<i4")
        at += 4 * sequences
        self._pointers = whole[at : at + 8 * sequences].view("<i8")
        at += 8 * sequences
        self._documents = whole[at : at + 8 * boundaries].view("<i8")
        # The index' last entry: to add all of a billion takes seconds. `_check` compares.
        self.tokens = int(self._pointers[-1]) // self.dtype.itemsize + int(self._sizes[-1]) if sequences else 0
        self._check(index, data, _SPREAD)
        self._data: npt.NDArray = (
            np.memmap(data, mode="r", dtype=self.dtype) if self.tokens else np.empty(0, self.dtype)
        )

    def _check(self, index: Path, data: Path, most: int | None = None) -> None:
        """Raise a UserError where index and data don't fit; of more than `most` blocks the index looks at those alone,
        which lie evenly spread, the first and the last among them."""
        needed, found = self.tokens * self.dtype.itemsize, data.stat().st_size
        if needed != found:
            raise UserError(
                f"{data}: {needed:,} bytes expected for {self.tokens:,} tokens of {self.dtype.name}, found {found:,}"
            )
        for block in _blocks(len(self._sizes), most):
            sizes = self._sizes[block].astype(np.int64)
            end = (
                int(self._pointers[block.start - 1]) // self.dtype.itemsize + int(self._sizes[block.start - 1])
                if block.start
                else 0
            )
            ends = end + np.cumsum(sizes)
            if (sizes < 0).any() or (self._pointers[block] != (ends - sizes) * self.dtype.itemsize).any():
                raise UserError(
                    f"{index}: sequences don't follow each other without gaps in {data.name}: write it again"
                )
        bounds = self._documents
        whole = len(bounds) > 0 and bounds[0] == 0 and bounds[-1] == len(self._sizes)
        blocks = _blocks(len(self), most)
        if not whole or any((np.diff(bounds[block.start : block.stop + 1]) < 0).any() for block in blocks):
            raise UserError(f"{index}: document boundaries don't run from 0 to {len(self._sizes):,} sequences")

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self._documents) - 1

    @cached_property
    def content(self) -> Content:
        """Return what PREFIX.bin holds, as remembered where neither its size nor its times have changed; else all of
        it is read (a core hashes 1.8 GB/s), and remembered where the folder can be written.

        What a disk changes without a write is not seen until it is read again.

        Raises:
            UserError: it cannot be read, or has another checksum than its report says.
        """
        if (known := _remembered(self.prefix)) is not None:
            return known
        path, digest = bin_path(self.prefix), hashlib.sha256()
        smallest, largest = 0, -1
        try:
            self._check(idx_path(self.prefix), path)
            stamp = _after_a_tick(path)
            count = _PART // self.dtype.itemsize
            with ThreadPoolExecutor(1) as hashing:
                for start in range(0, self.tokens, count):
                    part = self._data[start : start + count]
                    hashed = hashing.submit(digest.update, part.data)
                    low, high = int(part.min()), int(part.max())
                    smallest, largest = (min(smallest, low), max(largest, high)) if start else (low, high)
                    hashed.result()
            found = Content(digest.hexdigest(), smallest, largest)
            if _stamp(path) != stamp:
                raise UserError(f"{path} was written to while it was read: start again once that has ended")
        except OSError as error:
            raise UserError(f"{path}: can't be read ({error.strerror or error})") from error
        _check_recorded(path, found.sha256)
        _remember(self.prefix, stamp, found)
        return found

    def check_vocabulary(self, size: int) -> None:
        """Check that each token is a row of an embedding of `size` rows. Reads `content`.

        Raises:
            UserError: an id lies outside.
        """
        content = self.content
        if content.smallest < 0 or content.largest >= size:
            wrong = content.smallest if content.smallest < 0 else content.largest
            raise UserError(
                f"{bin_path(self.prefix)} holds token id {wrong}, outside the model's vocabulary of {size:,}: raise "
                "zero_tp.model.vocab_size, or prepare the corpus with the model's tokenizer"
            )

    def identity(self, *, whole: bool = True) -> dict[str, Any]:
        """Return what identifies the corpus wherever it lies: `documents`, `tokens`, `type`, `sha256` and `content`.

        `sha256` is of PREFIX.idx and of 64 evenly spread blocks of PREFIX.bin. Every other way to cut or to tokenise
        the documents changes it; tokens that are changed one by one, and documents as long as before, may not.
        `content` is that of all of PREFIX.bin.

        Args:
            whole: with `content`, for which all may have to be read.

        Raises:
            UserError: a file has another checksum than its report says.
        """
        hashed = hashlib.sha256()
        with idx_path(self.prefix).open("rb") as index:
            while block := index.read(_HASHED_BYTES):
                hashed.update(block)
        _check_recorded(idx_path(self.prefix), hashed.hexdigest())
        count = _HASHED_BYTES // _HASHED_BLOCKS // self.dtype.itemsize
        for i in range(_HASHED_BLOCKS):
            start = max(0, self.tokens - count) * i // (_HASHED_BLOCKS - 1)
            hashed.update(self._data[start : start + count].tobytes())
        kind = {"documents": len(self), "tokens": self.tokens, "type": self.dtype.name}
        content = {"content": self.content.sha256} if whole else {}
        return {**kind, "sha256": hashed.hexdigest(), **content}

    def document(self, i: int) -> npt.NDArray[np.int64]:
        """Return the token ids of document `i`, int64 [tokens of the document]. IndexError outside 0 … len-1."""
        return self.read(*self.extent(i))

    def extent(self, i: int) -> tuple[int, int]:
        """Return (where document `i` begins in the flat stream, its tokens). IndexError outside 0 … len-1."""
        if not 0 <= i < len(self):
            raise IndexError(f"document {i} of {len(self)}")
        start, end = self.first_tokens(i, i + 2).tolist()
        return start, end - start

    def sequences(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """Return which of the tokens that `read` gives begin a sequence, as their numbers in it, rising."""
        ends = np.array([start, start + count]) * self.dtype.itemsize
        first, last = _not_above(self._pointers, ends - 1).tolist()
        begins = self._pointers[first:last][self._sizes[first:last] > 0]
        return begins.astype(np.int64) // self.dtype.itemsize - start

    def first_tokens(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """Return where in the flat stream the documents `first` … `last` - 1 begin, int64 [last - first].

        Document `len` begins at the end. It is read from the mapped file: in memory a billion documents take 8 GB.
        """
        sequences = np.minimum(self._documents[first:last], len(self._sizes))
        found = np.full(len(sequences), self.tokens, np.int64)
        begun = sequences < len(self._sizes)
        found[begun] = self._pointers[sequences[begun]] // self.dtype.itemsize
        return found

    def longest_document(self, enough: int) -> int:
        """Return the tokens of the longest document, or of one that has `enough`."""
        longest = 0
        for block in _blocks(len(self)):
            if longest < enough:
                longest = max(longest, int(np.diff(self.first_tokens(block.start, block.stop + 1)).max()))
        return longest

    def documents(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """Return the number of the document of each token that `read` gives, int64 [count]; an empty one has none."""
        ends = np.array([start, start + count - 1]) * self.dtype.itemsize
        sequences = _not_above(self._pointers, ends) - 1
        first, last = (_not_above(self._documents, sequences) - 1).tolist()
        begins = self.first_tokens(first, last + 1)
        begins[0] = start
        return np.repeat(np.arange(first, last + 1), np.diff(begins, append=start + count))

    def read(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """Return tokens `start` … `start + count - 1` of the flat stream, a new int64 array [count].

        Raises:
            IndexError: they lie outside it.
        """
        if start < 0 or count < 0 or start + count > self.tokens:
            raise IndexError(f"tokens {start} to {start + count} of {self.tokens} in {self.prefix}")
        return self._data[start : start + count].astype(np.int64)


def _not_above(ascending: npt.NDArray[np.int64], values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return how many entries are at most each of the values. It looks at log2 of them; `np.searchsorted` would copy
    all of an index, whose entries are not aligned."""
    low, high = np.zeros(len(values), np.int64), np.full(len(values), len(ascending), np.int64)
    for _ in range(len(ascending).bit_length()):
        middle = np.minimum((low + high) // 2, len(ascending) - 1)
        right = (low < high) & (ascending[middle] <= values)
        low, high = np.where(right, middle + 1, low), np.where(right | (low >= high), high, middle)
    return low


def _blocks(count: int, most: int | None = None) -> Iterator[slice]:
    """Yield slices of `count` entries of an index: what is looked at of one is in memory, never of all.

    Args:
        most: so many of them, evenly spread, where there are more.
    """
    blocks = -(-count // _INDEX_BLOCK)
    chosen = range(blocks) if most is None or blocks <= most else [i * (blocks - 1) // (most - 1) for i in range(most)]
    for block in chosen:
        yield slice(block * _INDEX_BLOCK, min((block + 1) * _INDEX_BLOCK, count))


def _read_header(index: Path) -> tuple[np.dtype, int, int]:
    with open(index, "rb") as file:
        header = file.read(_HEADER.size)
    if not header.startswith(MAGIC):
        raise UserError(f"{index}: not a Megatron index: it begins with {header[:9]!r}, not {MAGIC!r}")
    if len(header) < _HEADER.size:
        raise UserError(f"{index}: {_HEADER.size} bytes of header expected, found {len(header)}")
    _, version, code, sequences, boundaries = _HEADER.unpack(header)
    if version != VERSION:
        raise UserError(f"{index}: format version {version}, only version {VERSION} is known")
    if code not in DTYPES:
        known = ", ".join(f"{key} {value.name}" for key, value in DTYPES.items())
        raise UserError(f"{index}: token type {code} is not an integer type; known: {known}")
    return DTYPES[code], sequences, boundaries


class IndexedWriter:
    """A writer writes a corpus, document by document: `.bin` as it goes, `.idx` at the end.

    It is a context manager: when the block raises, no `.idx` is written, so what is there can't be taken for a corpus.
    Memory: 4 bytes a sequence, and 8 a document.
    """

    def __init__(self, prefix: str | Path, vocabulary_size: int) -> None:
        self.prefix = str(prefix)
        self.vocabulary_size = vocabulary_size
        self.dtype = token_dtype(vocabulary_size)
        self.tokens = 0
        self._sizes, self._documents = array("i"), array("q", [0])
        self._digest, self._smallest, self._largest = hashlib.sha256(), vocabulary_size, -1
        self._file = open(bin_path(prefix), "wb")  # noqa: SIM115 - closed by close() and __exit__

    def add_document(self, ids: npt.ArrayLike) -> None:
        """Append one document, ids [tokens]. UserError when an id lies outside the vocabulary."""
        values = np.asarray(ids)
        self.add_documents(values, [values.size])

    def add_documents(self, ids: npt.ArrayLike, sizes: npt.ArrayLike, begins: npt.ArrayLike | None = None) -> None:
        """Append documents of `sizes` tokens, whose ids follow each other.

        Args:
            begins: whether a sentence begins with each token, bool; each is a sequence then. None: documents are.

        Raises:
            UserError: an id lies outside the vocabulary, or a document is too long for the format.
        """
        values, lengths = np.asarray(ids), np.asarray(sizes, dtype=np.int64)
        assert lengths.sum() == values.size, (lengths.sum(), values.size)
        if values.size:
            low, high = int(values.min()), int(values.max())
            if low < 0 or high >= self.vocabulary_size:
                bad = low if low < 0 else high
                raise UserError(f"token id {bad} lies outside the vocabulary of {self.vocabulary_size:,} tokens")
            self._smallest, self._largest = min(self._smallest, low), max(self._largest, high)
        longest = int(lengths.max()) if lengths.size else 0
        if longest > np.iinfo(np.int32).max:
            raise UserError(f"a document of {longest:,} tokens: at most {np.iinfo(np.int32).max:,} fit the format")
        stored = values.astype(self.dtype).tobytes()
        self._file.write(stored)
        self._digest.update(stored)
        ends = np.cumsum(lengths)
        inside = np.zeros(0, np.int64) if begins is None else np.setdiff1d(np.flatnonzero(begins), ends - lengths)
        starts = np.sort(np.concatenate([ends - lengths, inside]))
        self._sizes.frombytes(np.diff(starts, append=values.size).astype(np.intc).tobytes())
        sequences = 1 + np.searchsorted(inside, ends) - np.searchsorted(inside, ends - lengths)
        self._documents.frombytes((self._documents[-1] + np.cumsum(sequences)).tobytes())
        self.tokens += values.size

    def close(self) -> None:
        """Write the index, which makes the corpus whole, and remember the content."""
        self._file.close()
        sizes = np.array(self._sizes, dtype="<i4")
        starts = np.zeros(len(sizes), dtype="<i8")
        np.cumsum(sizes[:-1], out=starts[1:])
        with open(idx_path(self.prefix), "wb") as file:
            code = next(code for code, dtype in DTYPES.items() if dtype == self.dtype)
            file.write(_HEADER.pack(MAGIC, VERSION, code, len(sizes), len(self._documents)))
            file.write(sizes.tobytes())
            file.write((starts * self.dtype.itemsize).tobytes())
            file.write(np.array(self._documents, dtype="<i8").tobytes())
        smallest, largest = (self._smallest, self._largest) if self.tokens else (0, -1)
        content = Content(self._digest.hexdigest(), smallest, largest)
        _remember(self.prefix, _after_a_tick(bin_path(self.prefix)), content)

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.close()
        else:
            self._file.close()
