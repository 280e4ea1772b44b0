"""Search for the fastest settings that fit, at the run's global batch and world size.

All candidates are ranked by formulas. The best ones then get a dry run and must load as a run's
config.
"""

from __future__ import annotations

import itertools
import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from zero_tp.base.constants import DTYPES, GIB
from zero_tp.base.errors import ConfigError, UserError
from zero_tp.base.settings.deepspeed import (
    ActivationCheckpointing,
    DeepSpeedSettings,
    OffloadOptimizer,
)
from zero_tp.base.settings.keys import apply_overrides
from zero_tp.base.settings.recompute import RecomputeMode, RecomputePolicy
from zero_tp.base.strict_json import read_json
from zero_tp.base.validation import ConfigErrors
from zero_tp.engine.settings.rules import refuse_experts
from zero_tp.model.architectures import architecture_of
from zero_tp.model.architectures.spec import TransformerSpec
from zero_tp.parallel.devices import Device
from zero_tp.parallel.loss import accumulates_in_fp32
from zero_tp.run.config import RunConfig
from zero_tp.tools.planning.dryrun import dry_run
from zero_tp.tools.planning.memory import ModelSize, PaperMemory, RankMemory, model_size, params_of
from zero_tp.tools.planning.plan import Estimate
from zero_tp.tools.planning.plan_settings import LossBlocks, Workload, ZeroSettings, workload_of
from zero_tp.tools.planning.tracking import MemorySample
from zero_tp.tools.planning.zero import ZeroMemory

NEAREST = 8
"""Number of candidates that do not fit by formulas and still get a dry run."""
MODES: tuple[RecomputeMode, ...] = ("none", "selective", "full")
OFFLOADS = ((0, False, False), (1, True, False), (3, True, True))
"""(the lowest ZeRO stage with this offload, offload of the optimizer, offload of the
parameters).
"""


class Search:
    """The candidates of a run, ranked by formulas.

    Attributes:
        ranked: those that fit, the fastest first, then the others by their shortage.
        fitting: number of candidates that fit by formulas.
    """

    def __init__(self, config: RunConfig, device: Device, *, expert_imbalance: float = 1.0):
        """Rank all candidates by formulas.

        Args:
            expert_imbalance: see `Workload`.
        """
        assert config.world_size is not None
        self.expert_imbalance = expert_imbalance
        self.config = config
        self.device = device
        self.ranks = config.world_size
        self._dry_runs: dict[tuple[int, bool, int, int, str], list[MemorySample]] = {}
        self.ranked = list(self._candidates())
        if not self.ranked:
            raise UserError(
                f"--search: no TP size suits {self.ranks} ranks, the model's heads and MLP, and a "
                "global batch of "
                f"{config.global_batch}; change one of them"
            )
        # What fits has a shortage of 0 and is ordered by time, then by memory. What does not fit
        # comes after it, the smallest shortage first.
        self.ranked.sort(key=lambda this: (max(0.0, this.shortage), this.time.total, this.needed))
        self.fitting = sum(candidate.fits for candidate in self.ranked)

    def fastest(self, overrides: Sequence[str], top: int) -> tuple[list[Estimate], dict[str, Any]]:
        """Return the fastest `top` candidates, and the config of the first one.

        Each has fitted in a dry run and loads as a run's config.

        If none that fits by formulas fits in its dry run, the next NEAREST candidates get one too.

        Raises:
            UserError: nothing fits. The message names the nearest candidate and its shortage.
        """
        # The written config starts from the user's file and not from the resolved one, so it has
        # the user's keys and no defaults.
        raw = read_json(self.config.path)
        apply_overrides(raw, overrides)
        shown: list[tuple[Estimate, dict[str, Any]]] = []
        too_large: list[Estimate] = []
        refusal: ConfigError | None = None
        # Formulas only rank. The dry run decides whether a candidate fits, and takes seconds, so it
        # runs until enough have fitted.
        for number, candidate in enumerate(self.ranked[: self.fitting + NEAREST]):
            if len(shown) == top or (shown and number >= self.fitting):
                break
            estimate = self._dry_run(candidate)
            written = candidate_config(raw, estimate.workload, estimate.settings)
            if not estimate.fits:
                too_large.append(estimate)
            elif error := load_error(written, self.ranks):
                refusal = error
            else:
                shown.append((estimate, written))
        if shown:
            return [estimate for estimate, _ in shown], shown[0][1]
        if refusal is not None:
            raise UserError(
                f"--search: every setting that fits is refused, the last one because: {refusal}"
            )
        raise UserError(self._describe_nearest(too_large))

    def _describe_nearest(self, too_large: Sequence[Estimate]) -> str:
        device = self.device
        nearest = min(too_large, key=lambda estimate: estimate.shortage)
        largest = sorted(nearest.peak.bytes.items(), key=lambda item: -item[1])[:3]
        listed = ", ".join(f"{name} {size / GIB:.1f}" for name, size in largest)
        return (
            f"{self.config.path}: does not fit {self.ranks} × {device.name}: of {len(self.ranked)} "
            "candidates "
            f"{self.fitting or 'none'} fit by formulas, and none of the nearest {len(too_large)} "
            "fits in a dry run; "
            f"{nearest.describe()} comes nearest with {nearest.needed / GIB:.1f} of "
            f"{device.memory_gib:.4g} GiB "
            f"a device ({listed}) and {nearest.host_needed / GIB:.0f} of "
            f"{device.host_memory_gib:.4g} GiB of a node's "
            f"host memory, short by {nearest.shortage / GIB:.1f} GiB a device; use more or larger "
            "devices"
        )

    def _candidates(self) -> Iterator[Estimate]:
        """Yield all candidates, with their memory by formulas.

        Drawn for 8 ranks and a global batch of 64:

            TP 1   DP 8   8 rows a replica    micro × accumulation 1 × 8, 2 × 4, 4 × 2, 8 × 1
            TP 2   DP 4   16 rows a replica   1 × 16 … 16 × 1, each with and without SP
            TP 8   DP 1   64 rows a replica   1 × 64 … 64 × 1

        Times the EP degrees that divide DP and the model's experts, 4 stages, 2 or 3
        recomputations, 3 offloads and 2 ways to reduce gradients. What a stage does not have is
        left out.
        """
        config = self.config
        device = self.device
        run_settings = ZeroSettings.of(config, cpu=device.is_cpu)
        run_workload = workload_of(
            config,
            cpu=device.is_cpu,
            varlen=device.varlen,
            expert_imbalance=self.expert_imbalance,
        )
        for tensor, sequence, expert in self._degrees():
            data = self.ranks // tensor
            samples, left_over = divmod(config.global_batch, data)
            if left_over or (sequence and (tensor == 1 or run_workload.length % tensor)):
                continue
            try:
                groups = config.zero_tp.param_groups
                params = params_of(config)
                degrees = tensor, sequence
                model = model_size(config.hf_config(), *degrees, groups, params, expert=expert)
            except UserError:  # heads or MLP do not divide
                continue
            policies = _policies(run_workload, model.spec)
            choices = itertools.product(
                _divisors(samples), self._stages[expert], policies, OFFLOADS, (False, True)
            )
            for micro, stage, policy, (lowest_stage, optimizer, parameters), owners in choices:
                changes = {
                    "offload_optimizer": optimizer,
                    "offload_param": parameters,
                    "requests_owner_reduction": owners,
                }
                settings = run_settings.with_stage(
                    stage, data=data, expert=expert, accumulation=samples // micro, **changes
                )
                # Where a stage cannot reduce to owners, or with one replica, both values of
                # `owners` would be the same candidate twice.
                if stage < lowest_stage or settings.reduces_to_owners != owners:
                    continue
                checkpointing = run_workload.checkpointing
                workload = replace(
                    run_workload,
                    batch=micro,
                    tensor=tensor,
                    sequence=sequence,
                    expert=expert,
                    policy=policy,
                    checkpointing=checkpointing
                    if policy.mode == "full"
                    else ActivationCheckpointing(),
                )
                zero = ZeroMemory(
                    model.parameters, settings, workload.fully_recomputed_layers(model.spec.layers)
                )
                yield Estimate(
                    device,
                    model,
                    workload,
                    RankMemory(zero, _estimated_samples(model, workload, zero)),
                )

    def _degrees(self) -> Iterator[tuple[int, bool, int]]:
        """Yield degrees of TP, whether SP is on, and degrees of EP. Those without EP come first, so
        that of equals they stay first.
        """
        for expert, stages in self._stages.items():
            for tensor, sequence in itertools.product(_divisors(self.ranks), (False, True)):
                if stages and self.ranks // tensor % expert == 0:
                    yield tensor, sequence, expert

    @cached_property
    def _stages(self) -> dict[int, list[int]]:
        """Return the ZeRO stages that a run accepts with each degree of EP that divides the
        model's experts, 1 first.
        """
        hf_config = self.config.hf_config()
        experts = architecture_of(hf_config).spec(hf_config).experts
        degrees = [1] if experts is None else _divisors(math.gcd(experts.count, self.ranks))
        return {
            expert: [stage for stage in range(4) if _accepts(self.config.settings, stage, expert)]
            for expert in degrees
        }

    def _dry_run(self, estimate: Estimate) -> Estimate:
        workload = estimate.workload
        spec = estimate.model.spec
        # Neither the ZeRO stage nor offload changes activations, so candidates that differ only
        # there share a dry run.
        key = (
            workload.tensor,
            workload.sequence,
            workload.expert,
            workload.batch,
            workload.policy.model_dump_json(),
        )
        if key not in self._dry_runs:
            self._dry_runs[key] = dry_run(self.config.hf_config(), workload)
        memory = RankMemory(
            estimate.memory.zero,
            self._dry_runs[key],
            workload.activation_checkpoint_bytes(spec.hidden, spec.layers),
        )
        return replace(estimate, memory=memory)


def _estimated_samples(
    model: ModelSize, workload: Workload, zero: ZeroMemory
) -> list[MemorySample]:
    """Return a few samples by the papers' formulas: the end of forward, and three in backward.

    They add what the formulas leave out: all activations of the layer whose backward runs, the
    gradient of the output layer and gradients of the residual stream. One block of logits replaces
    all logits (parallel/loss.py).
    """
    # The four samples, with what they add to the formulas' activations A:
    #
    #     end of forward                A, one block of logits, the head's gradient
    #     backward of the last layer    A, all of one layer, the head's gradient
    #     middle of backward            A/2, one layer, half of all gradients
    #     backward of the first layer   A/L, one layer, all gradients
    paper = PaperMemory(model, workload, zero.settings.stage, zero.settings.data)
    layers = model.spec.layers
    logits = 4.0 * workload.labels * model.spec.vocabulary / workload.tensor
    saved = paper.all_layers_bytes() + paper.outside_bytes() - logits
    one_layer = paper.layer_bytes(recomputes=False)
    blocks = LossBlocks.of(model.spec, workload)
    dtype = getattr(torch, DTYPES[workload.dtype])
    gradient = (
        (4 if accumulates_in_fp32(blocks.length, blocks.positions, dtype) else workload.itemsize)
        * blocks.rows
        * model.spec.hidden
    )
    block = workload.itemsize * blocks.positions * blocks.batch * blocks.rows
    stream = 4 * workload.itemsize * paper.layer.residual
    # With ZeRO-3 the sample in the middle of backward is of the layer with the most gathered
    # parameters.
    gathered = zero.gathered_by_layer if zero.settings.stage == 3 else {("backward", 0): 0.0}
    _, middle = max(gathered, key=gathered.__getitem__)
    total = float(zero.parameters.total)
    return [
        MemorySample("forward", layers, saved + gradient, block, 0.0),
        MemorySample(
            "backward",
            layers - 1,
            saved,
            one_layer + stream + workload.itemsize * blocks.rows * model.spec.hidden,
            0.0,
        ),
        MemorySample(
            "backward", min(max(middle, 0), layers - 1), saved / 2, one_layer + stream, total / 2
        ),
        MemorySample("backward", 0, saved / layers, one_layer + stream, total),
    ]


def _policies(run: Workload, spec: TransformerSpec) -> list[RecomputePolicy]:
    """Return the policies of recomputation that a search tries, of a run's workload."""
    # Fused attention has no activations that selective recomputation could drop.
    is_fused = not run.stores_scores(spec) and not (run.cpu and spec.dropouts.attention)
    is_fused = is_fused and spec.gated_delta is None
    policies = [
        RecomputePolicy(mode=mode) for mode in MODES if not (is_fused and mode == "selective")
    ]
    # The run's own policy may have fields that no mode has by default, such as a number of layers.
    return policies + [run.policy] * (run.policy not in policies)


def _accepts(settings: DeepSpeedSettings, stage: int, expert: int) -> bool:
    """Return whether a run with these settings accepts a degree of EP at a ZeRO stage, with its
    optimizer on the device or on the host.
    """
    for device in ("none", "cpu"):
        update = {"stage": stage, "offload_optimizer": OffloadOptimizer(device=device)}
        zero = settings.zero_optimization.model_copy(update=update)
        try:
            refuse_experts(settings.model_copy(update={"zero_optimization": zero}), expert)
        except ConfigErrors:
            continue
        return True
    return False


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


# ---- back to a config ----------------------------------------------------------------------------


def candidate_config(
    raw: Mapping[str, Any], workload: Workload, settings: ZeroSettings
) -> dict[str, Any]:
    """Return a run's config with the settings of a candidate.

    Args:
        raw: the JSON of the file after overrides.
    """
    zero = dict(raw.get("zero_optimization", {}))
    before = int(zero.get("stage", 0))
    if settings.stage != 3:
        zero = {key: value for key, value in zero.items() if not key.startswith("stage3_")}
    # DeepSpeed's default, true, all-reduces; reducing to owners needs both keys.
    zero.pop("use_multi_rank_bucket_allreduce", None)
    if settings.requests_owner_reduction:
        zero |= {"use_multi_rank_bucket_allreduce": False, "reduce_scatter": True}
    # `overlap_comm` has another default at stage 3. Without the key the run gets it, as the
    # estimate assumes (`with_stage`).
    if before != settings.stage and 3 in (before, settings.stage):
        zero.pop("overlap_comm", None)
    for key in ("offload_optimizer", "offload_param"):
        if not getattr(settings, key):
            zero.pop(key, None)
        elif (zero.get(key) or {}).get("device", "none") == "none":
            zero[key] = {"device": "cpu", "pin_memory": True}
    parallel = {
        **raw["zero_tp"].get("parallel", {}),
        "tensor": workload.tensor,
        "sequence": workload.sequence,
    }
    # Without EP as the file has it: most runs' files have no such key.
    if workload.expert > 1 or "expert" in parallel:
        parallel["expert"] = workload.expert
    config: dict[str, Any] = {
        **raw,
        "train_batch_size": workload.batch * settings.accumulation * settings.data,
        "train_micro_batch_size_per_gpu": workload.batch,
        "gradient_accumulation_steps": settings.accumulation,
        "zero_optimization": {**zero, "stage": settings.stage},
        "zero_tp": {**raw["zero_tp"], "parallel": parallel, "recompute": workload.recompute},
    }
    # A run refuses P_a and cpu_checkpointing without `full` recomputation.
    if workload.policy.mode != "full":
        config.pop("activation_checkpointing", None)
    return config


def load_error(config: Mapping[str, Any], ranks: int) -> ConfigError | None:
    """Return why a run refuses this config, or None."""
    # A run reads its config from a file by `load`, so runs accept a candidate that loads.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "candidate.json")
        path.write_text(json.dumps(config))
        try:
            RunConfig.load(path, (), ranks)
        except ConfigError as error:
            return error
    return None
