"""Copy weights from Hugging Face models in memory."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from zero_tp.model.architectures import aliases_of, architecture_of, file_tensors, weights_of
from zero_tp.parallel.layout import Layout
from zero_tp.parallel.parameter import Init
from zero_tp.parallel.topology import Topology


class LiveSource:
    """A `WeightSource` that reads a live model of transformers' own class; each rank takes its
    shards.

    If ZeRO-3 has partitioned the model, the constructor gathers all of it on every rank.

    Args:
        config: one that describes the model's weights.
    """

    def __init__(self, model: Any, config: PretrainedConfig):
        self.weights = {weight.our_name: weight for weight in weights_of(config)}
        # Some classes have a part of the weights as buffers.
        stored = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
        whole = {name: gather_parameter(tensor).cpu() for name, tensor in stored.items()}
        self.tensors = file_tensors(self.weights.values(), whole)
        self.generation = getattr(model, "generation_config", None)

    def fill(
        self,
        local: Tensor,
        name: str,
        whole: Sequence[int],
        layout: Layout,
        init: Init,
        topology: Topology,
    ) -> None:
        parameter = self.weights[name].from_hf(self.tensors)
        if tuple(parameter.shape) != tuple(whole):
            raise ValueError(
                f"{name}: expected shape {tuple(whole)}, the model has {tuple(parameter.shape)}"
            )
        local.copy_(
            layout.shard(parameter, topology.tensor_rank, topology.tensor, topology.expert_rank)
        )


def gather_parameter(parameter: Tensor) -> Tensor:
    """Return a parameter, or a whole copy of one that ZeRO-3 has partitioned.

    Of a partitioned one it is collective over the ranks that hold its parts.
    """
    if not hasattr(parameter, "ds_tensor"):
        return parameter.detach()
    # Whoever has partitioned the parameter has imported DeepSpeed.
    deepspeed = sys.modules["deepspeed"]
    with deepspeed.zero.GatheredParameters([parameter]):
        # A copy, because DeepSpeed frees the gathered data when the context ends.
        return parameter.detach().clone()


@torch.no_grad()
def load_native(
    parameters: Mapping[str, Tensor], config: PretrainedConfig, tensors: Mapping[str, Tensor]
) -> tuple[list[str], list[str]]:
    """Copy a Hugging Face state dict, or a part of one, into a model's whole parameters.

    Neither TP nor ZeRO-3 may have sharded them.

    Args:
        parameters: the model's, by our names.
        tensors: the state dict, by the names of the native class or of its files.

    Returns:
        (missing, unexpected): names of the model that `tensors` lacks, and names that the model
        lacks.

    Raises:
        RuntimeError: a tensor has another shape than the model's, or tied tensors differ.
    """
    aliases = aliases_of(config)
    missing = list[str]()
    names = set(aliases)
    names_of_files = {
        file_name: name for name, file_name in architecture_of(config).file_names.items()
    }
    tensors = {names_of_files.get(name, name): tensor for name, tensor in tensors.items()}
    tensors = file_tensors(weights_of(config), tensors)
    for alias, source in aliases.items():
        # A state dict with the alias alone has the weight under its other name.
        if alias in tensors and not torch.equal(
            tensors[alias], tensors.setdefault(source, tensors[alias])
        ):
            raise RuntimeError(f"tensors {source} and {alias} differ, but the config ties them")
    for weight in weights_of(config):
        names |= set(weight.names)
        # Several parameters may have rows of one tensor (Phi-3's Q, K and V), which is missing
        # once.
        missing += [name for name in weight.names if name not in tensors and name not in missing]
        for name, shape in weight.shapes(tuple(parameters[weight.our_name].shape)).items():
            if name in tensors and tuple(tensors[name].shape) != shape:
                raise RuntimeError(
                    f"{name}: shape {tuple(tensors[name].shape)}, the model has {shape}"
                )
        parameter = weight.as_rows(parameters[weight.our_name])
        for name, spans in weight.spans(parameter.shape[0]).items():
            if name in tensors:
                tensor = weight.from_stored(tensors[name])
                for span in spans:
                    # A weight's map has our parameter as the whole and Hugging Face's tensor as the
                    # part.
                    parameter[span.whole].copy_(tensor[span.local])
    return missing, sorted(tensors.keys() - names)
