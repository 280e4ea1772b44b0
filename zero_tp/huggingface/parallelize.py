"""Split live models of transformers' own classes over a topology."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from zero_tp.architectures import aliases_of, architecture_of
from zero_tp.errors import UserError
from zero_tp.huggingface.for_causal_lm import ZeroTPForCausalLM
from zero_tp.huggingface.for_pretraining import ZeroTPForPreTraining
from zero_tp.huggingface.model import HuggingFaceModel
from zero_tp.topology import Topology
from zero_tp.weights.live_weights import LiveSource


def parallel_model(
    native: Any, topology: Topology, *, seed: int = 0, device: torch.device | str = "cpu"
) -> HuggingFaceModel:
    """Return our model with the weights of a live model of transformers' own class. Each rank takes its shards.

    Frozen weights stay frozen.

    Args:
        native: the same on every rank, without PEFT adapters; an instance of its model_type's `native_class`.

    Raises:
        UserError: another class, adapters, added weights, a config that our layers can't compute, a half-frozen weight.
    """
    if getattr(native, "peft_config", None):
        raise UserError(
            "PEFT: the model has adapters, which are layers of transformers' own; train it with transformers' Trainer, "
            "or give what its merge_and_unload() returns"
        )
    if not isinstance(native, PreTrainedModel):
        raise UserError(
            f"model: {type(native).__name__} is no model of transformers; give one, such as GPT2LMHeadModel"
        )
    architecture = architecture_of(native.config)
    classes = (architecture.native_class, architecture.masked_lm_class)
    class_name = next((base.__name__ for base in type(native).__mro__ if base.__name__ in classes), None)
    if class_name is None:
        names = " or ".join(filter(None, classes))
        raise UserError(f"model: {type(native).__name__} is not supported; give a {names}")
    native.config.architectures = [class_name]  # as its save_pretrained does; it decides about the sentence head
    model_class = ZeroTPForCausalLM if architecture.causal else ZeroTPForPreTraining
    source = LiveSource(native)
    model: HuggingFaceModel = model_class(
        native.config, topology, source=source, seed=seed, dtype=native.dtype, device=device
    )
    parameters = dict(native.named_parameters(remove_duplicate=False))
    frozen = {name for name, parameter in parameters.items() if not parameter.requires_grad}
    added = parameters.keys() - aliases_of(native.config).keys()
    for our_name, parameter in model.named_parameters():
        weight = source.weights[our_name]
        native_names = {weight.native_name} if weight.native_name else set(weight.names)
        added -= native_names
        if frozen & native_names and not native_names <= frozen:
            problem = f"model: {', '.join(sorted(native_names))} are one weight here, of which a part is frozen"
            raise UserError(f"{problem}; freeze all of them or none")
        parameter.requires_grad_(not frozen & native_names)
    if added:
        raise UserError(f"model: {class_name} has no {min(added)}, which would be lost; give a model without it")
    return model
