"""Muon for the matrices of layers and AdamW for the rest, on the shards of TP and every ZeRO stage.

A step, after DeepSpeed has unscaled and clipped the gradients:

    momentum        m ← μ·m + (1 - μ)·g; the direction is (1 - μ)·g + μ·m with Nesterov, else m
    orthogonalise   each matrix whole, on its owner (`MatrixExchange`)
    decay, update   w ← (1 - rate · decay)·w - rate · factor · result

DeepSpeed's own Muon orthogonalises what a rank has, and clips its result. It is chosen by an
attribute of parameters and by "muon" in the name of the optimizer's class, which both are missing
here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero_tp.engine.zero.fragments import Fragment
from zero_tp.engine.zero.matrices import Matrix, call_of, matrices_of
from zero_tp.engine.zero.matrix_exchange import MatrixExchange
from zero_tp.engine.zero.orthogonalize import NewtonSchulz, iteration_flops, rate_factor
from zero_tp.parallel.spans import Span
from zero_tp.parallel.topology import Topology

if TYPE_CHECKING:
    from zero_tp.model.parallel_model import ParallelModel

MOMENTUM = "momentum_buffer"


@dataclass(frozen=True)
class MatrixUnit:
    """The matrices that one call of `step` updates: a group's, or under ZeRO-3 a sub-group's.

    Attributes:
        fragments: this rank's, of their parameters.
    """

    exchange: MatrixExchange
    fragments: tuple[Fragment, ...]


class MatrixOptimizer(torch.optim.AdamW):
    """Updates groups that have a `momentum` by Muon, and others by AdamW.

    Until `bind` has told it where the matrices lie, a step changes nothing: some of DeepSpeed's
    optimizers step once on zeros to make their states.

    Args:
        groups: of parameters. Muon's have lr, weight_decay, momentum, nesterov, ns_steps,
            ns_coefficients, eps and adjust_lr_fn, as `torch.optim.Muon` has; others AdamW's.
        dtype: of the products of Newton-Schulz.
        per_head: each head's Q, K and V are matrices.
    """

    STATES = (MOMENTUM, "exp_avg", "exp_avg_sq")
    overflow = False
    """Skip the step: in fp32 without ZeRO nothing but this attribute says so."""

    def __init__(self, groups: Iterable[dict[str, Any]], dtype: torch.dtype, *, per_head: bool):
        groups = list(groups)
        # Some schedules of transformers read the rate in the defaults.
        super().__init__(groups, lr=groups[0]["lr"], fused=True)
        self._dtype = dtype
        self._per_head = per_head
        # DeepSpeed replaces the parameters of groups by its masters.
        self._matrices = {
            id(parameter)
            for group in groups
            if "momentum" in group
            for parameter in group["params"]
        }
        self._units: dict[int, MatrixUnit] | None = None

    def bind(
        self,
        model: ParallelModel,
        fragments: Iterable[Fragment],
        updated: Sequence[Sequence[Tensor]],
    ) -> None:
        """Find the matrices and their owners. Collective over all ranks.

        Args:
            fragments: this rank's, of all parameters.
            updated: this rank's masters that each call of `step` updates.

        Raises:
            UserError: a matrix is updated in parts, by two groups or sub-groups.
        """
        topology = model.topology
        parameters = {
            name: parameter
            for name, parameter in model.named_parameters()
            if id(parameter) in self._matrices
        }
        own = {fragment.name: fragment for fragment in fragments if fragment.name in parameters}
        numbers = {
            id(tensor): number for number, tensors in enumerate(updated) for tensor in tensors
        }
        spans, calls = _gather(
            {name: (numbers[id(fragment.flat)], fragment.span) for name, fragment in own.items()},
            topology,
        )
        by_call: dict[int, list[Matrix]] = {}
        for matrix in matrices_of(
            model.config, parameters, topology.tensor, per_head=self._per_head
        ):
            by_call.setdefault(call_of(matrix, calls), []).append(matrix)
        self._units = {}
        for number, matrices in by_call.items():
            costs = [iteration_flops(*matrix.shape) for matrix in matrices]
            unit = MatrixUnit(
                MatrixExchange(matrices, costs, spans, topology),
                tuple(fragment for fragment in own.values() if calls[fragment.name] == number),
            )
            # A rank joins the exchange also where it has no element.
            self._units |= {id(tensor): unit for tensor in updated[number]}

    def is_matrix(self, flat: Tensor) -> bool:
        """Return whether Muon updates these masters, once the optimizer is bound."""
        return self._units is not None and id(flat) in self._units

    def state_names(self, flat: Tensor) -> tuple[str, ...]:
        """Return the names of the states that belong to these masters, of as many elements."""
        return self.STATES[:1] if self.is_matrix(flat) else self.STATES[1:]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters of the groups. Collective over all ranks."""
        if self._units is None or self.overflow:
            return
        groups = self.param_groups
        for group in groups:
            # DeepSpeed passes one group a call, or under ZeRO-3 empties the others.
            if "momentum" in group and group["params"]:
                self._update(self._units[id(group["params"][0])], group)
        self.param_groups = [group for group in groups if "momentum" not in group]
        try:
            super().step()
        finally:
            self.param_groups = groups

    def _iteration(self, group: Mapping[str, Any]) -> NewtonSchulz:
        return NewtonSchulz(
            group["ns_steps"], tuple(group["ns_coefficients"]), group["eps"], self._dtype
        )

    def _update(self, unit: MatrixUnit, group: Mapping[str, Any]) -> None:
        rate, momentum = group["lr"], group["momentum"]
        directions = {}
        for flat in group["params"]:
            gradient = torch.zeros_like(flat) if flat.grad is None else flat.grad
            state = self.state[flat]
            if MOMENTUM not in state:
                state[MOMENTUM] = torch.zeros_like(flat, requires_grad=False)
            average = state[MOMENTUM].lerp_(gradient, 1 - momentum)
            # In place, because nothing reads the gradient afterwards: a new tensor would be as
            # large as the shard of all matrices.
            directions[id(flat)] = (
                gradient.lerp_(average, momentum) if group["nesterov"] else average
            )
            flat.mul_(1 - rate * group["weight_decay"])
        masters = {fragment.name: fragment.master for fragment in unit.fragments}
        iteration = self._iteration(group)

        def use(matrix: Matrix, parameter: str, run: slice, result: Tensor) -> None:
            factor = rate_factor(group["adjust_lr_fn"], *matrix.stored_shape)
            masters[parameter][run].add_(result, alpha=-rate * factor)

        unit.exchange.exchange(
            {
                fragment.name: fragment.view(directions[id(fragment.flat)])
                for fragment in unit.fragments
            },
            lambda matrix, whole: iteration.orthogonalize(whole),
            use,
            torch.empty(0, dtype=self._dtype, device=group["params"][0].device),
        )


def _gather(
    own: Mapping[str, tuple[int, Span]], topology: Topology
) -> tuple[dict[str, list[Span]], dict[str, int]]:
    """Return (parameter → the span of each rank, empty where it has none; → the number of the call
    that updates it). Collective over all ranks.
    """
    everyone = [own] * topology.world
    if topology.world > 1:
        dist.all_gather_object(everyone, own)
    spans: dict[str, list[Span]] = {}
    calls: dict[str, int] = {}
    for rank, theirs in enumerate(everyone):
        for name, (number, span) in theirs.items():
            empty = [Span(0, 0, 0)] * topology.world
            spans.setdefault(name, empty)[rank] = span
            calls[name] = number
    return spans, calls
