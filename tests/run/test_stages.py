"""A run of several stages is one of transformers, whatever is stopped in its middle and wherever it
goes on; its samples are those that docs/recipes.md says.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.pools import Pools, RankError
from tests.support.staged_runs import (
    FIRST_STEPS,
    plain_figures,
    run_stages,
    samples_as_documented,
    write_staged,
)
from tests.tiers import THOROUGH, in_tiers

LAST = FIRST_STEPS[-1] - 1
MIDDLES = (3, 6, 10, 14)
"""Steps before which the run is stopped: while the batch grows, and in the middle of stages."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_staged(tmp_path_factory.mktemp("stages"))


@pytest.fixture(scope="module")
def unstopped(config: Path, ranks: Pools) -> list[Any]:
    return ranks(2).run(run_stages, str(config), [], str(config.parent / "unstopped"), LAST)


def assert_same(figures: Mapping[int, Any], expected: Mapping[int, Any], tolerance: float) -> None:
    for step, found in figures.items():
        assert found == pytest.approx(expected[step], rel=tolerance, abs=tolerance), step


def test_a_run_of_stages_is_that_of_transformers(config: Path, unstopped: list[Any]) -> None:
    plain = plain_figures(config)
    assert_same(unstopped[0]["figures"], plain["figures"], 1e-5)
    for name, weight in unstopped[0]["weights"].items():
        torch.testing.assert_close(weight, plain["weights"][name].data, rtol=1e-4, atol=1e-5)
    assert unstopped[0]["rope"]["rope_theta"] == 300.0


def test_each_step_reads_the_samples_that_the_documentation_says(
    config: Path, unstopped: list[Any]
) -> None:
    raw = json.loads(config.read_text())
    steps = [*samples_as_documented(raw, str(config.parent / "a"))]
    assert len(steps) == LAST
    for step, rows in enumerate(steps, 1):
        # Micro-batch i of all ranks comes before micro-batch i + 1.
        micro = zip(*(rank["samples"][step] for rank in unstopped), strict=True)
        read = torch.cat([row for batches in micro for row in batches])
        assert torch.equal(read, rows[:, :-1]), step


@THOROUGH
def test_a_run_stopped_in_each_stage_is_the_unstopped_one_bit_for_bit(
    config: Path, unstopped: list[Any], ranks: Pools, tmp_path: Path
) -> None:
    run = str(tmp_path / "run")
    figures: dict[int, Any] = {}
    before = None
    for last in (*MIDDLES, LAST):
        done = ranks(2).run(run_stages, str(config), [], run, last, before)
        figures |= done[0]["figures"]
        before = last
    assert figures == unstopped[0]["figures"]
    for name, weight in done[0]["weights"].items():
        assert torch.equal(weight, unstopped[0]["weights"][name]), name


MOVED = {
    "TP 2, ZeRO-3": ["zero_tp.parallel.tensor=2", "zero_optimization.stage=3"],
    "TP 2, another micro-batch": [
        "zero_tp.parallel.tensor=2",
        "train_micro_batch_size_per_gpu=4",
    ],
    "ZeRO-2, offloaded": [
        "zero_optimization.stage=2",
        'zero_optimization.offload_optimizer={"device": "cpu"}',
    ],
    "ZeRO-0": ["zero_optimization.stage=0"],
    "ZeRO-3, offloaded": [
        "zero_optimization.stage=3",
        'zero_optimization.offload_optimizer={"device": "cpu"}',
    ],
}


@THOROUGH
@pytest.mark.parametrize("moved", in_tiers([*MOVED], ["TP 2, ZeRO-3"]))
def test_a_run_goes_on_elsewhere(
    moved: str, config: Path, unstopped: list[Any], ranks: Pools, tmp_path: Path
) -> None:
    """Every second part of the run is trained elsewhere."""
    run = str(tmp_path / "run")
    figures: dict[int, Any] = {}
    before = None
    for index, last in enumerate((*MIDDLES, LAST)):
        overrides = MOVED[moved] if index % 2 else []
        done = ranks(2).run(run_stages, str(config), overrides, run, last, before)
        figures |= done[0]["figures"]
        before = last
    assert_same(figures, unstopped[0]["figures"], 1e-5)


@pytest.mark.thorough
def test_a_ramp_of_the_whole_run_equals_that_of_its_only_stage(
    config: Path, ranks: Pools, tmp_path: Path
) -> None:
    ramp = {"start": 4, "increment": 4, "tokens": 400}
    alone: dict[str, Any] = json.loads(config.read_text())
    alone["zero_tp"]["training"] = {"steps": 7, "seed": 11, "batch_size_rampup": ramp}
    alone["scheduler"]["params"] = {"warmup_tokens": 300, "decay_tokens": 300} | {
        "num_training_steps": "auto"
    }
    paths = [tmp_path / f"{name}.json" for name in ("alone", "staged")]
    paths[0].write_text(json.dumps(alone))
    stages = {"stages": [{"name": "all", "steps": 7, "batch_size_rampup": ramp}]}
    alone["zero_tp"]["training"] = {"seed": 11, **stages}
    paths[1].write_text(json.dumps(alone))
    figures = [
        ranks(2).run(run_stages, str(path), [], str(path.with_suffix("")), 7)[0]["figures"]
        for path in paths
    ]
    assert figures[0] == figures[1]


@pytest.mark.thorough
def test_a_stage_is_appended_and_a_trained_one_stays(
    config: Path, unstopped: list[Any], ranks: Pools, tmp_path: Path
) -> None:
    raw = json.loads(config.read_text())
    run, path = str(tmp_path / "run"), tmp_path / "run.json"
    stages = raw["zero_tp"]["training"]["stages"]

    def go_on(written: list[Any], last: int, before: int | None) -> Any:
        raw["zero_tp"]["training"]["stages"] = written
        path.write_text(json.dumps(raw))
        return ranks(2).run(run_stages, str(path), [], run, last, before)[0]["figures"]

    # Without what comes later, the file's schedule is as long: `long` brings its own.
    figures = go_on(stages[:2], 10, None)
    figures |= go_on(stages, LAST, 10)
    assert figures == unstopped[0]["figures"]
    changes: list[tuple[str, Any]] = [
        (r"stages\[1\].steps: 8", {"sequence_length": 8}),
        (r"stages\[1\].lr_scale: 1.0", {"lr_scale": 1.0}),
        (r"stages\[1\].rope.rope_theta: 301.0", {"rope": {"rope_theta": 301.0}}),
        (r"stages\[1\].steps: 6", {"tokens": 1000}),
        (r'stages\[1\].name: "third"', {"name": "third", "data": None}),
    ]
    for message, change in changes:
        changed = [stages[0], {**stages[1], **change}, stages[2]]
        with pytest.raises(RankError, match=message + ", but the run of .* was started with"):
            go_on(changed, LAST, 10)
    # One that has not begun may change, its corpora too.
    shutil.copy(config.parent / "b.bin", tmp_path / "c.bin")
    shutil.copy(config.parent / "b.idx", tmp_path / "c.idx")
    other = {"name": "other", "steps": 2, "data": str(tmp_path / "c")}
    go_on([*stages[:2], other], 14, 10)
    # A trained stage's own "auto" schedule stays when another stage follows it.
    falling = {**stages[2], "steps": 2}
    go_on([*stages[:2], falling], 14, 10)
    rates = go_on([*stages[:2], falling, {"name": "after", "steps": 2}], 16, 14)
    assert [rate for _, _, rate in rates.values()] == [0.0, 0.0], "the end of the schedule"


BF16 = ["bf16.enabled=true", "data_types.grad_accum_dtype=fp32"]
EMA = ['zero_tp.training.ema={"decay": 0.8}', "zero_tp.training.z_loss=1e-3"]
MUON = ['optimizer={"type": "Muon", "params": {"lr": 1e-2, "adamw": {"lr": 3e-3}}}']
COSINE = {"total_num_steps": "auto", "warmup_tokens": 300}
FALLING = "scheduler=" + json.dumps({"type": "WarmupCosineLR", "params": COSINE})
SETTINGS = {
    "averages and z-loss": EMA,
    "bf16": BF16,
    "Muon": MUON,
    "a schedule of DeepSpeed": [FALLING, *EMA],
    "without a schedule": ["scheduler=null"],
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", SETTINGS)
def test_stages_with_other_settings(name: str, config: Path, ranks: Pools, tmp_path: Path) -> None:
    """Stopped in each stage they are the unstopped run bit for bit; on TP 2 they are near it."""
    overrides = SETTINGS[name]
    if name == "without a schedule":
        raw = json.loads(config.read_text())
        del raw["scheduler"]
        config = tmp_path / "run.json"
        config.write_text(json.dumps(raw))
        overrides = []
    whole = ranks(2).run(run_stages, str(config), overrides, str(tmp_path / "whole"), LAST)[0]
    figures: dict[int, Any] = {}
    before = None
    for last in (*MIDDLES, LAST):
        run = str(tmp_path / "run")
        done = ranks(2).run(run_stages, str(config), overrides, run, last, before)[0]
        figures |= done["figures"]
        before = last
    assert figures == whole["figures"]
    for tensors in ("weights", "averages"):
        assert whole[tensors].keys() == done[tensors].keys()
        for key, tensor in done[tensors].items():
            assert torch.equal(tensor, whole[tensors][key]), (tensors, key)
    split = [*overrides, "zero_tp.parallel.tensor=2"]
    moved = ranks(2).run(run_stages, str(config), split, str(tmp_path / "moved"), LAST)[0]
    assert_same(moved["figures"], whole["figures"], 2e-2 if name == "bf16" else 1e-4)


@pytest.mark.thorough
def test_a_run_without_stages_gets_some(config: Path, ranks: Pools, tmp_path: Path) -> None:
    """What it has trained is its first stage."""
    raw = json.loads(config.read_text())
    del raw["scheduler"]
    run, path = str(tmp_path / "run"), tmp_path / "run.json"
    begin = {"name": "begin", "steps": 4}
    more = {"name": "more", "steps": 2, "sequence_length": 32}

    def go_on(training: dict[str, Any], last: int, before: int | None) -> Any:
        raw["zero_tp"]["training"] = {"seed": 11, **training}
        path.write_text(json.dumps(raw))
        return ranks(2).run(run_stages, str(path), [], run, last, before)[0]["figures"]

    figures = go_on({"steps": 4}, 4, None)
    figures |= go_on({"stages": [begin, more]}, 6, 4)
    with pytest.raises(
        RankError, match=r"stages\[0\].lr_scale: 2.0, but the run of .* was started"
    ):
        go_on({"stages": [{**begin, "lr_scale": 2.0}, more]}, 6, 4)
    run = str(tmp_path / "staged")
    assert figures == go_on({"stages": [begin, more]}, 6, None)
