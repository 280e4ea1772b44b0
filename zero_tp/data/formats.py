"""Readers of records, one for each kind of input: JSON lines, JSON, text, CSV, Parquet, Arrow, data sets of the hub.

`FORMATS` names them by the ending of a file. A reader takes a source and its decompressed bytes, and yields `Record`s.
Readers of tables set `Source.key` before their first record; `choose_json_key` sets it from the first block of JSON
objects.
"""

from __future__ import annotations

import codecs
import csv
import importlib
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from types import ModuleType
from typing import IO, TYPE_CHECKING, Any, NamedTuple

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

if TYPE_CHECKING:
    from zero_tp.data.sources import Source

_ROWS = 256  # of a table that are in memory


def needed(module: str, purpose: str, extra: str = "data") -> ModuleType:
    """Import an optional library of an extra. UserError: it is not installed; names the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        library = module.partition(".")[0]
        raise UserError(f"{purpose} needs {library}: pip install -c constraints.txt -e .[{extra}]") from error


# --- lines ------------------------------------------------------------------------------------------------------------


def _too_long(unit: str, length: int, remedy: str = "") -> Problem:
    return Problem("too long", f"a {unit} of {length:,} bytes, at most {MOST_LINE:,} are read{remedy}")


def _lines(file: IO[bytes]) -> Iterator[Record]:
    """Yield every line with its number. A line beyond `MOST_LINE` bytes is a problem and never in memory as a whole."""
    number = 0
    while line := file.readline(MOST_LINE + 1):
        number += 1
        if len(line) <= MOST_LINE:
            yield Record(number, line)
            continue
        length = len(line)
        while not line.endswith(b"\n") and (line := file.readline(2**20)):
            length += len(line)
        yield Record(number, _too_long("line", length))


def _is_blank(record: Record) -> bool:
    return isinstance(record.content, bytes) and not record.content.strip()


def _json_lines(source: Source, file: IO[bytes]) -> Iterator[Record]:
    """Yield the lines that are not blank."""
    return (record for record in _lines(file) if not _is_blank(record))


def choose_json_key(source: Source, records: Sequence[Record]) -> None:
    """Choose the field of the text from the objects of the first block.

    Raises:
        UserError: they have no such field.
    """
    fields: dict[str, bool] = {}
    for _, content in records:
        parsed = object_of(content) if isinstance(content, bytes) else content
        if isinstance(parsed, dict):
            for name, value in parsed.items():
                fields[name] = fields.get(name, False) or isinstance(value, str)
    usual = source.text_key or TEXT_KEYS[0]
    is_known = usual in fields or usual == EVERY_STRING or not fields
    source.key = usual if is_known else choose_key(fields, source.text_key, source.name)


def _json(source: Source, file: IO[bytes]) -> Iterator[Record]:
    """Yield the records of a .json file: an array of objects, JSON lines, or one object, which is a document."""
    stream = io.BufferedReader(file, 2**17)  # type: ignore[type-var]
    head = stream.peek(2**16).removeprefix(codecs.BOM_UTF8).lstrip()
    if head.startswith(b"["):
        yield from _json_array(source, stream)
        return
    first = stream.readline(MOST_LINE + 1)
    if first.strip() and isinstance(object_of(first), Problem):
        whole = first + stream.read(MOST_LINE)
        document = object_of(whole)
        yield from [Record(0, document)] if isinstance(document, dict) else _json_lines(source, io.BytesIO(whole))
        return
    if first.strip():
        yield Record(1, first)
    for place, content in _json_lines(source, stream):
        yield Record(place + 1, content)


def _json_array(source: Source, stream: io.BufferedReader[Any]) -> Iterator[Record]:
    ijson = needed("ijson", f"{source.name}: an array of JSON")
    if stream.peek(3).startswith(codecs.BOM_UTF8):
        stream.read(3)
    number = 0
    try:
        for number, item in enumerate(ijson.items(stream, "item", use_float=True), start=1):
            other = Problem("malformed", f"a JSON object is needed, found {json_kind(type(item).__name__)}")
            yield Record(number, item if isinstance(item, dict) else other)
    except (ijson.JSONError, UnicodeDecodeError) as error:
        yield Record(number + 1, Problem("unreadable", f"not valid JSON ({first_line(error)}): the rest of it is lost"))


def _text(source: Source, file: IO[bytes]) -> Iterator[Record]:
    """Yield the documents of a .txt file: the file, its lines, or its paragraphs between blank lines."""
    if source.documents == "file":
        text = file.read(MOST_LINE + 1)
        if len(text) <= MOST_LINE:
            yield Record(0, text)
            return
        length = len(text) + sum(map(len, iter(lambda: file.read(2**20), b"")))
        yield Record(0, _too_long("document", length, ": part it with --documents line or blank-line"))
    elif source.documents == "line":
        for place, content in _json_lines(source, file):
            yield Record(place, content.rstrip(b"\r\n") if isinstance(content, bytes) else content)
    else:
        yield from _paragraphs(file)


def _paragraphs(file: IO[bytes]) -> Iterator[Record]:
    lines, first, length = list[bytes](), 1, 0
    for record in chain(_lines(file), [Record(0, b"")]):
        place, content = record
        if isinstance(content, Problem):
            yield record
        elif not _is_blank(record):
            assert isinstance(content, bytes)
            first = first if length else place
            length += len(content)
            lines.append(content)
            if length > MOST_LINE:
                lines.clear()
        elif length:
            text = b"".join(lines).rstrip(b"\r\n")
            yield Record(first, text if lines else _too_long("document", length))
            lines, length = [], 0


# --- tables -----------------------------------------------------------------------------------------------------------


def _choose_columns(source: Source, fields: Mapping[str, bool]) -> list[str]:
    """Choose the field of the text of a table, and return the columns to read."""
    source.key = choose_key(fields, source.text_key, source.name)
    if source.key == EVERY_STRING:
        return [name for name, is_text in fields.items() if is_text]
    return [source.key, *([TITLE] if fields.get(TITLE) and source.key != TITLE else [])]


def _csv(source: Source, file: IO[bytes]) -> Iterator[Record]:
    """Yield the rows of a .csv file: a header, commas, double quotes, and line breaks inside quotes."""
    too_long: list[Record] = []

    def lines() -> Iterator[str]:
        for place, content in _lines(file):
            if isinstance(content, Problem):
                too_long.append(Record(place, content))
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
        yield from too_long
        return
    columns = {name: header.index(name) for name in _choose_columns(source, dict.fromkeys(header, True))}
    while True:
        place = rows.line_num + 1
        try:
            row = next(rows)
        except StopIteration:
            yield from too_long
            return
        except csv.Error as error:
            yield Record(place, Problem("malformed", f"not CSV: {error}"))
            continue
        yield from too_long
        too_long.clear()
        if row and len(row) != len(header):
            detail = f"{len(row):,} fields where the header has {len(header):,}"
            yield Record(place, Problem("malformed", detail))
        elif row:
            yield Record(place, {name: row[column] for name, column in columns.items()})


def _arrow(source: Source, file: IO[bytes]) -> Iterator[Record]:
    """Yield the rows of a Parquet file, or of one in Arrow's stream or file format, in batches of rows."""
    pyarrow = needed("pyarrow", f"{source.name}: a .{source.kind} file")
    row = 0
    try:
        schema, batches = (_parquet_batches if source.kind == "parquet" else _ipc_batches)(source, file)
        fields = _choose_columns(source, {field.name: _is_text(field.type, pyarrow.types) for field in schema})
        assert source.key is not None
        for batch in batches(fields):
            for values in zip(*(_column_bytes(batch.column(name), pyarrow) for name in fields), strict=True):
                row += 1
                record = dict(zip(fields, values, strict=True))
                null = Problem("no text", f"{source.key!r} must be a string, found null")
                yield Record(row, null if record.get(source.key, b"") is None else record)
    except (pyarrow.ArrowException, OSError, MemoryError, KeyError, UnicodeDecodeError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno is not None and not isinstance(error, pyarrow.ArrowException):
            raise
        detail = f"not a whole {source.kind} file ({one_line(first_line(error), 200)}): the rest of it is lost"
        yield Record(row + 1, Problem("unreadable", detail))


def _is_text(kind: Any, types: ModuleType) -> bool:
    plain = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    return bool(plain or (types.is_dictionary(kind) and types.is_string(kind.value_type)))


def _parquet_batches(source: Source, file: IO[bytes]) -> tuple[Any, Callable[[list[str]], Iterator[Any]]]:
    """Return the schema, and a function of column names that yields batches of rows."""
    table = needed("pyarrow.parquet", source.name).ParquetFile(file)
    return table.schema_arrow, lambda fields: table.iter_batches(batch_size=_ROWS, columns=fields)


def _ipc_batches(source: Source, file: IO[bytes]) -> tuple[Any, Callable[[list[str]], Iterator[Any]]]:
    ipc = needed("pyarrow", source.name).ipc
    is_file = file.read(6) == b"ARROW1"
    file.seek(0)
    table = ipc.open_file(file) if is_file else ipc.open_stream(file)
    batches = map(table.get_batch, range(table.num_record_batches)) if is_file else iter(table)
    return table.schema, lambda fields: (
        batch.slice(start, _ROWS) for batch in batches for start in range(0, len(batch), _ROWS)
    )


def _column_bytes(column: Any, pyarrow: ModuleType) -> list[bytes | None]:
    """Return the texts of a column as bytes, so that one that is not UTF-8 is a problem of its row alone.

    Raises:
        pyarrow.ArrowInvalid: the column is damaged; to read it unchecked would crash.
    """
    column.validate(full=hasattr(column, "dictionary"))
    column = column.dictionary_decode() if hasattr(column, "dictionary") else column
    binary = column.cast(pyarrow.large_binary())
    binary.validate(full=True)
    texts: list[bytes | None] = binary.to_pylist()
    return texts


def read_hub(source: Source) -> Iterator[Record]:
    """Yield the rows of a data set of the Hugging Face hub, streamed.

    Raises:
        UserError: it can't be read, neither from the hub nor from this machine's cache.
    """
    name, config, split = source.dataset
    hint = (
        "without a network it must be in the cache of this machine (HF_HOME): `hf download --repo-type dataset "
        f"{name}` puts it there"
    )
    datasets = needed("datasets", source.name)
    row = 0
    try:
        try:
            stream = datasets.load_dataset(name, config, split=split, streaming=True)
        except ConnectionError:  # a snapshot in the hub's cache is a directory
            hub = needed("huggingface_hub", source.name)
            directory = hub.snapshot_download(name, repo_type="dataset", local_files_only=True)
            stream = datasets.load_dataset(directory, config, split=split, streaming=True)
        features = stream.features or {key: None for key in next(iter(stream), {})}
        if not features:
            return
        texts = {key: getattr(kind, "dtype", "string") in ("string", "large_string") for key, kind in features.items()}
        for row, values in enumerate(stream.select_columns(_choose_columns(source, texts)), start=1):
            yield Record(row, values)
    except (UserError, GeneratorExit):
        raise
    except Exception as error:  # datasets and huggingface_hub raise a dozen kinds, with and without a network
        problem = f"can't be read further than row {row:,}" if row else "can't be read"
        raise UserError(f"{source.name}: {problem}: {first_line(error)}; {hint}") from error


class Format(NamedTuple):
    """A kind of file.

    Attributes:
        read: yields the records.
        is_columnar: it is compressed inside, and read at random.
    """

    read: Callable[[Source, IO[bytes]], Iterable[Record]]
    is_columnar: bool = False


FORMATS = {
    "jsonl": Format(_json_lines),
    "json": Format(_json),
    "txt": Format(_text),
    "csv": Format(_csv),
    "parquet": Format(_arrow, is_columnar=True),
    "arrow": Format(_arrow, is_columnar=True),
}
