"""A plan: what one run needs on one kind of device, and whether that is there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from zero_tp.config import RunConfig
from zero_tp.constants import GIB
from zero_tp.devices import Device
from zero_tp.errors import UserError
from zero_tp.models.flops import utilisation
from zero_tp.planning import formulas
from zero_tp.planning.memory import PaperView, Point, TrueView
from zero_tp.planning.shape import Shape
from zero_tp.planning.timing import StepTime, Timing
from zero_tp.planning.views import model_of, paper_view, true_view
from zero_tp.planning.zero import Parameters

Model = tuple[Shape, Parameters, int]


@dataclass(frozen=True)
class Plan:
    """Made by `plan`.

    Attributes:
        config: loaded for the ranks of one pipeline stage.
        pipeline, interleaving: of the papers' accounting; a run has none.
    """

    config: RunConfig
    device: Device
    model: Model
    true: TrueView
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
        return self.true.peak

    @property
    def needed(self) -> float:
        """Bytes of the device's memory: the peak with the allocator's gaps and what is reserved."""
        return needed(self.true, self.device)

    @property
    def spare(self) -> float:
        """Bytes of the device that stay free; negative: short by so much."""
        return self.device.memory_gib * GIB - self.needed

    @property
    def host_spare(self) -> float:
        """Bytes of a node's host memory that stay free; negative: short by so much."""
        return self.device.host_memory_gib * GIB - host_needed(self.true, self.device, self.ranks)

    @property
    def fits(self) -> bool:
        return self.spare >= 0 and self.host_spare >= 0

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.config.global_batch * self.config.zero_tp.data.sequence_length

    @property
    def model_flops(self) -> float:
        """Of one step, all devices together."""
        return self.model[0].model_flops(self.config.global_batch, self.config.zero_tp.data.sequence_length)

    @property
    def mfu(self) -> float | None:
        peak = self.device.tflops(self.config.dtype)
        assert peak is not None, "checked by check_device"
        return utilisation(self.model_flops, self.time.total, self.ranks, peak * 1e12)

    def elements_sent(self) -> dict[str, float]:
        """What one rank sends in a step over TP and over DP, as the papers count."""
        config, layer = self.config, self.paper.layer()
        layers = self.model[0].layers / self.pipeline
        return {
            "tensor": config.accumulation * layers * formulas.tensor_volume(layer, self.paper.mode),
            "data": formulas.zero_volume(
                self.model[2] / (layer.t * self.pipeline), config.zero_stage, config.data_parallel
            ),
        }

    def as_json(self) -> dict[str, Any]:
        """Everything, with units in the names."""
        config, peak = self.config, self.peak
        block = config.zero_tp
        return {
            "config": str(config.path),
            "model": {
                "model_type": config.hf_config().model_type,
                "parameters": self.model[2],
                "parameters_of_rank": self.model[1].total,
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
            "peak_bytes": {"phase": peak.phase, "total": peak.total, "host": peak.host, **peak.bytes},
            "needed_bytes": self.needed,
            "spare_bytes": self.spare,
            "host_spare_bytes": self.host_spare,
            "fits": self.fits,
            "step_seconds": {**self.time.terms(), "total": self.time.total},
            "tokens_per_second": self.tokens / self.time.total,
            "model_flops": self.model_flops,
            "mfu": self.mfu,
        }


def needed(view: TrueView, device: Device) -> float:
    """Bytes of the device's memory, margins included. A CPU rank's device is its host."""
    tensors = view.peak.total + (view.host if device.is_cpu else 0.0)
    return tensors * (1 + device.fragmentation) + device.reserved_gib * GIB


def host_needed(view: TrueView, device: Device, ranks: int) -> float:
    """Bytes of a node's host memory."""
    return 0.0 if device.is_cpu else view.host * min(device.per_node, ranks)


def check_device(device: Device, config: RunConfig) -> None:
    """
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
    """
    Args:
        config: loaded with the ranks of one pipeline stage as its world size.
        pipeline, interleaving: p and m of the papers' accounting and of the time.

    Raises:
        UserError: the device can't compute in the run's dtype, or the layers don't divide by the stages.
    """
    check_device(device, config)
    parallel = config.zero_tp.parallel
    model = model or model_of(config.hf_config(), parallel.tensor, parallel.sequence)
    layers = model[0].layers
    if layers % (pipeline * interleaving):
        stages = f"{pipeline} stages" + (f" × {interleaving}" if interleaving > 1 else "")
        raise UserError(f"--pipeline: {layers} layers do not divide by {stages}; choose factors of {layers}")
    true = true_view(config, cpu=device.is_cpu, model=model)
    paper = paper_view(config, pipeline=pipeline, interleaving=interleaving, model=model)
    return Plan(
        config=config,
        device=device,
        model=model,
        true=true,
        paper=paper,
        time=timing(config, device, true, pipeline, interleaving).estimate(),
        pipeline=pipeline,
        interleaving=interleaving,
    )


def timing(config: RunConfig, device: Device, true: TrueView, pipeline: int = 1, interleaving: int = 1) -> Timing:
    zero = true.zero
    return Timing(
        shape=true.shape,
        settings=true.settings,
        zero=zero.at,
        parameters=zero.parameters.total,
        device=device,
        dtype=config.dtype,
        pipeline=pipeline,
        interleaving=interleaving,
    )


def as_on_the_cpu(config: RunConfig, model: Model, *, fused_attention: bool) -> TrueView:
    """The true view that a dry run is compared with, which runs the CPU's kernels.

    Args:
        fused_attention: see `dryrun.dry_run`.
    """
    shape, parameters, whole = model
    if fused_attention and not shape.eager:
        shape = replace(shape, attention_dropout=False)
    return true_view(config, cpu=True, model=(shape, parameters, whole))
