"""Split live models of transformers' own classes over a topology."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from zero_tp.base.errors import UserError
from zero_tp.model.architectures import architecture_of
from zero_tp.model.huggingface.for_causal_lm import ZeroTPForCausalLM
from zero_tp.model.huggingface.for_pretraining import ZeroTPForPreTraining
from zero_tp.model.huggingface.live_model import read_live_model
from zero_tp.model.huggingface.model import HuggingFaceModel
from zero_tp.model.weights.live_weights import LiveSource
from zero_tp.parallel.topology import Topology


def parallel_model(
    native: Any, topology: Topology, *, seed: int = 0, device: torch.device | str = "cpu"
) -> HuggingFaceModel:
    """Return our model that computes what a live model of transformers' own class does. Each rank
    takes its shards.

    The live modules count where they differ from the config. Ties, the padding row, dropout, frozen
    weights, the mode (training or evaluation) and a dtype that has rounded rotary frequencies are
    adopted. Other differences are refused.

    Args:
        native: the same on every rank, without PEFT adapters; an instance of its model_type's
            `native_class`.

    Raises:
        UserError: another class, adapters, a config that our layers can't compute, a half-frozen
            weight, or a difference from the config, such as added weights, hooks, a replaced
            forward or another norm epsilon.
    """
    if getattr(native, "peft_config", None):
        raise UserError(
            "PEFT: the model has adapters, which are layers of transformers' own; train it with "
            "transformers' Trainer, "
            "or give what its merge_and_unload() returns"
        )
    if not isinstance(native, PreTrainedModel):
        raise UserError(
            f"model: {type(native).__name__} is no model of transformers; give one, such as "
            "GPT2LMHeadModel"
        )
    architecture = architecture_of(native.config)
    classes = (architecture.native_class, architecture.masked_lm_class)
    class_name = next(
        (name for name in filter(None, classes) if isinstance(native, getattr(transformers, name))),
        None,
    )
    if class_name is None:
        names = " or ".join(filter(None, classes))
        raise UserError(f"model: {type(native).__name__} is not supported; give a {names}")
    config, spec = read_live_model(native, class_name)
    model_class = ZeroTPForCausalLM if architecture.causal else ZeroTPForPreTraining
    source = LiveSource(native, config)
    model: HuggingFaceModel = model_class(
        config, topology, source=source, seed=seed, dtype=native.dtype, device=device, spec=spec
    )
    frozen = {
        name
        for name, weight in native.named_parameters(remove_duplicate=False)
        if not weight.requires_grad
    }
    for our_name, parameter in model.named_parameters():
        weight = source.weights[our_name]
        # transformers' class stacks experts as we do; `names` are those of files, one for each
        # expert.
        native_names = {weight.native_name} if weight.native_name else set(weight.names)
        # Llama's gate_proj and up_proj are one parameter here, and `requires_grad` is one for all
        # its rows.
        if frozen & native_names and not native_names <= frozen:
            problem = (
                f"model: {', '.join(sorted(native_names))} are one weight here, of which a part is "
                "frozen"
            )
            raise UserError(f"{problem}; freeze all of them or none")
        parameter.requires_grad_(not frozen & native_names)
    return model.train(native.training)
