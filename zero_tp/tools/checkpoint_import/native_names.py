"""The table of a source whose tensors have the names of transformers' class."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from transformers import PretrainedConfig

from zero_tp.base.errors import UserError
from zero_tp.model.architectures import Weight, aliases_of, architecture_of, weights_of
from zero_tp.tools.checkpoint_import.source import SourceWeight
from zero_tp.tools.checkpoint_import.stored_tensors import StoredTensor, are_equal


def native_weights(config: PretrainedConfig) -> list[SourceWeight]:
    """Return the table of all parameters, by the names in the class's `state_dict`."""
    weights = [_in_class(weight) for weight in weights_of(config)]
    return [SourceWeight(weight.our_name, weight.names, native=weight) for weight in weights]


def _in_class(weight: Weight) -> Weight:
    """Return a weight as transformers' class stores it, which stacks experts as we do."""
    if weight.native_name is None:
        return weight
    return replace(weight, hf_name=weight.native_name, native_name=None, experts=None, sizes=())


def native_tensors(
    tensors: Mapping[str, StoredTensor],
    shared: Mapping[str, str],
    config: PretrainedConfig,
    folder: Path,
) -> dict[str, StoredTensor]:
    """Return a model's tensors by the class's names, each once.

    Args:
        tensors: by the names of the client's module, which may have a prefix such as `module.`.
        shared: second name of a tensor → its first.

    Raises:
        UserError: the config ties what was trained apart, or the other way round.
    """
    prefix = common_prefix(tensors, config)
    named = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    aliases = aliases_of(config)
    for second, first in shared.items():
        second, first = second.removeprefix(prefix), first.removeprefix(prefix)
        if second not in aliases and first not in aliases:
            raise UserError(
                f"{folder}: {second} was trained as one tensor with {first}, and they are two in "
                "the config; set tie_word_embeddings to true in its config.json, and give it with "
                "--config"
            )
        # The class may list the alias first.
        named[second] = named[first]
    for alias, source in aliases.items():
        if alias in named and source in named and not are_equal(named[alias], named[source]):
            raise UserError(
                f"{folder}: {alias} and {source} differ, and the config ties them; set "
                "tie_word_embeddings to false in its config.json, and give it with --config"
            )
    return {name: tensor for name, tensor in named.items() if name not in aliases}


def common_prefix(tensors: Mapping[str, StoredTensor], config: PretrainedConfig) -> str:
    """Return what stands before the class's names, such as `module.`; "" if nothing does."""
    weights = native_weights(config)
    first = weights[0].names[0]
    ends = [name.removesuffix(first) for name in tensors if f".{name}".endswith(f".{first}")]
    return min(ends, key=len, default="")


def obsolete_buffers(config: PretrainedConfig) -> tuple[str, ...]:
    """Return patterns of buffers that earlier versions of the class saved."""
    architecture = architecture_of(config)
    base = re.escape(architecture.base_prefix)
    return tuple(f"(?:{base})?(?:{pattern})" for pattern in architecture.obsolete_tensors)
