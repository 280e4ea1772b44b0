"""Tables with a column of lists of token ids: Parquet, Arrow and JSON lines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zero_tp.base.errors import UserError, first_line, json_kind, one_line
from zero_tp.base.files import open_regular
from zero_tp.data.documents import file_format, read_blocks, size_and_time
from zero_tp.data.formats import import_optional
from zero_tp.data.records import EVERY_STRING, Problem, Source, parse_dict
from zero_tp.tools.corpus.settings import PrepareSettings
from zero_tp.tools.corpus.tokens.files import Ids, Items, TokenFile, TokenRange
from zero_tp.tools.corpus.tokens.samples import choose_ids_key

_ROWS = 1024  # of a table in memory at once
_NO_IDS = "no token ids"


@dataclass
class LinesFile(TokenFile):
    """JSON lines with a list of integers each."""

    ids_key: str | None = None

    def items(self) -> Iterator[Items]:
        key = self.ids_key
        source = Source(self.name, "jsonl", EVERY_STRING, path=self.path)
        for block in read_blocks(source):
            rows = _Rows()
            for place, content in block.records:
                row = parse_dict(content) if isinstance(content, bytes) else content
                if isinstance(row, Problem):
                    rows.add_problem(place, row)
                    continue
                if key is None:
                    lists = [name for name, value in row.items() if isinstance(value, list)]
                    kinds = {name: json_kind(type(value).__name__) for name, value in row.items()}
                    key = choose_ids_key(Path(self.name), lists, kinds, None)
                rows.add(place, row.get(key), key)
            yield from rows.items()


class _Rows:
    """Rows until they are items. Items have consecutive numbers, so a problem ends some."""

    def __init__(self) -> None:
        self._ready = list[Items]()
        self._place = 0
        self._read = list[Ids]()

    def add(self, place: int, value: Any, key: str) -> None:
        is_list = isinstance(value, list) and all(type(number) is int for number in value)
        if not is_list or any(not 0 <= number < 2**63 for number in value):
            self.add_problem(place, Problem(_NO_IDS, f"{key!r} must be a list of token ids"))
            return
        if self._read and place != self._place + len(self._read):
            self._finish()
        self._place = self._place if self._read else place
        self._read.append(np.array(value, np.int64))

    def add_problem(self, place: int, problem: Problem) -> None:
        self._finish()
        nothing = TokenRange("<i8", 0, ids=np.zeros(0, np.int64))
        self._ready.append(Items(nothing, np.zeros(0, np.int64), place, [(place, problem)]))

    def _finish(self) -> None:
        if self._read:
            ids = np.concatenate(self._read)
            sizes = np.array(list(map(len, self._read)), np.int64)
            self._ready.append(Items(TokenRange("<i8", len(ids), ids=ids), sizes, self._place))
            self._read = []

    def items(self) -> list[Items]:
        self._finish()
        return self._ready


@dataclass
class TableFile(TokenFile):
    """Rows of Parquet, or of Arrow's stream or file format."""

    ids_key: str = ""

    def items(self) -> Iterator[Items]:
        assert self.path is not None
        with open_regular(self.path) as file:
            row = 1
            batches = _batches(self.path, file, self.ids_key)
            while (batch := _next(self.name, batches)) is not None:
                yield from _column_items(self.name, batch.column(self.ids_key), row)
                row += len(batch)


def _next(name: str, batches: Iterator[Any]) -> Any:
    pyarrow = import_optional("pyarrow", name)
    try:
        return next(batches, None)
    except (pyarrow.ArrowException, OSError, KeyError, OverflowError, MemoryError) as error:
        raise UserError(
            f"{name}: a damaged file ({one_line(first_line(error), 200)}): copy it again"
        ) from error


def _batches(path: Path, file: Any, key: str | None) -> Iterator[Any]:
    """Yield the rows in batches; only the column `key`, unless it is None."""
    if path.suffix == ".parquet":
        table = import_optional("pyarrow.parquet", str(path)).ParquetFile(file)
        yield from table.iter_batches(_ROWS, columns=None if key is None else [key])
        return
    ipc = import_optional("pyarrow.ipc", str(path))
    magic = file.read(6)
    file.seek(0)
    # The file format begins with it, the stream format with its first message.
    if magic == b"ARROW1":
        table = ipc.open_file(file)
        batches = map(table.get_batch, range(table.num_record_batches))
    else:
        batches = ipc.open_stream(file)
    for batch in batches:
        for start in range(0, len(batch), _ROWS):
            yield batch.slice(start, _ROWS)


def _schema(path: Path) -> Any:
    with open_regular(path) as file:
        if path.suffix == ".parquet":
            return import_optional("pyarrow.parquet", str(path)).ParquetFile(file).schema_arrow
        ipc = import_optional("pyarrow.ipc", str(path))
        magic = file.read(6)
        file.seek(0)
        return (ipc.open_file if magic == b"ARROW1" else ipc.open_stream)(file).schema


def _column_items(name: str, column: Any, row: int) -> Iterator[Items]:
    """Yield the items of a column, whose first one is row `row`."""
    pyarrow = import_optional("pyarrow", name)
    try:
        # Unchecked, damaged offsets would read outside the values.
        column.validate(full=True)
    except pyarrow.ArrowException as error:
        raise UserError(f"{name}: damaged ({first_line(error)}): copy it again") from error
    is_missing = column.is_null().to_numpy(zero_copy_only=False)
    sizes = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    values = column.flatten()
    if values.null_count:
        raise UserError(f"{name}: a token id is missing after row {row:,}: repair the table")
    ids = values.to_numpy(zero_copy_only=False)
    # A block without the rows that have no list at all: they are counted, with their numbers.
    missing = Problem(_NO_IDS, "the row has no list of token ids")
    ends = np.cumsum(sizes)
    start = 0
    for stop in [*np.flatnonzero(is_missing).tolist(), len(sizes)]:
        if start < stop:
            part = ids[ends[start] - sizes[start] : ends[stop - 1]]
            tokens = TokenRange(part.dtype.str, len(part), ids=part)
            yield Items(tokens, sizes[start:stop], row + start)
        if stop < len(sizes):
            nothing = TokenRange(ids.dtype.str, 0, ids=ids[:0])
            yield Items(nothing, sizes[:0], row + stop, [(row + stop, missing)])
        start = stop + 1


def open_ids(path: Path, settings: PrepareSettings) -> Iterator[TokenFile]:
    """Yield a file of rows."""
    kind = file_format(path)
    stamp = size_and_time(path)
    if kind in ("jsonl", "json"):
        yield LinesFile(
            str(path), kind, path=path, size_and_time=stamp, dtype="<i8", ids_key=settings.ids_key
        )
        return
    if kind not in ("parquet", "arrow"):
        raise UserError(f"{path}: rows of ids are in .parquet, .arrow or .jsonl files")
    pyarrow = import_optional("pyarrow", f"{path}: a .{kind} file")
    try:
        schema = _schema(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a whole {kind} file ({first_line(error)})") from error
    columns = {field.name: str(field.type) for field in schema}
    types = {name: np.dtype(inner) for name, inner in _list_types(schema)}
    key = choose_ids_key(path, list(types), columns, settings.ids_key)
    dtype = types[key].str
    yield TableFile(str(path), kind, path=path, size_and_time=stamp, dtype=dtype, ids_key=key)


def _list_types(schema: Any) -> Iterator[tuple[str, str]]:
    """Yield the columns of lists of integers, with the integers' types."""
    types = import_optional("pyarrow.types", "a table")
    for field in schema:
        is_list = (
            types.is_list(field.type)
            or types.is_large_list(field.type)
            or types.is_fixed_size_list(field.type)
        )
        if is_list and types.is_integer(field.type.value_type):
            yield field.name, str(field.type.value_type)
