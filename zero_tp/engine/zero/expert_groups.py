"""What DeepSpeed 0.19.8 needs to know about experts that are divided over ranks.

Its ZeRO-1 and 2 partition such parameters over the ranks that have the same experts, sum their
gradients over these ranks, and divide by all replicas: each rank's rows come from a whole expert
group, so the sum over the expert-data group is that over all replicas.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from deepspeed.moe.layer import MoE
from deepspeed.utils import groups as deepspeed_groups
from torch import Tensor, nn

from zero_tp.model.wrapper_checks import DEEPSPEED_MARKER
from zero_tp.parallel.layout import has_layout, layout_of
from zero_tp.parallel.topology import Topology

T = TypeVar("T")

UNSPLIT_GROUP = "unsplit_group"
"""Key of an optimizer's group: its number before `split_by_group`."""

Trainable = list[dict[str, Any]] | list[nn.Parameter] | torch.optim.Optimizer


class _Marker(MoE):
    """DeepSpeed's engine looks for modules of this class, and reads only this attribute."""

    def __init__(self, num_experts: int):
        nn.Module.__init__(self)
        self.num_experts = num_experts

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Make no groups: `expert_groups` has set those of the topology."""


def is_divided(parameter: Tensor) -> bool:
    """Return whether a parameter is of experts that are divided over ranks."""
    return has_layout(parameter) and layout_of(parameter).experts > 1


@contextmanager
def expert_groups(model: nn.Module, topology: Topology) -> Iterator[None]:
    """Tell DeepSpeed which parameters are divided over expert ranks, and the groups of these ranks,
    for the block in which it makes its engine.
    """
    if topology.expert == 1:
        yield
        return
    name = _group_name(topology)
    for parameter in model.parameters():
        if is_divided(parameter):
            parameter.allreduce = False  # type: ignore[attr-defined]
            parameter.group_name = name  # type: ignore[attr-defined]
    rank = topology.rank
    for kind, group, members in (
        ("EXPERT_PARALLEL", topology.expert_group, topology.expert_members()),
        ("EXPERT_DATA_PARALLEL", topology.expert_data_group, topology.expert_data_members()),
    ):
        getattr(deepspeed_groups, f"_{kind}_GROUP")[name] = group
        ranks = next(ranks for ranks in members if rank in ranks)
        getattr(deepspeed_groups, f"_{kind}_GROUP_RANKS")[name] = ranks
    model.add_module(DEEPSPEED_MARKER, _Marker(topology.expert))
    try:
        yield
    finally:
        del model._modules[DEEPSPEED_MARKER]


def _group_name(topology: Topology) -> str:
    # DeepSpeed keeps groups by name for the whole process, and reads the size at the name's end.
    return f"tensor_{topology.tensor}_ep_size_{topology.expert}"


def split_by_group(trainable: Trainable, topology: Topology) -> Trainable:
    """Return the optimizer's groups with experts in groups of their own, as DeepSpeed's ZeRO wants
    them. An optimizer is changed in place.

    One group of a norm N and experts X becomes [N] and, marked with "moe", [X]. Both have the
    group's number under `UNSPLIT_GROUP`.
    """
    if topology.expert == 1:
        return trainable
    if isinstance(trainable, torch.optim.Optimizer):
        trainable.param_groups[:] = _split(trainable.param_groups, topology)
        return trainable
    if not isinstance(trainable[0], dict):
        trainable = [{"params": trainable}]
    return _split(trainable, topology)


def _split(groups: Sequence[dict[str, Any]], topology: Topology) -> list[dict[str, Any]]:
    marks = {"moe": True, "name": _group_name(topology)}
    parts = []
    for number, group in enumerate(groups):
        for divided, added in ((False, {}), (True, marks)):
            members = [one for one in group["params"] if is_divided(one) == divided]
            if members:
                parts.append({**group, "params": members, UNSPLIT_GROUP: number, **added})
    return parts


def unsplit(values: Sequence[T], groups: Sequence[dict[str, Any]]) -> list[T]:
    """Return one of `values`, which each group of an optimizer has one of, for each group before
    `split_by_group`.

    Both parts of a group have the same value.
    """
    if not any(UNSPLIT_GROUP in group for group in groups):
        return list(values)
    by_number = {group[UNSPLIT_GROUP]: value for group, value in zip(groups, values, strict=True)}
    return [by_number[number] for number in sorted(by_number)]


def split(values: Sequence[T], groups: Sequence[dict[str, Any]]) -> list[T]:
    """Return the inverse of `unsplit`.

    Raises:
        ValueError: another number of groups had values before the split.
    """
    numbers = [group.get(UNSPLIT_GROUP, number) for number, group in enumerate(groups)]
    if len(set(numbers)) != len(values):
        raise ValueError(f"{len(values)} values for {len(set(numbers))} groups")
    return [values[number] for number in numbers]
