"""Plan the memory and the time of a run on one kind of device."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from zero_tp.base.constants import GIB
from zero_tp.model.flops import model_flops, utilisation
from zero_tp.parallel.devices import Device
from zero_tp.run.config import RunConfig
from zero_tp.tools.planning import formulas
from zero_tp.tools.planning.dryrun import dry_run
from zero_tp.tools.planning.exchange_time import ExchangeTraffic
from zero_tp.tools.planning.matrix_update import MatrixUpdate
from zero_tp.tools.planning.memory import (
    ModelSize,
    PaperMemory,
    Point,
    RankMemory,
    largest_stage,
    rank_memory,
    run_model_size,
)
from zero_tp.tools.planning.plan_settings import Workload, ZeroSettings, workload_of
from zero_tp.tools.planning.rates import matrix_flops
from zero_tp.tools.planning.timing import StepTime, StepTimeEstimator

HOUR, DAY = 3600, 86400  # seconds


@dataclass(frozen=True)
class Estimate:
    """The memory [bytes] and time of a run on one kind of device.

    The settings are the config's or those of a search.
    """

    device: Device
    model: ModelSize
    workload: Workload
    memory: RankMemory

    @property
    def settings(self) -> ZeroSettings:
        return self.memory.zero.settings

    @property
    def ranks(self) -> int:
        return self.workload.tensor * self.settings.data

    @property
    def peak(self) -> Point:
        return self.memory.peak

    @cached_property
    def time(self) -> StepTime:
        """Return the seconds of one step."""
        # A rank's parameters and not Ψ/t: replicated ones are on every rank.
        parameters = self.model.parameters
        tensors = sum(map(len, parameters.groups))
        return StepTimeEstimator(
            self.model.spec,
            self.workload,
            self.device,
            self.settings,
            parameters.total,
            tensors,
            self.muon,
            parameters.experts,
        ).estimate()

    @property
    def muon(self) -> tuple[MatrixUpdate, ...]:
        """Return the update of each group of matrices; none under another optimizer."""
        return tuple(update for update in self.memory.zero.matrix_updates if update is not None)

    @property
    def communicators(self) -> int:
        """Return a rank's number of communicators.

        There is one of the world, and one of each TP, DP, expert or expert-data group that is
        smaller.
        """
        settings = self.settings
        sizes = [self.workload.tensor, settings.data]
        if settings.expert > 1:
            sizes += [settings.expert, settings.expert_data]
        return (self.ranks > 1) + sum(1 < size < self.ranks for size in sizes)

    @property
    def reserved(self) -> float:
        """Return the bytes of the context, kernels and communicators."""
        return (self.device.context_gib + self.communicators * self.device.communicator_gib) * GIB

    @property
    def tensor_bytes(self) -> float:
        """Return the bytes of tensors at the peak. Host memory counts for a CPU rank."""
        return self.peak.total + (self.peak.host if self.device.is_cpu else 0.0)

    @property
    def needed(self) -> float:
        """Return the bytes of device memory that are needed, with all margins."""
        return self.tensor_bytes * (1 + self.device.fragmentation) + self.reserved

    @property
    def usable(self) -> float:
        """Return the largest peak [bytes of tensors] that fits on the device with all margins."""
        # `needed` solved for the peak: peak · (1 + fragmentation) + reserved = memory.
        limit = (self.device.memory_gib * GIB - self.reserved) / (1 + self.device.fragmentation)
        return limit - (self.tensor_bytes - self.peak.total)

    @property
    def spare(self) -> float:
        """Return the bytes of device memory that stay free; negative if the run does not fit."""
        return self.device.memory_gib * GIB - self.needed

    @property
    def host_needed(self) -> float:
        """Return the bytes of a node's host memory that are needed."""
        return (
            0.0 if self.device.is_cpu else self.memory.host * min(self.device.per_node, self.ranks)
        )

    @property
    def host_spare(self) -> float:
        """Return the bytes of a node's host memory that stay free; negative if the run does not
        fit.
        """
        return self.device.host_memory_gib * GIB - self.host_needed

    @property
    def shortage(self) -> float:
        """Return the missing bytes of the device or of its share of host memory.

        The larger one counts; it is at most 0 if the run fits.
        """
        # A node's shortage of host memory, per rank: both then count bytes of one rank.
        return max(-self.spare, -self.host_spare / min(self.device.per_node, self.ranks))

    @property
    def fits(self) -> bool:
        return self.shortage <= 0

    def describe(self) -> str:
        """Return the settings in words: `TP 2, SP, ZeRO-1, recompute none, micro 4 × 16`."""
        workload = self.workload
        zero = self.settings
        parts = [f"TP {workload.tensor}", *["SP"] * workload.sequence]
        parts += [f"EP {workload.expert}"] * (workload.expert > 1)
        parts += [f"ZeRO-{zero.stage}", *["reduced to owners"] * zero.requests_owner_reduction]
        parts += [workload.describe_recompute(), f"micro {workload.batch} × {zero.accumulation}"]
        offloaded = ["optimizer"] * zero.offload_optimizer + ["parameters"] * zero.offload_param
        return ", ".join([*parts, *([f"offload {' and '.join(offloaded)}"] if offloaded else [])])

    def as_json(self) -> dict[str, Any]:
        """Return the settings, memory and time, with units in the names."""
        workload = self.workload
        zero = self.settings
        return {
            "tensor": workload.tensor,
            "sequence": workload.sequence,
            "expert": workload.expert,
            "stage": zero.stage,
            "recompute": workload.recompute,
            "micro": workload.batch,
            "accumulation": zero.accumulation,
            "offload_optimizer": zero.offload_optimizer,
            "offload_param": zero.offload_param,
            "owners": zero.requests_owner_reduction,
            "needed_bytes": self.needed,
            "host_node_bytes": self.host_needed,
            "peak_bytes": self.peak.as_json(),
            "step_seconds": self.time.as_json(),
        }


@dataclass(frozen=True)
class Plan(Estimate):
    """The plan of one run on one kind of device; call `plan` to get it.

    Attributes:
        token_budget: tokens of the whole run; None: those of the config's steps.
        stage: name of the planned stage, the one that needs the most memory; empty if the run has
            none. The time of the run is as if all its tokens had the speed of this stage.
    """

    config: RunConfig
    token_budget: int | None = None
    stage: str = ""

    @property
    def run_tokens(self) -> int:
        return self.token_budget or self.step_tokens * self.config.zero_tp.training.steps

    @property
    def run_seconds(self) -> float:
        """Return the time of the whole run's steps."""
        return self.time.total * self.run_tokens / self.step_tokens

    @property
    def paper(self) -> PaperMemory:
        return PaperMemory(
            self.model, self.workload, self.config.zero_stage, self.config.data_parallel
        )

    @property
    def step_tokens(self) -> int:
        """Return the tokens of one step."""
        return self.config.global_batch * self.workload.length

    @property
    def model_flops(self) -> float:
        """Return the model FLOPs of one step, all devices together."""
        config = self.config
        return model_flops(
            self.model.spec, config.global_batch, self.workload.length, config.label_fraction
        )

    @property
    def mfu(self) -> float | None:
        peak = matrix_flops(self.device, self.config.dtype)
        return utilisation(self.model_flops, self.time.total, self.ranks, peak)

    @property
    def expert_bytes(self) -> float:
        """Return the bytes that the busiest rank sends to other expert ranks in a step."""
        spec = self.model.spec
        workload = self.workload
        if workload.expert == 1:
            return 0.0
        accumulation = self.config.accumulation
        recomputed = 0.0
        if workload.policy.mode == "full":
            recomputed = workload.policy.mean_recomputed_layers(spec.layers, accumulation)
        share = recomputed / spec.layers
        exchange = ExchangeTraffic(spec, workload)
        sent = (1 - share) * exchange.sent() + share * exchange.sent(recomputed=True)
        return accumulation * len(spec.expert_layers) * sent

    def elements_sent(self) -> dict[str, float]:
        """Return the elements that one rank sends in a step over TP and over DP, by the papers'
        formulas.
        """
        config = self.config
        paper = self.paper
        policy = self.workload.policy
        layers = self.model.spec.layers
        recomputed = policy.mean_recomputed_layers(layers, config.accumulation)
        tensor = recomputed * formulas.tensor_volume(paper.layer, policy.mode)
        tensor += (layers - recomputed) * formulas.tensor_volume(paper.layer)
        data = sum(
            formulas.zero_volume(parameters, config.zero_stage, ranks, config.accumulation)
            for parameters, ranks in paper.shares
        )
        elements = {"tensor": config.accumulation * tensor, "data": data}
        if self.workload.expert > 1:
            elements["expert"] = self.expert_bytes / self.workload.itemsize
        return elements

    def dry_run_all_layers(self) -> tuple[Point, float]:
        """Return the peak of a dry run that executes every layer, and the seconds that it took."""
        start = time.perf_counter()
        samples = dry_run(self.config.hf_config(), self.workload, all_layers=True)
        return replace(self.memory, samples=samples).peak, time.perf_counter() - start

    def as_json(self) -> dict[str, Any]:
        """Return everything, with units in the names."""
        config = self.config
        workload = self.workload
        return {
            "config": str(config.path),
            "model": {
                "model_type": config.hf_config().model_type,
                "parameters": self.model.num_parameters,
                "active_parameters": self.model.active_parameters,
                "parameters_of_rank": self.model.parameters.total,
            },
            "device": self.device.model_dump(),
            "ranks": self.ranks,
            "parallel": {
                "tensor": workload.tensor,
                "data": config.data_parallel,
                "sequence": workload.sequence,
                "expert": workload.expert,
            },
            "zero_stage": config.zero_stage,
            "dtype": config.dtype,
            "recompute": workload.recompute,
            "batch": {
                "global": config.global_batch,
                "micro": config.micro_batch,
                "accumulation": config.accumulation,
                "tokens": self.step_tokens,
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
            "tokens_per_second": self.step_tokens / self.time.total,
            "run": {
                "tokens": self.run_tokens,
                "days": self.run_seconds / DAY,
                "device_hours": self.run_seconds * self.ranks / HOUR,
            },
            "muon": [update.as_json() for update in self.muon],
            "model_flops": self.model_flops,
            "mfu": self.mfu,
        }


def plan(
    config: RunConfig,
    device: Device,
    tokens: int | None = None,
    *,
    expert_imbalance: float = 1.0,
) -> Plan:
    """Plan a run on a device.

    `Plan.needed` [bytes of a rank] is the peak of memory.py (activations by dryrun.py, states by
    zero.py) and the device's margins; `Plan.time.total` [seconds a step] is that of timing.py.

    Args:
        config: loaded with a world size.
        tokens: tokens of the whole run; None: those of the config's steps.
        expert_imbalance: see `Workload`.

    Raises:
        UserError: the device can't compute in the run's dtype.
    """
    matrix_flops(device, config.dtype)  # refuses before the dry run
    if tokens is None and (config.zero_tp.training.stages or config.stages[0].ramp is not None):
        tokens = config.timeline.tokens
    model = run_model_size(config)

    def workload_in(stage: RunConfig) -> Workload:
        cpu, varlen = device.is_cpu, device.varlen
        return workload_of(stage, cpu=cpu, varlen=varlen, expert_imbalance=expert_imbalance)

    # A run of several stages is planned by the one that needs the most memory.
    largest = largest_stage(config, lambda one: rank_memory(one, workload_in(one), model))
    workload = workload_in(largest.config)
    return Plan(device, model, workload, largest.memory, largest.config, tokens, largest.name)
