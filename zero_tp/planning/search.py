"""Find settings that are free to change, at the run's global batch and world size, the fastest that fit first.

All are ranked by formulas; what is listed has been run dry, and accepted as a run is.
"""

from __future__ import annotations

import copy
import itertools
import json
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
from zero_tp.parallel.loss import accumulates_in_fp32, block_positions
from zero_tp.planning.dryrun import dry_run
from zero_tp.planning.memory import Model, PaperView, RankMemory, model_of
from zero_tp.planning.plan import Estimate
from zero_tp.planning.plan_settings import Workload, ZeroSettings, workload_of
from zero_tp.planning.tracking import Moment
from zero_tp.planning.zero import ZeroMemory
from zero_tp.strict_json import read_json

NEAREST = 8
"""If nothing fits by formulas, so many settings that come nearest are run dry before the search gives up."""
MODES: tuple[RecomputeMode, ...] = ("none", "selective", "full")
OFFLOADS = ((0, False, False), (1, True, False), (3, True, True))
"""The least ZeRO stage of each offload, and whether it is of the optimizer and of the parameters."""


@dataclass(frozen=True)
class Candidate(Estimate):
    """Settings of a run, with what they need and the time of their steps."""

    def describe(self) -> str:
        """Return the settings in words: `TP 2, SP, ZeRO-1, recompute none, micro 4 × 16`."""
        workload, zero = self.workload, self.settings
        parts = [f"TP {workload.tensor}"]
        parts += ["SP"] if workload.sequence else []
        parts += [f"ZeRO-{zero.stage}", *["reduced to owners"] * zero.owners]
        parts += [f"recompute {workload.policy.mode}", f"micro {workload.batch} × {zero.accumulation}"]
        away = ["optimizer"] * zero.offload_optimizer + ["parameters"] * zero.offload_param
        parts += [f"offload {' and '.join(away)}"] if away else []
        return ", ".join(parts)

    def as_json(self) -> dict[str, Any]:
        """Return everything, with units in the names."""
        workload, zero = self.workload, self.settings
        return {
            "tensor": workload.tensor,
            "sequence": workload.sequence,
            "stage": zero.stage,
            "recompute": workload.policy.mode,
            "micro": workload.batch,
            "accumulation": zero.accumulation,
            "offload_optimizer": zero.offload_optimizer,
            "offload_param": zero.offload_param,
            "owners": zero.owners,
            "needed_bytes": self.needed,
            "host_node_bytes": self.host_needed,
            "peak_bytes": self.peak.as_json(),
            "step_seconds": self.time.as_json(),
        }


class Search:
    """The settings of a run that are free to change, ranked by formulas.

    Attributes:
        ranked: those that fit, the fastest first, then the others, the nearest to fitting first.
        fitting: how many fit.
    """

    def __init__(self, config: RunConfig, device: Device):
        """Rank every choice by formulas.

        Raises:
            UserError: the device can't compute in the run's dtype; no setting splits this world size.
        """
        assert config.world_size is not None
        self.config, self.device, self.ranks = config, device, config.world_size
        self._dry_runs: dict[tuple[int, bool, int, str], list[Moment]] = {}
        self.ranked = list(self._candidates())
        if not self.ranked:
            raise UserError(
                f"--search: no tensor size splits {self.ranks} ranks, the model and a global batch of "
                f"{config.global_batch}; change one of them"
            )
        self.ranked.sort(key=lambda one: (max(0.0, one.short), one.time.total, one.needed))
        self.fitting = sum(one.fits for one in self.ranked)

    def fastest(self, overrides: Sequence[str], top: int) -> tuple[list[Candidate], dict[str, Any]]:
        """Return the fastest `top` candidates that fit in a dry run and load as a config, and the config of the first.

        If none of those that fit by formulas is left, the nearest of the others are run dry too.

        Raises:
            UserError: nothing fits. The message has what was tried, what is short and by how much.
        """
        raw = read_json(self.config.path)
        apply_overrides(raw, overrides)
        shown: list[Candidate] = []
        too_large: list[Candidate] = []
        best: dict[str, Any] = {}
        refusal: ConfigError | None = None
        for number, estimate in enumerate(self.ranked[: self.fitting + NEAREST]):
            if len(shown) == top or (shown and number >= self.fitting):
                break
            candidate = self._dry_run(estimate)
            if not candidate.fits:
                too_large.append(candidate)
                continue
            written = changed(raw, candidate.workload, candidate.settings)
            if (error := load_error(written, self.ranks)) is not None:
                refusal = error
                continue
            best = best or written
            shown.append(candidate)
        if not shown and refusal is not None:
            raise UserError(f"--search: every setting that fits is refused, the last one because: {refusal}")
        if not shown:
            raise UserError(self._describe_nearest(too_large))
        return shown, best

    def _describe_nearest(self, too_large: Sequence[Candidate]) -> str:
        device, nearest = self.device, min(too_large, key=lambda one: one.short)
        largest = sorted(nearest.peak.bytes.items(), key=lambda item: -item[1])[:3]
        listed = ", ".join(f"{name} {size / GIB:.1f}" for name, size in largest)
        return (
            f"{self.config.path}: does not fit {self.ranks} × {device.name}: of {len(self.ranked)} ways "
            f"{self.fitting or 'none'} fit by formulas, and none of the nearest {len(too_large)} fits when run dry; "
            f"{nearest.describe()} comes nearest with {nearest.needed / GIB:.1f} of {device.memory_gib:.4g} GiB "
            f"a device ({listed}) and {nearest.host_needed / GIB:.0f} of {device.host_memory_gib:.4g} GiB of a node's "
            f"host memory, short by {nearest.short / GIB:.1f} GiB a device; use more or larger devices"
        )

    def _candidates(self) -> Iterator[Candidate]:
        """Yield all settings that are free to change, with their memory by formulas."""
        config, device = self.config, self.device
        hf_config, deepspeed_config = config.hf_config(), config.deepspeed_config()
        run_workload = workload_of(config, cpu=device.is_cpu, varlen=device.varlen)
        for tensor, sequence in itertools.product(_divisors(self.ranks), (False, True)):
            data = self.ranks // tensor
            samples, left_over = divmod(config.global_batch, data)
            if left_over or (sequence and (tensor == 1 or run_workload.length % tensor)):
                continue
            try:
                model = model_of(hf_config, tensor, sequence)
            except UserError:  # heads or MLP do not divide
                continue
            run_settings = ZeroSettings.of(deepspeed_config, data, cpu=device.is_cpu)
            # A fused attention keeps nothing that selective recomputation would save.
            fused = model.spec.attention != "eager" and not (device.is_cpu and model.spec.dropouts.attention)
            modes = [mode for mode in MODES if not (fused and mode == "selective")]
            for micro, stage, recompute, offload, owners in itertools.product(
                _divisors(samples), range(4), modes, OFFLOADS, (False, True)
            ):
                least_stage, optimizer, parameters = offload
                settings = run_settings.with_stage(
                    stage,
                    accumulation=samples // micro,
                    offload_optimizer=optimizer,
                    offload_param=parameters,
                    owners=owners,
                )
                if stage < least_stage or settings.to_owners != owners:
                    continue
                workload = replace(
                    run_workload,
                    batch=micro,
                    tensor=tensor,
                    sequence=sequence,
                    policy=RecomputePolicy(mode=recompute),
                    checkpointing=run_workload.checkpointing if recompute == "full" else {},
                )
                zero = ZeroMemory(model.parameters, settings)
                moments = _estimated_moments(model, workload, zero)
                yield Candidate(device, model, workload, RankMemory(zero, moments))

    def _dry_run(self, estimate: Candidate) -> Candidate:
        workload, spec = estimate.workload, estimate.model.spec
        key = (workload.tensor, workload.sequence, workload.batch, workload.policy.mode)
        if key not in self._dry_runs:
            self._dry_runs[key] = dry_run(self.config.hf_config(), workload)
        memory = RankMemory(estimate.memory.zero, self._dry_runs[key], workload.stored(spec.hidden, spec.layers))
        return replace(estimate, memory=memory)


def _estimated_moments(model: Model, workload: Workload, zero: ZeroMemory) -> list[Moment]:
    """Return a few moments by the papers' formulas: the end of forward, and both ends of the layers' backward.

    Added to what the formulas count: all activations of a layer that is recomputed, the gradient of the output layer
    and a block of logits (as parallel/loss.py computes them), and the gradients of an eager core's scores.
    """
    paper, layers = PaperView(model, workload, zero.settings.stage, zero.settings.data), model.spec.layers
    logits = 4.0 * workload.labels * model.spec.vocabulary / workload.tensor
    saved = paper.layers_bytes() + paper.outside_bytes() - logits
    recomputed = paper.layer_bytes(recomputes=False)
    shard, dtype = -(-model.spec.vocabulary // workload.tensor), getattr(torch, DTYPES[workload.dtype])
    length, batch = (workload.length, workload.batch) if model.spec.causal else (workload.labels, 1)
    positions = block_positions(length, batch, shard, model.spec.hidden, dtype)
    gradient = (4 if accumulates_in_fp32(length, positions, dtype) else workload.element) * shard * model.spec.hidden
    block = workload.element * positions * batch * shard
    stream = 4 * workload.element * paper.layer.residual
    most = (
        max(zero.gathered_by_layer, key=lambda place: zero.gathered_by_layer[place])[1]
        if zero.settings.stage == 3
        else 0
    )
    total = float(zero.parameters.total)
    return [
        Moment("forward", layers, saved + gradient, block, 0.0),
        Moment("backward", layers - 1, saved, recomputed + stream + workload.element * shard * model.spec.hidden, 0.0),
        Moment("backward", min(max(most, 0), layers - 1), saved / 2, recomputed + stream, total / 2),
        Moment("backward", 0, saved / layers, recomputed + stream, total),
    ]


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


# ---- back to a config ------------------------------------------------------------------------------------------------


def changed(raw: Mapping[str, Any], workload: Workload, settings: ZeroSettings) -> dict[str, Any]:
    """Return the run's config with a candidate's settings.

    Args:
        raw: the object of the file, overrides applied.
    """
    config = copy.deepcopy(dict(raw))
    config["train_batch_size"] = workload.batch * settings.accumulation * settings.data
    config["train_micro_batch_size_per_gpu"] = workload.batch
    config["gradient_accumulation_steps"] = settings.accumulation
    zero = dict(config.get("zero_optimization", {}))
    if settings.stage != 3:
        zero = {key: value for key, value in zero.items() if not key.startswith("stage3_")}
    zero.pop("use_multi_rank_bucket_allreduce", None)
    if settings.owners:
        zero |= {"use_multi_rank_bucket_allreduce": False, "reduce_scatter": True}
    before = int(zero.get("stage", 0))
    if before != settings.stage and 3 in (before, settings.stage):
        zero.pop("overlap_comm", None)
    for key, wanted in (("offload_optimizer", settings.offload_optimizer), ("offload_param", settings.offload_param)):
        if not wanted:
            zero.pop(key, None)
        elif (zero.get(key) or {}).get("device", "none") == "none":
            zero[key] = {"device": "cpu", "pin_memory": True}
    config["zero_optimization"] = {**zero, "stage": settings.stage}
    if workload.policy.mode != "full":
        config.pop("activation_checkpointing", None)
    block = dict(config["zero_tp"])
    block["parallel"] = {"tensor": workload.tensor, "sequence": workload.sequence}
    block["recompute"] = workload.policy.mode
    config["zero_tp"] = block
    return config


def load_error(config: Mapping[str, Any], ranks: int) -> ConfigError | None:
    """Return why a run refuses this config, or None."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "candidate.json")
        path.write_text(json.dumps(config))
        try:
            RunConfig.load(path, (), ranks)
        except ConfigError as error:
            return error
    return None
