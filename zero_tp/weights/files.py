"""The weights files of a Hugging Face directory, and slices of their tensors.

safetensors hold nothing but tensors. Pickled files are read only where a person allows it, and then by torch's
restricted unpickler, which makes tensors and plain containers alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

from zero_tp.errors import UserError, first_line

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


class TensorFiles(Protocol):
    """Tensors by name, spread over files."""

    def names(self) -> list[str]:
        """All of them."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole tensor's."""

    def dtype(self, name: str) -> str:
        """As safetensors writes it: F32, BF16, I64, …"""

    def get_slice(self, name: str) -> Any:
        """What gives the elements when it is indexed with slices, and reads those alone."""


def find_weights(directory: Path, allow_pickle: bool = False) -> Path:
    """The directory's weights file or index. Imports nothing heavy.

    Raises:
        UserError: there is none, or it is pickled and that is not allowed.
    """
    for name in (INDEX, SINGLE):
        if (directory / name).is_file():
            return directory / name
    for name in (PICKLED_INDEX, PICKLED):
        if not (directory / name).is_file():
            continue
        if allow_pickle:
            return directory / name
        raise UserError(
            f"{directory}: its weights are pickled ({name}), which can carry code; use a safetensors version of it, or "
            "--allow-pickle (in Python allow_pickle=True) to read it with torch's restricted unpickler"
        )
    raise UserError(
        f"{directory}: no weights in it: no {SINGLE} nor {INDEX}; give a Hugging Face directory of safetensors"
    )


def open_weights(directory: Path, allow_pickle: bool = False) -> TensorFiles:
    """
    Raises:
        UserError: see `find_weights`; a file is missing, or is not what its name says.
    """
    path = find_weights(directory, allow_pickle)
    kind = Safetensors if path.name in (SINGLE, INDEX) else Pickled
    if path.name in (SINGLE, PICKLED):
        return kind([path])
    return kind([directory / name for name in _files_of(path)])


def _files_of(index: Path) -> list[str]:
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index}: not an index with a weight_map ({error})") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise UserError(f"{index}: {name!r} is not the name of a file beside it")
        if not (index.parent / name).is_file():
            raise UserError(f"{index.parent / name}: missing, but {index.name} names it")
    return sorted(names)


class Safetensors:
    """Files of safetensors, mapped into memory."""

    def __init__(self, paths: list[Path]):
        from safetensors import safe_open

        self._holder: dict[str, Any] = {}
        for path in paths:
            try:
                file = safe_open(path, framework="pt")
            except Exception as error:  # safetensors' own type derives from nothing narrower
                raise UserError(f"{path}: not a readable safetensors file ({error})") from error
            _add(self._holder, dict.fromkeys(file.keys(), file), path)

    def names(self) -> list[str]:
        return list(self._holder)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        return str(self.get_slice(name).get_dtype())

    def get_slice(self, name: str) -> Any:
        return self._holder[name].get_slice(name)


class Pickled:
    """Files that torch.save wrote, mapped into memory and unpickled with `weights_only=True`."""

    def __init__(self, paths: list[Path]):
        import torch

        self._tensors: dict[str, Any] = {}
        for path in paths:
            try:
                loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except Exception as error:  # zipfile's, pickle's, torch's: a broken file can raise anything
                raise UserError(f"{path}: torch's restricted unpickler refuses it ({first_line(error)})") from error
            if not isinstance(loaded, dict) or not all(isinstance(value, torch.Tensor) for value in loaded.values()):
                raise UserError(f"{path}: not a dict of tensors by name")
            _add(self._tensors, loaded, path)

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> str:
        dtype = str(self._tensors[name].dtype).removeprefix("torch.")
        return {"bfloat16": "BF16"}.get(dtype, dtype.replace("float", "F").replace("int", "I").upper())

    def get_slice(self, name: str) -> Any:
        return self._tensors[name]


def _add(into: dict[str, Any], found: dict[str, Any], path: Path) -> None:
    twice = into.keys() & found.keys()
    if twice:
        raise UserError(f"{path}: tensor {min(twice)} is in another file too")
    into.update(found)
