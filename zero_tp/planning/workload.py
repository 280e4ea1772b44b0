"""Describe a micro-batch on one rank: everything but the model that its bytes and seconds depend on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from zero_tp.activations.policy import RecomputePolicy
from zero_tp.config import RunConfig
from zero_tp.constants import DTYPES
from zero_tp.planning.zero import page_locked


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
