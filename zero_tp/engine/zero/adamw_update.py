"""The update of ZeRO-1 and 2 by AdamW, and of ZeRO-0 in 16 bits: one pass over the gradients for
their norm, one for the update.

DeepSpeed's own step goes over each gradient nine times: for an overflow scan, for fp64 copies
and their norm, to flatten, to convert, to clip, and for the optimizer and the rounded weights.
Without ZeRO it also copies all gradients to fp32 at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.utils import all_gather_dp_groups
from deepspeed.runtime.zero.stage_1_and_2 import (
    INITIAL_MICRO_STEP_ID,
    OPTIMIZER_ALLGATHER_TIMER,
    OPTIMIZER_GRADIENTS_TIMER,
    OPTIMIZER_STEP_TIMER,
    OPTIMIZER_TIMERS,
    DeepSpeedZeroOptimizer,
)
from torch import Tensor, nn

from zero_tp.engine.zero.adamw import FlatAdamW
from zero_tp.engine.zero.veto import StepVeto
from zero_tp.parallel.collectives import all_reduce
from zero_tp.parallel.elementwise import ElementwiseOps
from zero_tp.parallel.gradients import is_counted, squared_norms
from zero_tp.parallel.topology import Topology

SMALL = 2**16
"""Elements below which gradients are copied together, because a launch would cost more."""
SHARED = 2**20
"""The most elements that are copied together."""


@dataclass(frozen=True)
class UpdateBlock:
    """Neighbours in a group's partition that one call updates.

    Attributes:
        gradients: the places of its gradients in DeepSpeed's list.
        elements: its elements of this rank's partition of the group.
        is_counted: this rank adds its squares to the norm. Other TP ranks count a replicated
            parameter's.
        is_shared: its gradients are small, so more may join.
    """

    gradients: slice
    elements: slice
    is_counted: bool
    is_shared: bool


def update_blocks(sizes: Sequence[int], counted: Sequence[bool | None]) -> list[UpdateBlock]:
    """Divide a partition into blocks.

    With SMALL = 4 and parameters of 9, 2, 3, 8 elements and padding of 2:

        gradients    9 | 2 3 | 8 | (2)
        blocks       each large one by itself, the small neighbours together, no padding

    Args:
        sizes: elements of each gradient.
        counted: of each gradient, whether this rank counts it; None: padding, which has no block.
    """
    blocks: list[UpdateBlock] = []
    offset = 0
    for place, (size, counts) in enumerate(zip(sizes, counted, strict=True)):
        begin, offset = offset, offset + size
        if counts is None:
            continue
        last = blocks[-1] if blocks else None
        if (
            last is not None
            and last.is_shared
            and size < SMALL
            and last.is_counted == counts
            and last.gradients.stop == place
            and offset - last.elements.start <= SHARED
        ):
            blocks.pop()
            gradients = slice(last.gradients.start, place + 1)
            blocks.append(UpdateBlock(gradients, slice(last.elements.start, offset), counts, True))
        else:
            elements = slice(begin, offset)
            blocks.append(UpdateBlock(slice(place, place + 1), elements, counts, size < SMALL))
    return blocks


class GroupPlan(NamedTuple):
    """What one group's update and norm go through.

    Attributes:
        sizes: elements of each gradient.
        norm_factors: 1 for each block that this rank counts in the norm, else 0, fp64.
    """

    sizes: list[int]
    blocks: list[UpdateBlock]
    norm_factors: Tensor


def own_weights(optimizer: Any, group: int) -> Tensor:
    """Return this rank's partition of a group's weights, in DeepSpeed's optimizer of ZeRO-1 and
    2.
    """
    # Of the DP group, or of the expert-data group.
    rank = optimizer.real_dp_process_group[group].rank()
    weights: Tensor = optimizer.parallel_partitioned_bit16_groups[group][rank]
    return weights


class AdamWUpdate:
    """Replaces the step of DeepSpeed's optimizer of ZeRO-1 and 2, where `is_supported`.

    No second copy of all gradients exists; with one replica each is freed after its update. The
    host waits for the device once, for the norm, which decides whether the step is skipped.

    Args:
        optimizer: DeepSpeed's, around torch's fused AdamW.
        veto: finds spikes.
        elementwise: compiles the update; None: torch's fused kernel runs it.

    Attributes:
        change: see `ZeroEngine.on_update`.
    """

    def __init__(
        self,
        optimizer: Any,
        topology: Topology,
        veto: StepVeto,
        elementwise: ElementwiseOps | None,
    ):
        self._optimizer = optimizer
        self._topology = topology
        self._veto = veto
        self._adamw = FlatAdamW(optimizer.optimizer, elementwise)
        self._plans: dict[int, GroupPlan] = {}
        self.change: Callable[[Sequence[Tensor]], bool] | None = None

    @staticmethod
    def is_supported(optimizer: Any) -> bool:
        """Return whether DeepSpeed's optimizer keeps its states on the device, for AdamW."""
        return (
            type(optimizer) is DeepSpeedZeroOptimizer
            and not optimizer.cpu_offload
            and FlatAdamW.is_supported(optimizer.optimizer)
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Compute the norm of the accumulated gradients; update the weights, unless it is not
        finite or a spike. Collective over all ranks.
        """
        optimizer = self._optimizer
        optimizer.micro_step_id = INITIAL_MICRO_STEP_ID
        optimizer.timers(OPTIMIZER_GRADIENTS_TIMER).start()
        gradients = [self._take_gradients(group) for group in range(len(optimizer.bit16_groups))]
        norm = self._norm(gradients)
        veto = self._veto
        is_spike = veto.finds_spike(norm / optimizer.loss_scale)
        if veto.figures is None:
            scaled_norm = norm.item()
        else:
            # One wait reads what a log line has, too.
            scaled_norm, *veto.read_figures = torch.cat(
                [norm.to(veto.figures)[None], veto.figures]
            ).tolist()
        optimizer.timers(OPTIMIZER_GRADIENTS_TIMER).stop()
        # All ranks read the same norm. One that is not finite comes from such a gradient on some
        # rank, or from squares whose sum exceeds fp32, which DeepSpeed skips, too.
        optimizer.overflow = is_spike or not math.isfinite(scaled_norm)
        optimizer.timers(OPTIMIZER_STEP_TIMER).start()
        if optimizer.overflow:
            optimizer._global_grad_norm = float("inf")
        else:
            optimizer._global_grad_norm = scaled_norm / optimizer.loss_scale
            factor = self._unscaling(scaled_norm)
            for group, flat_gradients in enumerate(gradients):
                self._update_group(group, flat_gradients, factor)
            self._change_masters()
            # Its schedule warns if it has not stepped.
            optimizer.optimizer._opt_called = True
            optimizer._lazy_init_hp_params_optimizer_state()
        del gradients
        optimizer.timers(OPTIMIZER_STEP_TIMER).stop()
        optimizer.timers(OPTIMIZER_ALLGATHER_TIMER).start()
        if not optimizer.overflow:
            all_gather_dp_groups(
                groups_flat=optimizer.bit16_groups_flat,
                partitioned_param_groups=optimizer.parallel_partitioned_bit16_groups,
                dp_process_group=optimizer.real_dp_process_group,
                start_alignment_factor=optimizer.nccl_start_alignment_factor,
                allgather_bucket_size=optimizer.allgather_bucket_size,
            )
        optimizer.timers(OPTIMIZER_ALLGATHER_TIMER).stop()
        optimizer.timers.log(OPTIMIZER_TIMERS)

    def _take_gradients(self, group: int) -> list[Tensor]:
        """Take a group's gradients from DeepSpeed, as one flat tensor a block."""
        optimizer = self._optimizer
        gradients = list(optimizer.averaged_gradients[group])
        optimizer.averaged_gradients[group] = None
        optimizer.all_grad_tensors[group] = None
        for parameters in (optimizer.params_in_partition, optimizer.params_not_in_partition):
            optimizer.free_grad_in_param_list(parameters[group])
        sizes = [gradient.numel() for gradient in gradients]
        if group not in self._plans or self._plans[group].sizes != sizes:
            self._plans[group] = self._plan(group, gradients)
        flat_gradients: list[Tensor] = []
        for block in self._plans[group].blocks:
            parts = [gradient.reshape(-1) for gradient in gradients[block.gradients]]
            flat_gradients.append(parts[0] if len(parts) == 1 else torch.cat(parts))
        return flat_gradients

    def _plan(self, group: int, gradients: Sequence[Tensor]) -> GroupPlan:
        # DeepSpeed pairs gradients with parameters in order, after it has left padding out. A
        # partition without parameters is one tensor of zeros.
        parameters = iter(self._optimizer.params_in_partition[group])
        owners = [
            None if getattr(gradient, "_zero_padding", False) else next(parameters, None)
            for gradient in gradients
        ]
        counted = [None if owner is None else is_counted(owner, self._topology) for owner in owners]
        sizes = [gradient.numel() for gradient in gradients]
        blocks = update_blocks(sizes, counted)
        factors = [float(block.is_counted) for block in blocks]
        device = gradients[0].device
        return GroupPlan(sizes, blocks, torch.tensor(factors, dtype=torch.float64, device=device))

    def _norm(self, gradients: Sequence[Sequence[Tensor]]) -> Tensor:
        """Return the norm of all ranks' gradients, fp32 [0-d]; not finite if one of them is not.

        Two all-reduces, over DP and over TP, of one number a group.
        """
        squares = []
        for group, flat_gradients in enumerate(gradients):
            factors = self._plans[group].norm_factors
            # A rank that does not count a replicated gradient adds 0 times its square: 0, or nan if
            # the gradient is not finite on this rank alone.
            squares.append(
                torch.dot(squared_norms(flat_gradients), factors)
                if flat_gradients
                else factors.sum()
            )
        total = torch.stack(squares).float()
        for reduced in (self._topology.data_group, self._topology.tensor_group):
            total = all_reduce(total, reduced)
        return torch.linalg.vector_norm(total.sqrt())

    def _unscaling(self, norm: float) -> float:
        """Return the factor of gradients that undoes fp16's loss scale and clips, in fp32 as in
        DeepSpeed's `unscale_and_clip_grads`.

        Args:
            norm: of the scaled gradients.
        """
        scale = torch.tensor(float(self._optimizer.loss_scale))
        limit = self._optimizer.clip_grad
        if limit > 0:
            clip = (torch.tensor(norm) / scale + 1e-6) / limit
            scale = scale * clip.clamp(min=1.0)
        return float(1.0 / scale)

    def _update_group(self, group: int, gradients: list[Tensor], factor: float) -> None:
        """Update a group's masters, moments and weights (adamw.py); free each gradient."""
        optimizer = self._optimizer
        blocks = self._plans[group].blocks
        if not blocks:
            return  # of a few small parameters this rank may have none
        flat = optimizer.single_partition_of_fp32_groups[group]
        rounded = self._rounded_weights(group)
        # The group has this step's learning rate.
        update = self._adamw.begin(flat, optimizer.param_groups[group], factor)
        for block in blocks:
            weight = None if rounded is None else rounded[block.elements]
            update(gradients.pop(0), block.elements, weight)

    def _change_masters(self) -> None:
        """Call `change`, and round the masters again if it has changed some."""
        optimizer = self._optimizer
        flats = optimizer.single_partition_of_fp32_groups
        if self.change is not None and self.change(flats):
            for group, flat in enumerate(flats):
                if (weights := self._rounded_weights(group)) is not None:
                    weights.copy_(flat)

    def _rounded_weights(self, group: int) -> Tensor | None:
        """Return this rank's partition of a group's weights; None if they are the masters."""
        weights = own_weights(self._optimizer, group).detach()
        master = self._optimizer.single_partition_of_fp32_groups[group]
        return None if weights.data_ptr() == master.data_ptr() else weights


class UnpartitionedAdamWUpdate:
    """Replaces the step of DeepSpeed's 16-bit optimizer without ZeRO, where `is_supported`.

    Each gradient is converted, clipped and freed with its update.

    Args:
        optimizer: DeepSpeed's, around torch's fused AdamW.
        elementwise: see `AdamWUpdate`.

    Attributes:
        change: see `ZeroEngine.on_update`.
    """

    def __init__(self, optimizer: Any, elementwise: ElementwiseOps | None):
        self._optimizer = optimizer
        self._adamw = FlatAdamW(optimizer.optimizer, elementwise)
        self._prepared: tuple[float | None, float] | None = None
        self.change: Callable[[Sequence[Tensor]], bool] | None = None

    @staticmethod
    def is_supported(optimizer: Any) -> bool:
        """Return whether DeepSpeed's optimizer has a master of each parameter, for AdamW."""
        return type(optimizer) is FP16_UnfusedOptimizer and FlatAdamW.is_supported(
            optimizer.optimizer
        )

    def prepare(self, norm: float, factor: float | None) -> None:
        """Say what the next step does with its gradients.

        Args:
            norm: theirs, without fp16's loss scale.
            factor: multiplies them: it clips, and undoes the loss scale. None: the step is skipped.
        """
        self._prepared = factor, float("inf") if factor is None else norm

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update the weights, unless the step is skipped; drop the gradients."""
        assert self._prepared is not None, "`prepare` comes before each step"
        factor, norm = self._prepared
        self._prepared = None
        optimizer = self._optimizer
        optimizer.overflow = factor is None
        optimizer._global_grad_norm = norm
        groups = zip(
            optimizer.param_groups, optimizer.fp16_groups, optimizer.fp32_groups, strict=True
        )
        if factor is not None:
            for options, weights, masters in groups:
                for weight, master in zip(weights, masters, strict=True):
                    self._update(weight, master, options, factor)
            self._change_masters()
            # Its schedule warns if it has not stepped.
            optimizer.optimizer._opt_called = True
        optimizer.zero_grad()

    def _update(
        self, weight: nn.Parameter, master: Tensor, options: Mapping[str, Any], factor: float
    ) -> None:
        # Without a gradient the moments and the master decay, as in DeepSpeed's step.
        gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
        weight.grad = None
        update = self._adamw.begin(master, options, factor)
        update(gradient.reshape(-1), slice(None), weight.detach().view(-1))

    def _change_masters(self) -> None:
        """Call `change`, and round the masters again if it has changed some."""
        optimizer = self._optimizer
        masters = [master for group in optimizer.fp32_groups for master in group]
        if self.change is not None and self.change(masters):
            for weights, group in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
                for weight, master in zip(weights, group, strict=True):
                    weight.copy_(master)
