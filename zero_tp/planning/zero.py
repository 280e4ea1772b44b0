"""Count what DeepSpeed 0.19 really allocates for model states, and when, at each ZeRO stage.

The papers' figures (planning/formulas.py) leave out its flat copies, buckets, the largest gathered layers and the
temporaries of the step. Everything here was read off allocations of a real engine; tests compare it with one.
P is a rank's partition of the flattened parameters, e bytes an element of the run's dtype, RB `reduce_bucket_size`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from zero_tp.planning.gathered import most_gathered
from zero_tp.planning.plan_settings import ZeroSettings, page_locked

ALLREDUCE_BUCKET = 500_000_000
"""Elements that DeepSpeed flattens at once where there are no buckets (constants.py, MEMORY_OPT_ALLREDUCE_SIZE)."""
NORM_BYTES = 8
"""A gradient's norm is taken in fp64."""


class StateBytes(NamedTuple):
    """The bytes on the device at one moment, by category, and in host memory."""

    parameters: float = 0.0
    gathered: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    buffers: float = 0.0
    host: float = 0.0


@dataclass(frozen=True)
class Parameters:
    """One TP rank's parameters.

    Attributes:
        matrices, flats: elements of each parameter of two dimensions or more, and of the others: DeepSpeed flattens
            the two groups by themselves, because weight decay skips the second.
        modules: elements of each parameter of each module, in the order in which forward runs them; a tied output
            layer has the embedding's again.
        layers: of each module the layer's number, -1 before the first and L after the last.
    """

    matrices: tuple[int, ...]
    flats: tuple[int, ...]
    modules: tuple[tuple[int, ...], ...]
    layers: tuple[int, ...]

    @property
    def groups(self) -> list[tuple[int, ...]]:
        return [group for group in (self.matrices, self.flats) if group]

    @cached_property
    def total(self) -> int:
        return sum(map(sum, self.groups))

    @cached_property
    def largest(self) -> int:
        return max(map(max, self.groups))


@dataclass(frozen=True)
class ZeroMemory:
    """The account of one rank of one run."""

    parameters: Parameters
    settings: ZeroSettings

    # ---- sizes -------------------------------------------------------------------------------------------------------

    @cached_property
    def bucket(self) -> int:
        """Return the elements of a bucket. A CPU's memory is taken when it is touched: what gradients can fill."""
        size = self.settings.reduce_bucket
        return min(size, self.parameters.total) if self.settings.cpu else size

    @cached_property
    def partitions(self) -> list[int]:
        """Return rank 0's elements of each group; stages 1 and 2 pad the group, stage 3 each parameter."""
        data = self.settings.data
        if self.settings.stage == 3:
            return [sum(-(-size // data) for size in group) for group in self.parameters.groups]
        return [-(-sum(group) // (2 * data)) * 2 for group in self.parameters.groups]

    @cached_property
    def partition(self) -> int:
        return sum(self.partitions)

    @cached_property
    def partition_parameters(self) -> list[int]:
        """Return the elements of each parameter that rank 0's partition reaches into: its gradient buffer has all."""
        sizes = []
        for group, length in zip(self.parameters.groups, self.partitions, strict=True):
            starts = itertools.accumulate(group, initial=0)
            sizes += [size for size, start in zip(group, starts, strict=False) if start < length]
        return sizes

    @cached_property
    def states(self) -> StateBytes:
        """Return what stays all the time once the first step has made the moments."""
        zero, total, part = self.settings, self.parameters.total, self.partition
        e, largest = zero.element, self.parameters.largest
        if zero.stage == 0:
            master = 4 * total if e < 4 else 0
            return StateBytes(parameters=e * total, optimizer=zero.moments * total + master)
        master_moments = (4 + zero.moments) * part
        if zero.stage < 3:
            whole = e * sum(length * zero.data for length in self.partitions)
            if not zero.offload_optimizer:
                sums = zero.accumulated / e * whole if zero.separate_fp32_grads else 0.0
                return StateBytes(parameters=whole, optimizer=master_moments, buffers=sums)
            return StateBytes(whole, buffers=e * largest, host=zero.moments * part + self._host_copies)
        sizes = itertools.chain(*self.parameters.groups)
        persistent = e * sum(size for size in sizes if size <= zero.persistence_threshold)
        device = 0.0 if zero.offload_param else e * part
        states = StateBytes(device, gathered=persistent, buffers=e * self.bucket, host=self._host_copies)
        if zero.offload_optimizer:
            return states._replace(host=states.host + master_moments)
        return states._replace(gradients=self._sum * part, optimizer=master_moments)

    @cached_property
    def _optimizer_copies(self) -> list[int]:
        """Return the bytes of each tensor that an offloaded optimizer has on the host, without moments.

        At stage 3 these are the gradients, accumulated and in fp32; its masters are counted elsewhere. Stages 1 and 2
        have masters, gradients in fp32, weights to copy back and a buffer. Stage 2 also has a gradient of each
        parameter if it accumulates.
        """
        zero, e = self.settings, self.settings.element
        if not zero.offload_optimizer:
            return []
        if zero.stage == 3:
            return [self._sum * self.partition, *(4 * size for size in self._sub_groups)]
        copies = [size * length for length in self.partitions for size in (4, 4, e)]
        added_up = zero.stage == 2 and zero.accumulation > 1 and not zero.accumulates_wider
        return [*copies, e * self.parameters.largest, *(e * size for size in self.partition_parameters if added_up)]

    @cached_property
    def pinned(self) -> list[int]:
        """Return the bytes of each tensor that DeepSpeed page-locks: neither moments nor ZeRO-3's masters."""
        zero = self.settings
        parameters = [zero.element * length for length in self.partitions if zero.offload_param]
        return [*parameters, *(self._optimizer_copies if zero.pins else [])]

    @cached_property
    def _host_copies(self) -> float:
        """Return the bytes on the host without moments and ZeRO-3's masters; a CPU rank page-locks nothing."""
        parameters = self.settings.element * self.partition if self.settings.offload_param else 0
        rounding = 0 if self.settings.cpu else sum(page_locked(size) - size for size in self.pinned)
        return float(parameters + sum(self._optimizer_copies) + rounding)

    @property
    def _sub_groups(self) -> list[int]:
        """Return the elements that ZeRO-3's optimizer updates at once, in order: whole partitions of parameters."""
        sub_groups = []
        for group in self.parameters.groups:
            filled = 0
            for size in group:
                filled += -(-size // self.settings.data)
                if filled >= self.settings.sub_group:
                    sub_groups.append(filled)
                    filled = 0
            sub_groups += [filled] if filled else []
        return sub_groups

    @property
    def _sum(self) -> int:
        """Return the bytes of an element of added gradients."""
        return max(self.settings.accumulated, self.settings.element)

    @property
    def _own(self) -> float:
        """Return the bytes of the buffer in which stages 1 and 2 keep this rank's reduced gradients until the step."""
        if self.settings.accumulates_wider:
            return float(self.settings.accumulated * self.partition)
        return 0.0 if self.settings.offload_optimizer else float(self.settings.element * sum(self.partition_parameters))

    @cached_property
    def gathered_by_layer(self) -> dict[tuple[str, int], float]:
        """Return the most bytes gathered, by ("forward" or "backward", the layer's number)."""
        zero = self.settings
        limits = (zero.persistence_threshold, zero.prefetch_bucket, zero.max_live, zero.max_reuse)
        most = most_gathered(self.parameters.modules, self.parameters.layers, *limits)
        return {place: zero.element * elements for place, elements in most.items()}

    # ---- over a step -------------------------------------------------------------------------------------------------

    def during(self, phase: str, done: float, layer: int, transients: float = 0.0) -> StateBytes:
        """Return the bytes at a moment inside the last micro-batch of a step.

        Args:
            phase: "forward" or "backward".
            done: elements whose gradients are done in this micro-batch.
            layer: the layer's number, -1 before the first and L after the last.
            transients: of the activations at that moment.
        """
        zero, states, e = self.settings, self.states, self.settings.element
        total, accumulates = self.parameters.total, zero.accumulation > 1
        if zero.stage == 3:
            return states._replace(gathered=states.gathered + self.gathered_by_layer[phase, layer])
        with_gradients = total if accumulates else min(done, total)
        if zero.stage == 0 or zero.single_replica or zero.separate_fp32_grads:
            return states._replace(gradients=e * with_gradients)
        if zero.stage == 1 and not zero.overlap:
            bucket = self._sum * self.bucket if phase == "backward" or accumulates else 0
            return states._replace(gradients=self._sum * with_gradients, buffers=states.buffers + bucket)
        before = 0.0
        if accumulates and (zero.accumulates_wider or not zero.offload_optimizer):
            before = self._sum * total if zero.stage == 1 else self._own
        if phase == "forward":
            return states._replace(gradients=before)
        gradients, flattened = before, 0.0
        if done > self.bucket:  # one bucket at least has been reduced
            gradients = self._with_own(before)
            flattened = 0 if zero.overlap else e * self.bucket
        buckets = e * self.bucket * (2 if zero.overlap else 1)
        norm = NORM_BYTES * self.parameters.largest if zero.offload_optimizer and zero.stage == 2 else 0
        # Flattening and norms happen in hooks, when the layer's own transients are gone.
        excess = max(0.0, max(flattened, norm) - transients)
        return states._replace(gradients=gradients, buffers=states.buffers + buckets + excess)

    def _with_own(self, before: float) -> float:
        """Return the bytes of the gradients once a bucket has been reduced: added up in a wider dtype they stay one."""
        return max(before, self._own) if self.settings.accumulates_wider else before + self._own

    def end_of_backward(self) -> StateBytes:
        """Return the bytes when the last buckets are reduced, without activations."""
        zero, states, e = self.settings, self.states, self.settings.element
        total = self.parameters.total
        if zero.stage in (0, 3) or zero.single_replica or zero.separate_fp32_grads:
            states = self.during("backward", total, -1)
            flat = e if zero.stage == 0 else 0
            if zero.separate_fp32_grads:
                flat = self._sum + zero.reduced  # as they are added up, and as they are sent
            flattened = flat * min(total, ALLREDUCE_BUCKET) if zero.data > 1 else 0
            return states._replace(buffers=states.buffers + flattened)
        if zero.stage == 1 and not zero.overlap:
            # Each gradient moves into the bucket; when the first is full, this rank's buffer is made.
            fills = itertools.accumulate(self.parameters.matrices, initial=0)
            first_fill = max(filled for filled in fills if filled <= self.bucket)
            gradients = max(self._sum * total, self._sum * (total - first_fill) + self._own)
            return states._replace(gradients=gradients, buffers=states.buffers + self._sum * self.bucket)
        before = self._own if zero.accumulation > 1 else 0
        # Two buckets overlap; one is flattened.
        second = e * (self.bucket if zero.overlap else min(self.bucket, total))
        return states._replace(gradients=self._with_own(before), buffers=states.buffers + e * self.bucket + second)

    def converting(self) -> StateBytes:
        """Return the most while gradients become those of the masters, before the optimizer steps.

        Stages 1 to 3 flatten those of a group, and make fp32 of what is flat, while the gradients still exist.
        """
        zero, states, e = self.settings, self.states, self.settings.element
        if zero.stage == 0:
            total = self.parameters.total
            return states._replace(gradients=e * total + (4 * total if e < 4 else 0))
        if zero.offload_optimizer:
            return states._replace(gathered=0.0) if zero.stage == 3 else states
        if zero.separate_fp32_grads:
            return states._replace(gradients=e * self.parameters.total)
        group = self._group
        if zero.stage == 3:
            # The persistent parameters are partitioned for the step, and gathered again after it.
            flat = zero.accumulated * group if zero.accumulated < 4 else 0
            return states._replace(gathered=0.0, gradients=states.gradients + 4 * group, buffers=states.buffers + flat)
        if zero.accumulates_wider:
            return states._replace(gradients=self._own)
        return states._replace(gradients=self._own + 4 * group, buffers=(e if e < 4 else 0) * group)

    def updating(self) -> StateBytes:
        """Return the most while the optimizer computes, which makes its moments there in a run's first step."""
        zero, states = self.settings, self.converting()
        if zero.stage == 0:
            total, largest = self.parameters.total, self.parameters.largest
            return states._replace(buffers=self._temporaries(largest, 3, total))
        group = self._group
        temporaries = self._temporaries(group, 2, group)
        if zero.offload_optimizer:
            return states._replace(host=states.host + temporaries)
        if zero.single_replica:  # nobody else's: a group's gradients go as soon as they are fp32
            states = states._replace(gradients=states.gradients - zero.element * group)
        return states._replace(buffers=self.states.buffers + temporaries)

    @property
    def _group(self) -> int:
        """Return the elements that the optimizer updates at once: the largest group's, at stage 3 a part of it."""
        most = max(self.partitions)
        if self.settings.stage < 3:
            return most
        return min(most, max(self.settings.sub_group, -(-self.parameters.largest // self.settings.data)))

    def _temporaries(self, largest: int, loops: int, together: int) -> float:
        """Return the bytes of torch's temporaries: on the CPU a few of the largest tensor, else one of all tensors."""
        if not self.settings.torch_optimizer:
            return 0.0
        host = self.settings.cpu or self.settings.offload_optimizer
        return 4.0 * (loops * largest if host else together)
