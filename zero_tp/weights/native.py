"""The native transformers class of a config, without data: what it is made of and what its tensors look like."""

from __future__ import annotations

from typing import Any

from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM, PretrainedConfig

from zero_tp.models.architectures import architecture_of


def native_model(config: PretrainedConfig) -> Any:
    """The model on the meta device."""
    with init_empty_weights(include_buffers=True):
        return AutoModelForCausalLM.from_config(config)


def native_shapes(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor by its name; tied ones once."""
    aliases = architecture_of(config).tied if config.tie_word_embeddings else {}
    state = native_model(config).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in state.items() if name not in aliases}
