"""Weights in FP8 whose blocks of 128 × 128 share a factor (DeepSeek-V3, arXiv 2412.19437, section
3.3.2). They are dequantised where a slice of them is read.

DeepSeek-V3's files have two tensors for each matrix of a layer:

    weight              float8_e4m3fn [o, i]
    weight_scale_inv    fp32 [⌈o / 128⌉, ⌈i / 128⌉]    the factor, in spite of its name
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_tp.base.errors import UserError

BLOCK = 128
SCALES = "_scale_inv"


class Fp8Matrix:
    """A matrix of a file, bf16 [o, i]. It reads and dequantises what is indexed.

    The last block of rows or columns may be smaller.
    """

    dtype = torch.bfloat16

    def __init__(self, values: Tensor, scales: Tensor):
        self.values = values
        self.scales = scales
        self.shape = values.shape

    def is_floating_point(self) -> bool:
        return True

    def __getitem__(self, index: tuple[slice, slice]) -> Tensor:
        """Return bf16 [rows, columns]."""
        numbers = [torch.arange(size)[part] for size, part in zip(self.shape, index, strict=True)]
        rows, columns = (places // BLOCK for places in numbers)
        scales = self.scales[rows][:, columns]
        return (self.values[index].float() * scales).to(self.dtype)

    def whole(self) -> Tensor:
        """Return all of it."""
        return self[slice(None), slice(None)]


def join_scales(tensors: Mapping[str, Tensor], directory: Path) -> dict[str, Any]:
    """Return a file's tensors with an `Fp8Matrix` for each matrix and its scales.

    Args:
        directory: for error messages.

    Raises:
        UserError: FP8 without scales, or scales of another shape or dtype.
    """
    joined: dict[str, Any] = dict(tensors)
    for name, values in tensors.items():
        if values.dtype != torch.float8_e4m3fn:
            continue
        scales = joined.pop(name + SCALES, None)
        shape = tuple(-(-size // BLOCK) for size in values.shape)
        if scales is None or scales.dtype != torch.float32 or tuple(scales.shape) != shape:
            problem = f"expected fp32 {name}{SCALES} of shape {shape}"
            raise UserError(
                f"{directory}: tensor {name} in FP8: {problem}, a factor for each {BLOCK} × {BLOCK}"
            )
        joined[name] = Fp8Matrix(values, scales)
    return joined
