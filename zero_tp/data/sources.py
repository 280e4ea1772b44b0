"""Read a source in blocks of records as they are stored, about 1 MiB each and the same ones on every machine.

`RecordBatch.documents` turns records into texts, which may happen in another process. A bad record is a `Problem` in
its place: nothing is left out silently, and it costs no other record.
"""

from __future__ import annotations

import bz2
import hashlib
import io
import lzma
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

import zstandard

from zero_tp.data.formats import STREAMS, TABLES, choose_json_key, read_hub
from zero_tp.data.records import Problem, Record, RecordBatch, Source
from zero_tp.errors import UserError
from zero_tp.files import open_regular

_BLOCK_BYTES, _BLOCK_RECORDS = 2**20, 10_000
_READ_BYTES, _COMPRESSED_BYTES = 2**20, 2**11  # at once; 2 KiB may be 64 MiB decompressed, and are lost at an error
COMPRESSIONS: dict[str, Callable[[], Any]] = {
    ".gz": partial(zlib.decompressobj, 16 + zlib.MAX_WBITS),
    ".bz2": bz2.BZ2Decompressor,
    ".xz": lzma.LZMADecompressor,
    ".zst": lambda: zstandard.ZstdDecompressor().decompressobj(),
}
"""Ending of a file → a decompressor of one frame."""


def read_blocks(source: Source) -> Iterator[RecordBatch]:
    """Yield all records of a source in blocks.

    Raises:
        UserError: the file can't be read, a library for it is missing, or no field holds a text.
    """
    source.key, source.position = None, 0
    try:
        for number, records in enumerate(batch_records(read_hub(source) if source.kind == "hub" else _records(source))):
            if number == 0 and source.kind in ("jsonl", "json"):
                choose_json_key(source, records)
            yield RecordBatch(source.name, number, source.key, records)
    except OSError as error:
        raise UserError(f"{source.name}: {error.strerror or error}") from error


def _records(source: Source) -> Iterator[Record]:
    """Yield the records of a file or of standard input, then set its hash."""
    with open_regular(source.path) if source.path is not None else os.fdopen(os.dup(sys.stdin.fileno()), "rb") as raw:
        if source.path is not None and source.kind in TABLES:
            yield from TABLES[source.kind](source, raw)
            source.sha256 = file_sha256(source.path)
            return
        ending, digest, place = source.path.suffix if source.path is not None else "", hashlib.sha256(), 0
        pieces = _raw_pieces(source, raw, digest, _COMPRESSED_BYTES if ending in COMPRESSIONS else _READ_BYTES)
        decompressed = _decompress(pieces, COMPRESSIONS[ending]) if ending in COMPRESSIONS else pieces
        try:
            for record in STREAMS[source.kind](source, io.BufferedReader(_Pieces(decompressed), _READ_BYTES)):
                place = record.place
                yield record
        except EOFError as error:
            yield Record(place + 1, Problem("unreadable", f"not a whole {ending} file ({error}): the rest is lost"))
        for _ in pieces:  # the hash is that of the whole file
            pass
        source.sha256 = digest.hexdigest()


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


def _raw_pieces(source: Source, file: IO[bytes], digest: Any, size: int) -> Iterator[bytes]:
    """Yield a file's bytes; hash and count them."""
    while data := file.read(size):
        digest.update(data)
        source.position += len(data)
        yield data


def _decompress(pieces: Iterator[bytes], new_decompressor: Callable[[], Any]) -> Iterator[bytes]:
    """Decompress all frames of a file, which may be padded with zeros.

    Raises:
        EOFError: a frame is damaged, or cut: the readers of zstandard and fsspec end silently there.
    """
    frame = None
    for data in pieces:
        while data := data if frame is not None else data.lstrip(b"\0"):
            frame = frame or new_decompressor()
            try:
                yield frame.decompress(data)
            except (OSError, zlib.error, lzma.LZMAError, zstandard.ZstdError) as error:
                raise EOFError(str(error)) from error
            data = b""
            if frame.eof:
                data, frame = frame.unused_data, None
    if frame is not None:
        raise EOFError("it ends inside a frame")


class _Pieces(io.RawIOBase):
    """A file of consecutive pieces of bytes."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._piece = pieces, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._piece:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._piece = memoryview(piece)
        count = min(len(buffer), len(self._piece))
        buffer[:count], self._piece = self._piece[:count], self._piece[count:]
        return count
