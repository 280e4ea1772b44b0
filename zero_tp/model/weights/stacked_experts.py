"""Files that divide a parameter into other tensors than published ones: that stack a layer's
experts in one, as transformers' classes do, or cut a convolution elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from zero_tp.base.errors import UserError
from zero_tp.model.architectures import Weight, to_hf


def unstack_experts(
    tensors: Mapping[str, Tensor],
    weights: Iterable[Weight],
    shapes: Mapping[str, tuple[int, ...]],
    prefix: str,
    directory: Path,
) -> dict[str, Tensor]:
    """Return a file's tensors with one for each expert, views of the stacked ones.

    `save_pretrained` writes one tensor for each expert. A saved `state_dict` has those of the
    class. Mixtral's, with f the width of an expert and E experts:

        mlp.experts.gate_up_proj [E, 2f, h]  →  block_sparse_moe.experts.0.w1.weight [f, h]
                                                block_sparse_moe.experts.0.w3.weight [f, h]
                                                block_sparse_moe.experts.1.w1.weight …

    Args:
        shapes: our parameter's name → its whole shape, which is the stacked tensor's.
        prefix: of names in the class with a head; files of the bare model lack it.
        directory: for error messages.

    Raises:
        UserError: a stacked tensor of another shape, or the same experts twice.
    """
    # Only the mapping is copied; the tensors stay memory-mapped.
    unstacked = dict(tensors)
    for weight in weights:
        native_name = weight.native_name
        if native_name is None or native_name in weight.names:
            continue
        name = next(
            (name for name in (native_name, native_name.removeprefix(prefix)) if name in unstacked),
            None,
        )
        if name is None:
            continue
        stacked = unstacked.pop(name)
        expected = shapes[weight.our_name]
        if tuple(stacked.shape) != expected:
            problem = f"expected shape {expected}, found {tuple(stacked.shape)}"
            raise UserError(f"{directory}: tensor {name}: {problem}")
        parts = to_hf([weight], {weight.our_name: stacked}.__getitem__)
        for part in parts:
            if part in unstacked:
                raise UserError(f"{directory}: tensors {name} and {part} are both {native_name}")
        unstacked |= parts
    return unstacked


def divide_by_sizes(
    tensors: Mapping[str, Tensor], weights: Iterable[Weight], directory: Path
) -> dict[str, Tensor]:
    """Return a file's tensors with those of a class's one tensor cut by `Weight.sizes`.

    `save_pretrained` of transformers 5.24 cuts OLMo Hybrid's convolution into thirds, published
    files have those of queries, keys and values. With key heads of 8 features in all, values of 24:

        q_conv1d [14, 1, 4], k_conv1d [14, 1, 4], v_conv1d [12, 1, 4]
            →    [8, 1, 4],           [8, 1, 4],           [24, 1, 4]

    Args:
        directory: for error messages.
    """
    divided = dict(tensors)
    for weight in weights:
        names = weight.names
        if weight.native_name is None or not weight.sizes or not divided.keys() >= set(names):
            continue
        heights = [divided[name].shape[:1].numel() for name in names]
        if heights == list(weight.sizes):
            continue
        if sum(heights) != sum(weight.sizes):
            problem = f"expected {sum(weight.sizes)} rows, found {sum(heights)}"
            raise UserError(f"{directory}: tensors {', '.join(names)}: {problem}")
        joined = torch.cat([divided[name] for name in names])
        divided |= dict(zip(names, joined.split(weight.sizes), strict=True))
    return divided
