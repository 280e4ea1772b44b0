"""Divide a model's parameters into the optimizer's groups, by `zero_tp.param_groups`.

Each group has its own weight decay and its own factor of the learning rate, which
`engine/zero/lr_schedules.py` applies at every step.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig

from zero_tp.base.constants import PARAM_GROUPS_KEY
from zero_tp.base.errors import ConfigError, shown
from zero_tp.base.settings.optimizer import Muon, Optimizer, OptimizerParams
from zero_tp.base.settings.param_groups import Kind, ParamGroup
from zero_tp.engine.zero.matrix_optimizer import MatrixOptimizer
from zero_tp.engine.zero.orthogonalize import products_dtype
from zero_tp.model.model_class import meta_model
from zero_tp.model.parallel_model import ParallelModel
from zero_tp.model.parameter_kinds import DECAYED_KINDS, parameter_kinds
from zero_tp.parallel.layout import whole_shape

REST = ParamGroup.model_construct()
"""The parameters that no entry selects."""


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters with the same settings of the optimizer.

    Attributes:
        selector: how an entry of `param_groups` selects them, or "the rest".
        names: of the parameters, in the model's order.
        num_tensors, num_parameters: in Hugging Face's files; elements of the whole model.
        weight_decay: of these parameters.
        lr_scale: factor of the learning rate.
        is_muon: Muon updates them; only where the optimizer is Muon.
    """

    selector: str
    names: tuple[str, ...]
    num_tensors: int
    num_parameters: int
    weight_decay: float
    lr_scale: float = 1.0
    is_muon: bool = False


def divide_parameters(
    model: ParallelModel, entries: Sequence[ParamGroup], params: OptimizerParams
) -> list[ParameterGroup]:
    """Return the groups of all parameters: first those that no entry selects, then each entry's.

    The first entry that matches a parameter has it. Parameters without a written decay are two
    groups: those of `DECAYED_KINDS`, with `weight_decay`, and the others, with 0. So are a model's
    without entries, in the order of `model.named_parameters()`:

        entries                                  groups
        none                                     decayed, not decayed
        {"kind": "embedding", "weight_decay": 0} the other decayed, not decayed, embeddings

    Under Muon the matrices of each are a group before it, unless the entry's optimizer is AdamW.

    Raises:
        ConfigError: an entry selects no parameter, or a part of one; it names AdamW without Muon.
    """
    kinds = parameter_kinds(model)
    hf_names = {
        weight.our_name: weight.names for weight in model.architecture.weights_of(model.spec)
    }
    owners: dict[str, int] = {}
    for index, entry in enumerate(entries):
        if entry.optimizer is not None and not isinstance(params, Muon):
            key = f"{PARAM_GROUPS_KEY}.{index}.optimizer"
            raise ConfigError(key, "one optimizer updates all parameters", "leave it out")
        matching = [
            name
            for name in kinds
            if _matches(entry, index, kinds[name], hf_names.get(name, ()), free=name not in owners)
        ]
        if all(name in owners for name in matching):
            raise _selects_nothing(entry, index, has_earlier_group=bool(matching))
        owners |= {name: index for name in matching if name not in owners}
    groups: list[ParameterGroup] = []
    for number, entry in ((None, REST), *enumerate(entries)):
        names = [name for name in kinds if owners.get(name) == number]
        for is_muon, decay, members in _by_decay(entry, names, kinds, params):
            tensors = {hf_name for name in members for hf_name in hf_names.get(name, (name,))}
            sizes = (math.prod(whole_shape(model.get_parameter(name))) for name in members)
            group = ParameterGroup(
                entry.selector,
                tuple(members),
                len(tensors),
                sum(sizes),
                decay,
                entry.lr_scale if is_muon else entry.lr_scale * _adamw_scale(params),
                is_muon,
            )
            groups.append(group)
    return groups


def config_groups(
    config: PretrainedConfig, entries: Sequence[ParamGroup], params: OptimizerParams
) -> list[ParameterGroup]:
    """Return `divide_parameters` of a config's model, which is built on the meta device."""
    return divide_parameters(meta_model(config), entries, params)


def _matches(
    entry: ParamGroup, index: int, kind: Kind, hf_names: Sequence[str], *, free: bool
) -> bool:
    """Return whether an entry selects a parameter.

    Args:
        free: no entry before has selected it. Others need not match as a whole.
    """
    if entry.pattern is None:
        return entry.kind == kind
    matches = [name for name in hf_names if re.search(entry.pattern, name)]
    if free and matches and len(matches) < len(hf_names):
        other = next(name for name in hf_names if name not in matches)
        raise ConfigError(
            f"{PARAM_GROUPS_KEY}.{index}.pattern",
            f"{shown(entry.pattern)} matches {matches[0]} but not {other}, and both are parts of "
            "one parameter",
            "write a pattern that matches both or neither",
        )
    return bool(matches)


def _selects_nothing(entry: ParamGroup, index: int, *, has_earlier_group: bool) -> ConfigError:
    field = "kind" if entry.pattern is None else "pattern"
    key = f"{PARAM_GROUPS_KEY}.{index}.{field}"
    value = shown(entry.kind if entry.pattern is None else entry.pattern)
    if has_earlier_group:
        problem = f"{value} matches only parameters that an entry before it has"
        return ConfigError(key, problem, "move it up, or leave it out")
    problem = f"{value} matches no parameter of the model"
    remedy = "leave it out"
    if entry.pattern is not None:
        remedy = "it is searched in the names of the tensors of Hugging Face's files"
    return ConfigError(key, problem, f"{remedy}; a tied output layer is the embedding")


def _by_decay(
    entry: ParamGroup, names: list[str], kinds: dict[str, Kind], params: OptimizerParams
) -> Iterator[tuple[bool, float, list[str]]]:
    """Yield (Muon updates them, weight decay, names), without empty groups."""
    decay = params.weight_decay
    rest = names
    parts: list[tuple[bool, float, list[str]]] = []
    if isinstance(params, Muon):
        if entry.optimizer is None:
            matrices = [name for name in names if kinds[name] == "matrix"]
            rest = [name for name in names if kinds[name] != "matrix"]
            written = decay if entry.weight_decay is None else entry.weight_decay
            parts = [(True, written, matrices)]
        decay = decay if params.adamw.weight_decay is None else params.adamw.weight_decay
    if entry.weight_decay is not None:
        parts += [(False, entry.weight_decay, rest)]
    else:
        decayed = [name for name in rest if kinds[name] in DECAYED_KINDS]
        others = [name for name in rest if kinds[name] not in DECAYED_KINDS]
        parts += [(False, decay, decayed), (False, 0.0, others)]
    yield from (part for part in parts if part[-1])


def _adamw_scale(params: OptimizerParams) -> float:
    """Return the factor of AdamW's rate beside Muon's, which a schedule moves."""
    if not isinstance(params, Muon) or params.adamw.lr is None:
        return 1.0
    return params.adamw.lr / params.lr


def optimizer_groups(
    model: ParallelModel, entries: Sequence[ParamGroup], params: OptimizerParams
) -> list[dict[str, Any]]:
    """Return the groups of `divide_parameters` as torch's optimizers take them.

    A factor of the rate is the group's `lr_scale` (`lr_schedules.scale_rates`).
    """
    groups = []
    for group in divide_parameters(model, entries, params):
        values: dict[str, Any] = {
            "params": [model.get_parameter(name) for name in group.names],
            "weight_decay": group.weight_decay,
        }
        if group.lr_scale != 1.0:
            values["lr_scale"] = group.lr_scale
        if isinstance(params, Muon):
            values["lr"] = params.lr
            values |= _muon_arguments(params) if group.is_muon else _adamw_arguments(params)
        groups.append(values)
    return groups


def _muon_arguments(params: Muon) -> dict[str, Any]:
    names = ("momentum", "nesterov", "ns_steps", "ns_coefficients", "eps", "adjust_lr_fn")
    return {name: getattr(params, name) for name in names}


def _adamw_arguments(params: Muon) -> dict[str, Any]:
    return {"betas": params.adamw.betas, "eps": params.adamw.eps}


def trainable_of(
    model: ParallelModel, entries: Sequence[ParamGroup], optimizer: Optimizer, dtype: torch.dtype
) -> list[dict[str, Any]] | MatrixOptimizer:
    """Return the groups for the optimizer that DeepSpeed makes, or under Muon the optimizer.

    Args:
        dtype: of the weights.
    """
    params = optimizer.params
    groups = optimizer_groups(model, entries, params)
    if not isinstance(params, Muon):
        return groups
    products = products_dtype(dtype == torch.float32)
    return MatrixOptimizer(groups, products, per_head=params.per_head)
