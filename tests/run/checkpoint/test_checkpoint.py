"""Saving, resuming on the same topology, and the export to Hugging Face, for every ZeRO stage and precision."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.support.pools import Pools
from tests.support.settings import engine_of, fp16_supported
from tests.tiers import THOROUGH, in_tiers
from zero_tp.run.checkpoint.convert import to_huggingface
from zero_tp.run.checkpoint.directory import LATEST, checkpoints_directory, complete_steps, prune, step_directory
from zero_tp.run.checkpoint.find import find_checkpoint
from zero_tp.run.config import RunConfig

VOCABULARY, SEQUENCE, BATCH = 101, 16, 24
STOP, STEPS = 10, 20

MODEL = {
    "model_type": "gpt2",
    "n_layer": 1,
    "n_embd": 48,
    "n_head": 4,
    "n_positions": SEQUENCE,
    "vocab_size": VOCABULARY,
    "bos_token_id": 0,
    "eos_token_id": 0,
}

OFFLOADS: dict[str, dict[str, Any]] = {
    "none": {},
    "optimizer": {"offload_optimizer": {"device": "cpu"}},
    "parameters": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
}


def write_config(path: Path, stage: int, dtype: str, tensor: int = 2, offload: str = "none", seed: int = 7) -> Path:
    """A run with dropout on, accumulation and a schedule."""
    optimizer = {"lr": 1e-2, "weight_decay": 0.1, **({"torch_adam": True} if offload == "none" else {})}
    config = {
        "train_batch_size": BATCH,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": optimizer},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_max_lr": 1e-2}},
        "zero_optimization": {"stage": stage, **OFFLOADS[offload]},
        "zero_tp": {
            "model": MODEL,
            "parallel": {"tensor": tensor},
            "data": {"train": "nowhere/train", "sequence_length": SEQUENCE},
            "training": {"steps": 4, "seed": seed},
            "checkpoint": {"keep": 2},
        },
    }
    if dtype.startswith("bf16"):
        config["bf16"] = {"enabled": True}
    if dtype == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 10}
    if dtype == "bf16_fp32_accumulation":
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    path.write_text(json.dumps(config))
    return path


def changed(path: Path, **checkpoint: Any) -> Path:
    config = json.loads(path.read_text())
    config["zero_tp"]["checkpoint"] |= {key.rstrip("_"): value for key, value in checkpoint.items()}
    changed = path.with_name("changed.json")
    changed.write_text(json.dumps(config))
    return changed


def batch_of(step: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(step))


def build(path: str | Path) -> tuple[Any, RunConfig]:
    import torch.distributed as dist

    config = RunConfig.load(path, world_size=dist.get_world_size())
    return engine_of(config), config


def steps_of(engine: Any, first: int, last: int) -> list[tuple[float, float]]:
    """(loss, gradient norm) of the steps first … last."""
    done = []
    for step in range(first, last + 1):
        own = batch_of(step).chunk(engine.topology.data)[engine.topology.data_rank]
        micro_batches = own.chunk(engine.deepspeed_engine.gradient_accumulation_steps())
        done.append((engine.train_step([(w[:, :-1], w[:, 1:]) for w in micro_batches]), engine.gradient_norm))
    return done


def masters_of(engine: Any) -> dict[str, Tensor]:
    from zero_tp.engine.zero.states import MASTER

    states = engine.zero.states()
    return {each.name: states.get(each, MASTER).clone() for each in states.fragments}


@fp16_supported()
def straight(path: str, run: str, save_at: list[int], last: int) -> dict[str, Any]:
    """Train, saving on the way; returns the losses, this rank's masters and the evaluation logits of the last save."""
    from zero_tp.run.checkpoint.save import run_saver

    engine, config = build(path)
    saver = run_saver(engine.zero, config, Path(run))
    done, logits = [], None
    for step in range(1, last + 1):
        done += steps_of(engine, step, step)
        if step in save_at:
            saver.save(step)
            assert saver.outcome() == (step, "")
            engine.deepspeed_engine.eval()
            with torch.no_grad():
                logits = engine.deepspeed_engine(batch_of(0)[:2, :-1]).logits.float().clone()
    return {"steps": done, "masters": masters_of(engine), "logits": logits}


@fp16_supported()
def resumed(path: str, run: str, last: int) -> dict[str, Any]:
    """Resume in a fresh engine and train to `last`."""
    from zero_tp.run.checkpoint.start_point import Resume

    engine, config = build(path)
    start = Resume(find_checkpoint(Path(run)))
    start.restore(engine.zero, config.zero_tp.training.seed)
    step = start.step
    scale = None if engine.zero.loss_scale is None else engine.zero.loss_scale.value
    return {"steps": steps_of(engine, step + 1, last), "masters": masters_of(engine), "from": step, "scale": scale}


FIRST = [(4, 2, 1, "bf16_fp32_accumulation", "none"), (4, 2, 3, "bf16", "parameters")]
CASES = [
    *FIRST,
    (4, 2, 0, "fp32", "none"),
    (4, 2, 2, "bf16", "optimizer"),
    *((4, 2, stage, dtype, "none") for stage, dtype in ((0, "bf16"), (1, "fp32"), (2, "fp32"), (2, "bf16"))),
    *((4, 2, 3, dtype, "none") for dtype in ("fp32", "bf16")),
    (2, 1, 2, "fp32", "none"),
    (3, 1, 3, "fp32", "none"),
    (4, 4, 1, "fp32", "none"),
    (4, 2, 1, "fp32", "optimizer"),
]


@pytest.mark.parametrize(("world", "tensor", "stage", "dtype", "offload"), in_tiers(CASES, FIRST[1:]))
def test_a_resumed_run_is_the_run_that_never_stopped(
    ranks: Pools, tmp_path: Path, world: int, tensor: int, stage: int, dtype: str, offload: str
) -> None:
    path = write_config(tmp_path / "run.json", stage, dtype, tensor, offload)
    run = tmp_path / "run"
    whole = ranks(world).run(straight, str(path), str(run), [STOP], STEPS)
    again = ranks(world).run(resumed, str(path), str(run), STEPS)
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
def test_a_run_goes_on_with_another_implementation_of_adam(ranks: Pools, tmp_path: Path, offload: str) -> None:
    """torch's plain AdamW, then its fused kernel or DeepSpeed's on the host, take the same steps but for rounding."""
    path = write_config(tmp_path / "before.json", 2, "fp32")
    before = json.loads(path.read_text())
    before["optimizer"]["params"]["fused"] = False
    path.write_text(json.dumps(before))
    after = write_config(tmp_path / "after.json", 2, "fp32", offload=offload)
    params = [
        RunConfig.load(each, world_size=2).engine_settings.written()["optimizer"]["params"] for each in (path, after)
    ]
    assert params[0]["fused"] is False and params[1].get("fused") is (True if offload == "none" else None)
    run = tmp_path / "run"
    whole = ranks(2).run(straight, str(path), str(run), [4], 8)
    again = ranks(2).run(resumed, str(after), str(run), 8)
    for straight_on, changed_over in zip(whole, again, strict=True):
        assert changed_over["from"] == 4
        for found, expected in zip(changed_over["steps"], straight_on["steps"][4:], strict=True):
            assert found == pytest.approx(expected, rel=1e-4)


def loss_scales(stage: int, overflows: list[bool], resume_at: int) -> tuple[list[float], list[float], set[str]]:
    """Return the scales of a run, those of one that resumes at `resume_at`, and the keys of the saved state."""
    from tests.engine.test_engine import build as engine_of
    from tests.support.compare import grid

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
    overflows[:8] = [True, True, True, False, False, False, False, False]  # it falls and rises whatever is drawn
    for resume_at in (2, 7, 20):
        for whole, again, saved in ranks(2).run(loss_scales, stage, overflows, resume_at):
            assert whole == again
            assert len(set(whole)) > 2, "the scale has moved"
            assert saved == {"cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis"}


@pytest.mark.parametrize(("before", "after"), [("fp16", "bf16"), ("bf16", "fp16"), ("fp32", "fp16")])
def test_a_run_goes_on_in_another_dtype_with_that_dtypes_scale(
    ranks: Pools, tmp_path: Path, before: str, after: str
) -> None:
    run = str(tmp_path / "run")
    first, then = write_config(tmp_path / "before.json", 2, before), write_config(tmp_path / "after.json", 1, after)
    whole = ranks(2).run(straight, str(first), run, [2], 3)
    for again, result in zip(ranks(2).run(resumed, str(then), run, 3), whole, strict=True):
        assert again["scale"] == (2.0**10 if after == "fp16" else None)
        assert again["steps"][0][0] == pytest.approx(result["steps"][2][0], rel=1e-2)


@pytest.mark.parametrize(("settings", "kept"), [({"keep": 2}, [2, 3]), ({"keep": 1, "keep_every": 2}, [2, 3])])
def test_the_newest_and_milestones_stay_and_latest_names_the_last(
    ranks: Pools, tmp_path: Path, settings: dict[str, int], kept: list[int]
) -> None:
    path, run = changed(write_config(tmp_path / "run.json", 1, "fp32", 1), **settings), tmp_path / "run"
    ranks(2).run(straight, str(path), str(run), [1, 2, 3], 3)
    assert complete_steps(run) == kept
    assert (checkpoints_directory(run) / LATEST).read_text().strip() == step_directory(run, 3).name
    names = [LATEST, *(step_directory(run, step).name for step in kept)]
    assert sorted(p.name for p in checkpoints_directory(run).iterdir()) == names
    prune(run, 1)
    assert complete_steps(run) == [3]
