"""Inputs: files of JSON lines, JSON, plain text, CSV, Parquet and Arrow, most of them also compressed; standard input;
and data sets of the Hugging Face hub.

A `Source` gives `RecordBatch`s of records as they are stored, about 1 MiB each and the same ones on every machine.
`RecordBatch.documents` turns records into texts, which may happen in another process. A bad record is a `Problem` in
its place: nothing is left out silently, and it costs no other record.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import lzma
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

import zstandard

from zero_tp.data.formats import FORMATS, choose_json_key, read_hub
from zero_tp.data.records import Input, Problem, Record, RecordBatch
from zero_tp.errors import UserError
from zero_tp.files import open_regular

DOCUMENTS = ("file", "line", "blank-line")
_BLOCK_BYTES, _BLOCK_RECORDS = 2**20, 10_000


@dataclass
class Source(Input):
    """A file, standard input, or a data set of the hub.

    Attributes:
        path: of the file; None: there is none.
        sha256: of the bytes as stored, after all blocks were read.
    """

    path: Path | None = None
    sha256: str = ""
    _stream: Watched | None = field(default=None, repr=False)

    @property
    def position(self) -> int:
        """Return how many bytes of the file have been read."""
        return self._stream.count if self._stream is not None else 0

    def blocks(self) -> Iterator[RecordBatch]:
        """Yield all records in blocks.

        Raises:
            UserError: the file can't be read, a library for it is missing, or no field holds a text.
        """
        self.key, number = None, 0
        try:
            for records in batch_records(read_hub(self) if self.kind == "hub" else self._records()):
                if number == 0 and self.kind in ("jsonl", "json"):
                    choose_json_key(self, records)
                yield RecordBatch(self.name, number, self.key, records)
                number += 1
        except OSError as error:
            raise UserError(f"{self.name}: {error.strerror or error}") from error

    def _records(self) -> Iterator[Record]:
        """Yield the records of a file or of standard input, then set its hash."""
        compression = COMPRESSIONS.get(self.path.suffix) if self.path is not None else None
        read, is_columnar = FORMATS[self.kind]
        with open_regular(self.path) if self.path is not None else os.fdopen(os.dup(sys.stdin.fileno()), "rb") as raw:
            file: IO[bytes] = raw
            if not is_columnar:
                self._stream = Watched(raw)
                file = io.BufferedReader(self._stream, 2**20)
            place = 0
            try:
                for record in read(self, compression.open(file) if compression else file):
                    place = record.place
                    yield record
            except (OSError, EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError) as error:
                if compression is None or (isinstance(error, OSError) and error.errno is not None):
                    raise
                detail = f"not a whole {compression.name} file ({error}): the rest of it is lost"
                yield Record(place + 1, Problem("unreadable", detail))
            if self._stream is not None:
                self.sha256 = self._stream.finish()
            elif self.path is not None:
                self.sha256 = file_sha256(self.path)


def batch_records(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Yield records in batches of about 1 MiB."""
    batch: list[Record] = []
    size = 0
    for record in records:
        batch.append(record)
        content = record.content
        size += sum(map(len, map(str, content.values()))) if isinstance(content, dict) else len(content)
        if size >= _BLOCK_BYTES or len(batch) == _BLOCK_RECORDS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of the file's bytes as stored (compressed, if it is), in hexadecimal."""
    try:
        with open_regular(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from error


# --- streams of bytes -------------------------------------------------------------------------------------------------


class Watched(io.RawIOBase):
    """Hash and count the bytes that are read from another stream."""

    def __init__(self, raw: IO[bytes]) -> None:
        self.raw, self.digest, self.count = raw, hashlib.sha256(), 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self.raw.read(len(buffer))
        buffer[: len(data)] = data
        self.digest.update(data)
        self.count += len(data)
        return len(data)

    def finish(self) -> str:
        """Read the rest, and return the SHA-256 of all."""
        while self.read(2**20):
            pass
        return self.digest.hexdigest()


class _Zstd(io.RawIOBase):
    """Decompress zstandard frames; raise EOFError if the last one is cut.

    The readers of zstandard and fsspec end silently at a cut. pyarrow's raises, but drops the bytes before the cut.
    """

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw, self._decompressor = raw, zstandard.ZstdDecompressor()
        self._frame: Any = None
        self._decompressed = memoryview(b"")
        self._compressed = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._decompressed:
            data = self._compressed or self._raw.read(2**17)
            if not data:
                if self._frame is not None:
                    raise EOFError("it ends inside a frame")
                return 0
            self._frame = self._frame or self._decompressor.decompressobj()
            self._decompressed, self._compressed = memoryview(self._frame.decompress(data)), b""
            if self._frame.eof:
                self._compressed, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._decompressed))
        buffer[:count], self._decompressed = self._decompressed[:count], self._decompressed[count:]
        return count


class Compression(NamedTuple):
    """A compression by its name in messages, and a function that opens a file's decompressed bytes."""

    name: str
    open: Callable[[IO[bytes]], IO[bytes]]


COMPRESSIONS = {
    ".gz": Compression("gzip", gzip.open),  # type: ignore[arg-type]
    ".bz2": Compression("bzip2", bz2.open),
    ".xz": Compression("xz", lzma.open),
    ".zst": Compression("zstd", lambda raw: io.BufferedReader(_Zstd(raw), 2**17)),
}
