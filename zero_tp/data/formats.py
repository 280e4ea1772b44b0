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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, groupby
from types import ModuleType
from typing import IO, Any

from zero_tp.data.records import (
    EVERY_STRING,
    HUB,
    MOST_LINE,
    TEXT_KEYS,
    TITLE,
    Problem,
    Record,
    Source,
    choose_key,
    object_of,
)
from zero_tp.errors import UserError, first_line, json_kind, one_line

DOCUMENTS = ("file", "line", "blank-line")
_ROWS = 256  # of a table that are in memory


def needed(module: str, purpose: str, extra: str = "data") -> ModuleType:
    """Import an optional library of an extra. UserError: it is not installed; names the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        library = module.partition(".")[0]
        raise UserError(f"{purpose} needs {library}: pip install -c constraints.txt -e .[{extra}]") from error


# --- lines ------------------------------------------------------------------------------------------------------------


def _too_long(unit: str) -> Problem:
    return Problem("too long", f"a {unit} of more than {MOST_LINE:,} bytes: split it")


def _join(parts: Iterable[bytes], unit: str) -> bytes | Problem:
    """Join bytes, or return a problem beyond `MOST_LINE` of them, which are never in memory."""
    within, length = list[bytes](), 0
    for part in parts:
        length += len(part)
        if length <= MOST_LINE:
            within.append(part)
    return b"".join(within) if length <= MOST_LINE else _too_long(unit)


def _rest(file: IO[bytes]) -> Iterator[bytes]:
    return iter(partial(file.read, 2**20), b"")


def _lines(file: IO[bytes]) -> Iterator[Record]:
    """Yield every line with its number."""
    number = 0
    while line := file.readline(MOST_LINE + 1):
        number += 1
        yield Record(number, line if len(line) <= MOST_LINE else _too_long("line"))
        while len(line) > MOST_LINE and not line.endswith(b"\n"):
            line = file.readline(MOST_LINE + 1)


def _is_blank(record: Record) -> bool:
    return isinstance(record.content, bytes) and not record.content.strip()


def _json_lines(source: Source, file: IO[bytes]) -> Iterator[Record]:
    """Yield the lines that are not blank."""
    return (record for record in _lines(file) if not _is_blank(record))


def choose_json_key(source: Source, records: Sequence[Record]) -> None:
    """Choose the field of the text from the objects of the first block. UserError: they have no such field."""
    fields: dict[str, bool] = {}
    for _, content in records:
        parsed = object_of(content) if isinstance(content, bytes) else content
        if isinstance(parsed, dict):
            for name, value in parsed.items():
                fields[name] = fields.get(name, False) or isinstance(value, str)
    usual = source.text_key or TEXT_KEYS[0]
    source.key = usual if usual in fields or not fields else choose_key(fields, source)


def _json(source: Source, file: io.BufferedReader) -> Iterator[Record]:
    """Yield the records of a .json file: an array of objects, JSON lines, or one object, which is a document."""
    if file.peek(2**16).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
        yield from _json_array(source, file)
        return
    first = file.readline(MOST_LINE + 1)
    if not first.strip() or isinstance(object_of(first), dict):
        yield from [Record(1, first)] if first.strip() else []
        yield from (Record(place + 1, content) for place, content in _json_lines(source, file))
        return
    whole = _join(chain([first], _rest(file)), "file")
    if isinstance(whole, bytes) and isinstance(object_of(whole), Problem):
        yield from _json_lines(source, io.BytesIO(whole))
    else:
        yield Record(0, whole)


def _json_array(source: Source, file: io.BufferedReader) -> Iterator[Record]:
    ijson = needed("ijson", f"{source.name}: an array of JSON")
    if file.peek(3).startswith(codecs.BOM_UTF8):
        file.read(3)
    number = 0
    try:
        for number, item in enumerate(ijson.items(file, "item", use_float=True), start=1):
            other = Problem("malformed", f"a JSON object is needed, found {json_kind(type(item).__name__)}")
            yield Record(number, item if isinstance(item, dict) else other)
    except (ijson.JSONError, UnicodeDecodeError) as error:
        yield Record(number + 1, Problem("unreadable", f"not valid JSON ({first_line(error)}): the rest of it is lost"))


def _text(source: Source, file: IO[bytes]) -> Iterator[Record]:
    """Yield the documents of a .txt file: the file, its lines, or its paragraphs between blank lines."""
    if source.documents == "file":
        yield Record(0, _join(_rest(file), "document"))
    elif source.documents == "line":
        for place, content in _json_lines(source, file):
            yield Record(place, content.rstrip(b"\r\n") if isinstance(content, bytes) else content)
    else:
        lines = enumerate(iter(partial(file.readline, MOST_LINE + 1), b""), start=1)
        for has_text, paragraph in groupby(lines, lambda line: bool(line[1].strip())):
            if has_text:
                place, first = next(paragraph)
                text = _join(chain([first], (line for _, line in paragraph)), "document")
                yield Record(place, text.rstrip(b"\r\n") if isinstance(text, bytes) else text)


# --- tables -----------------------------------------------------------------------------------------------------------


def _choose_columns(source: Source, fields: Mapping[str, bool]) -> list[str]:
    """Choose the field of the text of a table, and return the columns to read."""
    source.key = choose_key(fields, source)
    wanted = fields if source.key == EVERY_STRING else (source.key, TITLE)
    return [name for name, is_text in fields.items() if is_text and name in wanted]


def _csv(source: Source, file: IO[bytes]) -> Iterator[Record]:
    """Yield the rows of a .csv file: a header, commas, double quotes, and line breaks inside quotes."""
    csv.field_size_limit(MOST_LINE)
    rows = csv.reader(map(_csv_line, _lines(file)), strict=True)
    try:
        header = next(rows, None)
    except (csv.Error, OverflowError) as error:
        yield Record(1, Problem("malformed", f"its header is no CSV: {error}"))
        return
    if header is None:
        return
    columns = {name: header.index(name) for name in _choose_columns(source, dict.fromkeys(header, True))}
    while True:
        place = rows.line_num + 1
        try:
            row = next(rows, None)
        except (csv.Error, OverflowError) as error:
            yield Record(place, Problem("malformed" if isinstance(error, csv.Error) else "too long", str(error)))
            continue
        if row is None:
            return
        if row and len(row) != len(header):
            detail = f"{len(row):,} fields where the header has {len(header):,}"
            yield Record(place, Problem("malformed", detail))
        elif row:
            yield Record(place, {name: row[column] for name, column in columns.items()})


def _csv_line(record: Record) -> str:
    """Return a line as text. OverflowError: it is too long."""
    place, line = record
    if isinstance(line, Problem):
        raise OverflowError(line.detail)
    assert isinstance(line, bytes)
    return (line.removeprefix(codecs.BOM_UTF8) if place == 1 else line).decode("utf-8", "surrogateescape")


def _arrow(source: Source, file: IO[bytes]) -> Iterator[Record]:
    """Yield the rows of a Parquet file, or of one in Arrow's stream or file format."""
    pyarrow = needed("pyarrow", f"{source.name}: a .{source.kind} file")
    row = 0
    try:
        for batch in (_parquet_batches if source.kind == "parquet" else _ipc_batches)(source, file):
            names = batch.schema.names
            columns = [_column_bytes(batch.column(name), pyarrow) for name in names]
            for values in zip(*columns, strict=True):
                row += 1
                yield Record(row, dict(zip(names, values, strict=True)))
    except (pyarrow.ArrowException, OSError, MemoryError, KeyError, UnicodeDecodeError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        detail = f"not a whole {source.kind} file ({one_line(first_line(error), 200)}): the rest of it is lost"
        yield Record(row + 1, Problem("unreadable", detail))


def _text_columns(source: Source, schema: Any) -> list[str]:
    kinds = ("string", "large_string", "dictionary<values=string,")
    return _choose_columns(source, {field.name: str(field.type).startswith(kinds) for field in schema})


def _parquet_batches(source: Source, file: IO[bytes]) -> Iterator[Any]:
    table = needed("pyarrow.parquet", source.name).ParquetFile(file)
    return table.iter_batches(batch_size=_ROWS, columns=_text_columns(source, table.schema_arrow))


def _ipc_batches(source: Source, file: IO[bytes]) -> Iterator[Any]:
    ipc, magic = needed("pyarrow.ipc", source.name), file.read(6)
    file.seek(0)
    if magic == b"ARROW1":
        table = ipc.open_file(file)
        batches = map(table.get_batch, range(table.num_record_batches))
    else:
        table = batches = ipc.open_stream(file)
    columns = _text_columns(source, table.schema)
    for batch in batches:
        for start in range(0, len(batch), _ROWS):
            yield batch.select(columns).slice(start, _ROWS)


def _column_bytes(column: Any, pyarrow: ModuleType) -> list[bytes | None]:
    """Return the texts of a column as bytes, so that one that is not UTF-8 is a problem of its row alone.

    To read a damaged column unchecked would crash; validation raises ArrowInvalid.
    """
    is_dictionary = hasattr(column, "dictionary")
    column.validate(full=is_dictionary)
    binary = (column.dictionary_decode() if is_dictionary else column).cast(pyarrow.large_binary())
    binary.validate(full=True)
    texts: list[bytes | None] = binary.to_pylist()
    return texts


def read_hub(source: Source) -> Iterator[Record]:
    """Yield the rows of a data set of the Hugging Face hub, streamed. UserError: neither it nor a cache can be read."""
    name, config, split = [*source.name.removeprefix(HUB).split(":", 2), "", ""][:3]
    datasets, hub = (needed(module, source.name) for module in ("datasets", "huggingface_hub"))
    row = 0
    try:
        try:
            stream = datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
        except ConnectionError:  # a snapshot in the hub's cache is a directory
            directory = hub.snapshot_download(name, repo_type="dataset", local_files_only=True)
            stream = datasets.load_dataset(directory, config or None, split=split or "train", streaming=True)
        features = stream.features or {key: None for key in next(iter(stream), {})}
        if not features:
            return
        texts = {key: getattr(kind, "dtype", "string") in ("string", "large_string") for key, kind in features.items()}
        for row, values in enumerate(stream.select_columns(_choose_columns(source, texts)), start=1):
            yield Record(row, values)
    except (UserError, GeneratorExit):
        raise
    except Exception as error:  # datasets and huggingface_hub raise a dozen kinds, with and without a network
        raise UserError(
            f"{source.name}: can't be read further than row {row:,}: {first_line(error)}; without a network it must be "
            f"in the cache of this machine (HF_HOME): `hf download --repo-type dataset {name}` puts it there"
        ) from error


STREAMS = {"jsonl": _json_lines, "json": _json, "txt": _text, "csv": _csv}
"""Readers of files that may be compressed, or come from standard input."""
TABLES = {"parquet": _arrow, "arrow": _arrow}
"""Readers of files that are compressed inside, and read at random."""
FORMATS = {**STREAMS, **TABLES}
