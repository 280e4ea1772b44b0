"""Tensors in a safetensors file, of which only the asked part is read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from zero_tp.base.errors import UserError
from zero_tp.base.strict_json import InvalidJson, parse_object
from zero_tp.tools.checkpoint_import.stored_tensors import FileTensor

# safetensors 0.8.0, `safetensors/src/tensor.rs`: Dtype, and the largest header.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_LARGEST_HEADER = 100_000_000


@dataclass(frozen=True)
class SafetensorsFile:
    """The tensors of a file by name, and its texts by key."""

    tensors: dict[str, FileTensor]
    metadata: dict[str, str]


def open_safetensors(path: Path) -> SafetensorsFile:
    """Open a file without reading its tensors.

    Raises:
        UserError: it is damaged, or has tensors of a dtype that is not read.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _LARGEST_HEADER:
                raise ValueError(f"a header of {length} bytes")
            header = parse_object(file.read(length))
            size = file.seek(0, 2) - 8 - length
        metadata = header.pop("__metadata__", {})
        tensors = {}
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            shape, dtype = tuple(entry["shape"]), _DTYPES[entry["dtype"]]
            if not 0 <= first <= last <= size or last - first != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"{name} is not within the file")
            tensors[name] = FileTensor.contiguous(path, 8 + length + first, shape, dtype)
    except (OSError, InvalidJson, AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path}: is no safetensors file ({type(error).__name__}: {error}); copy the "
            "checkpoint again"
        ) from error
    return SafetensorsFile(tensors, metadata)
