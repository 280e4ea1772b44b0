"""Read from a run's config what its memory and time depend on, apart from the model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from zero_tp.activations.policy import RecomputePolicy
from zero_tp.config import RunConfig
from zero_tp.config.resolve import copies_gradients
from zero_tp.constants import DTYPES


def page_locked(size: int) -> int:
    """Return the bytes that torch page-locks for a tensor of `size` bytes (ATen/core/CachingHostAllocator.h)."""
    return 1 << (size - 1).bit_length()


@dataclass(frozen=True)
class Workload:
    """One micro-batch on one rank.

    Attributes:
        length, batch: s and b.
        dtype: "fp32", "bf16" or "fp16".
        cpu: the ranks are CPU processes; else they have accelerators.
        checkpointing: DeepSpeed's `activation_checkpointing` block.
        documents: attention stays inside a document (`data.document_attention` "reset").
        labelled: share of the tokens that have labels.
        varlen: the accelerators run `varlen_attn`, so that documents and windows need no mask.
    """

    length: int
    batch: int
    tensor: int = 1
    sequence: bool = False
    dtype: str = "bf16"
    cpu: bool = False
    policy: RecomputePolicy = field(default_factory=lambda: RecomputePolicy(mode="none"))
    checkpointing: Mapping[str, Any] = field(default_factory=dict)
    documents: bool = False
    labelled: float = 1.0
    varlen: bool = True

    @property
    def labels(self) -> int:
        """Return the most labels of a micro-batch."""
        return math.ceil(self.labelled * self.length) * self.batch

    @property
    def element(self) -> int:
        """Return the bytes of an element."""
        return int(getattr(torch, DTYPES[self.dtype]).itemsize)

    @property
    def partitioned(self) -> bool:
        """Return whether checkpoints are split over TP (P_a); under SP they are split already."""
        return bool(self.checkpointing.get("partition_activations")) and self.tensor > 1 and not self.sequence

    @property
    def to_host(self) -> bool:
        """Return whether an accelerator's checkpoints wait in host memory (P_a+cpu)."""
        return bool(self.checkpointing.get("cpu_checkpointing")) and not self.cpu

    def stored(self, hidden: int, layers: int) -> tuple[float, float]:
        """Return the bytes that checkpoints take all the time: M_D's buffer on the device, and those on the host."""
        again = len(self.policy.recomputed_layers(layers))
        slots = self.checkpointing.get("number_checkpoints") or again
        parts = self.tensor if self.sequence or self.partitioned else 1
        one = self.element * math.ceil(self.length * self.batch * hidden / parts)
        if not self.checkpointing.get("contiguous_memory_optimization"):
            return 0.0, float(again * page_locked(one)) if self.to_host else 0.0
        return (0.0, float(page_locked(slots * one))) if self.to_host else (float(slots * one), 0.0)


def workload_of(config: RunConfig, *, cpu: bool, varlen: bool = True) -> Workload:
    """Return the workload of a run's micro-batch on one rank."""
    block, parallel = config.zero_tp, config.zero_tp.parallel
    return Workload(
        length=block.data.sequence_length,
        batch=config.micro_batch,
        tensor=parallel.tensor,
        sequence=parallel.sequence and parallel.tensor > 1,
        dtype=config.dtype,
        cpu=cpu,
        policy=block.recompute_policy,
        checkpointing=config.deepspeed_config().get("activation_checkpointing", {}),
        documents=block.data.document_attention == "reset" and block.masked is None,
        labelled=config.labelled,
        varlen=varlen,
    )


# ---- ZeRO ------------------------------------------------------------------------------------------------------------


ELEMENT_KEYS = {
    "reduce_bucket": "reduce_bucket_size",
    "prefetch_bucket": "stage3_prefetch_bucket_size",
    "persistence_threshold": "stage3_param_persistence_threshold",
    "max_live": "stage3_max_live_parameters",
    "max_reuse": "stage3_max_reuse_distance",
    "sub_group": "sub_group_size",
}
"""The keys of `zero_optimization` for the attributes that count elements."""


@dataclass(frozen=True)
class ZeroSettings:
    """The part of a DeepSpeed config that decides about memory and communication, with DeepSpeed's defaults.

    Attributes:
        data: N_d. element: e. cpu: the device is the CPU, and host memory is its own.
        copies: see `copies_gradients`.
        moments: bytes of the optimizer's states of a parameter, without the fp32 master.
        torch_optimizer: torch's class that is not fused, which makes temporaries.
        accumulated, reduced: bytes of an element of the gradients that are added up, and that are sent over DP.
        bf16: the run's dtype, which has an optimizer of its own at stage 1; see `separate_fp32_grads`.
        clips: gradients are clipped.
        owners: the config asks for what `to_owners` says.
        pins: what the optimizer's offload copies is page-locked; what that of parameters copies always is.
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
    bf16: bool = False
    reduced: int = 2
    clips: bool = False
    owners: bool = False
    pins: bool = True

    @classmethod
    def of(cls, config: Mapping[str, Any], data: int, *, cpu: bool) -> ZeroSettings:
        """Return the settings of a DeepSpeed config.

        Args:
            config: DeepSpeed's, without "auto".
        """
        zero = config.get("zero_optimization", {})
        half = any(config.get(name, {}).get("enabled") for name in ("bf16", "fp16"))
        block = config.get("optimizer", {})
        optimizer, params = str(block.get("type", "adamw")), block.get("params", {})
        stage = int(zero.get("stage", 0))
        offload = zero.get("offload_optimizer") or {}
        elements = {name: int(zero[key]) for name, key in ELEMENT_KEYS.items() if key in zero}
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
            bf16=bool(config.get("bf16", {}).get("enabled")),
            reduced=sizes[config.get("communication_data_type")],
            clips=bool(config.get("gradient_clipping")),
            accumulation=int(config.get("gradient_accumulation_steps", 1)),
            overlap=stage == 3 if overlap is None else bool(overlap),
            offload_optimizer=(offload.get("device") or "none") != "none",
            offload_param=((zero.get("offload_param") or {}).get("device") or "none") != "none",
            moments=4 if optimizer.lower() == "sgd" else 8,
            owners=not all_reduces,
            pins=bool(offload.get("pin_memory", True)) and offload.get("device") != "nvme",
            torch_optimizer=not params.get("fused") and (bool(params.get("torch_adam")) or optimizer == "SGD"),
            copies=copies_gradients(dict(config)),
            **elements,
        )

    @property
    def single_replica(self) -> bool:
        """Tell whether gradients stay where backward makes them; see `zero_tp.zero.stages.is_single_replica`."""
        return self.stage in (1, 2) and self.data == 1 and not self.offload_optimizer and not self.copies

    @property
    def accumulates_wider(self) -> bool:
        """Tell whether gradients are added up in a wider dtype than that of the run."""
        return self.accumulated > self.element

    @property
    def separate_fp32_grads(self) -> bool:
        """Tell whether DeepSpeed's BF16_Optimizer runs: all gradients are added up in a tensor that is always there."""
        return self.stage == 1 and self.bf16 and self.accumulates_wider and not self.offload_optimizer

    @property
    def in_buckets(self) -> bool:
        """Tell whether gradients are reduced in buckets of `reduce_bucket_size`, which may overlap with backward."""
        return self.stage > 0 and not self.separate_fp32_grads

    @property
    def to_owners(self) -> bool:
        """Tell whether stages 1 and 2 reduce each part of a gradient to its owner, as the paper has it.

        By default DeepSpeed all-reduces, which sends twice as much; its BF16_Optimizer always does.
        """
        return self.owners and self.stage in (1, 2) and self.in_buckets and self.data > 1

    @property
    def volumes(self) -> tuple[int, int]:
        """Return what a rank sends in a step to gather parameters and to reduce gradients [Ψ(N_d-1)/N_d elements].

        An all-reduce counts twice. ZeRO-1 sends 1 + 2, or 1 + 1 with `to_owners` (1910.02054, section 7.1).
        """
        micro = self.accumulation
        if self.stage == 3:
            return 2 * micro, micro
        return min(self.stage, 1), (1 if self.to_owners else 2) * (micro if self.stage == 2 else 1)

    def with_stage(self, stage: int, **changes: Any) -> ZeroSettings:
        """Return these settings at another stage; to and from stage 3 with that stage's default of `overlap_comm`.

        Args:
            changes: of other attributes.
        """
        overlap = stage == 3 if stage != self.stage and 3 in (stage, self.stage) else self.overlap
        return replace(self, stage=stage, overlap=overlap, **changes)
