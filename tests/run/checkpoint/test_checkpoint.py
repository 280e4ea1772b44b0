"""Saving, resuming on the same topology, and the export to Hugging Face, for every ZeRO stage
and precision.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.checkpoint_runs import (
    batch_of,
    resume_and_train,
    train_and_save,
    write_changed,
    write_config,
)
from tests.support.pools import Pools
from tests.support.settings import fp16_supported
from tests.tiers import THOROUGH, in_tiers
from zero_tp.run.checkpoint.convert import to_huggingface
from zero_tp.run.checkpoint.directory import (
    LATEST,
    checkpoints_directory,
    complete_steps,
    prune,
    step_directory,
)
from zero_tp.run.config import RunConfig

STOP, STEPS = 2, 4


FIRST = [(4, 2, 1, "bf16_fp32_accumulation", "none"), (4, 2, 3, "bf16", "parameters")]
CASES = [
    *FIRST,
    (4, 2, 0, "fp32", "none"),
    (4, 2, 2, "bf16", "optimizer"),
    *(
        (4, 2, stage, dtype, "none")
        for stage, dtype in ((0, "bf16"), (1, "fp32"), (2, "fp32"), (2, "bf16"))
    ),
    *((4, 2, 3, dtype, "none") for dtype in ("fp32", "bf16")),
    (2, 1, 2, "fp32", "none"),
    (3, 1, 3, "fp32", "none"),
    (4, 4, 1, "fp32", "none"),
    (4, 2, 1, "fp32", "optimizer"),
]


@pytest.mark.parametrize(
    ("world", "tensor", "stage", "dtype", "offload"), in_tiers(CASES, FIRST[1:])
)
def test_a_resumed_run_is_the_run_that_never_stopped(
    ranks: Pools, tmp_path: Path, world: int, tensor: int, stage: int, dtype: str, offload: str
) -> None:
    path = write_config(tmp_path / "run.json", stage, dtype, tensor, offload)
    run = tmp_path / "run"
    whole = ranks(world).run(train_and_save, str(path), str(run), [STOP], STEPS)
    again = ranks(world).run(resume_and_train, str(path), str(run), STEPS)
    for before, after in zip(whole, again, strict=True):
        assert after["from"] == STOP
        assert after["steps"] == before["steps"][STOP:], "losses and norms bit for bit"
        assert after["masters"].keys() == before["masters"].keys()
        for name, master in before["masters"].items():
            assert torch.equal(after["masters"][name], master), name

    export = tmp_path / "export"
    to_huggingface(run, export)
    model = AutoModelForCausalLM.from_pretrained(export)
    assert type(model).__name__ == "GPT2LMHeadModel"
    logits = model.eval()(batch_of(0)[:2, :-1]).logits
    # The export is made of the fp32 masters, a bf16 run computes with their rounded values.
    tolerance = 1e-5 if dtype == "fp32" else 0.1
    for result in whole:
        assert (logits - result["logits"]).abs().max() < tolerance


@THOROUGH
@pytest.mark.parametrize("offload", ["none", "optimizer"])
def test_a_run_goes_on_with_another_implementation_of_adam(
    ranks: Pools, tmp_path: Path, offload: str
) -> None:
    """torch's plain AdamW, then its fused kernel or DeepSpeed's on the host, take the same steps
    but for rounding.
    """
    path = write_config(tmp_path / "before.json", 2, "fp32")
    before = json.loads(path.read_text())
    before["optimizer"]["params"]["fused"] = False
    path.write_text(json.dumps(before))
    after = write_config(tmp_path / "after.json", 2, "fp32", offload=offload)
    params = [
        RunConfig.load(each, world_size=2).engine_settings.written()["optimizer"]["params"]
        for each in (path, after)
    ]
    assert params[0]["fused"] is False and params[1].get("fused") is (
        True if offload == "none" else None
    )
    run = tmp_path / "run"
    whole = ranks(2).run(train_and_save, str(path), str(run), [4], 8)
    again = ranks(2).run(resume_and_train, str(after), str(run), 8)
    for straight_on, changed_over in zip(whole, again, strict=True):
        assert changed_over["from"] == 4
        for found, expected in zip(changed_over["steps"], straight_on["steps"][4:], strict=True):
            assert found == pytest.approx(expected, rel=1e-4)


def loss_scales(
    stage: int, overflows: list[bool], resume_at: int
) -> tuple[list[float], list[float], set[str]]:
    """Return the scales of a run, those of one that resumes at `resume_at`, and the keys of the
    saved state.
    """
    from tests.support.compare import grid
    from tests.support.small_engine import build as engine_of

    fp16 = {"enabled": True, "loss_scale_window": 3, "hysteresis": 2, "min_loss_scale": 1.0}
    found = []
    with fp16_supported():
        scales = [engine_of(grid(2, True), stage, fp16=fp16).zero.loss_scale for _ in range(2)]
    scale, fresh = scales
    for step, overflow in enumerate(overflows):
        if step == resume_at:
            state = json.loads(json.dumps(scale.state()))
            fresh.restore(state)
        scale.update(overflow)
        found.append(scale.value)
    again = found[:resume_at]
    for overflow in overflows[resume_at:]:
        fresh.update(overflow)
        again.append(fresh.value)
    return found, again, set(state)


@pytest.mark.parametrize("stage", [0, 2])
def test_the_loss_scale_goes_on_where_it_was(ranks: Pools, run_seed: int, stage: int) -> None:
    generator = torch.Generator().manual_seed(run_seed)
    overflows = (torch.rand(40, generator=generator) < 0.15).tolist()
    # It falls and rises whatever is drawn.
    overflows[:8] = [True, True, True, False, False, False, False, False]
    for resume_at in (2, 7, 20):
        for whole, again, saved in ranks(2).run(loss_scales, stage, overflows, resume_at):
            assert whole == again
            assert len(set(whole)) > 2, "the scale has moved"
            assert saved == {"cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis"}


@pytest.mark.parametrize(
    ("before", "after"), [("fp16", "bf16"), ("bf16", "fp16"), ("fp32", "fp16")]
)
def test_a_run_goes_on_in_another_dtype_with_that_dtypes_scale(
    ranks: Pools, tmp_path: Path, before: str, after: str
) -> None:
    run = str(tmp_path / "run")
    first, then = (
        write_config(tmp_path / "before.json", 2, before),
        write_config(tmp_path / "after.json", 1, after),
    )
    whole = ranks(2).run(train_and_save, str(first), run, [2], 3)
    for again, result in zip(ranks(2).run(resume_and_train, str(then), run, 3), whole, strict=True):
        assert again["scale"] == (2.0**10 if after == "fp16" else None)
        assert again["steps"][0][0] == pytest.approx(result["steps"][2][0], rel=1e-2)


@pytest.mark.parametrize(
    ("settings", "kept"), [({"keep": 2}, [2, 3]), ({"keep": 1, "keep_every": 2}, [2, 3])]
)
def test_the_newest_and_milestones_stay_and_latest_names_the_last(
    ranks: Pools, tmp_path: Path, settings: dict[str, int], kept: list[int]
) -> None:
    path, run = (
        write_changed(write_config(tmp_path / "run.json", 1, "fp32", 1), **settings),
        tmp_path / "run",
    )
    ranks(2).run(train_and_save, str(path), str(run), [1, 2, 3], 3)
    assert complete_steps(run) == kept
    assert (checkpoints_directory(run) / LATEST).read_text().strip() == step_directory(run, 3).name
    names = [LATEST, *(step_directory(run, step).name for step in kept)]
    assert sorted(p.name for p in checkpoints_directory(run).iterdir()) == names
    prune(run, 1)
    assert complete_steps(run) == [3]
