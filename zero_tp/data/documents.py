"""Documents are read from files: JSON lines, JSON, plain text, CSV, Parquet and Arrow, most of them also compressed;
from standard input, and from data sets of the Hugging Face hub.

A `Source` is one of these. It gives `Block`s of records as they are stored, about 1 MiB each and the same ones on every
machine; `Block.documents` turns records into texts, which may happen in another process. What is no document is a
`Problem` in its place: nothing is left out silently, and one bad record costs no other.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import glob
import gzip
import hashlib
import importlib
import io
import lzma
import os
import stat
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NamedTuple

from zero_tp.errors import UserError, did_you_mean, first_line, one_line
from zero_tp.files import MOST_BYTES, InvalidJson, parse_json

KINDS = {
    **{".jsonl": "jsonl", ".json": "json", ".txt": "txt"},
    **{".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"},
}
COMPRESSIONS = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"}
COLUMNAR = ("parquet", "arrow")  # compressed inside, and read at random
DOCUMENTS = ("file", "line", "blank-line")
STDIN, HUB = "-", "hf:"
TEXT_KEYS = ("text", "content", "body", "document", "raw_content", "article")
"""Fields in which a text is looked for, where none is named."""
TITLE = "title"
EVERY_STRING = "\0"
"""Instead of a field: all strings of a record."""
MOST_LINE = MOST_BYTES
_BLOCK_BYTES, _BLOCK_RECORDS, _ROWS = 2**20, 10_000, 256

Content = bytes | dict[str, Any]


class Problem(NamedTuple):
    """A problem says why a record is no document: one of a few reasons, by which they are counted, and what exactly."""

    reason: str
    detail: str


class Document(NamedTuple):
    """A document is a text, with the title that its record gives it, if any."""

    text: str
    title: str | None = None


class Record(NamedTuple):
    """A record is what a file holds at `place` (a line or row, from 1; 0: the whole file)."""

    place: int
    content: Content | Document | Problem


@dataclass(frozen=True)
class Block:
    """A block holds some records of a source that follow each other.

    Attributes:
        number: of the block in its source, from 0.
        key: the field of the text, where records have fields.
    """

    source: str
    number: int
    key: str | None
    records: Sequence[Record]

    def documents(self) -> Iterator[tuple[int, Document | Problem]]:
        """Yield the place and the document of each record, in order."""
        for place, content in self.records:
            yield place, document_of(content, self.key)


def where(source: str, place: int) -> str:
    """Return the place of a record as a message names it: file and line."""
    return f"{source}:{place}" if place else source


# --- one record -------------------------------------------------------------------------------------------------------


def document_of(content: Content | Document | Problem, key: str | None) -> Document | Problem:
    """Return the document of a record: bytes with a `key` are a line of JSON, without one a text."""
    if isinstance(content, Document | Problem):
        return content
    if isinstance(content, bytes) and key is not None:
        found = _object_of(content)
        return found if isinstance(found, Problem) else _document_of_object(found, key)
    if isinstance(content, dict):
        assert key is not None
        return _document_of_object(content, key)
    assert isinstance(content, bytes)
    text = _decoded(content)
    return text if isinstance(text, Problem) else Document(text.removeprefix("\ufeff").replace("\r\n", "\n"))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str | bytes):
        yield value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _strings(each)


def _document_of_object(record: Mapping[str, Any], key: str) -> Document | Problem:
    if key == EVERY_STRING:
        return Document("\n".join(_strings(record)).encode("utf-8", "replace").decode())
    if key not in record:
        return Problem("no text", f"no key {key!r}; the keys found are {_named(record)}: choose one with --text-key")
    text, title = record[key], record.get(TITLE)
    if isinstance(text, bytes):
        text = _decoded(text)
        if isinstance(text, Problem):
            return text
    if not isinstance(text, str):
        return Problem("no text", f"{key!r} must be a string, found {type(text).__name__}")
    if not text.isascii() and (bad := _surrogate(text)) is not None:
        return bad
    title = title.decode("utf-8", "replace") if isinstance(title, bytes) else title
    return Document(text, title if isinstance(title, str) else None)


def _surrogate(text: str) -> Problem | None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return Problem("not UTF-8", f"not UTF-8 at character {error.start}")
    return None


def _decoded(data: bytes) -> str | Problem:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        return Problem("not UTF-8", f"not UTF-8 at byte {error.start}: convert it to UTF-8 first")


def _object_of(line: bytes) -> dict[str, Any] | Problem:
    try:
        record = parse_json(line.removeprefix(codecs.BOM_UTF8))
    except InvalidJson as error:
        return Problem("not UTF-8" if "UTF-8" in str(error) else "malformed", str(error))
    if not isinstance(record, dict):
        return Problem("malformed", f"a JSON object is needed, found {type(record).__name__}")
    return record


def _named(fields: Iterable[str]) -> str:
    return one_line(", ".join(sorted(map(repr, fields))), 500) or "none"


def text_of(record: dict[str, Any], place: str, text_key: str) -> str:
    """Return the string under `text_key` of a line's object. UserError: there is none."""
    found = _document_of_object(record, text_key)
    if isinstance(found, Problem):
        raise UserError(f"{place}: {found.detail}")
    return found.text


def _choose_key(fields: Mapping[str, bool], wanted: str | None, source: str) -> str:
    """Return the field that holds the text: `wanted`, or one of `TEXT_KEYS`, or the only one that is a string.

    Args:
        fields: name → whether it is a string.

    Raises:
        UserError: there is no such field; names those seen.
    """
    if wanted == EVERY_STRING:
        return wanted
    if wanted is not None:
        if fields.get(wanted):
            return wanted
        what = "is not a string" if wanted in fields else "is not there"
        near = f" ({did_you_mean(wanted, fields)})" if fields and wanted not in fields else ""
        raise UserError(
            f"{source}: no key {wanted!r} with a text ({what}); the keys found are {_named(fields)}: "
            f"choose one with --text-key{near}"
        )
    texts = [name for name, is_text in fields.items() if is_text]
    for name in (*TEXT_KEYS, *(texts if len(texts) == 1 else ())):
        if name in texts:
            return name
    raise UserError(f"{source}: no key 'text'; the keys found are {_named(fields)}: choose one with --text-key")


# --- files as streams of bytes ----------------------------------------------------------------------------------------


def needed(module: str, what: str) -> ModuleType:
    """Import an optional library. UserError: it is not installed; with the remedy."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"{what} needs {module.partition('.')[0]}: pip install -c constraints.txt -e .[data]"
        ) from error


class _Watched(io.RawIOBase):
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

    def __init__(self, raw: IO[bytes], name: str) -> None:
        self._raw, self._made = raw, needed("zstandard", name).ZstdDecompressor()
        self._frame: Any = None
        self._given = memoryview(b"")
        self._left = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._given:
            data = self._left or self._raw.read(2**17)
            if not data:
                if self._frame is not None:
                    raise EOFError("it ends inside a frame")
                return 0
            self._frame = self._frame or self._made.decompressobj()
            self._given, self._left = memoryview(self._frame.decompress(data)), b""
            if self._frame.eof:
                self._left, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._given))
        buffer[:count], self._given = self._given[:count], self._given[count:]
        return count


def _decompressed(raw: IO[bytes], compression: str | None, name: str) -> IO[bytes]:
    if compression == "zstd":
        return io.BufferedReader(_Zstd(raw, name), 2**17)
    opened = {"gzip": gzip.open, "bzip2": bz2.open, "xz": lzma.open}
    return opened[compression](raw, "rb") if compression else raw  # type: ignore[operator]


def _cut(error: Exception, compression: str | None) -> Problem | None:
    """Return what a damaged file costs: all from there on. None: it is no damage of a compressed file."""
    known = isinstance(error, EOFError | zlib.error | lzma.LZMAError) or type(error).__name__ == "ZstdError"
    if compression and (known or (isinstance(error, OSError) and error.errno is None)):
        return Problem("unreadable", f"not a whole {compression} file ({error}): the rest of it is lost")
    return None


# --- the kinds of files -----------------------------------------------------------------------------------------------


def _lines(file: IO[bytes]) -> Iterator[Record]:
    """Yield every line with its number; of one beyond `MOST_LINE` bytes no more is in memory."""
    number = 0
    while line := file.readline(MOST_LINE + 1):
        number += 1
        if len(line) <= MOST_LINE:
            yield Record(number, line)
            continue
        length = len(line)
        while not line.endswith(b"\n") and (line := file.readline(2**20)):
            length += len(line)
        yield Record(number, Problem("too long", f"a line of {length:,} bytes, at most {MOST_LINE:,} are read"))


def _filled(records: Iterable[Record]) -> Iterator[Record]:
    """Leave out blank lines."""
    return (record for record in records if isinstance(record.content, Problem) or record.content.strip())  # type: ignore[union-attr]


class _JsonLines:
    """JSON lines: a document each. Blank lines are none."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def records(self, file: IO[bytes]) -> Iterator[Record]:
        return _filled(_lines(file))

    def key(self, first: Sequence[Record]) -> str | None:
        """Return the field of the text, as the first block has it; None where it has no object at all."""
        fields: dict[str, bool] = {}
        for _, content in first:
            found = _object_of(content) if isinstance(content, bytes) else content
            if isinstance(found, dict):
                for name, value in found.items():
                    fields[name] = fields.get(name, False) or isinstance(value, str)
        usual = self.source.text_key or TEXT_KEYS[0]
        if usual in fields or usual == EVERY_STRING or not fields:
            return usual
        return _choose_key(fields, self.source.text_key, self.source.name)


class _Json(_JsonLines):
    """A .json file is an array of objects, JSON lines, or one object, which is a document."""

    def records(self, file: IO[bytes]) -> Iterator[Record]:
        stream = io.BufferedReader(file, 2**17)  # type: ignore[type-var]
        head = stream.peek(2**16).removeprefix(codecs.BOM_UTF8).lstrip()
        if head.startswith(b"["):
            yield from self._array(stream)
            return
        first = stream.readline(MOST_LINE + 1)
        if not first.strip() or not isinstance(_object_of(first), Problem):
            if first.strip():
                yield Record(1, first)
            for place, content in _filled(_lines(stream)):
                yield Record(place + 1, content)
            return
        whole = first + stream.read(MOST_LINE)
        found = _object_of(whole)
        if isinstance(found, dict):
            yield Record(0, found)
            return
        for place, content in _filled(_lines(io.BytesIO(whole))):
            yield Record(place, content)

    def _array(self, stream: IO[bytes]) -> Iterator[Record]:
        ijson = needed("ijson", f"{self.source.name}: an array of JSON")
        if stream.peek(3).startswith(codecs.BOM_UTF8):  # type: ignore[attr-defined]
            stream.read(3)
        number = 0
        try:
            for number, item in enumerate(ijson.items(stream, "item", use_float=True), start=1):
                kind = Problem("malformed", f"a JSON object is needed, found {type(item).__name__}")
                yield Record(number, item if isinstance(item, dict) else kind)
        except (ijson.JSONError, UnicodeDecodeError) as error:
            yield Record(
                number + 1, Problem("unreadable", f"not valid JSON ({first_line(error)}): the rest of it is lost")
            )


class _Text:
    """A .txt file is one document, or has one a line, or several that blank lines part."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def key(self, first: Sequence[Record]) -> str | None:
        return None

    def records(self, file: IO[bytes]) -> Iterator[Record]:
        if self.source.documents == "file":
            yield Record(0, file.read())
        elif self.source.documents == "line":
            for place, content in _filled(_lines(file)):
                yield Record(place, content.rstrip(b"\r\n") if isinstance(content, bytes) else content)
        else:
            yield from self._paragraphs(file)

    def _paragraphs(self, file: IO[bytes]) -> Iterator[Record]:
        held, begun, length = list[bytes](), 1, 0
        for place, content in chain(_lines(file), [Record(0, b"")]):
            if isinstance(content, Problem):
                yield Record(place, content)
            elif content.strip():  # type: ignore[union-attr]
                begun = begun if length else place
                length += len(content)
                held.append(content)  # type: ignore[arg-type]
                if length > MOST_LINE:
                    held.clear()
            elif length:
                detail = f"a document of {length:,} bytes, at most {MOST_LINE:,} are read"
                yield Record(begun, b"".join(held).rstrip(b"\r\n") if held else Problem("too long", detail))
                held, length = [], 0


class _Columns:
    """Rows of a table: the field of the text is known before the first row."""

    def __init__(self, source: Source) -> None:
        self.source, self._key = source, ""

    def key(self, first: Sequence[Record]) -> str | None:
        return self._key or None

    def chosen(self, fields: Mapping[str, bool]) -> list[str]:
        """Choose the text's field, and return those that are read."""
        self._key = _choose_key(fields, self.source.text_key, self.source.name)
        if self._key == EVERY_STRING:
            return [name for name, is_text in fields.items() if is_text]
        return [self._key, *([TITLE] if fields.get(TITLE) and self._key != TITLE else [])]


class _Csv(_Columns):
    """A .csv file has a header, commas, double quotes, and line breaks inside quotes where it needs them."""

    def records(self, file: IO[bytes]) -> Iterator[Record]:
        lost: list[Record] = []

        def lines() -> Iterator[str]:
            for place, content in _lines(file):
                if isinstance(content, Problem):
                    lost.append(Record(place, content))
                else:
                    assert isinstance(content, bytes)
                    line = content.removeprefix(codecs.BOM_UTF8) if place == 1 else content
                    yield line.decode("utf-8", "surrogateescape")

        csv.field_size_limit(MOST_LINE)
        rows = csv.reader(lines(), strict=True)
        try:
            header = next(rows, None)
        except csv.Error as error:
            yield Record(1, Problem("malformed", f"its header is no CSV: {error}"))
            return
        if header is None:
            yield from lost
            return
        fields = self.chosen(dict.fromkeys(header, True))
        columns = [header.index(name) for name in fields]
        while True:
            begun = rows.line_num + 1
            try:
                row = next(rows)
            except StopIteration:
                yield from lost
                return
            except csv.Error as error:
                yield Record(begun, Problem("malformed", f"not CSV: {error}"))
                continue
            yield from lost
            lost.clear()
            if row and len(row) != len(header):
                detail = f"{len(row):,} fields where the header has {len(header):,}"
                yield Record(begun, Problem("malformed", detail))
            elif row:
                yield Record(begun, {name: row[column] for name, column in zip(fields, columns, strict=True)})


class _Arrow(_Columns):
    """Parquet files and Arrow's, in its stream and its file format: read in batches of rows."""

    def records(self, file: IO[bytes]) -> Iterator[Record]:
        pyarrow = needed("pyarrow", f"{self.source.name}: a .{self.source.kind} file")
        row = 0
        try:
            schema, batches = (self._parquet if self.source.kind == "parquet" else self._ipc)(file)
            types = pyarrow.types
            fields = self.chosen(
                {
                    each.name: any(
                        of(each.type) for of in (types.is_string, types.is_large_string, types.is_string_view)
                    )
                    or (types.is_dictionary(each.type) and types.is_string(each.type.value_type))
                    for each in schema
                }
            )
            for batch in batches(fields):
                for values in zip(*(_bytes_of(batch.column(name), pyarrow) for name in fields), strict=True):
                    row += 1
                    found = dict(zip(fields, values, strict=True))
                    null = Problem("no text", f"{self._key!r} must be a string, found null")
                    yield Record(row, null if found.get(self._key, b"") is None else found)
        except (pyarrow.ArrowException, OSError, MemoryError, KeyError, UnicodeDecodeError, OverflowError) as error:
            if isinstance(error, OSError) and error.errno is not None and not isinstance(error, pyarrow.ArrowException):
                raise
            detail = f"not a whole {self.source.kind} file ({one_line(first_line(error), 200)}): the rest of it is lost"
            yield Record(row + 1, Problem("unreadable", detail))

    def _parquet(self, file: IO[bytes]) -> tuple[Any, Callable[[list[str]], Iterator[Any]]]:
        opened = needed("pyarrow.parquet", self.source.name).ParquetFile(file)
        return opened.schema_arrow, lambda fields: opened.iter_batches(batch_size=_ROWS, columns=fields)

    def _ipc(self, file: IO[bytes]) -> tuple[Any, Callable[[list[str]], Iterator[Any]]]:
        ipc = needed("pyarrow", self.source.name).ipc
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        opened = ipc.open_file(file) if is_file else ipc.open_stream(file)
        parts = (opened.get_batch(number) for number in range(opened.num_record_batches)) if is_file else iter(opened)
        return opened.schema, lambda fields: (
            batch.slice(start, _ROWS) for batch in parts for start in range(0, len(batch), _ROWS)
        )


def _bytes_of(column: Any, pyarrow: ModuleType) -> list[bytes | None]:
    """Return the texts of a column as bytes: one that is not UTF-8 is one row's fault.

    Raises:
        pyarrow.ArrowInvalid: the column is damaged; to read it unchecked would crash.
    """
    column.validate(full=hasattr(column, "dictionary"))
    column = column.dictionary_decode() if hasattr(column, "dictionary") else column
    stored = column.cast(pyarrow.large_binary())
    stored.validate(full=True)
    found: list[bytes | None] = stored.to_pylist()
    return found


class _Hub(_Columns):
    """A data set of the Hugging Face hub, streamed."""

    def records(self, file: IO[bytes]) -> Iterator[Record]:
        name, config, split = self.source.dataset
        hint = (
            "without a network it must be in the cache of this machine (HF_HOME): `hf download --repo-type dataset "
            f"{name}` puts it there"
        )
        datasets = needed("datasets", self.source.name)
        try:
            try:
                found = datasets.load_dataset(name, config, split=split, streaming=True)
            except ConnectionError:  # a snapshot in the hub's cache is a directory
                hub = needed("huggingface_hub", self.source.name)
                there = hub.snapshot_download(name, repo_type="dataset", local_files_only=True)
                found = datasets.load_dataset(there, config, split=split, streaming=True)
            features = found.features or {key: None for key in next(iter(found))}
        except StopIteration:
            return
        except Exception as error:  # datasets and huggingface_hub raise a dozen kinds, with and without a network
            raise UserError(f"{self.source.name}: can't be read: {first_line(error)}; {hint}") from error
        texts = {key: getattr(kind, "dtype", "string") in ("string", "large_string") for key, kind in features.items()}
        fields = self.chosen(texts)
        rows = iter(found.select_columns(fields))
        row = 0
        while True:
            try:
                values = next(rows)
            except StopIteration:
                return
            except Exception as error:
                raise UserError(
                    f"{self.source.name}: can't be read further than row {row:,}: {first_line(error)}; {hint}"
                ) from error
            row += 1
            yield Record(row, values)


_FORMATS: dict[str, Callable[[Source], _JsonLines | _Text | _Columns]] = {
    "jsonl": _JsonLines,
    "json": _Json,
    "txt": _Text,
    "csv": _Csv,
    "parquet": _Arrow,
    "arrow": _Arrow,
    "hub": _Hub,
}


# --- sources ----------------------------------------------------------------------------------------------------------


@dataclass
class Source:
    """A source is one input: a file, standard input, or a data set of the hub.

    Attributes:
        name: as messages name it.
        kind: of `_FORMATS`.
        path: of the file; None: there is none.
        text_key: field of the text; None: it is found.
        documents: what a document of plain text is: the whole "file", a "line", or what a "blank-line" ends.
        dataset: repository, configuration and split.
        sha256: of the bytes as stored, once all blocks were given.
    """

    name: str
    kind: str
    path: Path | None = None
    text_key: str | None = None
    documents: str = "file"
    dataset: tuple[str, str | None, str] = ("", None, "")
    sha256: str = ""
    _stream: _Watched | None = field(default=None, repr=False)

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
        reader = _FORMATS[self.kind](self)
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

    def _opened(self) -> IO[bytes]:
        if self.kind in COLUMNAR:
            assert self.path is not None
            return open(self.path, "rb")
        if self.kind == "hub":
            return io.BytesIO()
        raw = open(self.path, "rb") if self.path is not None else os.fdopen(os.dup(sys.stdin.fileno()), "rb")  # noqa: SIM115
        self._stream = _Watched(raw)
        return io.BufferedReader(self._stream, 2**20)

    def _records(self, reader: Any, raw: IO[bytes], compression: str | None) -> Iterator[Record]:
        place = 0
        try:
            for record in reader.records(_decompressed(raw, compression, self.name)):
                place = record.place
                yield record
        except Exception as error:
            if (problem := _cut(error, compression)) is None:
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


def document_kind(path: Path) -> str:
    """Return one of the values of `KINDS`, by the file's ending without that of a compression.

    Raises:
        UserError: there is no such ending, or it is that of a file which is compressed inside.
    """
    name = path.name
    inner = name.removesuffix(path.suffix) if path.suffix in COMPRESSIONS else name
    for ending, kind in KINDS.items():
        if inner.endswith(ending):
            if inner != name and kind in COLUMNAR:
                raise UserError(
                    f"{path}: a {ending} file is compressed inside: unpack it with {path.suffix}'s own tool"
                )
            return kind
    raise UserError(
        f"{path}: unknown kind of file: the name must end with one of {', '.join(KINDS)}, "
        f"or with one of {', '.join(COMPRESSIONS)} after it"
    )


def check_files(paths: Iterable[Path]) -> None:
    """Raise a UserError for the first path that is missing, no regular file, or of an unknown kind."""
    for path in paths:
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            raise UserError(f"{path}: no such file") from None
        except (OSError, ValueError) as error:  # ValueError: a NUL
            raise UserError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
        if stat.S_ISDIR(mode):
            raise UserError(f"{path} is a directory: name the files in it")
        if not stat.S_ISREG(mode):
            raise UserError(
                f"{path} is not a regular file: write what it gives to a file, or give it as standard input"
            )
        document_kind(path)


def find_sources(
    words: Sequence[str | Path],
    text_key: str | None = None,
    documents: str = "file",
    stdin_kind: str = "jsonl",
    *,
    every_string: bool = False,
) -> list[Source]:
    """Return the sources that are named: files, directories (all files of a known kind below), globs, `-` (standard
    input) and `hf:NAME[:CONFIGURATION[:SPLIT]]`.

    Files of a directory or glob are in the order of their names.

    Args:
        every_string: the text of a record is all its strings, also those in lists, instead of one field.

    Raises:
        UserError: there is no such file, or none that can be read.
    """
    found: list[Source] = []
    for word in map(str, words):
        if word == STDIN:
            found.append(Source("standard input", stdin_kind, None, text_key, documents))
        elif word.startswith(HUB):
            name, config, split = [*word.removeprefix(HUB).split(":", 2), "", ""][:3]
            if not name:
                raise UserError(
                    f"{word}: name a data set: hf:NAME, hf:NAME:CONFIGURATION or hf:NAME:CONFIGURATION:SPLIT"
                )
            dataset = (name, config or None, split or "train")
            found.append(Source(word, "hub", None, text_key, documents, dataset))
        else:
            paths = _files(word)
            check_files(paths)
            found += [Source(_printable(path), document_kind(path), path, text_key, documents) for path in paths]
    for source in found if every_string else ():
        source.text_key = EVERY_STRING
    if sum(source.name == "standard input" for source in found) > 1:
        raise UserError("standard input can be read once: give - once")
    if not found:
        raise UserError("no input files")
    return found


def stream(
    inputs: Sequence[str | Path], text_key: str | None = None, documents: str = "file"
) -> Iterator[tuple[str, Document | Problem]]:
    """Yield every document of the inputs with its place, in order, and a Problem where there is none.

    Args: see `find_sources`.

    Raises:
        UserError: an input is missing or can't be read.
    """
    for source in find_sources(inputs, text_key, documents):
        for block in source.blocks():
            for place, document in block.documents():
                yield where(block.source, place), document


def _printable(path: Path) -> str:
    """Return a path as reports may have it: names of files may hold any bytes."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _files(word: str) -> list[Path]:
    path = Path(word)
    if os.path.lexists(word) if "\0" not in word else True:
        if not os.path.isdir(word):
            return [path]
        below = sorted(each for each in path.rglob("*") if each.is_file() and not _hidden(each, path))
        kept = [each for each in below if _known(each)]
        if not kept:
            raise UserError(f"{path} is a directory with no file that ends with one of {', '.join(KINDS)}")
        return kept
    if glob.has_magic(word):
        kept = sorted(Path(each) for each in glob.glob(word, recursive=True) if os.path.isfile(each))
        if not kept:
            raise UserError(f"{word}: no file has such a name")
        return kept
    return [path]


def _hidden(path: Path, below: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(below).parts)


def _known(path: Path) -> bool:
    try:
        document_kind(path)
    except UserError:
        return False
    return True


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of the file's bytes as stored (compressed, if it is), in hexadecimal."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from error


# --- every record has to be right -------------------------------------------------------------------------------------


def read_documents(path: Path, text_key: str | None = None) -> Iterator[str]:
    """Yield the texts of one file, in order, about 1 MiB of them in memory at a time; a .txt file is one document.
    (Blank lines separate paragraphs in ordinary prose, so cutting there would put parts of one work on both sides of a
    split.)

    Raises:
        UserError: naming the file and line: missing file, not UTF-8, not JSON, no such key, damaged gzip.
    """
    for block in Source(str(path), document_kind(path), path, text_key).blocks():
        for place, document in block.documents():
            if isinstance(document, Problem):
                raise UserError(f"{where(block.source, place)}: {document.detail}")
            yield document.text


def read_objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (file and line, for messages; the JSON object there) of a .jsonl file. UserError as `read_documents`."""
    source = Source(str(path), "jsonl", path)
    compression = COMPRESSIONS.get(path.suffix)
    try:
        with source._opened() as raw:
            for place, content in source._records(_JsonLines(source), raw, compression):
                found = _object_of(content) if isinstance(content, bytes) else content
                if not isinstance(found, dict):
                    raise UserError(f"{where(source.name, place)}: {found.detail}")  # type: ignore[union-attr]
                yield where(source.name, place), found
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from error
