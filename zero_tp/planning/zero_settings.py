"""Read from a DeepSpeed config what decides about a rank's memory and what it sends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from zero_tp.config.resolve import copies_gradients

MOMENT_BYTES = {"adam": 8, "adamw": 8, "sgd": 4}
"""Optimizer states a parameter beside the fp32 master."""


@dataclass(frozen=True)
class ZeroSettings:
    """The part of a DeepSpeed config that decides about memory and communication, with DeepSpeed's defaults.

    Attributes:
        data: N_d. element: e. cpu: the device is the CPU, and host memory is its own.
        copies: see `copies_gradients`.
        torch_optimizer: torch's class that is not fused, which makes temporaries.
        accumulated, reduced: bytes of an element of the gradients that are added up, and that are sent over DP.
        bf16: the run's dtype, which has an optimizer of its own at stage 1; see `sums_apart`.
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
            bf16=bool(config.get("bf16", {}).get("enabled")),
            reduced=sizes[config.get("communication_data_type")],
            clips=bool(config.get("gradient_clipping")),
            accumulation=int(config.get("gradient_accumulation_steps", 1)),
            overlap=stage == 3 if overlap is None else bool(overlap),
            offload_optimizer=(offload.get("device") or "none") != "none",
            offload_param=((zero.get("offload_param") or {}).get("device") or "none") != "none",
            moments=MOMENT_BYTES.get(str(block.get("type", "adamw")).lower(), 8),
            owners=not all_reduces,
            pins=bool(offload.get("pin_memory", True)) and offload.get("device") != "nvme",
            torch_optimizer=_makes_temporaries(block),
            copies=copies_gradients(dict(config)),
            **given,
        )

    @property
    def alone(self) -> bool:
        """Tell whether gradients stay where backward makes them; see `zero_tp.zero.stages.is_single_replica`."""
        return self.stage in (1, 2) and self.data == 1 and not self.offload_optimizer and not self.copies

    @property
    def wide(self) -> bool:
        """Tell whether gradients are added up in a wider dtype than that of the run."""
        return self.accumulated > self.element

    @property
    def sums_apart(self) -> bool:
        """Tell whether DeepSpeed's BF16_Optimizer runs: all gradients are added up in a tensor that is always there."""
        return self.stage == 1 and self.bf16 and self.wide and not self.offload_optimizer

    @property
    def in_buckets(self) -> bool:
        """Tell whether gradients are reduced in buckets of `reduce_bucket_size`, which may be beside backward."""
        return self.stage > 0 and not self.sums_apart

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
