"""A plan says what one run needs on one kind of device, and whether that is there."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_tp.config import RunConfig
from zero_tp.constants import GIB
from zero_tp.devices import Device, named_device
from zero_tp.errors import UserError
from zero_tp.models.flops import model_flops, utilisation
from zero_tp.planning import formulas
from zero_tp.planning.memory import Model, Point, RankMemory, model_in, rank_memory
from zero_tp.planning.papers import PaperView
from zero_tp.planning.timing import StepTime, Timing
from zero_tp.planning.workload import workload_of
from zero_tp.strict_json import read_json
from zero_tp.validation import validate


def device(name: str, ranks: int = 1) -> Device:
    """Return the device of a name in `zero_tp.devices.NAMES`, or that of a JSON file.

    Args:
        ranks: of the run; CPU ranks share one machine's memory and cores.

    Raises:
        ConfigError: an unknown name, or a file that does not describe a device.
    """
    if name.endswith(".json"):
        return validate(Device, read_json(Path(name)), name)
    return named_device(name, ranks)


@dataclass(frozen=True)
class Comparison:
    """A comparison has the peak of a dry run of all layers, that of the plan, and how long the first took [s]."""

    whole: Point
    planned: Point
    seconds: float

    def as_json(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "dry_run_bytes": {"phase": self.whole.phase, "total": self.whole.total, **self.whole.bytes},
            # The plan's peak; the key is kept for those who read it.
            "true_view_bytes": {"phase": self.planned.phase, "total": self.planned.total, **self.planned.bytes},
        }


@dataclass(frozen=True)
class Plan:
    """A Plan holds one run on one device; `plan` makes it.

    Attributes:
        config: loaded for the ranks of one pipeline stage.
        pipeline, interleaving: of the papers' accounting; a run has none.
    """

    config: RunConfig
    device: Device
    model: Model
    memory: RankMemory
    paper: PaperView
    time: StepTime
    pipeline: int = 1
    interleaving: int = 1

    @property
    def ranks(self) -> int:
        assert self.config.world_size is not None
        return self.config.world_size * self.pipeline

    @property
    def peak(self) -> Point:
        return self.memory.peak

    @property
    def needed(self) -> float:
        """Return the bytes needed of the device's memory: the peak with the allocator's gaps and what is reserved."""
        return needed(self.memory.peak, self.device)

    @property
    def spare(self) -> float:
        """Return the bytes of the device that stay free; negative: short by so much."""
        return self.device.memory_gib * GIB - self.needed

    @property
    def host_spare(self) -> float:
        """Return the bytes of a node's host memory that stay free; negative: short by so much."""
        return self.device.host_memory_gib * GIB - host_needed(self.memory.host, self.device, self.ranks)

    @property
    def fits(self) -> bool:
        return self.spare >= 0 and self.host_spare >= 0

    @property
    def tokens(self) -> int:
        """Return the tokens of one step."""
        return self.config.global_batch * self.config.zero_tp.data.sequence_length

    @property
    def model_flops(self) -> float:
        """Return the model FLOPs of one step, all devices together."""
        config = self.config
        length = config.zero_tp.data.sequence_length
        return model_flops(self.model.spec, config.global_batch, length, config.labelled)

    @property
    def mfu(self) -> float | None:
        peak = self.device.tflops(self.config.dtype)
        assert peak is not None, "checked by check_device"
        return utilisation(self.model_flops, self.time.total, self.ranks, peak * 1e12)

    def elements_sent(self) -> dict[str, float]:
        """Return the elements that one rank sends in a step over TP and over DP, as the papers count."""
        config, layer, policy = self.config, self.paper.layer, self.paper.workload.policy
        layers = self.model.spec.layers / self.pipeline
        return {
            "tensor": config.accumulation * layers * formulas.tensor_volume(layer, policy.mode),
            "data": formulas.zero_volume(
                self.model.whole / (layer.t * self.pipeline), config.zero_stage, config.data_parallel
            ),
        }

    def compare(self) -> Comparison:
        """Dry-run all layers, beside the sum of those that differ."""
        start = time.perf_counter()
        device = self.device
        whole = rank_memory(self.config, cpu=device.is_cpu, varlen=device.varlen, model=self.model, whole=True).peak
        return Comparison(whole, self.peak, time.perf_counter() - start)

    def as_json(self) -> dict[str, Any]:
        """Return everything, with units in the names."""
        config = self.config
        block = config.zero_tp
        return {
            "config": str(config.path),
            "model": {
                "model_type": config.hf_config().model_type,
                "parameters": self.model.whole,
                "parameters_of_rank": self.model.parameters.total,
            },
            "device": self.device.model_dump(),
            "ranks": self.ranks,
            "parallel": {
                "tensor": block.parallel.tensor,
                "data": config.data_parallel,
                "sequence": block.parallel.sequence,
                "pipeline": self.pipeline,
                "interleaving": self.interleaving,
            },
            "zero_stage": config.zero_stage,
            "dtype": config.dtype,
            "recompute": block.recompute_policy.mode,
            "batch": {
                "global": config.global_batch,
                "micro": config.micro_batch,
                "accumulation": config.accumulation,
                "tokens": self.tokens,
            },
            "paper_bytes": self.paper.bytes(),
            "paper_elements_sent": self.elements_sent(),
            "peak_bytes": self.peak.as_json(),
            "needed_bytes": self.needed,
            "spare_bytes": self.spare,
            "host_spare_bytes": self.host_spare,
            "fits": self.fits,
            "step_seconds": self.time.as_json(),
            "layer_seconds": self.time.layer.as_json(),
            "tokens_per_second": self.tokens / self.time.total,
            "model_flops": self.model_flops,
            "mfu": self.mfu,
        }


def needed(peak: Point, device: Device) -> float:
    """Return the bytes needed of the device's memory, margins included. A CPU rank's device is its host."""
    tensors = peak.total + (peak.host if device.is_cpu else 0.0)
    return tensors * (1 + device.fragmentation) + device.reserved_gib * GIB


def host_needed(host: float, device: Device, ranks: int) -> float:
    """Return the bytes needed of a node's host memory.

    Args:
        host: of one rank.
    """
    return 0.0 if device.is_cpu else host * min(device.per_node, ranks)


def check_device(device: Device, config: RunConfig) -> None:
    """Check that the device can compute in the run's dtype.

    Raises:
        UserError: the device has no matrix rate in the run's dtype.
    """
    if device.tflops(config.dtype) is None:
        others = [name for name in ("bf16", "fp16", "fp32") if device.tflops(name)]
        raise UserError(
            f"--device: {device.name} has no {config.dtype} matrix units; plan for {' or '.join(others)} "
            f"(--set bf16.enabled=false), or another device"
        )


def plan(
    config: RunConfig,
    device: Device,
    *,
    pipeline: int = 1,
    interleaving: int = 1,
    model: Model | None = None,
) -> Plan:
    """Plan a run on a device.

    Args:
        config: loaded with the ranks of one pipeline stage as its world size.
        pipeline, interleaving: p and m of the papers' accounting and of the time.

    Raises:
        UserError: the device can't compute in the run's dtype, or the layers don't divide by the stages.
    """
    check_device(device, config)
    model = model or model_in(config)
    layers = model.spec.layers
    if layers % (pipeline * interleaving):
        stages = f"{pipeline} stages" + (f" × {interleaving}" if interleaving > 1 else "")
        raise UserError(f"--pipeline: {layers} layers do not divide by {stages}; choose factors of {layers}")
    memory = rank_memory(config, cpu=device.is_cpu, varlen=device.varlen, model=model)
    workload, zero = workload_of(config, cpu=device.is_cpu, varlen=device.varlen), memory.zero
    return Plan(
        config=config,
        device=device,
        model=model,
        memory=memory,
        paper=PaperView(model, workload, config.zero_stage, config.data_parallel, pipeline, interleaving),
        time=Timing(
            spec=model.spec,
            at=workload,
            zero=zero.at,
            parameters=zero.parameters.total,
            device=device,
            pipeline=pipeline,
            interleaving=interleaving,
        ).estimate(),
        pipeline=pipeline,
        interleaving=interleaving,
    )
