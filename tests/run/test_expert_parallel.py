"""Runs with experts divided over ranks: the plain model is trained, and checkpoints move between
any sizes.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoint_runs import (
    VOCABULARY,
    build,
    resume_and_train,
    steps_of,
    train_and_save,
    write_config,
)
from tests.support.experts import fields
from tests.support.families import model_sizes
from tests.support.launched import forked_zero_tp
from tests.support.matrix_runs import failures_of
from tests.support.pools import Pools
from tests.tiers import THOROUGH, in_tiers
from zero_tp.base.errors import UserError
from zero_tp.engine.guards import check_duplicates
from zero_tp.engine.zero.expert_groups import is_divided
from zero_tp.parallel.layout import stored_buffers
from zero_tp.run.checkpoint.convert import to_huggingface
from zero_tp.run.config import RunConfig

CELLS = [
    # TP, SP, stage, recomputation, offload, accumulation, dtype; family; E
    ("TP 2", "SP", "ZeRO-2", "full", "no offload", "× 3", "fp32", "shared experts", 2),
    ("TP 1", "no SP", "ZeRO-1", "none", "no offload", "× 1", "fp32", "experts in groups", 2),
    ("TP 1", "no SP", "ZeRO-2", "none", "no offload", "× 1", "fp32", "experts", 4),
    (
        "TP 2",
        "no SP",
        "ZeRO-1",
        "selective",
        "no offload",
        "× 1",
        "fp32",
        "experts, norm of each head",
        2,
    ),
    (
        "TP 2",
        "SP",
        "ZeRO-1",
        "full, P_a, cpu",
        "optimizer offloaded",
        "× 1",
        "fp32",
        "experts, norm of all heads",
        2,
    ),
    ("TP 1", "no SP", "ZeRO-2", "full", "optimizer offloaded", "× 3", "fp32", "experts", 2),
    (
        "TP 1",
        "no SP",
        "ZeRO-1",
        "selective, every module",
        "no offload",
        "× 3",
        "fp32",
        "shared experts",
        4,
    ),
    ("TP 2", "SP", "ZeRO-1", "none", "no offload", "× 1", "fp32", "experts in groups", 2),
    (
        "TP 1",
        "no SP",
        "ZeRO-2",
        "full, every 2nd layer",
        "no offload",
        "× 1",
        "fp32",
        "experts, norm of all heads",
        4,
    ),
    ("TP 2", "SP", "ZeRO-2", "none", "no offload", "× 3", "bf16", "experts in groups", 2),
    (
        "TP 1",
        "no SP",
        "ZeRO-2",
        "selective",
        "no offload",
        "× 3",
        "bf16, fp32 accumulation",
        "shared experts",
        4,
    ),
    ("TP 1", "no SP", "ZeRO-1", "full", "optimizer offloaded", "× 1", "bf16", "experts", 2),
    ("TP 2", "SP", "ZeRO-2", "selective", "no offload", "× 3", "fp32", "sinks and clamps", 2),
]


@pytest.mark.parametrize("case", in_tiers([(cell,) for cell in CELLS], [(CELLS[1],)]))
def test_a_run_trains_the_plain_model(
    ranks: Pools, run_seed: int, tmp_path: Path, case: tuple[Any, ...]
) -> None:
    """Losses, norms, every gradient, weights and moments, as in the matrix of all settings."""
    *cell, family, expert = case
    changes = {"zero_tp.parallel.expert": expert}
    failures = failures_of(ranks, run_seed, tmp_path, tuple(cell), family, changes)
    assert not failures, "\n".join(failures)


DEEPSPEEDS_STEP = {"optimizer.params.fused": False}
"""AdamW that is not fused takes DeepSpeed's norm, clip and update."""
TO_OWNERS = {"zero_optimization.use_multi_rank_bucket_allreduce": False}
"""A gradient is reduced to the ranks that update it."""


@THOROUGH
@pytest.mark.parametrize(
    ("case", "changes"),
    [(CELLS[3], DEEPSPEEDS_STEP), (CELLS[1], DEEPSPEEDS_STEP), (CELLS[5], TO_OWNERS)],
)
def test_other_ways_of_the_update_train_the_plain_model(
    ranks: Pools, run_seed: int, tmp_path: Path, case: tuple[Any, ...], changes: dict[str, Any]
) -> None:
    *cell, family, expert = case
    changes = changes | {"zero_tp.parallel.expert": expert}
    failures = failures_of(ranks, run_seed, tmp_path, tuple(cell), family, changes)
    assert not failures, "\n".join(failures)


def biases_after(path: str, steps: int) -> list[torch.Tensor]:
    engine, _ = build(path)
    steps_of(engine, 1, steps)
    return [bias.clone() for _, bias in stored_buffers(engine.model)]


@THOROUGH
def test_routers_biases_move_as_without_expert_ranks(ranks: Pools, tmp_path: Path) -> None:
    """By counts over all replicas: three steps, each with an update of 0.01."""
    config = json.loads(write_config(tmp_path / "run.json", 1, "fp32", 1).read_text())
    config["zero_tp"]["model"] = {
        **model_sizes(5, "experts in groups"),
        "vocab_size": VOCABULARY,
    }
    config["zero_tp"]["training"]["router_bias_update_rate"] = 0.01
    found = []
    for expert in (1, 2, 4):
        config["zero_tp"]["parallel"]["expert"] = expert
        (tmp_path / "run.json").write_text(json.dumps(config))
        found.append(ranks(4).run(biases_after, str(tmp_path / "run.json"), 3))
    for each in found:
        assert len(each[0]) == 2 and all(bias.any() for bias in each[0])
        for of_rank in each:
            pairs = zip(of_rank, found[0][0], strict=True)
            assert all(torch.equal(bias, other) for bias, other in pairs)


@pytest.mark.heavy
def test_eight_ranks(ranks: Pools, tmp_path: Path) -> None:
    """TP 2 × DP 4 with E 2 resumes a run of TP 2 × DP 4 with all experts on each replica."""
    first = run_file(tmp_path / "before.json", 1, 1, 2, "qwen2_moe")
    second = run_file(tmp_path / "after.json", 2, 2, 2, "qwen2_moe")
    whole = ranks(8).run(train_and_save, str(first), str(tmp_path / "run"), [2], 4)
    again = ranks(8).run(resume_and_train, str(second), str(tmp_path / "run"), 4)
    for (loss, norm), (old_loss, old_norm) in zip(
        again[0]["steps"], whole[0]["steps"][2:], strict=True
    ):
        assert loss == pytest.approx(old_loss, rel=1e-6)
        assert norm == pytest.approx(old_norm, rel=1e-5)


def run_file(
    path: Path, expert: int, stage: int, tensor: int, model_type: str = "mixtral", **changes: Any
) -> Path:
    """A run whose loss does not depend on the micro-batch: without the load-balancing loss."""
    config = json.loads(write_config(path, stage, "fp32", tensor).read_text())
    count = "num_local_experts" if model_type in ("mixtral", "gpt_oss") else "num_experts"
    model = fields(model_type, vocab_size=VOCABULARY, output_router_logits=False, **{count: 8})
    config["zero_tp"] |= {"model": model, **changes}
    config["zero_tp"]["parallel"]["expert"] = expert
    path.write_text(json.dumps(config))
    return path


GRIDS = [(1, 1, 2), (2, 1, 1), (2, 2, 2), (4, 2, 1), (1, 3, 4)]
"""E, stage, TP of 4 ranks."""
MOVES = [
    ("mixtral", before, after)
    for before in GRIDS
    for after in GRIDS
    if before[0] > 1 or after[0] > 1
]
FIRST_MOVES = [("mixtral", (1, 3, 4), (4, 2, 1))]
MOVES += [("gpt_oss", (4, 2, 1), (2, 2, 2)), ("gpt_oss", (2, 1, 1), (1, 3, 4))]


@THOROUGH
@pytest.mark.parametrize(("model_type", "before", "after"), in_tiers(MOVES, FIRST_MOVES, every=3))
def test_a_checkpoint_resumes_at_another_size(
    ranks: Pools,
    tmp_path: Path,
    model_type: str,
    before: tuple[int, int, int],
    after: tuple[int, int, int],
) -> None:
    """Bit for bit at the same sizes, else as near as another order of sums. Biases of experts
    move with them.
    """
    first = run_file(tmp_path / "before.json", *before, model_type)
    second = run_file(tmp_path / "after.json", *after, model_type)
    run = tmp_path / "run"
    whole = ranks(4).run(train_and_save, str(first), str(run), [2], 4)
    again = ranks(4).run(resume_and_train, str(second), str(run), 4)
    if before == after:
        assert [found["steps"] for found in again] == [found["steps"][2:] for found in whole]
        for found, expected in zip(again, whole, strict=True):
            assert all(torch.equal(found["masters"][k], v) for k, v in expected["masters"].items())
        return
    for (loss, norm), (old_loss, old_norm) in zip(
        again[0]["steps"], whole[0]["steps"][2:], strict=True
    ):
        assert loss == pytest.approx(old_loss, rel=1e-6)
        assert norm == pytest.approx(old_norm, rel=1e-5)


@THOROUGH
@pytest.mark.parametrize("model_type", ["qwen2_moe", "gpt_oss"])
def test_an_export_has_all_experts(ranks: Pools, tmp_path: Path, model_type: str) -> None:
    from transformers import AutoModelForCausalLM

    from tests.support.checkpoint_runs import batch_of

    path = run_file(tmp_path / "run.json", 2, 1, 1, model_type)
    whole = ranks(4).run(train_and_save, str(path), str(tmp_path / "run"), [2], 2)
    to_huggingface(tmp_path / "run", tmp_path / "export")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export").eval()
    assert (model(batch_of(0)[:2, :-1]).logits - whole[0]["logits"]).abs().max() < 1e-5


def damaged(path: str, rank: int, *, divided: bool) -> str:
    """What the guard says of a weight that one rank changes; nothing of undamaged ones."""
    engine, _ = build(path)
    steps_of(engine, 1, 1)
    check_duplicates(engine.zero, 1)
    name, weight = next(
        (name, weight)
        for name, weight in engine.model.named_parameters()
        if is_divided(weight) == divided
    )
    if engine.topology.rank == rank:
        with torch.no_grad():
            weight.view(-1)[0] += 1
    with pytest.raises(UserError, match=name) as error:
        check_duplicates(engine.zero, 2)
    return str(error.value)


@pytest.mark.parametrize("divided", in_tiers([False, True], [True]))
def test_ranks_with_the_same_experts_are_compared(
    ranks: Pools, tmp_path: Path, divided: bool
) -> None:
    """Of DP 4 and E 2, ranks 1 and 3 have the same experts, and all have the same other weights."""
    path = run_file(tmp_path / "run.json", 2, 1, 1)
    messages = ranks(4).run(damaged, str(path), 3, divided=divided)
    assert len(set(messages)) == 1
    expected = "differs between data-parallel ranks 1 and 3" if divided else "on rank 3 differs"
    assert expected in messages[0]


GROUPS = [
    {"kind": "router", "weight_decay": 0.0, "lr_scale": 0.5},
    {"pattern": r"experts.*(w2|down_proj)", "lr_scale": 0.25},
]


@THOROUGH
def test_groups_of_parameters_have_their_own_rates(ranks: Pools, tmp_path: Path) -> None:
    """With some experts' matrices in one group, the rest in another, as without expert ranks."""
    traces = []
    for expert in (1, 4):
        path = run_file(tmp_path / f"{expert}.json", expert, 2, 1, param_groups=GROUPS)
        run = tmp_path / f"run {expert}"
        traces.append(ranks(4).run(train_and_save, str(path), str(run), [4], 4)[0]["steps"])
    for (loss, norm), (other_loss, other_norm) in zip(*traces, strict=True):
        assert loss == pytest.approx(other_loss, rel=1e-6)
        assert norm == pytest.approx(other_norm, rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"zero_tp.parallel.expert": 3}, "expert 3 does not divide data 4; use 2 or 4"),
        ({"zero_tp.parallel.expert": 8}, "expert 8 does not divide data 4; use 4"),
        (
            {"zero_tp.model.num_local_experts": 7},
            "7 experts do not divide over 2 ranks; use 1",
        ),
        ({"zero_optimization.stage": 0}, "zero_tp.parallel.expert: refused at stage 0"),
        ({"zero_optimization.stage": 3}, "zero_tp.parallel.expert: refused at stage 3"),
        (
            {"optimizer": {"type": "Muon", "params": {"lr": 0.01}}},
            'zero_tp.parallel.expert: refused with optimizer.type "Muon"',
        ),
        (
            {"zero_optimization.contiguous_gradients": False},
            "contiguous_gradients: refused as false with zero_tp.parallel.expert",
        ),
        (
            {"bf16.enabled": True, "data_types.grad_accum_dtype": "fp32"},
            "zero_tp.parallel.expert: refused at stage 1 with data_types.grad_accum_dtype",
        ),
    ],
)
def test_refused_configs(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = run_file(tmp_path / "run.json", 2, 1, 1)
    overrides = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
    with pytest.raises(UserError) as error:
        RunConfig.load(path, overrides, world_size=4)
    assert message in str(error.value)


def test_a_dense_model_has_no_experts_to_divide(tmp_path: Path) -> None:
    path = write_config(tmp_path / "run.json", 1, "fp32", 1)
    with pytest.raises(
        UserError, match=r"zero_tp.parallel.expert: 2, but the model has no experts"
    ):
        RunConfig.load(path, ["zero_tp.parallel.expert=2"], world_size=4)


def test_a_check_without_ranks_counts_expert_groups(tmp_path: Path) -> None:
    path = run_file(tmp_path / "run.json", 2, 1, 1)
    done = forked_zero_tp(tmp_path, "check", str(path))
    assert "a multiple of 2 (tensor 1 × data ?), expert 2" in done.stdout


@THOROUGH
def test_fp16_skips_and_scales_as_without_expert_ranks(ranks: Pools, tmp_path: Path) -> None:
    """The first scale is too large: steps are skipped until it has fallen."""
    traces = []
    for expert in (1, 2):
        path = run_file(tmp_path / f"{expert}.json", expert, 2, 1)
        config = json.loads(path.read_text())
        config["fp16"] = {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}
        path.write_text(json.dumps(config))
        run = tmp_path / f"run {expert}"
        traces.append(ranks(4).run(train_and_save, str(path), str(run), [8], 8)[0]["steps"])
    skipped = [[math.isnan(norm) for _, norm in steps] for steps in traces]
    assert skipped[0] == skipped[1] and any(skipped[0]) and not all(skipped[0])
    for (loss, norm), (other_loss, other_norm) in zip(*traces, strict=True):
        assert loss == pytest.approx(other_loss, rel=2e-3)
        assert math.isnan(norm) or norm == pytest.approx(other_norm, rel=1e-2)
