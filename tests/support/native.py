"""A model and its Hugging Face twin: the same weights under both names."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig

from tests.support.compare import WholeWeights, check_close, gradient_of, whole_gradients
from zero_tp.model import architectures as tables
from zero_tp.model.architectures import architecture_of, file_tensors, native_class_of, weights_of
from zero_tp.model.huggingface import ZeroTPForCausalLM, ZeroTPForPreTraining
from zero_tp.model.parallel_model import ParallelModel
from zero_tp.model.weights.entries import live_entries
from zero_tp.parallel.layout import stored_buffers, stored_tensors
from zero_tp.parallel.topology import Topology


def to_ours(config: PretrainedConfig, theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Hugging Face's tensors, or what belongs to each, under our names."""
    weights = weights_of(config)
    stored = file_tensors(weights, theirs)
    return {weight.our_name: weight.from_hf(stored) for weight in weights}


def to_theirs(config: PretrainedConfig, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our whole parameters, or what belongs to each, under the names of Hugging Face's class."""
    # Gradients and states are of parameters alone.
    weights = [
        weight for weight in weights_of(config) if weight.is_parameter or weight.our_name in ours
    ]
    stacked = {
        weight.native_name: ours[weight.our_name]
        for weight in weights
        if weight.native_name is not None
    }
    return stacked | tables.to_hf(
        [weight for weight in weights if weight.native_name is None], ours.__getitem__
    )


def native_model(config: PretrainedConfig, **options: Any) -> Any:
    """Transformers' own class, in fp32."""
    return getattr(transformers, native_class_of(config))._from_config(
        config, dtype=torch.float32, **options
    )


def perturbed(model: Any, scale: float = 0.1) -> Any:
    """The model, random everywhere: biases and norms too, so that none is missed."""
    with torch.no_grad():
        for parameter in (*model.parameters(), *dict(buffers_of_files(model)).values()):
            parameter.add_(torch.randn_like(parameter) * scale)
    return model


def buffers_of_files(model: Any) -> list[tuple[str, Tensor]]:
    """The buffers of a transformers model that are in its files, by name."""
    stored = model.state_dict().keys()
    return [pair for pair in model.named_buffers() if pair[0] in stored]


@torch.no_grad()
def draw_biases(model: ParallelModel) -> None:
    """Give the buffers of files values: zeros, as routers' biases are drawn, would hide errors."""
    for name, bias in stored_buffers(model):
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        bias.copy_(0.1 * torch.randn(bias.shape, generator=generator))


def our_class(config: PretrainedConfig) -> Any:
    return (
        ZeroTPForCausalLM if architecture_of(config).spec(config).causal else ZeroTPForPreTraining
    )


def native_tensors(model: ParallelModel) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, whole tensor) of every parameter of a live model. Collective over all
    ranks.
    """
    tensors = dict(stored_tensors(model))
    dtype = next(model.parameters()).dtype
    for entry in live_entries(tensors, model.config, model.topology, dtype):
        yield entry.name, entry.read()


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """Of every parameter that is trained: transformers freezes some routers' biases."""
    named = model.named_parameters()
    return {name: gradient_of(weight) for name, weight in named if weight.requires_grad}


def gradients_to_ours(config: PretrainedConfig, reference: Any) -> dict[str, Tensor]:
    """The gradients of a Hugging Face model under our names. Routers' biases have none."""
    theirs = file_tensors(weights_of(config), gradients(reference))
    weights = [weight for weight in weights_of(config) if weight.is_parameter]
    assert {name for weight in weights for name in weight.names} == theirs.keys()
    return {weight.our_name: weight.from_hf(theirs) for weight in weights}


def check_gradients(model: ParallelModel, reference: Any) -> int:
    """Every gradient is that of the twin, and no weight of either is without one; the number of
    gradients.

    Collective over the model's TP group.
    """
    ours = whole_gradients(model)
    check_close(ours, gradients_to_ours(model.config, reference))
    return len(ours)


class Native(WholeWeights):
    """A WeightSource that reads a live Hugging Face model."""

    def __init__(self, model: Any) -> None:
        super().__init__(to_ours(model.config, model.state_dict()))


def parallel_model(
    reference: Any, topology: Topology, attention: str | None = None, **options: Any
) -> Any:
    """This rank's part of a Hugging Face model, by default with its attention."""
    config = copy.deepcopy(reference.config)
    config._attn_implementation = attention or config._attn_implementation
    return our_class(config)(config, topology, source=Native(reference), **options)
