"""Files that stack a layer's experts in one tensor, as transformers' classes do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from zero_tp.base.errors import UserError
from zero_tp.model.architectures import Weight, to_hf


def unstack_experts(
    tensors: Mapping[str, Tensor], weights: Iterable[Weight], native: Any, directory: Path
) -> dict[str, Tensor]:
    """Return a file's tensors with one for each expert, views of the stacked ones.

    `save_pretrained` writes one tensor for each expert. A saved `state_dict` has those of the
    class. Mixtral's, with f the width of an expert and E experts:

        mlp.experts.gate_up_proj [E, 2f, h]  →  block_sparse_moe.experts.0.w1.weight [f, h]
                                                block_sparse_moe.experts.0.w3.weight [f, h]
                                                block_sparse_moe.experts.1.w1.weight …

    Args:
        native: the class's model, which has the shapes.
        directory: for error messages.

    Raises:
        UserError: a stacked tensor of another shape, or the same experts twice.
    """
    # Only the mapping is copied; the tensors stay memory-mapped.
    unstacked = dict(tensors)
    prefix = f"{native.base_model_prefix}."
    shapes = {name: tuple(tensor.shape) for name, tensor in native.state_dict().items()}
    for weight in weights:
        native_name = weight.native_name
        if native_name is None or native_name in weight.names:
            continue
        name = next(
            # A file of the bare model lacks the prefix.
            (name for name in (native_name, native_name.removeprefix(prefix)) if name in unstacked),
            None,
        )
        if name is None:
            continue
        stacked = unstacked.pop(name)
        if tuple(stacked.shape) != shapes[native_name]:
            problem = f"expected shape {shapes[native_name]}, found {tuple(stacked.shape)}"
            raise UserError(f"{directory}: tensor {name}: {problem}")
        parts = to_hf([weight], {weight.our_name: stacked}.__getitem__)
        for part in parts:
            if part in unstacked:
                raise UserError(f"{directory}: tensors {name} and {part} are both {native_name}")
        unstacked |= parts
    return unstacked
