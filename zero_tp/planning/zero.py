"""Count what DeepSpeed 0.19 really allocates for model states, and when, at each ZeRO stage.

The papers' figures (planning/formulas.py) leave out its flat copies, buckets, the largest gathered layers and the
temporaries of the step. Everything here was read off allocations of a real engine; tests compare it with one.
P is a rank's partition of the flattened parameters, e bytes an element of the run's dtype, RB `reduce_bucket_size`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from zero_tp.config.resolve import copies_gradients
from zero_tp.planning.gathered import most_gathered

MOMENT_BYTES = {"adam": 8, "adamw": 8, "lion": 4, "adagrad": 4, "sgd": 4}
"""Optimizer states a parameter beside the fp32 master."""
ALLREDUCE_BUCKET = 500_000_000
"""Elements that stage 0 flattens at once for its all-reduce (runtime/constants.py, MEMORY_OPT_ALLREDUCE_SIZE)."""
NORM_BYTES = 8
"""A gradient's norm is taken in fp64."""


class StateBytes(NamedTuple):
    """StateBytes are the bytes on the device at one moment, by category, and in host memory."""

    parameters: float = 0.0
    gathered: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    buffers: float = 0.0
    host: float = 0.0


@dataclass(frozen=True)
class Parameters:
    """These are one TP rank's parameters.

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

    @cached_property
    def total(self) -> int:
        return sum(self.matrices) + sum(self.flats)

    @property
    def groups(self) -> list[tuple[int, ...]]:
        return [group for group in (self.matrices, self.flats) if group]

    @cached_property
    def largest(self) -> int:
        return max(self.matrices + self.flats)


@dataclass(frozen=True)
class ZeroSettings:
    """ZeroSettings are the part of a DeepSpeed config that decides about memory, with DeepSpeed's defaults.

    Attributes:
        data: N_d. element: e. cpu: the device is the CPU, and host memory is its own.
        copies: see `copies_gradients`.
        torch_optimizer: torch's class that is not fused, which makes temporaries.
        accumulated, reduced: bytes of an element of the gradients that are added up, and that are sent over DP.
        clips: gradients are clipped.
        moments_at_once: torch's Adagrad makes its states as it is made, others at their first step.
        to_owners: stages 1 and 2 reduce each part of a gradient to its owner, as the paper has it. By default DeepSpeed
            all-reduces, which sends twice as much.
    """

    stage: int
    data: int
    element: int
    cpu: bool = False
    accumulation: int = 1
    reduce_bucket: int = 500_000_000
    overlap: bool = False
    offload_optimizer: bool = False
    offload_param: bool = False
    prefetch_bucket: int = 50_000_000
    persistence_threshold: int = 100_000
    max_live: int = 1_000_000_000
    max_reuse: int = 1_000_000_000
    sub_group: int = 1_000_000_000
    moments: int = 8
    torch_optimizer: bool = False
    copies: bool = False
    accumulated: int = 2
    reduced: int = 2
    clips: bool = False
    moments_at_once: bool = False
    to_owners: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any], data: int, *, cpu: bool) -> ZeroSettings:
        """Return the settings of a DeepSpeed config.

        Args:
            config: DeepSpeed's, without "auto".
        """
        zero = config.get("zero_optimization", {})
        half = any(config.get(name, {}).get("enabled") for name in ("bf16", "fp16"))
        block = config.get("optimizer", {})
        stage = int(zero.get("stage", 0))
        offload = zero.get("offload_optimizer") or {}
        given = {
            name: int(zero[key])
            for name, key in (
                ("reduce_bucket", "reduce_bucket_size"),
                ("prefetch_bucket", "stage3_prefetch_bucket_size"),
                ("persistence_threshold", "stage3_param_persistence_threshold"),
                ("max_live", "stage3_max_live_parameters"),
                ("max_reuse", "stage3_max_reuse_distance"),
                ("sub_group", "sub_group_size"),
            )
            if key in zero
        }
        all_reduces = zero.get("use_multi_rank_bucket_allreduce", True) or not zero.get("reduce_scatter", True)
        overlap = zero.get("overlap_comm")
        element = 2 if half else 4
        sizes = {"fp32": 4, "fp16": 2, "bf16": 2, None: element}
        return cls(
            stage=stage,
            data=data,
            element=element,
            cpu=cpu,
            accumulated=sizes[(config.get("data_types") or {}).get("grad_accum_dtype")],
            reduced=sizes[config.get("communication_data_type")],
            clips=bool(config.get("gradient_clipping")),
            accumulation=int(config.get("gradient_accumulation_steps", 1)),
            overlap=stage == 3 if overlap is None else bool(overlap),
            offload_optimizer=(offload.get("device") or "none") != "none",
            offload_param=((zero.get("offload_param") or {}).get("device") or "none") != "none",
            moments=MOMENT_BYTES.get(str(block.get("type", "adamw")).lower(), 8),
            moments_at_once=str(block.get("type")).lower() == "adagrad",
            to_owners=stage in (1, 2) and not all_reduces,
            torch_optimizer=_makes_temporaries(block),
            copies=copies_gradients(dict(config)),
            **given,
        )

    @property
    def alone(self) -> bool:
        """Tell whether gradients stay where backward makes them; see `zero_tp.zero.stages.is_alone`."""
        return self.stage in (1, 2) and self.data == 1 and not self.offload_optimizer and not self.copies

    def at_stage(self, stage: int, **changes: Any) -> ZeroSettings:
        """Return these settings at another stage; to and from stage 3 with that stage's default of `overlap_comm`.

        Args:
            changes: of other attributes.
        """
        overlap = stage == 3 if stage != self.stage and 3 in (stage, self.stage) else self.overlap
        return replace(self, stage=stage, overlap=overlap, **changes)


def _makes_temporaries(optimizer: Mapping[str, Any]) -> bool:
    params = optimizer.get("params", {})
    return not params.get("fused") and (bool(params.get("torch_adam")) or optimizer.get("type") == "SGD")


@dataclass(frozen=True)
class ZeroMemory:
    """A ZeroMemory is the account of one rank of one run."""

    parameters: Parameters
    at: ZeroSettings

    # ---- sizes -------------------------------------------------------------------------------------------------------

    @cached_property
    def partitions(self) -> list[int]:
        """Return rank 0's elements of each group; stages 1 and 2 pad the group, stage 3 each parameter."""
        data = self.at.data
        if self.at.stage == 3:
            return [sum(-(-size // data) for size in group) for group in self.parameters.groups]
        return [-(-sum(group) // (2 * data)) * 2 for group in self.parameters.groups]

    @cached_property
    def partition(self) -> int:
        return sum(self.partitions)

    @cached_property
    def straddling(self) -> int:
        """Return the elements of all parameters that rank 0's partition reaches into: its gradient buffer's size."""
        total = 0
        for group, length in zip(self.parameters.groups, self.partitions, strict=True):
            reached = 0
            for size in group:
                if reached >= length:
                    break
                reached += size
            total += reached
        return total

    @cached_property
    def states(self) -> StateBytes:
        """Return what stays all the time once the first step has made the moments."""
        at, total, part = self.at, self.parameters.total, self.partition
        e, largest = at.element, self.parameters.largest
        if at.stage == 0:
            master = 4 * total if e < 4 else 0
            return StateBytes(parameters=e * total, optimizer=at.moments * total + master)
        master_moments = (4 + at.moments) * part
        if at.stage < 3:
            whole = e * sum(length * at.data for length in self.partitions)
            if not at.offload_optimizer:
                return StateBytes(parameters=whole, optimizer=master_moments)
            copy = 4 * part + (e * part if e < 4 else 0)  # of the gradients, and of the weights on their way back
            return StateBytes(whole, buffers=e * largest, host=master_moments + copy + e * largest)
        persistent = e * sum(size for size in self._distinct if size <= at.persistence_threshold)
        device, host = (0, e * part) if at.offload_param else (e * part, 0)
        held = StateBytes(device, gathered=persistent, buffers=e * at.reduce_bucket, host=host)
        if at.offload_optimizer:
            return held._replace(host=host + master_moments + 4 * part + e * part)  # of gradients, in fp32 and as made
        return held._replace(gradients=e * part, optimizer=master_moments)

    @property
    def _distinct(self) -> tuple[int, ...]:
        return self.parameters.matrices + self.parameters.flats

    @cached_property
    def gathered_at(self) -> dict[tuple[str, int], float]:
        """Return the most bytes gathered, by ("forward" or "backward", the layer's number)."""
        at = self.at
        most = most_gathered(
            self.parameters.modules,
            self.parameters.layers,
            threshold=at.persistence_threshold,
            prefetch=at.prefetch_bucket,
            max_live=at.max_live,
            max_reuse=at.max_reuse,
        )
        return {where: at.element * elements for where, elements in most.items()}

    # ---- over a step -------------------------------------------------------------------------------------------------

    def during(self, phase: str, done: float, layer: int, micro: int = 0, transients: float = 0.0) -> StateBytes:
        """Return the bytes at a moment inside a micro-batch.

        Args:
            phase: "forward" or "backward".
            done: elements whose gradients are done in this micro-batch.
            layer: the layer's number, -1 before the first and L after the last.
            micro: the micro-batch's number in the step.
            transients: of the activations at that moment.
        """
        at, held, e = self.at, self.states, self.at.element
        buckets = e * at.reduce_bucket * (2 if at.overlap else 1)
        total = self.parameters.total
        if at.stage == 3:
            return held._replace(gathered=held.gathered + self.gathered_at[phase, layer])
        accumulated = e * (total if micro else min(done, total))
        if at.stage == 0 or at.alone:
            return held._replace(gradients=accumulated)
        if at.stage == 1 and not (at.overlap and micro == at.accumulation - 1):
            there = phase == "backward" or micro > 0
            return held._replace(gradients=accumulated, buffers=held.buffers + (buckets if there else 0))
        before = 0.0
        if micro and not at.offload_optimizer:
            before = e * (total if at.stage == 1 else self.straddling)
        if phase == "forward":
            return held._replace(gradients=before)
        gradients, flattened = before, 0.0
        if done > at.reduce_bucket:  # one bucket at least has been reduced
            gradients += 0 if at.offload_optimizer else e * self.straddling
            flattened = 0 if at.overlap else e * at.reduce_bucket
        norm = NORM_BYTES * self.parameters.largest if at.offload_optimizer and at.stage == 2 else 0
        # Flattening and norms happen in hooks, when the layer's own transients are gone.
        beside = max(0.0, max(flattened, norm) - transients)
        return held._replace(gradients=gradients, buffers=held.buffers + buckets + beside)

    @cached_property
    def _first_fill(self) -> int:
        """Return the elements of the parameters that fit the first bucket."""
        filled = 0
        for size in self.parameters.matrices:
            if filled + size > self.at.reduce_bucket:
                break
            filled += size
        return filled

    def end_of_backward(self) -> StateBytes:
        """Return the bytes when the last buckets are reduced, without activations."""
        at, held, e = self.at, self.states, self.at.element
        total, bucket = self.parameters.total, e * at.reduce_bucket
        if at.stage in (0, 3) or at.alone:
            held = self.during("backward", total, -1, at.accumulation - 1)
            flattened = e * min(total, ALLREDUCE_BUCKET) if at.stage == 0 and at.data > 1 else 0
            return held._replace(buffers=held.buffers + flattened)
        fill = e * min(at.reduce_bucket, total)
        own = 0 if at.offload_optimizer else e * self.straddling
        if at.stage == 1 and not at.overlap:
            # Each gradient moves into the bucket; when the first is full, this rank's buffer is made.
            gradients = max(e * total, e * (total - self._first_fill) + own)
            return held._replace(gradients=gradients, buffers=held.buffers + bucket)
        before = own if at.accumulation > 1 else 0
        flattened = 0 if at.overlap else fill
        buckets = bucket * (2 if at.overlap else 1)
        return held._replace(gradients=before + own, buffers=held.buffers + buckets + flattened)

    def step(self) -> StateBytes:
        """Return the most that the optimizer's step holds."""
        at, held, e = self.at, self.states, self.at.element
        if at.stage == 0:
            total, largest = self.parameters.total, self.parameters.largest
            copies = 4 * total if e < 4 else 0
            return held._replace(gradients=e * total + copies, buffers=self._temporaries(largest, 3, total))
        biggest = max(self.partitions)
        if at.stage < 3:
            if at.offload_optimizer:
                return held._replace(host=held.host + self._temporaries(biggest, 2, biggest))
            flat = (e if e < 4 else 0) * biggest  # before it becomes fp32, and the optimizer's temporaries after that
            gradients = e * self.straddling + 4 * biggest
            return held._replace(gradients=gradients, buffers=max(flat, self._temporaries(biggest, 2, biggest)))
        group = min(biggest, max(at.sub_group, -(-self.parameters.largest // at.data)))
        temporaries = self._temporaries(group, 2, group)
        if at.offload_optimizer:
            return held._replace(gathered=0.0, host=held.host + temporaries)
        # The persistent parameters are partitioned for the step, and gathered again after it.
        return held._replace(gathered=0.0, gradients=held.gradients + 4 * group, buffers=held.buffers + temporaries)

    def _temporaries(self, largest: int, loops: int, together: int) -> float:
        """Return the bytes of torch's temporaries: on the CPU a few of the largest tensor, else one of all tensors."""
        if not self.at.torch_optimizer:
            return 0.0
        host = self.at.cpu or self.at.offload_optimizer
        return 4.0 * (loops * largest if host else together)
