"""This module opens the weights files of a Hugging Face directory.

safetensors hold nothing but tensors. Pickled files are read only where a person allows it, and then by torch's
restricted unpickler, which makes tensors and plain containers alone. What is heavy is imported when a file is read.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_tp.errors import UserError, first_line
from zero_tp.files import InvalidJson, read_object

if TYPE_CHECKING:
    from torch import Tensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


def find_weights(directory: Path, allow_pickle: bool = False) -> Path:
    """Return the directory's weights file or index.

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


def open_weights(directory: Path, allow_pickle: bool = False) -> dict[str, Tensor]:
    """Return the directory's tensors by name. They are mapped into memory: what is used of one is read then.

    Raises:
        UserError: see `find_weights`; a file is missing, is not what its name says, or repeats a tensor.
    """
    path = find_weights(directory, allow_pickle)
    read = _safetensors if path.name in (SINGLE, INDEX) else _unpickled
    tensors: dict[str, Tensor] = {}
    for file in [path] if path.name in (SINGLE, PICKLED) else _files_of(path):
        found = read(file)
        if twice := tensors.keys() & found.keys():
            raise UserError(f"{file}: tensor {min(twice)} is in another file too")
        tensors |= found
    return tensors


def _files_of(index: Path) -> list[Path]:
    try:
        names = set(read_object(index)["weight_map"].values())
    except (OSError, InvalidJson, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index}: not an index with a weight_map ({error})") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise UserError(f"{index}: {name!r} is not the name of a file beside it")
        if not (index.parent / name).is_file():
            raise UserError(f"{index.parent / name}: missing, but {index.name} names it")
    return [index.parent / name for name in sorted(names)]


def _safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except Exception as error:  # safetensors' own type derives from nothing narrower
        raise UserError(f"{path}: not a readable safetensors file ({error})") from error


def _unpickled(path: Path) -> dict[str, Tensor]:
    import torch

    try:
        loaded: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # zipfile's, pickle's, torch's: a broken file can raise anything
        raise UserError(f"{path}: torch's restricted unpickler refuses it ({first_line(error)})") from error
    if not isinstance(loaded, dict) or not all(isinstance(value, torch.Tensor) for value in loaded.values()):
        raise UserError(f"{path}: not a dict of tensors by name")
    return dict(loaded)
