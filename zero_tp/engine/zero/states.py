"""Views of a rank's fp32 masters, optimizer states and average, for every ZeRO stage.

Of each parameter's TP shard a rank holds one fragment: all of it under ZeRO-0, its DP partition
under ZeRO-1 to 3. The fragment's master is a piece of a flat fp32 tensor; the optimizer's states
(moments) are tensors of the same length. Writing into the views restores a run.
docs/decisions/own-checkpoints.md says why DeepSpeed's own checkpoints are not used. Under ZeRO-1
with two replicas, the second one of a group with A (5 elements) and B (3) has:

    flat       A4 B0 B1 B2          its master; Adam's moments have this shape, too
    A          Span(4, 0, 1)        element 4 of A is element 0 of flat
    B          Span(0, 1, 3)        elements 0 to 2 of B are elements 1 to 3
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from zero_tp.engine.zero.fragments import Fragment
from zero_tp.engine.zero.matrix_optimizer import MatrixOptimizer
from zero_tp.engine.zero.weight_average import WeightAverage
from zero_tp.parallel.spans import Span

MASTER = "master"
EMA = "ema"


class OptimizerStates:
    """The masters and optimizer states of one rank, fragment by fragment.

    Attributes:
        fragments: those that are not empty, in the order of the model's parameters.
        optimizer: the innermost one, torch's or DeepSpeed's.
        average: of the masters, if the run has one.
    """

    def __init__(
        self,
        fragments: Iterable[Fragment],
        optimizer: Any,
        average: WeightAverage | None = None,
    ):
        self.fragments = [fragment for fragment in fragments if fragment.span.length]
        self.average = average
        # DeepSpeed wraps the optimizer that has the states; in fp32 without ZeRO there is no
        # wrapper.
        while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
            optimizer = optimizer.optimizer
        self.optimizer = optimizer

    def kinds(self) -> list[str]:
        """Return `master`, the names of the optimizer's states of as many elements, and `ema` if
        there is an average; equal on all ranks.
        """
        return [MASTER, *self._optimizer_kinds(), *([] if self.average is None else [EMA])]

    def _optimizer_kinds(self) -> list[str]:
        optimizer = self.optimizer
        if isinstance(optimizer, MatrixOptimizer):
            return [*(optimizer.STATES if optimizer.state else ())]
        if not self.fragments:
            return []
        flat = self.fragments[0].flat
        state = optimizer.state.get(flat, {})
        tensors = {
            key: value for key, value in state.items() if key != "step" and torch.is_tensor(value)
        }
        # Other tensors, such as a scalar, belong to no element and cannot be cut into fragments.
        return [key for key, value in tensors.items() if value.numel() == flat.numel()]

    def has(self, fragment: Fragment, kind: str) -> bool:
        """Return whether a fragment has this one of `kinds`: matrices under Muon have no moments of
        Adam, and the rest no momentum.
        """
        optimizer = self.optimizer
        if not isinstance(optimizer, MatrixOptimizer):
            return True
        return kind in (MASTER, EMA) or kind in optimizer.state_names(fragment.flat)

    def get(self, fragment: Fragment, kind: str) -> Tensor:
        """Return a view of its master or state, fp32 [span.length]; a new state is zeros."""
        if kind == MASTER:
            return fragment.master
        if kind == EMA:
            assert self.average is not None, "only a run with an average restores one"
            return fragment.view(self.average.of(fragment.flat))
        state = self.optimizer.state[fragment.flat]
        # A restored run has not stepped yet, so its optimizer has no states: they are made here,
        # and the caller fills them.
        if kind not in state:
            state[kind] = torch.zeros_like(fragment.flat, requires_grad=False)
        return fragment.view(state[kind])

    @property
    def steps(self) -> int | None:
        """Return the optimizer's count of updates; None if it counts none (SGD)."""
        # Not of a partition that is padding alone: its count is not restored, and starts again.
        states = (self.optimizer.state.get(fragment.flat, {}) for fragment in self.fragments)
        counts = {int(state["step"]) for state in states if "step" in state}
        assert len(counts) <= 1, f"the optimizer's states were updated {counts} times"
        return counts.pop() if counts else None

    def set_steps(self, steps: int | None) -> None:
        """Set every state's update count: a tensor in torch's optimizers, a number in DeepSpeed's.

        torch's fused kernels read the count on the parameter's device (torch/optim/adam.py,
        `_init_group`); the others read it on the host.
        """
        if steps is None:
            return
        is_torch = not type(self.optimizer).__module__.startswith("deepspeed.")
        on_device = any(
            group.get("fused") or group.get("capturable") for group in self.optimizer.param_groups
        )
        # Under ZeRO several fragments share a flat tensor, whose count is set once.
        for flat in {id(fragment.flat): fragment.flat for fragment in self.fragments}.values():
            if isinstance(self.optimizer, MatrixOptimizer) and self.optimizer.is_matrix(flat):
                continue  # Muon counts no steps
            device = flat.device if on_device else "cpu"
            count = torch.tensor(float(steps), device=device) if is_torch else steps
            self.optimizer.state[flat]["step"] = count
        _replay_cpu_adam(self.optimizer, steps)


class StatesOnNVMe(OptimizerStates):
    """States that ZeRO-3 keeps on NVMe: copies of the masters only, because DeepSpeed cannot
    restore the others.
    """

    def __init__(self, fragments: Iterable[Fragment], optimizer: Any, model: nn.Module):
        super().__init__(fragments, optimizer)
        self._model = model

    def kinds(self) -> list[str]:
        return [MASTER]

    def get(self, fragment: Fragment, kind: str) -> Tensor:
        from deepspeed.utils import safe_get_local_fp32_param

        master = safe_get_local_fp32_param(self._model.get_parameter(fragment.name))
        return master.detach().flatten()[: fragment.span.length].clone()


def _replay_cpu_adam(adam: Any, steps: int) -> None:
    """Give DeepSpeedCPUAdam the β₁^t and β₂^t of an uninterrupted run, by stepping one number
    `steps` times.

    It multiplies by β in fp32 at each step, but computes pow(β, t) if its first step is t. The two
    round differently; divided by 1 - β₂^t, the difference becomes 1e-5 of an update.
    """
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    if not isinstance(adam, DeepSpeedCPUAdam):
        return
    beta1, beta2 = adam.param_groups[0]["betas"]
    value, gradient, first, second = (torch.zeros(1) for _ in range(4))
    # Learning rate 0 and one element, which nothing else reads: only the products of β inside the
    # C++ object change.
    for step in range(1, steps + 1):
        adam.ds_opt_adam.adam_update(
            adam.opt_id, step, 0.0, beta1, beta2, 1.0, 0.0, True, value, gradient, first, second
        )


def partition_of(parameter: Tensor, data_rank: int) -> Tensor:
    """Return this rank's part of a parameter's TP shard: its DP partition under ZeRO-3, else the
    whole shard.

    The padding of the last partitions, whose values DeepSpeed does not set, is left out.
    """
    partition: Tensor | None = getattr(parameter, "ds_tensor", None)
    if partition is None:
        return parameter.detach()
    size: int = partition.ds_numel  # type: ignore[attr-defined]
    numel: int = parameter.ds_numel  # type: ignore[attr-defined]
    return partition.detach().flatten()[: Span.block(data_rank, size, numel).length]


def local_shape(parameter: Tensor) -> tuple[int, ...]:
    """Return the shape of a parameter's TP shard, also while ZeRO-3 has it partitioned."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))
