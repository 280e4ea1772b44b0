"""Make whole Hugging Face tensors from our parameters, of a file or of a live model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from transformers import PretrainedConfig

from zero_tp.base.errors import UserError
from zero_tp.model.architectures import Weight, aliases_of, to_hf, weights_of
from zero_tp.model.weights.live_weights import gather_parameter
from zero_tp.parallel.collectives import all_gather
from zero_tp.parallel.layout import Layout, Sharded, layout_of, whole_shape
from zero_tp.parallel.safetensors_files import Entry
from zero_tp.parallel.topology import Topology


def native_entries(
    config: PretrainedConfig,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], Tensor],
    dtype: torch.dtype,
) -> list[Entry]:
    """Return every Hugging Face tensor in `dtype` or its own, read from our parameters one at a
    time.

    One parameter can be several tensors (gate and up), or several parameters one tensor (fused Q, K
    and V). The other tensors of a parameter are cached until they are read, so it is read once.

        entry read             our parameters read     cached then
        gate_proj (Llama)      mlp.gate_up             up_proj
        up_proj                –                       –
        qkv_proj (Phi-3)       query, key, value       –

    Args:
        shapes: our parameter's name → its whole shape.
        read: our parameter's name → the whole of it.
    """
    sources: dict[str, list[Weight]] = {}
    for weight in weights_of(config):
        if weight.our_name not in shapes:
            raise UserError(
                f"export: there is no parameter {weight.our_name}, which a {config.model_type} has"
            )
        for name in weight.names:
            sources.setdefault(name, []).append(weight)
    cached: dict[str, Tensor] = {}

    def read_native(name: str) -> Tensor:
        if name not in cached:
            # At most one parameter's tensors are in memory. Those that are asked for later are read
            # again.
            cached.clear()
            cached.update(to_hf(sources[name], read))
        return cached.pop(name).to(sources[name][0].dtype or dtype)

    return [
        Entry(
            name,
            weight.shapes(shapes[weight.our_name])[name],
            weight.dtype or dtype,
            partial(read_native, name),
        )
        for name, (weight, *_) in sources.items()
    ]


def native_shapes(
    config: PretrainedConfig, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of transformers' class, tied ones under both names.

    Args:
        shapes: our parameter's name → its whole shape.
    """
    native: dict[str, tuple[int, ...]] = {}
    for weight in weights_of(config):
        native |= weight.shapes(shapes[weight.our_name])
    return native | {alias: native[source] for alias, source in aliases_of(config).items()}


def whole_parameter(parameter: Tensor, topology: Topology) -> Tensor:
    """Return the whole tensor of a live parameter, on every rank.

    Collective over the TP group, of experts over the expert group, too; under ZeRO-3 over the DP
    group.
    """
    return gather_shards(gather_parameter(parameter), layout_of(parameter), topology)


def gather_shards(local: Tensor, layout: Layout, topology: Topology) -> Tensor:
    """Return the whole of a tensor that is split as a layout says, on every rank. Collective."""
    shards = local.unsqueeze(0)
    if isinstance(layout, Sharded):
        shards = all_gather(shards, topology.tensor_group)
    if layout.experts > 1:
        shards = all_gather(shards, topology.expert_group)
    return layout.unshard(list(shards))


def live_entries(
    parameters: Mapping[str, Tensor],
    config: PretrainedConfig,
    topology: Topology,
    dtype: torch.dtype,
) -> list[Entry]:
    """Return every parameter of a live model under its Hugging Face name. Reading one is
    collective over all ranks.
    """
    shapes = {name: whole_shape(parameter) for name, parameter in parameters.items()}
    return native_entries(
        config, shapes, lambda name: whole_parameter(parameters[name], topology), dtype
    )
