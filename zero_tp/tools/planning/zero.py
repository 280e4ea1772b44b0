"""Bytes of model states and buffers that DeepSpeed 0.19 allocates over a step, at each ZeRO stage.

The papers' formulas (tools/planning/formulas.py) leave out flat copies, buckets, gathered layers
and the optimizer's temporaries. This account follows the allocations of a real engine, and tests
compare the two. Notation: e = bytes of an element of the run's dtype, N_d = replicas.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from zero_tp.engine.zero import facts
from zero_tp.parallel.elementwise import CACHE_ELEMENTS
from zero_tp.tools.planning.gathered import most_gathered
from zero_tp.tools.planning.matrix_update import (
    MatrixGroup,
    MatrixUpdate,
    Partition,
    matrix_update,
)
from zero_tp.tools.planning.plan_settings import ZeroSettings, page_locked

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
class RankParameters:
    """One TP rank's parameters, before ZeRO partitions them.

    Attributes:
        groups: elements of each parameter, by the optimizer's groups. By default they are two,
            because weight decay skips norms and biases; DeepSpeed flattens each group.
        modules: elements of each parameter of each module, in forward order. A tied output layer
            repeats those of the embedding.
        layers: for each module the layer's number, -1 before the first layer and L after the last.
        tied: the output layer and the embedding share their weight.
        matrices: what Muon updates of each group; empty under another optimizer.
        are_experts: of each group, whether its experts are divided over expert ranks, so that ZeRO
            partitions it over the ranks that have the same ones; empty: none are.
    """

    groups: tuple[tuple[int, ...], ...]
    modules: tuple[tuple[int, ...], ...]
    layers: tuple[int, ...]
    tied: bool
    matrices: tuple[MatrixGroup | None, ...] = ()
    are_experts: tuple[bool, ...] = ()

    @cached_property
    def total(self) -> int:
        # `modules` would count a tied embedding twice; torch's `parameters()`, of which the groups
        # are made, has it once.
        return sum(map(sum, self.groups))

    @cached_property
    def experts(self) -> int:
        """Return the elements of experts that are divided over expert ranks."""
        return sum(map(sum, itertools.compress(self.groups, self.are_experts)))

    @cached_property
    def largest(self) -> int:
        return max(map(max, self.groups))


@dataclass(frozen=True)
class ZeroMemory:
    """The model states of one rank over a step.

    Attributes:
        recomputed: numbers of the layers that backward recomputes as a whole.
        owner: the rank whose matrices Muon's update counts; None: the one with the most bytes.
    """

    parameters: RankParameters
    settings: ZeroSettings
    recomputed: range = range(0)
    owner: int | None = None

    # ---- sizes -----------------------------------------------------------------------------------

    @cached_property
    def bucket(self) -> int:
        """Return the elements of a bucket (`ZeroEngine`)."""
        return min(self.settings.reduce_bucket, self.parameters.total)

    @cached_property
    def replicas(self) -> list[int]:
        """Return the number of ranks over which ZeRO partitions each group."""
        zero = self.settings
        are_experts = self.parameters.are_experts or [False] * len(self.parameters.groups)
        return [zero.expert_data if one else zero.data for one in are_experts]

    @cached_property
    def partition_sizes(self) -> list[int]:
        """Return the elements of rank 0's partition of each group.

        Stages 1 and 2 pad the group, stage 3 pads each parameter.
        """
        # Drawn with N_d = 4, a group of matrices of 6 + 4 elements and a group of one vector of 3:
        #
        #     stage 1, 2   each group to a multiple of 2 · 4:  10 → 16, 3 → 8    parts 4 and 2
        #     stage 3      each parameter to a multiple of 4:  6 → 8, 4, 3 → 4   parts 2 + 1 and 1
        #
        # The 2 is DeepSpeed's `nccl_start_alignment_factor`: a partition of 16-bit elements starts
        # at a multiple of 4 bytes.
        groups = zip(self.parameters.groups, self.replicas, strict=True)
        if self.settings.stage == 3:
            return [sum(-(-size // ranks) for size in group) for group, ranks in groups]
        return [-(-sum(group) // (2 * ranks)) * 2 for group, ranks in groups]

    @cached_property
    def partition_numel(self) -> int:
        return sum(self.partition_sizes)

    @cached_property
    def sizes_in_partition(self) -> list[int]:
        """Return the elements of each parameter that is partly in rank 0's partition.

        The whole gradient of such a parameter stays.
        """
        # `copy_grads_in_partition` (stage_1_and_2.py) copies a parameter's gradient as a whole,
        # even where the partition ends inside it. N_d = 2 and parameters of 4 + 4 + 4:
        #
        #     group          a a a a  b b b b  c c c c
        #     rank 0's part  ^^^^^^^^^^^^              6 elements of masters
        #     kept gradients a a a a  b b b b          8 elements
        groups = zip(self.parameters.groups, self.partition_sizes, strict=True)
        return [
            size
            for group, length in groups
            for size, start in zip(group, itertools.accumulate(group, initial=0), strict=False)
            if start < length
        ]

    @cached_property
    def states(self) -> StateBytes:
        """Return the permanent bytes.

        They include the average of the weights, and the optimizer's moments, which a run's first
        step creates.
        """
        zero = self.settings
        total = self.parameters.total
        part = self.partition_numel
        e = zero.itemsize
        largest = self.parameters.largest
        master = 0 if zero.weights_are_masters else 4
        if zero.stage == 0:
            moments = self._moment_bytes([sum(group) for group in self.parameters.groups])
            return StateBytes(
                parameters=e * total, optimizer=(master + zero.average) * total + moments
            )
        moments = self._moment_bytes(self.partition_sizes)
        # The average lies beside the masters, padding included.
        master_moments = (master + zero.average) * part + moments
        if zero.stage < 3:
            # Every rank has the 16-bit weights of all ranks, as one padded tensor a group: the
            # parameters become views of it.
            lengths = zip(self.partition_sizes, self.replicas, strict=True)
            flat = e * sum(length * ranks for length, ranks in lengths)
            if not zero.offload_optimizer:
                # BF16_Optimizer makes its gradients by `zeros_like` of the flat weights, so every
                # rank has an element for each padded weight and not for its partition only.
                fp32_gradients = (
                    zero.grad_accum_itemsize / e * flat if zero.runs_bf16_optimizer else 0.0
                )
                return StateBytes(parameters=flat, optimizer=master_moments, buffers=fp32_gradients)
            # `temp_grad_buffer_for_gpu_offload`: through it sums of gradients come back from the
            # host, one parameter after another.
            # The masters are among the host's tensors, some of which are page-locked.
            host = zero.average * part + moments + self._host_bytes
            return StateBytes(flat, buffers=e * largest, host=host)
        sizes = itertools.chain(*self.parameters.groups)
        # A parameter up to the threshold is partitioned like all others. After its first use the
        # whole stays too, so it counts here and in `part`.
        persistent = e * sum(size for size in sizes if size <= zero.persistence_threshold)
        device = 0.0 if zero.offload_param else e * part
        # Stage 3 makes its bucket once (`ipg_buckets` in stage3.py); stages 1 and 2 allocate theirs
        # in backward, and so have none here.
        states = StateBytes(
            device, gathered=persistent, buffers=e * self.bucket, host=self._host_bytes
        )
        if zero.offload_optimizer:
            return states._replace(host=states.host + master_moments)
        return states._replace(gradients=self._grad_itemsize * part, optimizer=master_moments)

    @cached_property
    def _matrices(self) -> list[MatrixGroup | None]:
        """Return what Muon updates of each group."""
        groups = self.parameters.groups
        return [*self.parameters.matrices] or [None] * len(groups)

    def _moment_bytes(self, sizes: Sequence[int]) -> int:
        """Return the bytes of the optimizer's states of groups with so many elements."""
        zero = self.settings
        return sum(
            (zero.moments if matrices is None else zero.matrix_moments) * size
            for matrices, size in zip(self._matrices, sizes, strict=True)
        )

    @cached_property
    def matrix_updates(self) -> list[MatrixUpdate | None]:
        """Return Muon's update of each group; None for a group of another optimizer."""
        zero = self.settings
        updates = list[MatrixUpdate | None]()
        for matrices, length, calls in zip(
            self._matrices, self.partition_sizes, self._sub_group_numbers, strict=True
        ):
            if matrices is None or zero.iteration is None:
                updates.append(None)
                continue
            calls = calls if zero.stage == 3 else [0] * len(calls)
            partition = Partition(zero.stage, zero.data, length, tuple(calls))
            updates.append(matrix_update(matrices, partition, zero.iteration))
        return updates

    @cached_property
    def _host_optimizer_tensors(self) -> list[int]:
        """Return the bytes of each host tensor of an offloaded optimizer.

        Moments, averages and ZeRO-3's masters are not among them.

        Stage 3 has accumulated gradients and their fp32 copies. Stages 1 and 2 have masters, fp32
        gradients, 16-bit weights to copy back, and a buffer. When stage 2 accumulates, each
        parameter also has a gradient there.
        """
        zero = self.settings
        e = self.settings.itemsize
        if not zero.offload_optimizer:
            return []
        if zero.stage == 3:
            return [
                self._grad_itemsize * self.partition_numel,
                *(4 * size for sizes in self._sub_groups for size in sizes),
            ]
        # Masters, fp32 gradients, and `param_buffer_of_bit16_for_cpu_offload_groups`, in which the
        # update's result is rounded before it is copied to the device.
        copies = [size * length for length in self.partition_sizes for size in (4, 4, e)]
        # Stage 2 reduces each micro-batch and keeps the sum on the host between them
        # (`accumulated_grads_in_cpu`). Stage 1 reduces once a step, and a wider sum stays on the
        # device.
        accumulates = zero.stage == 2 and zero.accumulation > 1 and not zero.accumulates_wider
        return [
            *copies,
            e * self.parameters.largest,
            *(e * size for size in self.sizes_in_partition if accumulates),
        ]

    @cached_property
    def pinned(self) -> list[int]:
        """Return the bytes of each page-locked tensor.

        Moments and ZeRO-3's masters are pageable.
        """
        zero = self.settings
        parameters = [
            zero.itemsize * length for length in self.partition_sizes if zero.offload_param
        ]
        return [*parameters, *(self._host_optimizer_tensors if zero.pins_optimizer else [])]

    @cached_property
    def _host_bytes(self) -> float:
        """Return the bytes on the host, except moments and ZeRO-3's masters.

        A CPU rank page-locks nothing.
        """
        parameters = (
            self.settings.itemsize * self.partition_numel if self.settings.offload_param else 0
        )
        # The rounding is of each tensor by itself: two tensors of 3 GiB page-lock 4 GiB each, one
        # of 6 GiB would page-lock 8.
        rounding = 0 if self.settings.cpu else sum(page_locked(size) - size for size in self.pinned)
        return float(parameters + sum(self._host_optimizer_tensors) + rounding)

    @cached_property
    def _sub_groups(self) -> list[list[int]]:
        """Return the elements of ZeRO-3's sub-groups (stage3.py), by group.

        The optimizer updates them one after another.
        """
        sub_groups = []
        for group, numbers in zip(self.parameters.groups, self._sub_group_numbers, strict=True):
            filled = [0] * (numbers[-1] + 1)
            for size, number in zip(group, numbers, strict=True):
                filled[number] += -(-size // self.settings.data)
            sub_groups.append(filled)
        return sub_groups

    @cached_property
    def _sub_group_numbers(self) -> list[list[int]]:
        """Return, for each parameter of each group, the number of its sub-group in the group."""
        numbers = []
        for group in self.parameters.groups:
            filled = number = 0
            members = []
            for size in group:
                # The parameter that reaches `sub_group_size` still belongs to the sub-group
                # (`_create_fp16_sub_groups`), so a sub-group may be larger than the setting.
                members.append(number)
                filled += -(-size // self.settings.data)
                if filled >= self.settings.sub_group:
                    filled, number = 0, number + 1
            numbers.append(members)
        return numbers

    @property
    def _grad_itemsize(self) -> int:
        """Return the bytes of an element of kept gradients.

        Of the run's dtype and accumulation's it is the wider one's.
        """
        return max(self.settings.grad_accum_itemsize, self.settings.itemsize)

    @property
    def _reduced_gradients(self) -> float:
        """Return the bytes of reduced gradients of this rank's partition.

        Stages 1 and 2 keep them for the step.
        """
        if self.settings.accumulates_wider:
            return float(self.settings.grad_accum_itemsize * self.partition_numel)
        return (
            0.0
            if self.settings.offload_optimizer
            else float(self.settings.itemsize * sum(self.sizes_in_partition))
        )

    @cached_property
    def gathered_by_layer(self) -> dict[tuple[str, int], float]:
        """Return the most gathered bytes, by ("forward" or "backward", the layer's number)."""
        zero = self.settings
        parameters = self.parameters
        limits = (zero.persistence_threshold, zero.prefetch_bucket, zero.max_live, zero.max_reuse)
        most = most_gathered(
            parameters.modules, parameters.layers, parameters.tied, self.recomputed, *limits
        )
        return {key: zero.itemsize * elements for key, elements in most.items()}

    # ---- over a step -----------------------------------------------------------------------------

    def in_micro_batch(
        self, phase: str, finished: float, layer: int, transients: float = 0.0
    ) -> StateBytes:
        """Return the bytes at a moment inside the last micro-batch of a step.

        Where the gradients are, by stage, between two layers' backward:

            0, BF16_Optimizer   all finished ones, in `parameter.grad`
            1                   all finished ones and, from the first on, the bucket
            1 with overlap, 2   the unreduced ones in the bucket, the reduced ones of this rank
            3                   the reduced ones of this rank, in a permanent tensor

        Args:
            phase: "forward" or "backward".
            finished: elements of the gradients that this micro-batch has finished.
            layer: the layer's number, -1 before the first and L after the last.
            transients: the dry run's transient bytes at that moment.
        """
        zero = self.settings
        states = self.states
        e = self.settings.itemsize
        total = self.parameters.total
        accumulates = zero.accumulation > 1
        if zero.stage == 3:
            copies = self._cast_copies(e) if phase == "backward" else 0.0
            gathered = states.gathered + self.gathered_by_layer[phase, layer]
            return states._replace(gathered=gathered, buffers=states.buffers + copies)
        # The last micro-batch has the peak: with accumulation the sums of all parameters exist
        # before its backward starts. Without, gradients appear as backward finishes them.
        gradient_numel = total if accumulates else min(finished, total)
        if zero.stage == 0 or zero.keeps_gradients_in_place or zero.runs_bf16_optimizer:
            return states._replace(gradients=e * gradient_numel)
        if zero.stage == 1 and not zero.overlap:
            # DeepSpeed reduces here only after the step's last backward (`reduce_gradients`). The
            # first gradient's hook makes the bucket (`setup_buckets`), with accumulation in the
            # first micro-batch.
            bucket = self._grad_itemsize * self.bucket if phase == "backward" or accumulates else 0
            return states._replace(
                gradients=self._grad_itemsize * gradient_numel, buffers=states.buffers + bucket
            )
        accumulated = 0.0
        # Stage 2 with offload keeps the sums of earlier micro-batches in host memory, unless they
        # are in a wider dtype.
        if accumulates and (zero.accumulates_wider or not zero.offload_optimizer):
            accumulated = (
                self._grad_itemsize * total if zero.stage == 1 else self._reduced_gradients
            )
        if phase == "forward":
            return states._replace(gradients=accumulated)
        gradients = accumulated
        flattened = 0.0
        # `contiguous_gradients` moves each finished gradient into the bucket, so until the first
        # bucket is full they take no memory of their own.
        if finished > self.bucket:  # at least one bucket has been reduced
            gradients = self._add_reduced(accumulated)
            flattened = self._reduction_copies(self.bucket)
        # `set_norm_for_param_grad_in_gpu` converts one whole gradient to fp64 for its norm, at most
        # the largest parameter's.
        norm = (
            NORM_BYTES * self.parameters.largest
            if zero.offload_optimizer and zero.stage == 2
            else 0
        )
        # Hooks flatten and compute norms after the layer's own transients have been freed.
        excess = max(0.0, max(flattened, norm) - transients)
        return states._replace(
            gradients=gradients, buffers=states.buffers + self._bucket_bytes + excess
        )

    def _add_reduced(self, accumulated: float) -> float:
        """Return the bytes of gradients once a bucket is reduced.

        Wider accumulation adds the reduced ones in place.
        """
        if self.settings.accumulates_wider:
            return max(accumulated, self._reduced_gradients)
        # Both exist until the epilogue adds the new gradients to the sums (`all_grad_tensors`).
        return accumulated + self._reduced_gradients

    @property
    def _bucket_bytes(self) -> int:
        """Return the bytes of the buckets in the run's dtype.

        With `overlap_comm` one fills while one is reduced.
        """
        return self.settings.itemsize * self.bucket * (2 if self.settings.overlap else 1)

    def in_last_reduction(self) -> StateBytes:
        """Return the bytes in the last reduction, when all activations have been freed."""
        zero = self.settings
        states = self.states
        total = self.parameters.total
        if zero.stage in (0, 3) or zero.keeps_gradients_in_place or zero.runs_bf16_optimizer:
            states = self.in_micro_batch("backward", total, -1)
            copied = 0  # bytes for each element
            # A flat copy, and its cast to another dtype. A set, because a cast to the same dtype
            # returns the flat tensor itself.
            if zero.stage == 0 or zero.runs_bf16_optimizer:
                copied = sum({self._grad_itemsize, zero.communication_itemsize})
            # A single replica has nothing to send.
            flattened = copied * min(total, facts.ALLREDUCE_BUCKET) if zero.data > 1 else 0
            return states._replace(buffers=states.buffers + flattened)
        if zero.stage == 1 and not zero.overlap:
            # Gradients move into the bucket. When it is full, the buffer of reduced gradients is
            # allocated.
            #
            # Drawn with a bucket of 10 elements and parameters of 6 + 3 + 6 + 2: the bucket takes 6
            # + 3, and the third does not fit.
            #
            #     before        gradients 6 3 6 2    bucket (empty)
            #     reducing      gradients     6 2    bucket (6 + 3), and its copies if it is cast
            #     afterwards    gradients     6 2    bucket, and the buffer of reduced gradients
            #
            # Which line is the largest depends on the sizes.
            itemsize = self._grad_itemsize
            sizes = itertools.chain(*self.parameters.groups)
            offsets = itertools.accumulate(sizes, initial=0)
            unmoved = itemsize * (
                total - max(offset for offset in offsets if offset <= self.bucket)
            )
            finished = states._replace(
                gradients=max(itemsize * total, unmoved + self._reduced_gradients),
                buffers=states.buffers + itemsize * self.bucket,
            )
            reducing = finished._replace(
                gradients=unmoved, buffers=finished.buffers + self._cast_copies(itemsize)
            )
            return max(finished, reducing, key=lambda state: state.gradients + state.buffers)
        gradients = self._add_reduced(self._reduced_gradients if zero.accumulation > 1 else 0)
        copies = self._reduction_copies(min(self.bucket, total))
        return states._replace(
            gradients=gradients, buffers=states.buffers + self._bucket_bytes + copies
        )

    def _reduction_copies(self, numel: int) -> float:
        """Return the bytes of copies of a bucket with so many elements while it is reduced.

        Without `overlap_comm` DeepSpeed reduces a flat copy.
        """
        itemsize = self.settings.itemsize
        # `allreduce_bucket` flattens a list of slices into a new tensor, and casts that one if the
        # dtypes differ.
        return self._cast_copies(itemsize) or (0 if self.settings.overlap else itemsize * numel)

    def _cast_copies(self, itemsize: int) -> float:
        """Return the bytes of a bucket's flat copy and of its cast to `communication_data_type`.

        Without a cast they are 0.

        Args:
            itemsize: bytes of an element of the bucket.
        """
        # `tensor.to` returns the tensor itself where the dtypes are equal.
        if self.settings.communication_itemsize == itemsize or self.settings.data == 1:
            return 0.0
        return float(
            (itemsize + self.settings.communication_itemsize)
            * min(self.bucket, self.parameters.total)
        )

    def in_grad_conversion(self) -> StateBytes:
        """Return the peak while gradients are converted to fp32, before the optimizer steps.

        Stages 1 to 3 flatten the gradients of a group and convert the flat tensor, while the
        gradients still exist. bf16, 100 elements in the largest partition, no offload:

            gradients  200 bytes    what backward left
            buffers    200          the flat copy
            gradients  400          fp32, which the optimizer reads
        """
        return self._in_grad_conversion(max(numel for numel, _ in self._calls))

    def _in_grad_conversion(self, updated: int) -> StateBytes:
        """Return the peak while so many gradients are converted for one call of the optimizer."""
        zero = self.settings
        states = self.states
        e = self.settings.itemsize
        if zero.stage == 0:
            total = self.parameters.total
            # Without ZeRO DeepSpeed's fp32 copy is of all gradients at once.
            is_copied = e < 4 and not zero.runs_adamw_update
            return states._replace(gradients=e * total + (4 * total if is_copied else 0))
        if zero.offload_optimizer:
            if zero.stage == 3:
                return states._replace(gathered=0.0)
            if not zero.accumulates_wider:
                return states
            bucket = (
                zero.grad_accum_itemsize * self.bucket
                if zero.stage == 1 and not zero.overlap
                else 0
            )
            return states._replace(
                gradients=self._reduced_gradients, buffers=states.buffers + bucket
            )
        if zero.runs_bf16_optimizer:
            # BF16_Optimizer converts nothing: its fp32 sums are permanent, in `states.buffers`.
            return states._replace(gradients=e * self.parameters.total)
        if zero.runs_adamw_update:
            # The update converts each gradient by itself.
            return states._replace(gradients=self._reduced_gradients)
        if zero.stage == 3:
            # Persistent parameters are partitioned before the optimizer's step, and gathered after
            # it.
            flat = zero.grad_accum_itemsize * updated if zero.grad_accum_itemsize < 4 else 0
            return states._replace(
                gathered=0.0,
                gradients=states.gradients + 4 * updated,
                buffers=states.buffers + flat,
            )
        if zero.accumulates_wider:
            return states._replace(gradients=self._reduced_gradients)
        # One group after another, so only the largest counts. Its flat 16-bit tensor lives until
        # its fp32 copy exists (`flat_grad_partition` in `step`).
        gradients = self._reduced_gradients + 4 * updated
        return states._replace(gradients=gradients, buffers=(e if e < 4 else 0) * updated)

    def in_update(self) -> StateBytes:
        """Return the peak of the optimizer's update.

        A run's first update creates the moments, which are counted from the start.
        """
        updates = [self._in_update(numel, temporaries) for numel, temporaries in self._calls]
        return max(updates, key=lambda state: state.gradients + state.buffers + state.host)

    def in_first_update(self) -> StateBytes:
        """Return the peak of a run's first update, in which Muon's calls make the moments of their
        own groups, and AdamW's those of one group after another, without ZeRO of one parameter.
        benchmarks/papers/steps.py measures it; it is never a run's peak.
        """
        if self.settings.runs_adamw_update:
            return self._in_first_adamw_update()
        sizes = [sum(group) for group in self.parameters.groups]
        if self.settings.stage:
            sizes = self.partition_sizes
        updates = []
        for number, call in enumerate(self._calls, start=1):
            # Without ZeRO the one call begins with Muon's group.
            missing = self._moment_bytes([0] * number + sizes[number:])
            state = self._in_update(*call)
            updates.append(state._replace(optimizer=state.optimizer - missing))
        return max(updates, key=lambda state: state.gradients + state.buffers + state.optimizer)

    def _in_first_adamw_update(self) -> StateBytes:
        zero = self.settings
        total = self.parameters.total
        before = self._in_update(total, 0.0)
        if zero.stage:
            # The norm is computed before there are moments.
            buffers = self.states.buffers + self._update_copy(self._largest_updated)
            return before._replace(buffers=buffers)
        sizes = list(itertools.chain(*self.parameters.groups))
        updates = [
            before._replace(
                optimizer=before.optimizer - zero.moments * (total - done - size),
                gradients=zero.itemsize * (total - done),
                buffers=self._update_copy(size),
            )
            for done, size in zip(itertools.accumulate(sizes, initial=0), sizes, strict=False)
        ]
        return max(updates, key=sum)

    @property
    def _largest_updated(self) -> int:
        """Return the elements of the largest gradient that the update takes."""
        if self.settings.stage == 0:
            return self.parameters.largest
        return min(self.parameters.largest, max(self.partition_sizes))

    def _norm_copy(self, numel: int) -> float:
        """Return the bytes of the fp64 copy of a chunk of a gradient, which a CPU makes for the
        norm (`sum_of_squares`).
        """
        chunk = CACHE_ELEMENTS * torch.get_num_threads()
        return float(NORM_BYTES * min(numel, chunk) * self.settings.cpu)

    def _update_copy(self, numel: int) -> float:
        """Return the bytes of the fp32 copy of a chunk of a gradient, outside compiled kernels."""
        is_copied = self.settings.grad_accum_itemsize < 4
        return 4.0 * min(numel, facts.UPDATE_ELEMENTS) * is_copied

    def _in_update(self, updated: int, temporaries: float) -> StateBytes:
        """Return the peak of one call of the optimizer.

        Args:
            updated: elements. temporaries: bytes.
        """
        zero = self.settings
        states = self._in_grad_conversion(updated)
        if zero.runs_adamw_update:
            largest = self._largest_updated
            copied = max(self._update_copy(largest), self._norm_copy(largest))
            return states._replace(buffers=states.buffers + copied)
        if zero.stage == 0:
            return states._replace(buffers=temporaries)
        if zero.offload_optimizer:
            return states._replace(host=states.host + temporaries)
        # A group's gradients are freed after their conversion to fp32.
        if zero.keeps_gradients_in_place:
            states = states._replace(gradients=states.gradients - zero.itemsize * updated)
        return states._replace(buffers=self.states.buffers + temporaries)

    @cached_property
    def _calls(self) -> list[tuple[int, float]]:
        """Return (elements, bytes of temporaries) of the optimizer's calls.

        Of each group the largest call: the partition of a group, or one of stage 3's sub-groups.
        Without ZeRO one call updates everything.
        """
        if self.settings.stage == 0:
            total = self.parameters.total
            by_muon = [self._matrix_bytes(update) for update in self.matrix_updates if update]
            temporaries = self._temporaries(self.parameters.largest, 3, total)
            return [(total, max([temporaries, *by_muon]))]
        sizes = self.partition_sizes if self.settings.stage < 3 else map(max, self._sub_groups)
        # The partition of a group is one flat tensor, so "all tensors" of a call are this one.
        return [
            (numel, self._matrix_bytes(update))
            if update
            else (numel, self._temporaries(numel, 2, numel))
            for numel, update in zip(sizes, self.matrix_updates, strict=True)
        ]

    def _matrix_bytes(self, update: MatrixUpdate) -> float:
        """Return the bytes of temporaries of Muon's update on the owner."""
        by_rank = update.temporaries
        return float(by_rank.max() if self.owner is None else by_rank[self.owner])

    def _temporaries(self, largest: int, count: int, total: int) -> float:
        """Return the bytes of temporaries of torch's unfused optimizers.

        Args:
            largest: elements of the largest tensor; a loop on the CPU has `count` temporaries of
                this size.
            total: elements of all tensors; "foreach" on an accelerator has one temporary for all.
        """
        if not self.settings.torch_optimizer:
            return 0.0
        # torch's default is "foreach" on an accelerator, which works on all tensors at once, and a
        # loop over tensors on a CPU.
        host = self.settings.cpu or self.settings.offload_optimizer
        return 4.0 * (count * largest if host else total)
