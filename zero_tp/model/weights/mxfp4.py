"""Weights in MXFP4: numbers of 4 bits, of which 32 share a power of two (OCP Microscaling Formats
1.0, section 5.2). They are dequantised where a slice of them is read.

gpt-oss's files have two tensors for each matrix of a layer's experts:

    gate_up_proj_blocks    uint8 [E, 2f, h / 32, 16]    two numbers a byte, the low half first
    gate_up_proj_scales    uint8 [E, 2f, h / 32]        exponent + 127
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_tp.base.errors import UserError

_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = (*_POSITIVE, *(-value for value in _POSITIVE))
"""The number of each 4 bits: sign, exponent and mantissa (E2M1)."""
GROUP = 32
"""Numbers that share an exponent."""
BIAS = 127
BLOCKS, SCALES = "_blocks", "_scales"


class Mxfp4Tensor:
    """The experts' matrices of a file, as transformers dequantises them: bf16 [E, in, out].

    It reads and dequantises what is indexed of `mT`, [E, out, in].
    """

    dtype = torch.bfloat16

    def __init__(self, blocks: Tensor, scales: Tensor):
        self.blocks = blocks
        self.scales = scales
        experts, outputs, groups = scales.shape
        self.shape = (experts, groups * GROUP, outputs)

    def is_floating_point(self) -> bool:
        return True

    @property
    def mT(self) -> Mxfp4Rows:
        return Mxfp4Rows(self)

    def whole(self) -> Tensor:
        """Return all of it. bf16 [E, in, out]"""
        return self.mT[slice(None), slice(None), slice(None)].mT.contiguous()


class Mxfp4Rows:
    """Rows of an `Mxfp4Tensor`'s matrices, [E, out, in]."""

    def __init__(self, tensor: Mxfp4Tensor):
        self._tensor = tensor
        experts, inputs, outputs = tensor.shape
        self.shape = (experts, outputs, inputs)

    def __getitem__(self, index: tuple[slice, slice | Tensor, slice]) -> Tensor:
        """Return bf16 [experts, rows, columns]."""
        experts, rows, columns = index
        start, stop, _ = columns.indices(self.shape[2])
        first = start // GROUP
        groups = slice(first, -(-stop // GROUP))
        offset = start - first * GROUP
        # One expert at a time, because look-ups take eight times the memory of what they read.
        matrices = [
            dequantized(blocks[rows, groups], scales[rows, groups])
            for blocks, scales in zip(
                self._tensor.blocks[experts], self._tensor.scales[experts], strict=True
            )
        ]
        return torch.stack(matrices)[..., offset : offset + stop - start]


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers of blocks. uint8 [*, groups, 16], uint8 [*, groups] → bf16 [*, 32 ·
    groups].
    """
    values = torch.tensor(VALUES)
    # Of each byte its low half's number and its high half's.
    pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), 1)
    numbers = pairs[blocks.int()].flatten(-2)
    # Exact: a number has 2 bits, and bf16 has fp32's exponents.
    exponents = scales.int().sub(BIAS).unsqueeze(-1)
    return torch.ldexp(numbers, exponents).to(Mxfp4Tensor.dtype).flatten(-2)


def join_blocks(tensors: Mapping[str, Tensor], directory: Path) -> dict[str, Any]:
    """Return a file's tensors with an `Mxfp4Tensor` for each pair of blocks and scales.

    Args:
        directory: for error messages.

    Raises:
        UserError: blocks without their scales, or of other shapes.
    """
    joined: dict[str, Any] = dict(tensors)
    for name in tensors:
        if not name.endswith(BLOCKS):
            continue
        whole_name = name.removesuffix(BLOCKS)
        blocks = joined.pop(name)
        scales = joined.pop(whole_name + SCALES, None)
        if whole_name in joined:
            raise UserError(f"{directory}: tensors {name} and {whole_name} are the same weight")
        if (
            scales is None
            or {blocks.dtype, scales.dtype} != {torch.uint8}
            or scales.dim() != 3
            or tuple(blocks.shape) != (*scales.shape, GROUP // 2)
        ):
            problem = f"expected uint8 and {whole_name}{SCALES} of shape [E, out, groups]"
            raise UserError(f"{directory}: tensor {name}: {problem}, and 16 bytes a group")
        joined[whole_name] = Mxfp4Tensor(blocks, scales)
    return joined
