"""Readers of records, one for each kind of input: JSON lines, JSON, text, CSV, Parquet, Arrow, data sets of the hub.

`FORMATS` names them. A reader takes the input and its decompressed bytes, and yields `Record`s. Readers of tables set
`Input.key` before their first record; `choose_json_key` sets it from the first block of JSON objects.
"""

from __future__ import annotations

import codecs
import csv
import importlib
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import ModuleType
from typing import IO, Any

from zero_tp.data.records import (
    EVERY_STRING,
    MOST_LINE,
    TEXT_KEYS,
    TITLE,
    Problem,
    Record,
    choose_key,
    object_of,
)
from zero_tp.errors import UserError, first_line, json_kind, one_line

_ROWS = 256  # of a table that are in memory


def needed(module: str, what: str, extra: str = "data") -> ModuleType:
    """Import an optional library of an extra. UserError: it is not installed; with the remedy."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"{what} needs {module.partition('.')[0]}: pip install -c constraints.txt -e .[{extra}]"
        ) from error


@dataclass
class Input:
    """One input that a person names.

    Attributes:
        name: as messages name it.
        kind: of `FORMATS`.
        text_key: field of the text; None: it is found.
        documents: what a document of plain text is: the whole "file", a "line", or what a "blank-line" ends.
        dataset: repository, configuration and split of a data set of the hub.
        key: the field that the text is read from, once it is chosen; None for plain text.
    """

    name: str
    kind: str
    text_key: str | None = None
    documents: str = "file"
    dataset: tuple[str, str | None, str] = ("", None, "")
    key: str | None = None


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


def _json_lines(source: Input, file: IO[bytes]) -> Iterator[Record]:
    """Yield the lines of JSON lines but blank ones."""
    return _filled(_lines(file))


def choose_json_key(source: Input, first: Sequence[Record]) -> None:
    """Choose the field of the text from the objects of the first block.

    Raises:
        UserError: they have no such field.
    """
    fields: dict[str, bool] = {}
    for _, content in first:
        found = object_of(content) if isinstance(content, bytes) else content
        if isinstance(found, dict):
            for name, value in found.items():
                fields[name] = fields.get(name, False) or isinstance(value, str)
    usual = source.text_key or TEXT_KEYS[0]
    known = usual in fields or usual == EVERY_STRING or not fields
    source.key = usual if known else choose_key(fields, source.text_key, source.name)


def _json(source: Input, file: IO[bytes]) -> Iterator[Record]:
    """Yield the records of a .json file: an array of objects, JSON lines, or one object, which is a document."""
    stream = io.BufferedReader(file, 2**17)  # type: ignore[type-var]
    head = stream.peek(2**16).removeprefix(codecs.BOM_UTF8).lstrip()
    if head.startswith(b"["):
        yield from _json_array(source, stream)
        return
    first = stream.readline(MOST_LINE + 1)
    if not first.strip() or not isinstance(object_of(first), Problem):
        if first.strip():
            yield Record(1, first)
        for place, content in _filled(_lines(stream)):
            yield Record(place + 1, content)
        return
    whole = first + stream.read(MOST_LINE)
    found = object_of(whole)
    if isinstance(found, dict):
        yield Record(0, found)
        return
    for place, content in _filled(_lines(io.BytesIO(whole))):
        yield Record(place, content)


def _json_array(source: Input, stream: IO[bytes]) -> Iterator[Record]:
    ijson = needed("ijson", f"{source.name}: an array of JSON")
    if stream.peek(3).startswith(codecs.BOM_UTF8):  # type: ignore[attr-defined]
        stream.read(3)
    number = 0
    try:
        for number, item in enumerate(ijson.items(stream, "item", use_float=True), start=1):
            kind = Problem("malformed", f"a JSON object is needed, found {json_kind(type(item).__name__)}")
            yield Record(number, item if isinstance(item, dict) else kind)
    except (ijson.JSONError, UnicodeDecodeError) as error:
        yield Record(number + 1, Problem("unreadable", f"not valid JSON ({first_line(error)}): the rest of it is lost"))


def _text(source: Input, file: IO[bytes]) -> Iterator[Record]:
    """Yield the documents of a .txt file: the whole, one a line, or several between blank lines."""
    if source.documents == "file":
        yield Record(0, _whole_text(file))
    elif source.documents == "line":
        for place, content in _filled(_lines(file)):
            yield Record(place, content.rstrip(b"\r\n") if isinstance(content, bytes) else content)
    else:
        yield from _paragraphs(file)


def _whole_text(file: IO[bytes]) -> bytes | Problem:
    text = file.read(MOST_LINE + 1)
    if len(text) <= MOST_LINE:
        return text
    length = len(text) + sum(map(len, iter(lambda: file.read(2**20), b"")))
    remedy = "part it with --documents line or blank-line"
    return Problem("too long", f"a document of {length:,} bytes, at most {MOST_LINE:,} are read: {remedy}")


def _paragraphs(file: IO[bytes]) -> Iterator[Record]:
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


def _choose_columns(source: Input, fields: Mapping[str, bool]) -> list[str]:
    """Choose the field of the text of a table, and return the columns to read."""
    source.key = choose_key(fields, source.text_key, source.name)
    if source.key == EVERY_STRING:
        return [name for name, is_text in fields.items() if is_text]
    return [source.key, *([TITLE] if fields.get(TITLE) and source.key != TITLE else [])]


def _csv(source: Input, file: IO[bytes]) -> Iterator[Record]:
    """Yield the rows of a .csv file: a header, commas, double quotes, and line breaks inside quotes."""
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
    fields = _choose_columns(source, dict.fromkeys(header, True))
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


def _arrow(source: Input, file: IO[bytes]) -> Iterator[Record]:
    """Yield the rows of a Parquet file, or of one in Arrow's stream or file format, in batches of rows."""
    pyarrow = needed("pyarrow", f"{source.name}: a .{source.kind} file")
    row = 0
    try:
        schema, batches = (_parquet_batches if source.kind == "parquet" else _ipc_batches)(source, file)
        fields = _choose_columns(source, {field.name: _is_text(field.type, pyarrow.types) for field in schema})
        assert source.key is not None
        for batch in batches(fields):
            for values in zip(*(_bytes_of(batch.column(name), pyarrow) for name in fields), strict=True):
                row += 1
                found = dict(zip(fields, values, strict=True))
                null = Problem("no text", f"{source.key!r} must be a string, found null")
                yield Record(row, null if found.get(source.key, b"") is None else found)
    except (pyarrow.ArrowException, OSError, MemoryError, KeyError, UnicodeDecodeError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno is not None and not isinstance(error, pyarrow.ArrowException):
            raise
        detail = f"not a whole {source.kind} file ({one_line(first_line(error), 200)}): the rest of it is lost"
        yield Record(row + 1, Problem("unreadable", detail))


def _is_text(kind: Any, types: ModuleType) -> bool:
    plain = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    return bool(plain or (types.is_dictionary(kind) and types.is_string(kind.value_type)))


def _parquet_batches(source: Input, file: IO[bytes]) -> tuple[Any, Callable[[list[str]], Iterator[Any]]]:
    opened = needed("pyarrow.parquet", source.name).ParquetFile(file)
    return opened.schema_arrow, lambda fields: opened.iter_batches(batch_size=_ROWS, columns=fields)


def _ipc_batches(source: Input, file: IO[bytes]) -> tuple[Any, Callable[[list[str]], Iterator[Any]]]:
    ipc = needed("pyarrow", source.name).ipc
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


def _hub(source: Input, file: IO[bytes]) -> Iterator[Record]:
    """Yield the rows of a data set of the Hugging Face hub, streamed; `file` is empty."""
    name, config, split = source.dataset
    hint = (
        "without a network it must be in the cache of this machine (HF_HOME): `hf download --repo-type dataset "
        f"{name}` puts it there"
    )
    datasets = needed("datasets", source.name)
    try:
        try:
            found = datasets.load_dataset(name, config, split=split, streaming=True)
        except ConnectionError:  # a snapshot in the hub's cache is a directory
            hub = needed("huggingface_hub", source.name)
            there = hub.snapshot_download(name, repo_type="dataset", local_files_only=True)
            found = datasets.load_dataset(there, config, split=split, streaming=True)
        features = found.features or {key: None for key in next(iter(found))}
    except StopIteration:
        return
    except Exception as error:  # datasets and huggingface_hub raise a dozen kinds, with and without a network
        raise UserError(f"{source.name}: can't be read: {first_line(error)}; {hint}") from error
    texts = {key: getattr(kind, "dtype", "string") in ("string", "large_string") for key, kind in features.items()}
    fields = _choose_columns(source, texts)
    rows = iter(found.select_columns(fields))
    row = 0
    while True:
        try:
            values = next(rows)
        except StopIteration:
            return
        except Exception as error:
            raise UserError(
                f"{source.name}: can't be read further than row {row:,}: {first_line(error)}; {hint}"
            ) from error
        row += 1
        yield Record(row, values)


FORMATS: dict[str, Callable[[Input, IO[bytes]], Iterator[Record]]] = {
    "jsonl": _json_lines,
    "json": _json,
    "txt": _text,
    "csv": _csv,
    "parquet": _arrow,
    "arrow": _arrow,
    "hub": _hub,
}
