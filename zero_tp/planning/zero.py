"""Bytes of model states and buffers that DeepSpeed 0.19 allocates over a step, at each ZeRO stage.

The papers' formulas (planning/formulas.py) leave out flat copies, buckets, gathered layers and the optimizer's
temporaries. This account follows the allocations of a real engine, and tests compare the two. Notation: e = bytes of an
element of the run's dtype.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from zero_tp.planning.gathered import most_gathered
from zero_tp.planning.plan_settings import ZeroSettings, page_locked

ALLREDUCE_BUCKET = 500_000_000
"""Elements of one all-reduce where there are no buckets: stage 0, BF16_Optimizer (constants.py,
MEMORY_OPT_ALLREDUCE_SIZE)."""
NORM_BYTES = 8
"""DeepSpeed computes a gradient's norm in fp64."""


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
        matrices, vectors: elements of each parameter with two or more dimensions, and of the others. They are two
            groups of the optimizer, because weight decay skips the second; DeepSpeed flattens each group.
        modules: elements of each parameter of each module, in forward's order. A tied output layer repeats the
            embedding's.
        layers: for each module the layer's number, -1 before the first layer and L after the last.
        tied: the output layer's weight is the embedding's.
    """

    matrices: tuple[int, ...]
    vectors: tuple[int, ...]
    modules: tuple[tuple[int, ...], ...]
    layers: tuple[int, ...]
    tied: bool

    @property
    def groups(self) -> list[tuple[int, ...]]:
        return [group for group in (self.matrices, self.vectors) if group]

    @cached_property
    def total(self) -> int:
        return sum(map(sum, self.groups))

    @cached_property
    def largest(self) -> int:
        return max(map(max, self.groups))


@dataclass(frozen=True)
class ZeroMemory:
    """The model states of one rank over a step.

    Attributes:
        recomputed: numbers of the layers that backward runs again.
    """

    parameters: Parameters
    settings: ZeroSettings
    recomputed: range = range(0)

    # ---- sizes -------------------------------------------------------------------------------------------------------

    @cached_property
    def bucket(self) -> int:
        """Return the elements of a bucket. On a CPU only the part counts that gradients fill, and so touch."""
        size = self.settings.reduce_bucket
        return min(size, self.parameters.total) if self.settings.cpu else size

    @cached_property
    def partitions(self) -> list[int]:
        """Return rank 0's elements of each group. Stages 1 and 2 pad the group, stage 3 pads each parameter."""
        data = self.settings.data
        if self.settings.stage == 3:
            return [sum(-(-size // data) for size in group) for group in self.parameters.groups]
        return [-(-sum(group) // (2 * data)) * 2 for group in self.parameters.groups]

    @cached_property
    def partition(self) -> int:
        return sum(self.partitions)

    @cached_property
    def partition_parameters(self) -> list[int]:
        """Return the sizes of the parameters that overlap rank 0's partition; their whole gradients are kept."""
        sizes = []
        for group, length in zip(self.parameters.groups, self.partitions, strict=True):
            starts = itertools.accumulate(group, initial=0)
            sizes += [size for size, start in zip(group, starts, strict=False) if start < length]
        return sizes

    @cached_property
    def states(self) -> StateBytes:
        """Return the permanent bytes, from the end of the first step on, which creates the optimizer's moments."""
        zero, total, part = self.settings, self.parameters.total, self.partition
        e, largest = zero.element, self.parameters.largest
        if zero.stage == 0:
            master = 4 * total if e < 4 else 0
            return StateBytes(parameters=e * total, optimizer=zero.moments * total + master)
        master_moments = (4 + zero.moments) * part
        if zero.stage < 3:
            flat = e * sum(length * zero.data for length in self.partitions)
            if not zero.offload_optimizer:
                fp32_gradients = zero.accumulated / e * flat if zero.separate_fp32_grads else 0.0
                return StateBytes(parameters=flat, optimizer=master_moments, buffers=fp32_gradients)
            return StateBytes(flat, buffers=e * largest, host=zero.moments * part + self._host_bytes)
        sizes = itertools.chain(*self.parameters.groups)
        persistent = e * sum(size for size in sizes if size <= zero.persistence_threshold)
        device = 0.0 if zero.offload_param else e * part
        states = StateBytes(device, gathered=persistent, buffers=e * self.bucket, host=self._host_bytes)
        if zero.offload_optimizer:
            return states._replace(host=states.host + master_moments)
        return states._replace(gradients=self._accumulated_element * part, optimizer=master_moments)

    @cached_property
    def _host_optimizer_tensors(self) -> list[int]:
        """Return the bytes of each host tensor of an offloaded optimizer, without moments and ZeRO-3's masters.

        Stage 3 has accumulated gradients and their fp32 copies. Stages 1 and 2 have masters, fp32 gradients, 16-bit
        weights to copy back, and a buffer. Stage 2 with accumulation also has a gradient of each parameter.
        """
        zero, e = self.settings, self.settings.element
        if not zero.offload_optimizer:
            return []
        if zero.stage == 3:
            return [self._accumulated_element * self.partition, *(4 * size for size in self._sub_groups)]
        copies = [size * length for length in self.partitions for size in (4, 4, e)]
        accumulates = zero.stage == 2 and zero.accumulation > 1 and not zero.accumulates_wider
        return [*copies, e * self.parameters.largest, *(e * size for size in self.partition_parameters if accumulates)]

    @cached_property
    def pinned(self) -> list[int]:
        """Return the bytes of each tensor that is page-locked; moments and ZeRO-3's masters are not."""
        zero = self.settings
        parameters = [zero.element * length for length in self.partitions if zero.offload_param]
        return [*parameters, *(self._host_optimizer_tensors if zero.pins_optimizer else [])]

    @cached_property
    def _host_bytes(self) -> float:
        """Return the bytes on the host, without moments and ZeRO-3's masters; a CPU rank page-locks nothing."""
        parameters = self.settings.element * self.partition if self.settings.offload_param else 0
        rounding = 0 if self.settings.cpu else sum(page_locked(size) - size for size in self.pinned)
        return float(parameters + sum(self._host_optimizer_tensors) + rounding)

    @property
    def _sub_groups(self) -> list[int]:
        """Return the elements of ZeRO-3's sub-groups, which the optimizer updates one after another."""
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
    def _accumulated_element(self) -> int:
        """Return the bytes of an element of accumulated gradients."""
        return max(self.settings.accumulated, self.settings.element)

    @property
    def _reduced_gradients(self) -> float:
        """Return the bytes of reduced gradients of this rank's partition, which stages 1 and 2 keep for the step."""
        if self.settings.accumulates_wider:
            return float(self.settings.accumulated * self.partition)
        return 0.0 if self.settings.offload_optimizer else float(self.settings.element * sum(self.partition_parameters))

    @cached_property
    def gathered_by_layer(self) -> dict[tuple[str, int], float]:
        """Return the most gathered bytes, by ("forward" or "backward", the layer's number)."""
        zero = self.settings
        limits = (zero.persistence_threshold, zero.prefetch_bucket, zero.max_live, zero.max_reuse)
        modules, layers = self.parameters.modules, self.parameters.layers
        most = most_gathered(modules, layers, self.parameters.tied, self.recomputed, *limits)
        return {place: zero.element * elements for place, elements in most.items()}

    # ---- over a step -------------------------------------------------------------------------------------------------

    def during(self, phase: str, finished: float, layer: int, transients: float = 0.0) -> StateBytes:
        """Return the bytes at a moment inside the last micro-batch of a step.

        Args:
            phase: "forward" or "backward".
            finished: elements of the gradients that this micro-batch has finished.
            layer: the layer's number, -1 before the first and L after the last.
            transients: the dry run's transient bytes at that moment.
        """
        zero, states, e = self.settings, self.states, self.settings.element
        total, accumulates = self.parameters.total, zero.accumulation > 1
        if zero.stage == 3:
            copies = self._copies_to_send(e) if phase == "backward" else 0.0
            gathered = states.gathered + self.gathered_by_layer[phase, layer]
            return states._replace(gathered=gathered, buffers=states.buffers + copies)
        with_gradients = total if accumulates else min(finished, total)
        if zero.stage == 0 or zero.single_replica or zero.separate_fp32_grads:
            return states._replace(gradients=e * with_gradients)
        if zero.stage == 1 and not zero.overlap:
            bucket = self._accumulated_element * self.bucket if phase == "backward" or accumulates else 0
            return states._replace(
                gradients=self._accumulated_element * with_gradients, buffers=states.buffers + bucket
            )
        accumulated = 0.0
        if accumulates and (zero.accumulates_wider or not zero.offload_optimizer):
            accumulated = self._accumulated_element * total if zero.stage == 1 else self._reduced_gradients
        if phase == "forward":
            return states._replace(gradients=accumulated)
        gradients, flattened = accumulated, 0.0
        if finished > self.bucket:  # one bucket at least has been reduced
            gradients = self._with_reduced(accumulated)
            flattened = self._copies_to_send(e) or (0 if zero.overlap else e * self.bucket)
        buckets = e * self.bucket * (2 if zero.overlap else 1)
        norm = NORM_BYTES * self.parameters.largest if zero.offload_optimizer and zero.stage == 2 else 0
        # Hooks flatten and compute norms after the layer's own transients have been freed.
        excess = max(0.0, max(flattened, norm) - transients)
        return states._replace(gradients=gradients, buffers=states.buffers + buckets + excess)

    def _with_reduced(self, accumulated: float) -> float:
        """Return the bytes of gradients once a bucket is reduced; a wider accumulation holds the reduced ones too."""
        if self.settings.accumulates_wider:
            return max(accumulated, self._reduced_gradients)
        return accumulated + self._reduced_gradients

    def end_of_backward(self) -> StateBytes:
        """Return the bytes during the last reductions, when all activations have been freed."""
        zero, states, e = self.settings, self.states, self.settings.element
        total = self.parameters.total
        if zero.stage in (0, 3) or zero.single_replica or zero.separate_fp32_grads:
            states = self.during("backward", total, -1)
            flat = 0
            if zero.stage == 0 or zero.separate_fp32_grads:  # a flat copy, and another in the dtype to send
                flat = self._accumulated_element
                flat += zero.reduced if zero.reduced != flat else 0
            flattened = flat * min(total, ALLREDUCE_BUCKET) if zero.data > 1 else 0
            return states._replace(buffers=states.buffers + flattened)
        if zero.stage == 1 and not zero.overlap:
            # Gradients move into the bucket. When it is full, the buffer of reduced gradients is allocated.
            fills = itertools.accumulate(self.parameters.matrices, initial=0)
            first_fill = max(filled for filled in fills if filled <= self.bucket)
            gradients = max(
                self._accumulated_element * total,
                self._accumulated_element * (total - first_fill) + self._reduced_gradients,
            )
            finished = states._replace(
                gradients=gradients, buffers=states.buffers + self._accumulated_element * self.bucket
            )
            reducing = finished._replace(
                gradients=self._accumulated_element * (total - first_fill),
                buffers=finished.buffers + self._copies_to_send(self._accumulated_element),
            )
            return max(finished, reducing, key=lambda one: one.gradients + one.buffers)
        gradients = self._with_reduced(self._reduced_gradients if zero.accumulation > 1 else 0)
        # With overlap there are two buckets, else one and its flat copy.
        copies = self._copies_to_send(e) or (0 if zero.overlap else e * min(self.bucket, total))
        buckets = e * self.bucket * (2 if zero.overlap else 1)
        return states._replace(gradients=gradients, buffers=states.buffers + buckets + copies)

    def _copies_to_send(self, element: int) -> float:
        """Return the bytes of a bucket's flat copy and of its copy in the dtype to send; 0 if that is the bucket's.

        Args:
            element: bytes of an element of the bucket.
        """
        if self.settings.reduced == element or self.settings.data == 1:
            return 0.0
        return float((element + self.settings.reduced) * min(self.bucket, self.parameters.total))

    def converting(self) -> StateBytes:
        """Return the peak while gradients are converted to fp32 for the masters, before the optimizer steps.

        Stages 1 to 3 flatten the gradients of a group and convert the flat tensor, while the gradients still exist.
        """
        zero, states, e = self.settings, self.states, self.settings.element
        if zero.stage == 0:
            total = self.parameters.total
            return states._replace(gradients=e * total + (4 * total if e < 4 else 0))
        if zero.offload_optimizer:
            if zero.stage == 3:
                return states._replace(gathered=0.0)
            if not zero.accumulates_wider:
                return states
            bucket = zero.accumulated * self.bucket if zero.stage == 1 and not zero.overlap else 0
            return states._replace(gradients=self._reduced_gradients, buffers=states.buffers + bucket)
        if zero.separate_fp32_grads:
            return states._replace(gradients=e * self.parameters.total)
        updated = self._update_numel
        if zero.stage == 3:
            # Persistent parameters are partitioned before the optimizer's step, and gathered after it.
            flat = zero.accumulated * updated if zero.accumulated < 4 else 0
            return states._replace(
                gathered=0.0, gradients=states.gradients + 4 * updated, buffers=states.buffers + flat
            )
        if zero.accumulates_wider:
            return states._replace(gradients=self._reduced_gradients)
        gradients = self._reduced_gradients + 4 * updated
        return states._replace(gradients=gradients, buffers=(e if e < 4 else 0) * updated)

    def updating(self) -> StateBytes:
        """Return the peak of the optimizer's update, which creates the moments in a run's first step."""
        zero, states = self.settings, self.converting()
        if zero.stage == 0:
            total, largest = self.parameters.total, self.parameters.largest
            return states._replace(buffers=self._temporaries(largest, 3, total))
        updated = self._update_numel
        temporaries = self._temporaries(updated, 2, updated)
        if zero.offload_optimizer:
            return states._replace(host=states.host + temporaries)
        if zero.single_replica:  # a group's gradients are freed after their conversion to fp32
            states = states._replace(gradients=states.gradients - zero.element * updated)
        return states._replace(buffers=self.states.buffers + temporaries)

    @property
    def _update_numel(self) -> int:
        """Return the elements that the optimizer updates at once: the largest group, or stage 3's sub-group."""
        most = max(self.partitions)
        if self.settings.stage < 3:
            return most
        return min(most, max(self.settings.sub_group, -(-self.parameters.largest // self.settings.data)))

    def _temporaries(self, largest: int, count: int, total: int) -> float:
        """Return the bytes of temporaries of torch's unfused optimizers.

        Args:
            largest: elements of the largest tensor; a loop on the CPU has `count` temporaries of this size.
            total: elements of all tensors; "foreach" on an accelerator has one temporary for all.
        """
        if not self.settings.torch_optimizer:
            return 0.0
        host = self.settings.cpu or self.settings.offload_optimizer
        return 4.0 * (count * largest if host else total)
