"""Find settings that are free to change, at the run's global batch and world size, the fastest that fit first.

All are ranked by formulas; what is listed has been run dry, and accepted as a run is.
"""

from __future__ import annotations

import copy
import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from zero_tp.activations.policy import RecomputeMode, RecomputePolicy
from zero_tp.config import RunConfig
from zero_tp.config.resolve import apply_overrides
from zero_tp.constants import DTYPES, GIB
from zero_tp.devices import Device
from zero_tp.errors import ConfigError, UserError
from zero_tp.files import write_named
from zero_tp.parallel.loss import adds_up, block_positions
from zero_tp.planning.dryrun import dry_run
from zero_tp.planning.memory import Model, Point, RankMemory, model_of, zero_memory
from zero_tp.planning.moments import Moment
from zero_tp.planning.papers import PaperView
from zero_tp.planning.plan import check_device, host_needed, needed
from zero_tp.planning.timing import StepTime, Timing
from zero_tp.planning.workload import Workload, workload_of
from zero_tp.planning.zero import ZeroMemory
from zero_tp.planning.zero_settings import ZeroSettings
from zero_tp.strict_json import read_json

NEAREST = 8
"""Settings that by formulas do not fit, the nearest, that are run dry before it is said that none fits."""
MODES: tuple[RecomputeMode, ...] = ("none", "selective", "full")


@dataclass(frozen=True)
class Choice:
    """A choice is the settings of one candidate."""

    tensor: int
    sequence: bool
    stage: int
    recompute: RecomputeMode
    micro: int
    accumulation: int
    offload_optimizer: bool
    offload_param: bool

    def describe(self) -> str:
        """Return the settings in words: `TP 2, SP, ZeRO-1, recompute none, micro 4 × 16`."""
        parts = [f"TP {self.tensor}"]
        parts += ["SP"] if self.sequence else []
        parts += [f"ZeRO-{self.stage}", f"recompute {self.recompute}", f"micro {self.micro} × {self.accumulation}"]
        away = ["optimizer"] * self.offload_optimizer + ["parameters"] * self.offload_param
        parts += [f"offload {' and '.join(away)}"] if away else []
        return ", ".join(parts)


@dataclass(frozen=True)
class Candidate:
    """A candidate is a choice with what it needs.

    Attributes:
        peak: the moment at which the device holds the most.
        needed: bytes of the device's memory, margins included. host: of a node's host memory.
        short: bytes that the device or a device's share of the host lacks, the greater; 0 or less where all fits.
        time: of a step.
    """

    choice: Choice
    model: Model
    workload: Workload
    zero: ZeroMemory
    peak: Point
    needed: float
    host: float
    short: float
    time: StepTime

    def as_json(self) -> dict[str, Any]:
        """Return everything, with units in the names."""
        return {
            **vars(self.choice),
            "needed_bytes": self.needed,
            "host_node_bytes": self.host,
            "peak_bytes": self.peak.as_json(),
            "step_seconds": self.time.as_json(),
        }


class Search:
    """A search weighs the other settings of a run.

    Attributes:
        ranked: by formulas: those that fit before those that don't, the faster first, or the nearest to fitting.
        fitting: how many of them fit.
    """

    def __init__(self, config: RunConfig, device: Device):
        """Rank every choice by formulas.

        Raises:
            UserError: the device can't compute in the run's dtype; no setting splits this world size.
        """
        check_device(device, config)
        self.config, self.device = config, device
        self._deepspeed = config.deepspeed_config()
        self._workload = workload_of(config, cpu=device.is_cpu, varlen=device.varlen)
        self._dry_runs: dict[tuple[int, bool, int, str], list[Moment]] = {}
        self.ranked = [self._estimated(choice, model) for choice, model in _choices(config, cpu=device.is_cpu)]
        if not self.ranked:
            raise UserError(
                f"--search: no tensor size splits {config.world_size} ranks, the model and a global batch of "
                f"{config.global_batch}; change one of them"
            )
        self.ranked.sort(key=lambda one: (max(0.0, one.short), one.time.total, one.needed))
        self.fitting = sum(one.short <= 0 for one in self.ranked)

    def fastest(self, overrides: Sequence[str], top: int) -> tuple[list[Candidate], dict[str, Any]]:
        """Return the fastest `top` whose dry run fits and that a run accepts, and the first one's config.

        Where none of those that fit by formulas is one, the nearest of the others are run dry too.

        Raises:
            UserError: nothing fits; says what was tried, what is short and by how much.
        """
        raw = read_json(self.config.path)
        apply_overrides(raw, overrides)
        shown: list[Candidate] = []
        best: dict[str, Any] = {}
        lacking: list[Candidate] = []
        refused = None
        assert self.config.world_size is not None
        for number, estimated in enumerate(self.ranked[: self.fitting + NEAREST]):
            if number >= self.fitting and shown:
                break
            one = self._run_dry(estimated)
            if one.short > 0:
                lacking.append(one)
                continue
            written = changed(raw, one.choice, self.config.global_batch)
            refusal = accepted(written, self.config.world_size)
            if refusal is not None:
                refused = refusal
                continue
            best = best or written
            shown.append(one)
            if len(shown) == top:
                break
        if not shown and refused is not None:
            raise UserError(f"--search: every setting that fits is refused, the last one because: {refused}")
        if not shown:
            raise UserError(self._short(lacking))
        return shown, best

    def _short(self, lacking: Sequence[Candidate]) -> str:
        config, device = self.config, self.device
        least = min(lacking, key=lambda one: one.short)
        parts = sorted(least.peak.bytes.items(), key=lambda item: -item[1])[:3]
        listed = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts)
        return (
            f"{config.path}: does not fit {config.world_size} × {device.name}: of {len(self.ranked)} ways "
            f"{self.fitting or 'none'} fit by formulas, and none of the nearest {len(lacking)} fits when run dry; "
            f"{least.choice.describe()} comes nearest with {least.needed / GIB:.1f} of {device.memory_gib:.4g} GiB a "
            f"device ({listed}) and {least.host / GIB:.0f} of {device.host_memory_gib:.4g} GiB of a node's host "
            f"memory, short by {least.short / GIB:.1f} GiB a device; use more or larger devices"
        )

    def _estimated(self, choice: Choice, model: Model) -> Candidate:
        config, device = self.config, self.device
        assert config.world_size is not None
        given = ZeroSettings.of(self._deepspeed, config.world_size // choice.tensor, cpu=device.is_cpu)
        settings = given.at_stage(
            choice.stage,
            accumulation=choice.accumulation,
            offload_optimizer=choice.offload_optimizer,
            offload_param=choice.offload_param,
        )
        zero = zero_memory(model.parameters, settings)
        workload = replace(
            self._workload,
            batch=choice.micro,
            tensor=choice.tensor,
            sequence=choice.sequence,
            policy=RecomputePolicy(mode=choice.recompute),
            checkpointing=self._workload.checkpointing if choice.recompute == "full" else {},
        )
        memory = RankMemory(zero, _estimate(model, workload, zero))
        time = Timing(model.spec, workload, zero.at, model.parameters.total, device).estimate()
        return self._candidate(choice, model, workload, memory, time)

    def _run_dry(self, one: Candidate) -> Candidate:
        choice = one.choice
        key = (choice.tensor, choice.sequence, choice.micro, choice.recompute)
        if key not in self._dry_runs:
            self._dry_runs[key] = dry_run(self.config.hf_config(), one.workload)
        memory = RankMemory(one.zero, self._dry_runs[key])
        return self._candidate(choice, one.model, one.workload, memory, one.time)

    def _candidate(
        self, choice: Choice, model: Model, workload: Workload, memory: RankMemory, time: StepTime
    ) -> Candidate:
        device = self.device
        own, host = needed(memory.peak, device), host_needed(memory.host, device, self.config.world_size or 1)
        lacking = (host - device.host_memory_gib * GIB) / device.per_node
        short = max(own - device.memory_gib * GIB, lacking)
        return Candidate(choice, model, workload, memory.zero, memory.peak, own, host, short, time)


def _estimate(model: Model, workload: Workload, zero: ZeroMemory) -> list[Moment]:
    """Return a few moments by the papers' formulas: the end of forward, and both ends of the layers' backward.

    Beside what is kept, a layer that runs again has its activations whole, the output layer its gradient and a block of
    logits (as the loss of parallel/loss.py makes them), and an eager core its scores' gradients.
    """
    paper, layers = PaperView(model, workload, zero.at.stage, zero.at.data), model.spec.layers
    logits = 4.0 * workload.labels * model.spec.vocabulary / workload.tensor
    kept = paper.layers_bytes() + paper.outside_bytes() - logits
    again = paper.layer_bytes(recomputes=False)
    shard, dtype = -(-model.spec.vocabulary // workload.tensor), getattr(torch, DTYPES[workload.dtype])
    length, batch = (workload.length, workload.batch) if model.spec.causal else (workload.labels, 1)
    positions = block_positions(length, batch, shard, model.spec.hidden, dtype)
    wide = adds_up(length, positions, dtype)
    gradient = (4 if wide else workload.element) * shard * model.spec.hidden
    block = workload.element * positions * batch * shard
    stream = 4 * workload.element * paper.layer.residual
    most = max(zero.gathered_at, key=lambda at: zero.gathered_at[at])[1] if zero.at.stage == 3 else 0
    total = float(zero.parameters.total)
    return [
        Moment("forward", layers, kept + gradient, block, 0.0),
        Moment("backward", layers - 1, kept, again + stream + workload.element * shard * model.spec.hidden, 0.0),
        Moment("backward", min(max(most, 0), layers - 1), kept / 2, again + stream, total / 2),
        Moment("backward", 0, kept / layers, again + stream, total),
    ]


def _choices(config: RunConfig, *, cpu: bool) -> Iterator[tuple[Choice, Model]]:
    world, total = config.world_size, config.global_batch
    assert world is not None
    length, hf_config = config.zero_tp.data.sequence_length, config.hf_config()
    for tensor in _divisors(world):
        data = world // tensor
        if total % data:
            continue
        for sequence in (False, True):
            if sequence and (tensor == 1 or length % tensor):
                continue
            try:
                model = model_of(hf_config, tensor, sequence)
            except UserError:  # heads or MLP do not divide
                break
            # A fused attention keeps nothing that selective recomputation would save.
            fused = model.spec.attention != "eager" and not (cpu and model.spec.dropouts.attention)
            modes = [mode for mode in MODES if not (fused and mode == "selective")]
            for micro in _divisors(total // data):
                for stage in range(4):
                    for recompute in modes:
                        offloads = [(False, False)] + [(True, False)] * (stage > 0) + [(True, True)] * (stage == 3)
                        for optimizer, parameters in offloads:
                            accumulation = total // data // micro
                            yield (
                                Choice(tensor, sequence, stage, recompute, micro, accumulation, optimizer, parameters),
                                model,
                            )


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


# ---- back to a config ------------------------------------------------------------------------------------------------


def changed(raw: Mapping[str, Any], choice: Choice, global_batch: int) -> dict[str, Any]:
    """Return the run's file with a choice's settings.

    Args:
        raw: the object of the file, overrides applied.
    """
    config = copy.deepcopy(dict(raw))
    config["train_batch_size"] = global_batch
    config["train_micro_batch_size_per_gpu"] = choice.micro
    config["gradient_accumulation_steps"] = choice.accumulation
    zero = dict(config.get("zero_optimization", {}))
    if choice.stage != 3:
        zero = {key: value for key, value in zero.items() if not key.startswith("stage3_")}
    before = int(zero.get("stage", 0))
    if before != choice.stage and 3 in (before, choice.stage):
        zero.pop("overlap_comm", None)
    for key, wanted in (("offload_optimizer", choice.offload_optimizer), ("offload_param", choice.offload_param)):
        if not wanted:
            zero.pop(key, None)
        elif (zero.get(key) or {}).get("device", "none") == "none":
            zero[key] = {"device": "cpu", "pin_memory": True}
    config["zero_optimization"] = {**zero, "stage": choice.stage}
    if choice.recompute != "full":
        config.pop("activation_checkpointing", None)
    block = dict(config["zero_tp"])
    block["parallel"] = {"tensor": choice.tensor, "sequence": choice.sequence}
    block["recompute"] = choice.recompute
    config["zero_tp"] = block
    return config


def accepted(config: Mapping[str, Any], world: int) -> ConfigError | None:
    """Return what a run of this config would be refused for, or None."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "candidate.json")
        path.write_text(json.dumps(config))
        try:
            RunConfig.load(path, (), world)
        except ConfigError as error:
            return error
    return None


def write(config: Mapping[str, Any], path: Path) -> None:
    """Write a config as a JSON file, whole or not at all.

    Raises:
        UserError: the file can't be written.
    """
    write_named(path, json.dumps(config, indent=2) + "\n")
