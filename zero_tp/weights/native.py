"""The native transformers class of a config has tensors of these names and shapes, made of our parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from zero_tp.models.architectures import Weight, architecture_of, to_theirs
from zero_tp.tensors.files import Entry


def native_model(config: PretrainedConfig) -> Any:
    """Build the model on the meta device."""
    with init_empty_weights(include_buffers=True):
        return AutoModelForCausalLM.from_config(config)


def aliases_of(config: PretrainedConfig) -> dict[str, str]:
    """Return the tensors that are tied to another, alias → source; files hold the source."""
    return architecture_of(config).tied if config.tie_word_embeddings else {}


def weights_of(config: PretrainedConfig) -> list[Weight]:
    """Return every parameter of a model of this config, under both names."""
    architecture = architecture_of(config)
    return list(architecture.each_weight(architecture.spec(config)))


def native_entries(
    config: PretrainedConfig,
    shape: Callable[[str], tuple[int, ...]],
    read: Callable[[str], Tensor],
    dtype: torch.dtype,
) -> list[Entry]:
    """Return every Hugging Face tensor in `dtype`, read from our parameters one at a time.

    One parameter can be several tensors (gate and up), or several one (fused Q, K and V): what was not asked for yet is
    kept, so that tensors that are read one after another read it once.

    Args:
        shape: our parameter's name → its whole shape.
        read: our parameter's name → the whole of it.
    """
    makers: dict[str, list[Weight]] = {}
    for weight in weights_of(config):
        for name in weight.names:
            makers.setdefault(name, []).append(weight)
    kept: dict[str, Tensor] = {}

    def theirs(name: str) -> Tensor:
        if name not in kept:
            kept.clear()
            kept.update(to_theirs(makers[name], read))
        return kept.pop(name).to(dtype)

    return [
        Entry(name, weight.shapes(shape(weight.ours))[name], dtype, partial(theirs, name))
        for name, (weight, *_) in makers.items()
    ]
