"""Processed blocks of documents in an append-only file.

An interrupted preparation resumes from it.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import zstandard

from zero_tp.base.errors import UserError
from zero_tp.base.files import write_atomically
from zero_tp.data.records import DroppedRecord, RecordCounts

Mask = npt.NDArray[np.bool_]
COMMIT_SECONDS = 5.0
"""Time between commits; a kill loses the work since the last one."""
DOCUMENT_FACTS = np.dtype(
    [
        *(("split_hash", "<u8"), ("place", "<i8"), ("characters", "<i8"), ("bytes", "<i8")),
        *(("content_hash", "V16"), ("sketch_bytes", "<i4"), ("contaminated", "?")),
    ]
)
"""The facts of a document: a hash that decides its split, its line or row in the input, its sizes,
a hash of its text if duplicates are removed, the length of its sketch, and whether it overlaps with
an evaluation set.
"""
BLOCKS = "blocks"
COMMITTED = "committed"
COLUMNS = (
    *("documents", "texts", "sketches", "sizes", "tokens", "sentences"),
    *("split_hashes", "content_hashes", "places", "starts", "parts", "bounds"),
)
"""A block's columns: its documents' `DOCUMENT_FACTS`, compressed texts and sketches; once they are
tokenized, the tokens per document (int64), all tokens, and whether a sentence begins with each
token (bool).

Those of token files (`tokens.documents`) are "sizes" without the end-of-text token, "tokens" as
they were read, "sentences", and the last six: two hashes a document (uint64, V16), its place and
its start in the block's tokens (int64), the parts of files that the block's tokens are in, if it
has no "tokens" (JSON), and the smallest and largest id (int64).
"""


class ProcessedBlock(NamedTuple):
    """The columns of a block of a source, and the counts of its records.

    Attributes:
        sha256: the source's hash, only in the empty block that marks its end.
    """

    source: int
    number: int
    sha256: str | None
    columns: dict[str, bytes]
    counts: RecordCounts


class StoredBlock(NamedTuple):
    """A block in a spool: the number of its source, its offset in the file, and the length of
    each column.
    """

    path: Path
    source: int
    start: int
    lengths: Sequence[int]

    def read(self, column: str) -> bytes:
        # One column at a time: hashes and sizes of all documents are read without their texts.
        index = COLUMNS.index(column)
        with open(self.path, "rb") as file:
            file.seek(self.start + sum(self.lengths[:index]))
            return file.read(self.lengths[index])

    def texts(self, lengths: npt.NDArray[np.int64], selected: Mask) -> list[str]:
        """Return the texts of the selected documents, bool [documents].

        `lengths` are the bytes of each text.
        """
        texts = (
            split_bytes(zstandard.decompress(self.read("texts")), lengths) if selected.any() else []
        )
        return [text.decode("utf-8") for text in compress(texts, selected)]


def split_bytes(data: bytes, lengths: npt.NDArray[np.int64]) -> list[bytes]:
    """Cut data into pieces of these lengths."""
    ends = np.cumsum(lengths).tolist()
    return [data[end - length : end] for end, length in zip(ends, lengths.tolist(), strict=True)]


class Spool:
    """Processed blocks in an append-only file of a directory.

    A block is a line of JSON and its columns. The file `committed` holds the length that has been
    synced to disk. Bytes beyond it belong to blocks that were being written when the process died;
    the next start truncates them.

    Attributes:
        identity: everything that decides the content of blocks, a JSON object; None: nothing was
            committed.
        blocks, counts: all blocks in order, and the counts of their records.
        last_blocks: source → number of its last block.
        sha256: source → hash of a source that was read to its end.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.blocks = list[StoredBlock]()
        self.counts = RecordCounts()
        self.identity: dict[str, Any] | None = None
        self.last_blocks = dict[int, int]()
        self.sha256 = dict[int, str]()
        self.path = directory / BLOCKS
        self._committed = directory / COMMITTED
        self._length = 0
        try:
            # The directory of a preparation that was killed in its third block:
            #
            #     blocks      {identity} {header 0} columns 0 {header 1} columns 1 {header 2} colu
            #     committed   the length up to here -----------------------------^
            #
            # The next start reads the headers of blocks 0 and 1 and truncates the rest.
            if self._committed.is_file() and self.path.is_file():
                self._load(int(self._committed.read_text()))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self.path} is damaged ({error}): remove {directory}") from error

    def _load(self, length: int) -> None:
        with open(self.path, "rb") as file:
            # Fewer bytes than were synced: not a kill, but another program or a broken disk.
            if (size := os.fstat(file.fileno()).st_size) < length:
                raise ValueError(f"{size:,} bytes instead of {length:,}")
            line = file.readline()
            self.identity = json.loads(line)
            self._length = len(line)
            while self._length < length:
                # Only headers are read. Columns may be many times the memory.
                file.seek(self._length)
                self._index(file.readline())

    def open(self, identity: Mapping[str, Any]) -> Spool:
        """Open the file to append blocks.

        `identity` must be that of the committed blocks, if there are any.
        """
        assert self.identity in (None, identity)
        self.directory.mkdir(parents=True, exist_ok=True)
        # Append mode: after the truncation new blocks follow the committed ones.
        self._file = open(self.path, "ab")  # noqa: SIM115 - closed by close()
        self._file.truncate(self._length)
        if self.identity is None:
            self._length = self._file.write(json.dumps(identity).encode() + b"\n")
        self._next_commit = time.monotonic() + COMMIT_SECONDS
        return self

    def _index(self, line: bytes) -> None:
        """Add the block at the end of the file, whose header is `line`."""
        header = json.loads(line)
        source = header["source"]
        lengths = tuple(header["lengths"])
        start = self._length + len(line)
        self.blocks.append(StoredBlock(self.path, source, start, lengths))
        self._length = start + sum(lengths)
        self.last_blocks[source] = header["number"]
        if header["sha256"] is not None:
            self.sha256[source] = header["sha256"]
        self.counts.add(
            header["read"],
            header["dropped"],
            [DroppedRecord(**problem) for problem in header["problems"]],
        )

    def append(self, block: ProcessedBlock) -> None:
        columns = [block.columns.get(name, b"") for name in COLUMNS]
        header = {"source": block.source, "number": block.number, "sha256": block.sha256}
        lengths = list(map(len, columns))
        line = json.dumps({**header, "lengths": lengths, **block.counts.as_dict()}).encode() + b"\n"
        self._file.writelines([line, *columns])
        self._index(line)
        if time.monotonic() >= self._next_commit:
            self.commit()

    def commit(self) -> None:
        """Sync all blocks to disk, then record the file's length."""
        self.flush()
        # The blocks first, then their length. In the other order a power failure could leave a
        # length without its blocks.
        os.fsync(self._file.fileno())
        write_atomically(self._committed, str(self._length))
        self._next_commit = time.monotonic() + COMMIT_SECONDS

    def flush(self) -> None:
        """Make all blocks readable."""
        # Readers open the file by its name and would not see what is still in this process's
        # buffer.
        self._file.flush()

    def close(self) -> None:
        """Close the file. The next start loses blocks that were not committed, as after a kill."""
        with contextlib.suppress(OSError):  # a full disk: buffered blocks are not committed
            self._file.close()
