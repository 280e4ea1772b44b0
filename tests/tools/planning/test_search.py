"""A search finds the fastest settings that fit, which runs accept, or says what is short."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.plans import CONFIGS, GPT2, plan_gpt2
from tests.tiers import THOROUGH
from zero_tp.base.constants import GIB
from zero_tp.base.errors import UserError
from zero_tp.base.files import write_named
from zero_tp.base.settings.keys import apply_overrides
from zero_tp.base.settings.recompute import RecomputePolicy
from zero_tp.base.strict_json import read_json
from zero_tp.parallel.devices import named_device
from zero_tp.run.config import RunConfig
from zero_tp.tools.planning import plan_report as report
from zero_tp.tools.planning.plan import plan
from zero_tp.tools.planning.plan_settings import Workload, ZeroSettings
from zero_tp.tools.planning.search import NEAREST, Search, _divisors, candidate_config, load_error


@THOROUGH
def test_search_finds_faster_settings_that_runs_accept(tmp_path: Path) -> None:
    overrides = ["zero_tp.recompute=full", "train_batch_size=1024"]
    present = plan_gpt2(*overrides, world=64, device="a100-40gb")
    start = time.process_time()
    search = Search(present.config, present.device)
    shown, best = search.fastest(overrides, 5)
    assert len(search.ranked) > 1000 and time.process_time() - start < 10
    assert len(shown) == 5 and shown[0].time.total < present.time.total
    assert [one.time.total for one in shown] == sorted(one.time.total for one in shown)
    path = tmp_path / "best.json"
    path.write_text(json.dumps(best))
    written = plan(RunConfig.load(path, (), 64), present.device)
    assert written.config.global_batch == 1024 and written.fits
    assert written.needed == pytest.approx(shown[0].needed)
    assert written.time.total == pytest.approx(shown[0].time.total)
    advice = "\n".join(report.search_lines(search, shown, present))
    assert "the present settings fit" in advice and "longer than the first" in advice


@THOROUGH
def test_search_weighs_reductions_to_owners() -> None:
    """Where DeepSpeed has them: at stages 1 and 2, not in its BF16_Optimizer, and over two ranks
    or more.
    """

    def stages(*overrides: str) -> set[tuple[int, bool]]:
        config = RunConfig.load(
            GPT2, ("train_batch_size=8", "train_micro_batch_size_per_gpu=1", *overrides), 8
        )
        ranked = Search(config, named_device("h100")).ranked
        owners = [one for one in ranked if one.settings.requests_owner_reduction]
        assert all(
            one.workload.tensor < 8 and "reduced to owners" in one.describe() for one in owners
        )
        return {
            (one.settings.stage, one.settings.requests_owner_reduction)
            for one in ranked
            if not one.settings.offload_optimizer
        }

    both = {(stage, False) for stage in range(4)} | {(2, True)}
    assert stages() == both | {(1, True)}
    assert stages("data_types.grad_accum_dtype=fp32") == both


@pytest.mark.parametrize("stage_before", [1, 3])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    "reductions", [{}, {"use_multi_rank_bucket_allreduce": False}, {"reduce_scatter": False}]
)
def test_a_written_candidate_has_the_settings_that_were_weighed(
    stage_before: int, overlap: bool, reductions: dict[str, bool], tmp_path: Path
) -> None:
    raw, path = read_json(GPT2), tmp_path / "one.json"
    block = {"stage": stage_before, "overlap_comm": overlap, **reductions}
    apply_overrides(raw, [f"zero_optimization={json.dumps(block)}"])

    def settings_of(config: dict[str, Any]) -> ZeroSettings:
        path.write_text(json.dumps(config))
        return ZeroSettings.of(RunConfig.load(path, (), 8), cpu=False)

    before, workload = settings_of(raw), Workload(1024, 4, policy=RecomputePolicy(mode="full"))
    for stage, owners in [*((stage, False) for stage in range(4)), (1, True), (2, True)]:
        weighed = before.with_stage(stage, accumulation=16, requests_owner_reduction=owners)
        written = settings_of(candidate_config(raw, workload, weighed))
        assert written == weighed
        assert written.reduces_to_owners == owners


@pytest.mark.thorough
def test_search_keeps_the_runs_own_recomputation() -> None:
    policy = {"mode": "selective", "modules": ["norm", "mlp_activation"]}
    overrides = [f"zero_tp.recompute={json.dumps(policy)}", "zero_tp.parallel.tensor=2"]
    present = plan_gpt2(*overrides)
    search = Search(present.config, present.device)
    assert {one.workload.policy.mode for one in search.ranked} == {"none", "full", "selective"}
    assert "recompute selective, modules norm+mlp activation," in present.describe()
    (own,) = (one for one in search.ranked if one.describe() == present.describe())
    assert own.time.total == present.time.total
    raw = read_json(GPT2)
    apply_overrides(raw, overrides)
    written = candidate_config(raw, own.workload, own.settings)["zero_tp"]
    assert written["recompute"] == policy
    alone = next(one for one in search.ranked if one.workload.tensor == 1)
    assert load_error(candidate_config(raw, alone.workload, alone.settings), 8) is None


def test_divisors_of_a_large_batch_are_found_at_once() -> None:
    assert _divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]
    assert len(_divisors(2**30)) == 31 and _divisors(2**31 - 1) == [1, 2**31 - 1]


@THOROUGH
def test_if_nothing_fits_the_nearest_candidate_and_its_shortage_are_named(tmp_path: Path) -> None:
    path = CONFIGS / "papers" / "gpt_175b.json"
    overrides = ["train_batch_size=8", "zero_optimization.stage=0", "zero_tp.recompute=full"]
    overrides += ["zero_tp.parallel.sequence=false"]
    config, device = RunConfig.load(path, overrides, 8), named_device("rtx4090")
    present = plan(config, device)
    assert not present.fits and "does not fit, short by" in report.verdict(present)
    search = Search(config, device)
    with pytest.raises(UserError) as caught:
        search.fastest((), 5)
    message = str(caught.value)
    tried = (
        f"of {len(search.ranked)} candidates none fit by formulas, and none of the nearest "
        f"{NEAREST} fits in a"
    )
    assert f"does not fit 8 × rtx4090-24gb: {tried} dry run" in message
    raw = read_json(path)
    apply_overrides(raw, overrides)
    shortages: dict[
        str, float
    ] = {}  # by plans of runs with those settings, which know of no search
    for one in search.ranked[:NEAREST]:
        (tmp_path / "one.json").write_text(
            json.dumps(candidate_config(raw, one.workload, one.settings))
        )
        memory = plan(RunConfig.load(tmp_path / "one.json", (), 8), device).memory
        groups = 1 if one.workload.tensor in (1, 8) else 3
        shortages[one.describe()] = max(
            1.05 * memory.peak.total / GIB + 0.92 + 0.67 * groups - 23.6,
            (8 * memory.host / GIB - 1024) / 8,
        )
    nearest = min(shortages, key=lambda name: shortages[name])
    assert shortages[nearest] > 0 and f"; {nearest} comes nearest with" in message
    assert f", short by {shortages[nearest]:.1f} GiB a device" in message


@pytest.mark.thorough
def test_search_runs_the_nearest_dry_if_none_fits_by_formulas() -> None:
    search = Search(RunConfig.load(GPT2, (), 8), named_device("h100"))
    search.fitting = 0
    shown, _ = search.fastest((), 100)
    assert 0 < len(shown) <= NEAREST and all(one.shortage <= 0 for one in shown)


def test_a_config_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "best.json"
    write_named(path, '{"a": 1}')
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        UserError, match=r"best\.json: can't be written \(No space left on device\)"
    ):
        write_named(path, '{"a": 2}')
    assert read_json(path) == {"a": 1} and [each.name for each in tmp_path.iterdir()] == [
        "best.json"
    ]
