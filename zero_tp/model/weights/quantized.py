"""The kinds of quantized weights that are dequantised where they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from zero_tp.model.weights.fp8 import Fp8Matrix, join_scales
from zero_tp.model.weights.mxfp4 import Mxfp4Tensor, join_blocks


class Quantization(NamedTuple):
    """How the weights of one `quant_method` are read.

    Attributes:
        join: (a file's tensors, directory) → the same with one object for each quantized weight.
        kind: of these objects.
        note: what they are, for a line.
    """

    join: Callable[[Mapping[str, Tensor], Path], dict[str, Any]]
    kind: type[Any]
    note: str


QUANTIZATIONS = {
    "mxfp4": Quantization(join_blocks, Mxfp4Tensor, "experts in MXFP4"),
    "fp8": Quantization(join_scales, Fp8Matrix, "matrices in FP8"),
}
"""By `quant_method`, as in a config.json."""


def join_quantized(
    tensors: Mapping[str, Tensor], methods: Iterable[str], directory: Path
) -> tuple[dict[str, Any], list[str]]:
    """Return a file's tensors with one object for each quantized weight, and what these are.

    Args:
        methods: those that the files may have.
        directory: for error messages.
    """
    joined: dict[str, Any] = dict(tensors)
    notes = []
    for method in methods:
        quantization = QUANTIZATIONS[method]
        joined = quantization.join(joined, directory)
        if any(isinstance(tensor, quantization.kind) for tensor in joined.values()):
            notes.append(quantization.note)
    return joined, notes


def whole_tensors(tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return a file's joined tensors, all dequantised."""
    kinds = tuple(quantization.kind for quantization in QUANTIZATIONS.values())
    return {
        name: tensor.whole() if isinstance(tensor, kinds) else tensor
        for name, tensor in tensors.items()
    }
