"""Read what `torch.save` wrote without importing or calling anything that a file names.

A pickle names classes and functions, which an unpickler imports and calls. Here tensors become
`FileTensor`s, plain containers themselves, and any other class or function an `InertObject` of
what it was called with.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from zero_tp.base.errors import UserError, first_line
from zero_tp.tools.checkpoint_import.stored_tensors import FileTensor, Fixed

DTYPES = {
    name: getattr(torch, name)
    for name in (
        *("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"),
        *("int64", "int32", "int16", "int8", "uint8", "bool", "complex64", "complex128"),
    )
}
STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "BFloat16Storage": torch.bfloat16,
    "HalfStorage": torch.float16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
"""Typed storages, by which `torch.save` names a tensor's dtype."""


class InertObject:
    """An object of a class that is not imported, or the result of a function that is not called.

    Attributes:
        name: of the class or function, with its module.
        args: what it was called with.
        fields: the object's attributes, if it is no list, dict or object with a state of its own.
        state: what the object's `__setstate__` would be given.
        items, entries: what it holds as a list, or as a dict.
    """

    name = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> InertObject:
        record = super().__new__(cls)
        record.args = args
        record.fields = dict(kwargs)
        record.state = None
        record.items = []
        record.entries = {}
        return record

    args: tuple[Any, ...]
    fields: dict[str, Any]
    state: Any
    items: list[Any]
    entries: dict[Any, Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state
        # Objects with slots have a pair: attributes, and those of the slots.
        parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
        for part in parts:
            if isinstance(part, dict):
                self.fields |= part

    def __setitem__(self, key: Any, value: Any) -> None:
        self.entries[key] = value

    def append(self, item: Any) -> None:
        self.items.append(item)

    def extend(self, items: Sequence[Any]) -> None:
        self.items.extend(items)

    def __repr__(self) -> str:
        return f"<{self.name}>"


@dataclass(frozen=True)
class Storage(Fixed):
    """The bytes of a tensor in a file: where they start, and their number."""

    start: int
    size: int
    dtype: torch.dtype | None


@dataclass(frozen=True)
class _Function(Fixed):
    """A function of ours that a pickle may call; a bare one it could also change, for all files."""

    function: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


class _OrderedDict(OrderedDict[Any, Any]):
    """A dict without the attributes of a file's, such as `_metadata`, which could hide methods."""

    def __setstate__(self, state: object) -> None: ...


def _plain(kind: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that builds a plain container of nothing but another one."""

    def build(*parts: Any) -> Any:
        if len(parts) > 1 or not all(isinstance(part, (list, tuple, dict)) for part in parts):
            raise pickle.UnpicklingError(f"a {kind.__name__} of something that is no container")
        return kind(*parts)

    return build


def _encoded(text: str, encoding: str = "latin1") -> bytes:
    """Return bytes that protocol 2 holds as a text."""
    return text.encode("latin1") if encoding == "latin1" else b""


def _bytearray(content: Any = b"") -> bytearray:
    """Return a bytearray of bytes; a number of any size would take memory."""
    return bytearray(content) if isinstance(content, bytes) else bytearray()


def _default_dict(*args: Any) -> dict[Any, Any]:
    """Return a dict, for one with a default."""
    return {}


PLAIN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): _plain(_OrderedDict),
    ("collections", "defaultdict"): _default_dict,
    ("builtins", "dict"): _plain(dict),
    ("builtins", "list"): _plain(list),
    ("builtins", "tuple"): _plain(tuple),
    ("builtins", "set"): _plain(set),
    ("builtins", "frozenset"): _plain(frozenset),
    ("builtins", "bytearray"): _bytearray,
    ("torch", "Size"): _plain(tuple),
    ("_codecs", "encode"): _encoded,
    **{("torch", name): dtype for name, dtype in DTYPES.items()},
}
"""Names that stand for themselves, or for a harmless function of the same result."""


class _Unpickler(pickle.Unpickler):
    """Reads one pickle; `storage` returns the bytes that a persistent id stands for."""

    def __init__(
        self, file: Any, path: Path, storage: Callable[[str], tuple[int, int]] | None
    ) -> None:
        super().__init__(file, encoding="latin1")
        self.path = path
        self.storage = storage
        self.tensors: dict[tuple[str, str], Callable[..., Any]] = {
            ("torch._utils", "_rebuild_tensor"): self._tensor,
            ("torch._utils", "_rebuild_tensor_v2"): self._tensor,
            ("torch._utils", "_rebuild_tensor_v3"): self._tensor_with_dtype,
            ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
            ("torch._utils", "_rebuild_parameter_with_state"): lambda data, *_: data,
            ("torch._tensor", "_rebuild_from_type_v2"): lambda build, _, args, __: build(*args),
        }

    def find_class(self, module: str, name: str) -> Any:
        module = {"__builtin__": "builtins"}.get(module, module)
        for table in (self.tensors, PLAIN):
            if (module, name) in table:
                known = table[module, name]
                return known if isinstance(known, torch.dtype) else _Function(known)
        if module in ("torch", "torch.storage") and name in (*STORAGES, "UntypedStorage"):
            return Storage(0, 0, STORAGES.get(name))
        return type("InertObject", (InertObject,), {"name": f"{module}.{name}"})

    def persistent_load(self, identity: Any) -> Storage:
        if self.storage is None or not isinstance(identity, tuple) or identity[0] != "storage":
            raise pickle.UnpicklingError("a reference to something outside the file")
        _, kind, key, *_ = identity
        if not isinstance(kind, Storage):
            raise pickle.UnpicklingError(f"a storage of {kind!r}")
        start, size = self.storage(str(key))
        return Storage(start, size, kind.dtype)

    def _tensor(self, storage: Storage, offset: int, sizes: Any, strides: Any, *_: Any) -> Any:
        return self._stored(storage, offset, sizes, strides, storage.dtype)

    def _tensor_with_dtype(
        self, storage: Storage, offset: int, sizes: Any, strides: Any, *rest: Any
    ) -> Any:
        return self._stored(storage, offset, sizes, strides, rest[2])

    def _stored(
        self, storage: Storage, offset: int, sizes: Any, strides: Any, dtype: Any
    ) -> FileTensor:
        if not isinstance(storage, Storage) or not isinstance(dtype, torch.dtype):
            raise pickle.UnpicklingError("a tensor without a storage and a dtype")
        numbers = (offset, *sizes, *strides)
        if not all(isinstance(number, int) and number >= 0 for number in numbers):
            raise pickle.UnpicklingError("a tensor with a negative size")
        steps = zip(sizes, strides, strict=True)
        elements = offset + 1 + sum((size - 1) * stride for size, stride in steps)
        if 0 not in sizes and elements * dtype.itemsize > storage.size:
            raise pickle.UnpicklingError("a tensor larger than its storage")
        start = storage.start + offset * dtype.itemsize
        return FileTensor(self.path, start, tuple(sizes), dtype, tuple(strides))


def _refuse(path: Path, error: Exception | str) -> NoReturn:
    reason = error if isinstance(error, str) else first_line(error)
    raise UserError(f"{path}: cannot be read ({reason}); copy the checkpoint again") from (
        error if isinstance(error, Exception) else None
    )


def load_pickle(path: Path) -> Any:
    """Return the content of a pickle without tensors, such as `.metadata`.

    Raises:
        UserError: it is damaged, or no pickle.
    """
    try:
        with path.open("rb") as file:
            return _Unpickler(file, path, None).load()
    except FileNotFoundError:
        raise UserError(f"{path}: missing; copy the checkpoint again") from None
    except Exception as error:  # a damaged pickle can raise anything
        _refuse(path, error)


def load_torch(path: Path, start: int = 0, size: int | None = None) -> Any:
    """Return what `torch.save` wrote; its tensors are `FileTensor`s.

    Args:
        start, size: of the archive, which may be a part of the file.

    Raises:
        UserError: it is damaged, or of a version before torch 1.6.
    """
    try:
        with path.open("rb") as file:
            window = io.BufferedReader(_Window(file, start, size)) if start or size else file
            if window.read(2) != b"PK":
                _refuse(path, "not an archive of torch 1.6 or newer")
            with zipfile.ZipFile(window) as archive:
                return _load_archive(archive, path, start, window)
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"{path}: missing; copy the checkpoint again") from None
    except Exception as error:  # zipfile's, pickle's: a damaged file can raise anything
        _refuse(path, error)


def _load_archive(archive: zipfile.ZipFile, path: Path, start: int, file: Any) -> Any:
    entries = {
        info.filename.partition("/")[2]: info for info in archive.infolist() if not info.is_dir()
    }
    if any(info.compress_type != zipfile.ZIP_STORED for info in entries.values()):
        _refuse(path, "compressed, which torch.save does not do")
    if "byteorder" in entries and archive.read(entries["byteorder"]) != b"little":
        _refuse(path, "written on a big-endian machine")

    def storage(key: str) -> tuple[int, int]:
        info = entries[f"data/{key}"]
        # The local header's own name and extra field tell where the data begin.
        file.seek(info.header_offset)
        name, extra = struct.unpack("<26x2H", file.read(30))
        return start + info.header_offset + 30 + name + extra, info.file_size

    return _Unpickler(io.BytesIO(archive.read(entries["data.pkl"])), path, storage).load()


class _Window(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, file: Any, start: int, size: int | None) -> None:
        self.file = file
        self.start = start
        self.size = file.seek(0, 2) - start if size is None else size
        self.position = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self.position = offset + (0, self.position, self.size)[whence]
        return self.position

    def readinto(self, buffer: Any) -> int:
        self.file.seek(self.start + self.position)
        content = self.file.read(max(min(len(buffer), self.size - self.position), 0))
        buffer[: len(content)] = content
        self.position += len(content)
        return len(content)


DEEPEST = 64
"""Dicts within each other that are searched for tensors."""


def tensors_in(
    value: Any, prefix: str = "", *, path: Path | None = None, parents: tuple[int, ...] = ()
) -> Iterator[tuple[str, FileTensor]]:
    """Yield the tensors of nested dicts, by names that join their keys.

    Args:
        path: for error messages.
        parents: identities of the dicts around it.

    Raises:
        UserError: a tensor could be had only by a call of what the file names; a dict is in itself.
    """
    place = path or "the checkpoint"
    if id(value) in parents or len(parents) > DEEPEST:
        raise UserError(f"{place}: dicts are in themselves, or too deep; copy the checkpoint again")
    if not isinstance(value, dict):
        raise UserError(f"{place}: holds no tensors by name; copy the checkpoint again")
    for key, inner in value.items():
        name = f"{prefix}{key}"
        if isinstance(inner, FileTensor):
            yield name, inner
        elif isinstance(inner, dict):
            yield from tensors_in(inner, f"{name}.", path=path, parents=(*parents, id(value)))
        elif isinstance(inner, InertObject) and not name.endswith("_extra_state"):
            raise UserError(
                f"{place}: {name} is made by {inner.name}, which is not called; save it as a plain "
                "tensor"
            )
