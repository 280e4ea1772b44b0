"""Sources are files of JSON lines, JSON, plain text, CSV, Parquet and Arrow, most of them also compressed; standard
input; and data sets of the Hugging Face hub.

A `Source` gives `Block`s of records as they are stored, about 1 MiB each and the same ones on every machine;
`Block.documents` turns records into texts, which may happen in another process. What is no document is a `Problem` in
its place: nothing is left out silently, and one bad record costs no other.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import hashlib
import io
import lzma
import os
import sys
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import zstandard

from zero_tp.data.formats import FORMATS, Input, choose_json_key
from zero_tp.data.records import Block, Problem, Record
from zero_tp.errors import UserError
from zero_tp.files import open_regular

KINDS = {
    **{".jsonl": "jsonl", ".json": "json", ".txt": "txt"},
    **{".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"},
}
COMPRESSIONS = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"}
COLUMNAR = ("parquet", "arrow")  # compressed inside, and read at random
DOCUMENTS = ("file", "line", "blank-line")
_BLOCK_BYTES, _BLOCK_RECORDS = 2**20, 10_000


@dataclass
class Source(Input):
    """A source is one input: a file, standard input, or a data set of the hub.

    Attributes:
        path: of the file; None: there is none.
        sha256: of the bytes as stored, once all blocks were given.
    """

    path: Path | None = None
    sha256: str = ""
    _stream: Watched | None = field(default=None, repr=False)

    @property
    def position(self) -> int:
        """Return how many of them have been read."""
        return self._stream.count if self._stream is not None else 0

    def blocks(self) -> Iterator[Block]:
        """Yield all records in blocks.

        Raises:
            UserError: the file can't be read, a library for it is missing, or no field holds a text.
        """
        compression = COMPRESSIONS.get(self.path.suffix) if self.path is not None else None
        self.key, number = None, 0
        try:
            with self._opened() as raw:
                for records in batch_records(self._records(raw, compression)):
                    if number == 0 and self.kind in ("jsonl", "json"):
                        choose_json_key(self, records)
                    yield Block(self.name, number, self.key, records)
                    number += 1
                if self._stream is not None:
                    self.sha256 = self._stream.rest()
                elif self.path is not None:
                    self.sha256 = file_sha256(self.path)
        except OSError as error:
            raise UserError(f"{self.name}: {error.strerror or error}") from error

    @contextlib.contextmanager
    def _opened(self) -> Iterator[IO[bytes]]:
        if self.kind == "hub":
            yield io.BytesIO()
            return
        with open_regular(self.path) if self.path is not None else os.fdopen(os.dup(sys.stdin.fileno()), "rb") as raw:
            if self.kind not in COLUMNAR:
                self._stream = Watched(raw)
            yield raw if self._stream is None else io.BufferedReader(self._stream, 2**20)

    def _records(self, raw: IO[bytes], compression: str | None) -> Iterator[Record]:
        place = 0
        try:
            for record in FORMATS[self.kind](self, decompressed(raw, compression)):
                place = record.place
                yield record
        except Exception as error:
            if (problem := cut_short(error, compression)) is None:
                raise
            yield Record(place + 1, problem)


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
    """A stream hashes and counts the bytes that are read of another."""

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

    def rest(self) -> str:
        """Read what is left, and return the SHA-256 of all."""
        while self.read(2**20):
            pass
        return self.digest.hexdigest()


class _Zstd(io.RawIOBase):
    """A stream decompresses zstandard frames, and raises EOFError where the last one is cut."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw, self._made = raw, zstandard.ZstdDecompressor()
        self._frame: Any = None
        self._decompressed = memoryview(b"")
        self._left = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._decompressed:
            data = self._left or self._raw.read(2**17)
            if not data:
                if self._frame is not None:
                    raise EOFError("it ends inside a frame")
                return 0
            self._frame = self._frame or self._made.decompressobj()
            self._decompressed, self._left = memoryview(self._frame.decompress(data)), b""
            if self._frame.eof:
                self._left, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._decompressed))
        buffer[:count], self._decompressed = self._decompressed[:count], self._decompressed[count:]
        return count


def decompressed(raw: IO[bytes], compression: str | None) -> IO[bytes]:
    if compression == "zstd":
        return io.BufferedReader(_Zstd(raw), 2**17)
    opened = {"gzip": gzip.open, "bzip2": bz2.open, "xz": lzma.open}
    return opened[compression](raw, "rb") if compression else raw  # type: ignore[operator]


def cut_short(error: Exception, compression: str | None) -> Problem | None:
    """Return what a damaged file costs: all from there on. None: it is no damage of a compressed file."""
    known = isinstance(error, EOFError | zlib.error | lzma.LZMAError) or type(error).__name__ == "ZstdError"
    if compression and (known or (isinstance(error, OSError) and error.errno is None)):
        return Problem("unreadable", f"not a whole {compression} file ({error}): the rest of it is lost")
    return None
