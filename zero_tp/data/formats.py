"""Readers of records, one for each kind of file: JSON lines, JSON, text, CSV, Parquet, Arrow.

`FORMATS` maps the ending of a file to its reader, which takes a source and its decompressed bytes
and yields `Record`s. Readers of tables set `Source.key` before their first record; documents.py
sets it from the first block of JSON objects.
"""

from __future__ import annotations

import codecs
import csv
import importlib
import io
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import groupby
from types import ModuleType
from typing import IO, Any

from zero_tp.base.errors import UserError, first_line, one_line
from zero_tp.data.json_array import array_elements
from zero_tp.data.records import (
    EVERY_STRING,
    MAX_LINE_BYTES,
    TITLE,
    Problem,
    Record,
    Source,
    choose_key,
    parse_dict,
)

DOCUMENT_UNITS = ("file", "line", "blank-line")
"""The units of a .txt file that can be one document."""
_ROWS = 256  # rows of a table in memory at once


def import_optional(module: str, purpose: str, extra: str = "data") -> ModuleType:
    """Import a library of an extra.

    Raises:
        UserError: it is not installed; names the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        library = module.partition(".")[0]
        raise UserError(
            f"{purpose} needs {library}: pip install -c constraints.txt -e .[{extra}]"
        ) from error


# --- lines ----------------------------------------------------------------------------------------


def _limit(content: bytes, unit: str) -> bytes | Problem:
    """Return the content of a record, or a problem if it has more than `MAX_LINE_BYTES` bytes."""
    if len(content) <= MAX_LINE_BYTES:
        return content
    return Problem("too long", f"a {unit} of more than {MAX_LINE_BYTES:,} bytes: split it")


def _lines(source: Source, file: IO[bytes]) -> Iterator[Record]:
    """Yield the lines that are not blank, with their numbers."""
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if line.strip():
            yield Record(number, _limit(line, "line"))
        # Skip the rest of a line that is too long, so that it does not become lines of its own.
        while len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
            line = file.readline(MAX_LINE_BYTES + 1)


def _json(source: Source, file: io.BufferedReader) -> Iterator[Record]:
    """Yield the records of a .json file: an array of objects, JSON lines, or one object."""
    # `peek` moves nothing: the branch below reads from the beginning.
    if file.peek(2**16).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
        yield from _json_array(source, file)
        return
    lines = _lines(source, file)
    for first, content in lines:  # the first line decides; each branch returns
        if not isinstance(content, bytes) or isinstance(parse_dict(content), dict):
            yield Record(first, content)
            yield from lines
            return
        # The first line is no object of its own: an object over several lines, or JSON lines whose
        # first one is bad.
        whole = _limit(content + file.read(MAX_LINE_BYTES + 1), "file")
        # No object as a whole either: then each line counts for itself, and only the bad ones are
        # lost.
        if isinstance(whole, bytes) and isinstance(parse_dict(whole), Problem):
            yield from (
                Record(first - 1 + place, line) for place, line in _lines(source, io.BytesIO(whole))
            )
        else:
            yield Record(0, whole)
        return


def _json_array(source: Source, file: io.BufferedReader) -> Iterator[Record]:
    while file.read(1) != b"[":  # a byte order mark and white space
        pass
    number = 0
    try:
        for number, element in enumerate(array_elements(file, MAX_LINE_BYTES), start=1):
            yield Record(number, _limit(element, "record"))
    except EOFError as error:
        yield Record(
            number + 1,
            Problem("unreadable", f"not a whole array of JSON ({error}): the rest of it is lost"),
        )


def _text(source: Source, file: IO[bytes]) -> Iterator[Record]:
    """Yield the documents of a .txt file.

    A document is the file, a line, or a paragraph between blank lines (`document_unit`).
    """
    if source.document_unit == "file":
        yield Record(0, _limit(file.read(MAX_LINE_BYTES + 1), "document"))
    elif source.document_unit == "line":
        for place, content in _lines(source, file):
            yield Record(place, content.rstrip(b"\r\n") if isinstance(content, bytes) else content)
    else:
        lines = enumerate(iter(partial(file.readline, MAX_LINE_BYTES + 1), b""), start=1)
        for has_text, paragraph in groupby(lines, lambda line: bool(line[1].strip())):
            if has_text:
                place, first = next(paragraph)
                text = bytearray(first)
                # The lines of a paragraph that is too long are read on without being kept.
                for _, line in paragraph:
                    text += line if len(text) <= MAX_LINE_BYTES else b""
                content = _limit(bytes(text), "document")
                yield Record(
                    place, content.rstrip(b"\r\n") if isinstance(content, bytes) else content
                )


# --- tables ---------------------------------------------------------------------------------------


def choose_columns(source: Source, fields: Mapping[str, str | None]) -> list[str]:
    """Choose the field of the text of a table; return the columns to read.

    `fields` is that of `choose_key`.
    """
    source.key = choose_key(fields, source)
    if source.key == EVERY_STRING:
        return list(fields)
    return [name for name, kind in fields.items() if kind is None and name in (source.key, TITLE)]


def _csv(source: Source, file: io.BufferedReader) -> Iterator[Record]:
    """Yield the rows of a .csv file, which begins with a header.

    Fields are separated by commas. In double quotes, they may contain line breaks.
    """
    # Python's own limit is 131,072 characters a field, less than many documents.
    csv.field_size_limit(MAX_LINE_BYTES)
    # Bytes that are not UTF-8 become surrogates, and are then a problem of their row alone
    # (`document_of`). Lines end at \n only, because a quoted field may contain \r.
    text = io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="\n")
    # With `strict`, a quote inside a field or a missing one is an error, and not part of a text.
    rows = csv.reader(text, strict=True)
    try:
        header = next((row for row in rows if row), None)  # blank lines may precede it
    except csv.Error as error:
        yield Record(1, Problem("malformed", f"its header is no CSV: {error}"))
        return
    if header is None:
        return
    columns = {name: header.index(name) for name in choose_columns(source, dict.fromkeys(header))}
    while True:
        # The line where the row begins: a row with line breaks in quotes has several.
        place = rows.line_num + 1
        try:
            row = next(rows, None)
        except csv.Error as error:
            yield Record(place, Problem("malformed", str(error)))
            continue
        if row is None:
            return
        if row and len(row) != len(header):
            detail = f"{len(row):,} fields where the header has {len(header):,}"
            yield Record(place, Problem("malformed", detail))
        elif row:
            yield Record(place, {name: row[column] for name, column in columns.items()})


def _arrow(source: Source, file: IO[bytes]) -> Iterator[Record]:
    """Yield the rows of a Parquet file, or of one in Arrow's stream or file format."""
    pyarrow = import_optional("pyarrow", f"{source.name}: a .{source.kind} file")
    row = 0
    try:
        for batch in (_parquet_batches if source.kind == "parquet" else _ipc_batches)(source, file):
            names = batch.schema.names
            columns = [_column_values(batch.column(name), pyarrow) for name in names]
            for values in zip(*columns, strict=True):
                row += 1
                yield Record(row, dict(zip(names, values, strict=True)))
    except (
        pyarrow.ArrowException,
        OSError,
        MemoryError,
        KeyError,
        UnicodeDecodeError,
        OverflowError,
    ) as error:
        # Of the disk; pyarrow's own have no errno.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        detail = (
            f"not a whole {source.kind} file ({one_line(first_line(error), 200)}): the rest of it "
            "is lost"
        )
        yield Record(row + 1, Problem("unreadable", detail))


_TEXT_TYPES = (
    "string",
    "large_string",
    "string_view",
    "dictionary<values=string,",
    "dictionary<values=large_string,",
)


def _is_text(kind: Any) -> bool:
    return str(kind).startswith(_TEXT_TYPES)


def _text_columns(source: Source, schema: Any) -> list[str]:
    return choose_columns(
        source, {field.name: None if _is_text(field.type) else str(field.type) for field in schema}
    )


def _parquet_batches(source: Source, file: IO[bytes]) -> Iterator[Any]:
    table = import_optional("pyarrow.parquet", source.name).ParquetFile(file)
    return table.iter_batches(batch_size=_ROWS, columns=_text_columns(source, table.schema_arrow))


def _ipc_batches(source: Source, file: IO[bytes]) -> Iterator[Any]:
    ipc = import_optional("pyarrow.ipc", source.name)
    magic = file.read(6)
    file.seek(0)
    # The file format begins with it, the stream format with its first message.
    if magic == b"ARROW1":
        table = ipc.open_file(file)
        batches = map(table.get_batch, range(table.num_record_batches))
    else:
        table = batches = ipc.open_stream(file)
    columns = _text_columns(source, table.schema)
    for batch in batches:
        # A batch of an Arrow file may be all of it; Parquet's reader takes the number of rows
        # itself.
        for start in range(0, len(batch), _ROWS):
            yield batch.select(columns).slice(start, _ROWS)


def _column_values(column: Any, pyarrow: ModuleType) -> list[Any]:
    """Return the values of a column as JSON has them.

    They are texts, lists of them and dicts. All other values are None.

    A text is returned as bytes, because one that is not UTF-8 is a problem of its row alone.
    Reading a damaged column unchecked would crash the process; validation raises ArrowInvalid.
    """
    if not _is_text(column.type):
        column.validate(full=True)
        return [_without_bytes(value) for value in column.to_pylist(maps_as_pydicts="strict")]
    is_dictionary = hasattr(column, "dictionary")
    # A dictionary is validated before it is decoded: a wrong index would read outside its values.
    column.validate(full=is_dictionary)
    binary = (column.dictionary_decode() if is_dictionary else column).cast(pyarrow.large_binary())
    binary.validate(full=True)
    texts: list[bytes | None] = binary.to_pylist()
    return texts


def _without_bytes(value: Any) -> Any:
    """Return a nested value without binary ones, such as images, because only strings are texts."""
    if isinstance(value, dict):
        return {name: _without_bytes(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_without_bytes(inner) for inner in value]
    return value if isinstance(value, str) else None


STREAMS = {"jsonl": _lines, "json": _json, "txt": _text, "csv": _csv}
"""Readers of files that may be compressed, and of standard input."""
TABLES = {"parquet": _arrow, "arrow": _arrow}
"""Readers of files with their own compression and random access."""
FORMATS = {**STREAMS, **TABLES}
