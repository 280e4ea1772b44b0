"""The native transformers class of a config, without data: what it is made of, what its tensors look like, and how they
come from our parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from zero_tp.models.architectures import Weight, architecture_of, to_theirs
from zero_tp.tensors.files import Entry


def native_model(config: PretrainedConfig) -> Any:
    """The model on the meta device."""
    with init_empty_weights(include_buffers=True):
        return AutoModelForCausalLM.from_config(config)


def native_shapes(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor by its name; tied ones once."""
    aliases = architecture_of(config).tied if config.tie_word_embeddings else {}
    state = native_model(config).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in state.items() if name not in aliases}


def native_entries(
    weights: Iterable[Weight],
    shape: Callable[[str], tuple[int, ...]],
    read: Callable[[str], Tensor],
    dtype: torch.dtype,
) -> list[Entry]:
    """Every Hugging Face tensor, read from our parameters one at a time.

    One parameter can be several tensors (gate and up), or several one (fused Q, K and V): what was not asked for yet is
    kept, so that tensors that are read one after another read it once.

    Args:
        shape: our parameter's name → its whole shape.
        read: our parameter's name → the whole of it.
    """
    makers: dict[str, list[Weight]] = {}
    for weight in weights:
        for name in weight.names:
            makers.setdefault(name, []).append(weight)
    kept: dict[str, Tensor] = {}

    def theirs(name: str) -> Tensor:
        if name not in kept:
            kept.clear()
            kept.update(to_theirs(makers[name], read))
        return kept.pop(name)

    return [
        Entry(name, weight.shapes(shape(weight.ours))[name], dtype, partial(theirs, name))
        for name, (weight, *_) in makers.items()
    ]
