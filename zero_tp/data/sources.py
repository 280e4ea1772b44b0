"""Sources are files of JSON lines, JSON, plain text, CSV, Parquet and Arrow, most of them also compressed; standard
input; and data sets of the Hugging Face hub.

A `Source` gives `Block`s of records as they are stored, about 1 MiB each and the same ones on every machine;
`Block.documents` turns records into texts, which may happen in another process. What is no document is a `Problem` in
its place: nothing is left out silently, and one bad record costs no other.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from zero_tp.data.formats import FORMATS, Input
from zero_tp.data.records import Block, Record
from zero_tp.data.streams import COMPRESSIONS, Watched, cut_short, decompressed
from zero_tp.errors import UserError
from zero_tp.files import open_regular

KINDS = {
    **{".jsonl": "jsonl", ".json": "json", ".txt": "txt"},
    **{".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"},
}
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
    def size(self) -> int:
        """Return the bytes as stored; 0 where nobody knows."""
        return self.path.stat().st_size if self.path is not None else 0

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
        reader = FORMATS[self.kind](self)
        key, number = None, 0
        try:
            with self._opened() as raw:
                for records in _batched(self._records(reader, raw, compression)):
                    key = reader.key(records) if number == 0 else key
                    yield Block(self.name, number, key, records)
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

    def _records(self, reader: Any, raw: IO[bytes], compression: str | None) -> Iterator[Record]:
        place = 0
        try:
            for record in reader.records(decompressed(raw, compression)):
                place = record.place
                yield record
        except Exception as error:
            if (problem := cut_short(error, compression)) is None:
                raise
            yield Record(place + 1, problem)


def _batched(records: Iterable[Record]) -> Iterator[list[Record]]:
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
