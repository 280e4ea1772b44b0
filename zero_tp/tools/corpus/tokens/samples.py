"""Formats whose files hold samples: litdata's chunks and MosaicML's shards (MDS).

Both begin with uint32 n and uint32[n + 1], the bytes at which samples begin and the last one ends.
Read from the sources of litdata 0.2.76 (streaming/writer.py) and of mosaicml-streaming 0.13.0
(base/format/mds).
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from zero_tp.base.errors import UserError, shown
from zero_tp.base.files import open_regular
from zero_tp.base.strict_json import InvalidJson, read_object
from zero_tp.data.compression import open_decompressed, piece_bytes
from zero_tp.data.documents import size_and_time
from zero_tp.tools.corpus.settings import PrepareSettings
from zero_tp.tools.corpus.tokens.files import WINDOW, FlatFile, Ids, Items, TokenFile, TokenRange
from zero_tp.tools.corpus.tokens.flat import companion, dtype_of

TORCH_TYPES = {11: "|u1", 12: "|i1", 13: "<i2", 14: "<i2", 15: "<i4", 16: "<i4", 17: "<i8"}
TORCH_TYPES |= {18: "<i8", 20: "<u2"}
NUMPY_TYPES = dict(enumerate(("|i1", "<i2", "<i4", "<i8", "|u1", "<u2", "<u4", "<u8")))
"""Number in `no_header_tensor:N` and in `no_header_numpy:N` → type: litdata's constants.py."""
_MDS_TYPES = {8: "|u1", 9: "|i1", 16: "<u2", 17: "<i2", 32: "<u4", 33: "<i4", 64: "<u8", 65: "<i8"}
_MDS_COMPRESSIONS = {"zstd": ".zst", "gz": ".gz", "bz2": ".bz2"}
_IDS_KEYS = ("input_ids", "tokens", "ids")


def _number(file: IO[bytes]) -> int:
    return int(_numbers(file, 1)[0])


def _numbers(file: IO[bytes], count: int) -> npt.NDArray[np.int64]:
    return np.frombuffer(_exactly(file, 4 * count), "<u4").astype(np.int64)


def _exactly(file: IO[bytes], count: int) -> bytes:
    data = file.read(count)
    if len(data) < count:
        raise EOFError(f"{count:,} bytes expected, {len(data):,} are left")
    return data


@dataclass
class SampleFile(TokenFile):
    """A chunk or shard that is read from its start.

    Attributes:
        ending: of its compression, as `compression.COMPRESSIONS` has it.
    """

    ending: str = ""

    @abstractmethod
    def decode(self, sample: bytes) -> Ids:
        """Return the tokens of a sample. Raises ValueError or IndexError: it is damaged."""

    def items(self) -> Iterator[Items]:
        assert self.path is not None
        with open_regular(self.path) as raw:
            pieces = iter(partial(raw.read, piece_bytes(self.ending)), b"")
            try:
                yield from self._samples(open_decompressed(self.name, self.ending, pieces))
            except (EOFError, ValueError, IndexError) as error:
                if isinstance(error, UserError):
                    raise
                raise UserError(f"{self.name}: damaged ({error}): copy it again") from error

    def _samples(self, file: IO[bytes]) -> Iterator[Items]:
        count = _number(file)
        if 4 * count > self._most_bytes():
            raise EOFError(f"{count:,} samples expected")
        starts = _numbers(file, count + 1)
        if starts[0] < 4 * (count + 2) or (np.diff(starts) < 0).any():
            raise ValueError("its samples' offsets don't rise")
        _exactly(file, int(starts[0]) - 4 * (count + 2))
        read = list[Ids]()
        place = 1
        tokens = 0
        for number, size in enumerate(np.diff(starts).tolist(), start=1):
            read.append(self.decode(_exactly(file, size)))
            tokens += len(read[-1])
            if tokens >= WINDOW or number == count:
                yield _items(read, place)
                read, place, tokens = [], number + 1, 0
        if file.read(1):
            raise ValueError("bytes follow the last sample")

    def _most_bytes(self) -> int:
        # No compression makes more than 2^12 bytes of one.
        return self.size_and_time[0] * (2**12 if self.ending else 1)


def _items(read: list[Ids], place: int) -> Items:
    ids = np.concatenate([np.zeros(0, np.uint8), *read]) if len(read) != 1 else read[0]
    sizes = np.array(list(map(len, read)), np.int64)
    return Items(TokenRange(ids.dtype.str, len(ids), ids=ids), sizes, place)


def _read_index(path: Path, kind: str) -> dict[str, Any]:
    try:
        return read_object(path)
    except InvalidJson as error:
        raise UserError(f"{path}: not an index of {kind}: {error}") from error


def _shard_path(path: Path, name: object) -> Path:
    """Return a file of an index, which must be in its folder or below it."""
    file = path.parent / str(name)
    if ".." in Path(str(name)).parts or Path(str(name)).is_absolute() or not file.is_file():
        raise UserError(f"{path}: its file {name} is missing")
    return file


# --- litdata --------------------------------------------------------------------------------------


@dataclass
class LitdataChunk(SampleFile):
    """A compressed chunk, or one whose samples begin with their sizes."""

    has_sizes: bool = False

    def decode(self, sample: bytes) -> Ids:
        assert self.dtype is not None
        return np.frombuffer(sample, self.dtype, offset=4 if self.has_sizes else 0)


def open_litdata(path: Path, settings: PrepareSettings) -> Iterator[TokenFile]:
    """Yield the chunks of a folder's index.json, in its order."""
    index = _read_index(path, "litdata")
    try:
        config = index["config"]
        forms = config["data_format"]
        names = [chunk["filename"] for chunk in index["chunks"]]
        compression, encryption = config.get("compression"), config.get("encryption")
        has_sizes = config.get("item_loader", "PyTreeLoader") != "TokensLoader"
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: not an index of litdata: it has no {error}") from error
    if not isinstance(forms, list):
        raise UserError(f"{path}: not an index of litdata: its data_format is {shown(forms)}")
    match = re.fullmatch(
        r"no_header_(tensor|numpy):(\d+)", str(forms[0]) if len(forms) == 1 else ""
    )
    types = TORCH_TYPES if match and match[1] == "tensor" else NUMPY_TYPES
    if match is None or int(match[2]) not in types:
        raise UserError(
            f"{path}: its samples are {', '.join(map(str, forms))}: one 1-dimensional array of "
            "integers is needed, as litdata's TokensLoader has it"
        )
    is_whole = config.get("compression_level") in (None, "chunk")
    if encryption or (compression and not (is_whole and str(compression).startswith("zstd"))):
        raise UserError(
            f"{path}: encrypted, or compressed with {compression}: only zstd of whole chunks can "
            "be read (litdata's compression_level chunk)"
        )
    dtype = types[int(match[2])]
    yield companion(path, "litdata")
    for name in names:
        chunk = _shard_path(path, name)
        stamp = size_and_time(chunk)
        if compression or has_sizes:
            ending = ".zst" if compression else ""
            yield LitdataChunk(
                str(chunk),
                "litdata",
                path=chunk,
                size_and_time=stamp,
                dtype=dtype,
                ending=ending,
                has_sizes=has_sizes,
            )
        else:
            yield _flat_chunk(chunk, dtype)


def _flat_chunk(path: Path, dtype: str) -> FlatFile:
    size = path.stat().st_size
    width = np.dtype(dtype).itemsize
    count = int(np.fromfile(path, "<u4", 1)[0]) if size >= 4 else 0
    start = 4 * (count + 2)
    entries = count + 1 if start <= size else 0
    starts = np.fromfile(path, "<u4", entries, offset=4).astype(np.int64)
    if not entries or starts[0] != start or starts[-1] != size:
        raise UserError(f"{path}: damaged: its samples don't end at its {size:,} bytes")
    if ((starts - start) % width).any():
        raise UserError(f"{path}: damaged: a sample is no whole number of tokens")
    tokens = TokenRange(dtype, (size - start) // width, str(path), start)
    ends = (starts[1:] - start) // width
    return FlatFile(
        str(path), "litdata", path=path, size_and_time=size_and_time(path), tokens=tokens, ends=ends
    )


# --- MDS ------------------------------------------------------------------------------------------


@dataclass
class MdsShard(SampleFile):
    """A shard of MosaicML's streaming.

    Attributes:
        widths: bytes of each column; None: a sample says it.
        column: which of them has the tokens.
        value: its type, None: each value says it; and whether each value says its shape.
    """

    widths: tuple[int | None, ...] = ()
    column: int = 0
    value: tuple[str | None, bool] = ("<u2", False)

    def decode(self, sample: bytes) -> Ids:
        variable = [i for i, width in enumerate(self.widths) if width is None]
        lengths = np.frombuffer(sample, "<u4", len(variable)).tolist()
        sizes = list(self.widths)
        for i, length in zip(variable, lengths, strict=True):
            sizes[i] = length
        start = 4 * len(variable) + sum(size or 0 for size in sizes[: self.column])
        data = sample[start : start + (sizes[self.column] or 0)]
        if len(data) < (sizes[self.column] or 0):
            raise ValueError("a sample is shorter than its columns")
        dtype, has_shape = self.value
        if dtype is None:
            if data[0] not in _MDS_TYPES:
                raise ValueError(f"type {data[0]} is no integer")
            dtype, data = _MDS_TYPES[data[0]], data[1:]
        if has_shape:
            # The number of dimensions, and the width of their sizes as a power of 2.
            data = data[1 + (data[0] >> 2 << (data[0] & 3)) :]
        return np.frombuffer(data, dtype)


def open_mds(path: Path, settings: PrepareSettings) -> Iterator[TokenFile]:
    """Yield the shards of a folder's index.json."""
    index = _read_index(path, "MosaicML's streaming")
    yield companion(path, "mds")
    try:
        for shard in index["shards"]:
            yield _mds_shard(path, shard, settings)
    except UserError:
        raise
    except KeyError as error:
        raise UserError(f"{path}: not an index of MosaicML's streaming: no {error}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: not an index of MosaicML's streaming: {error}") from error


def _mds_shard(path: Path, shard: dict[str, Any], settings: PrepareSettings) -> MdsShard:
    if shard["format"] != "mds":
        raise UserError(f"{path}: a shard of format {shard['format']}; only mds can be read")
    raw, compressed = shard["raw_data"], shard["zip_data"]
    ending = ""
    file = path.parent / str(raw["basename"])
    if compressed is not None and not file.is_file():
        kind = str(shard["compression"]).partition(":")[0]
        if kind not in _MDS_COMPRESSIONS:
            raise UserError(
                f"{path}: compressed with {kind}, which can't be read here: decompress its shards, "
                f"or write them with one of {', '.join(_MDS_COMPRESSIONS)}"
            )
        ending = _MDS_COMPRESSIONS[kind]
        file, raw = _shard_path(path, compressed["basename"]), compressed
    else:
        file = _shard_path(path, raw["basename"])
    if (size := file.stat().st_size) != raw["bytes"]:
        raise UserError(f"{file}: {size:,} bytes instead of {raw['bytes']:,}: it is damaged")
    names, encodings = shard["column_names"], shard["column_encodings"]
    column = _token_column(path, dict(zip(names, encodings, strict=True)), settings)
    dtype, has_shape = _mds_value(path, encodings[names.index(column)], settings)
    return MdsShard(
        str(file),
        "mds",
        path=file,
        size_and_time=size_and_time(file),
        dtype=dtype or "<i8",
        ending=ending,
        widths=tuple(shard["column_sizes"]),
        column=names.index(column),
        value=(dtype, has_shape),
    )


def _token_column(path: Path, encodings: dict[str, str], settings: PrepareSettings) -> str:
    arrays = [
        name
        for name, encoding in encodings.items()
        if encoding.partition(":")[0] in ("bytes", "ndarray")
    ]
    return choose_ids_key(path, arrays, encodings, settings.ids_key)


def choose_ids_key(
    path: Path, candidates: list[str], columns: dict[str, str], ids_key: str | None
) -> str:
    """Return the name of the column with the tokens.

    Args:
        candidates: names of columns that may have some.
        columns: name → type of all.
    """
    likely = [name for name in _IDS_KEYS if name in candidates] or candidates
    if ids_key is None and (len(likely) == 1 or likely[:1] == list(_IDS_KEYS[:1])):
        return likely[0]
    if ids_key in candidates:
        return str(ids_key)
    listed = ", ".join(f"{name} ({kind})" for name, kind in sorted(columns.items()))
    problem = "several columns may have" if ids_key is None and candidates else "no column has"
    raise UserError(
        f"{path}: {problem} lists of token ids{f' under {ids_key!r}' if ids_key else ''}; the "
        f"columns are {listed}: choose one with --ids-key"
    )


def _mds_value(path: Path, encoding: str, settings: PrepareSettings) -> tuple[str | None, bool]:
    """Return the type of a column's tokens, and whether each value begins with its shape."""
    kind, *details = encoding.split(":")
    if kind == "bytes":
        return dtype_of(path, settings), False
    named = details[0] if details else ""
    dtype = np.dtype(named).newbyteorder("<") if named else None
    if dtype is not None and dtype.kind not in "iu":
        raise UserError(f"{path}: its column of {encoding} holds no integers")
    return None if dtype is None else dtype.str, len(details) < 2
