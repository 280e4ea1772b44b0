""" "auto", batch sizes and overrides, also of a resumed run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.mistakes import changed, written
from zero_tp.base.settings.keys import leaves
from zero_tp.base.settings.resolve import AUTO, SavedStart, resolve_batch
from zero_tp.base.settings.schedule import SCHEDULES, CosineWithMinLR
from zero_tp.run.config import ConfigError, RunConfig


def test_an_auto_schedule_follows_the_steps_until_its_rate_falls(tmp_path: Path) -> None:
    path = written(tmp_path, changed(scheduler__params__warmup_num_steps="auto"))
    first = RunConfig.load(path, ["zero_tp.training.steps=1000"], world_size=4)
    params = {"total_num_steps": 1001, "warmup_num_steps": 10}
    assert first.engine_settings.written()["scheduler"]["params"] == params
    for updates in (0, 10, 11, 900):
        saved = SavedStart(first.resolved(), {}, updates)
        later = RunConfig.load(path, ["zero_tp.training.steps=3000"], 4, saved)
        has_begun = updates > 10
        expected = params if has_begun else {**params, "total_num_steps": 3001}
        assert (
            later.engine_settings.written()["scheduler"]["params"] == expected
            and later.zero_tp.training.steps == 3000
        )
        said = (
            r"stays 1001, because the rate has been falling since step 10; --set \S+=3001"
            if has_begun
            else "3001, "
        )
        assert re.match(f"scheduler.params.total_num_steps: {said}", later.cautions()[0])
        assert not RunConfig.load(path, ["zero_tp.training.steps=1000"], 4, saved).cautions()
        written_out = RunConfig.load(path, ["scheduler.params.total_num_steps=2000"], 4, saved)
        assert (
            written_out.engine_settings.written()["scheduler"]["params"]["total_num_steps"] == 2000
        )


def test_a_run_may_say_its_tokens(tmp_path: Path) -> None:
    """As many steps as see them, the last of which may see more; the resolved config has the
    steps.
    """
    raw = changed(train_batch_size=64, train_micro_batch_size_per_gpu="auto")
    step = 64 * raw["zero_tp"]["data"]["sequence_length"]
    for tokens, steps in ((20 * step - 1, 20), (20 * step, 20), (20 * step + 1, 21)):
        raw["zero_tp"]["training"] = {"tokens": tokens}
        for world in (None, 4):
            config = RunConfig.load(written(tmp_path, raw), world_size=world)
            assert config.zero_tp.training.steps == steps and config.zero_tp.training.tokens is None
            assert (
                config.engine_settings.written()["scheduler"]["params"]["total_num_steps"]
                == steps + 1
                if world
                else True
            )
            again = RunConfig.load(
                written(tmp_path, config.resolved(), "config.json"), world_size=world
            )
            assert again.zero_tp.training.steps == steps
    del raw["train_batch_size"]
    raw["train_micro_batch_size_per_gpu"] = 2
    with pytest.raises(
        ConfigError, match=r"^zero_tp\.training\.tokens: needs the global batch.*--world-size"
    ):
        RunConfig.load(written(tmp_path, raw))


def test_a_decay_may_begin_anywhere_in_the_stable_phase(tmp_path: Path) -> None:
    params = {"num_warmup_steps": "auto", "num_training_steps": "auto", "num_decay_steps": 100}
    path = written(tmp_path, changed(scheduler={"type": "warmup_stable_decay", "params": params}))
    first = RunConfig.load(path, ["zero_tp.training.steps=1000"], 4)
    assert first.engine_settings.written()["scheduler"]["params"] == {
        **{"num_warmup_steps": 10, "num_training_steps": 1001, "num_decay_steps": 100}
    }
    for updates, length in ((500, 601), (901, 601), (902, 1001)):
        later = RunConfig.load(
            path, ["zero_tp.training.steps=600"], 4, SavedStart(first.resolved(), {}, updates)
        )
        assert (
            later.engine_settings.written()["scheduler"]["params"]["num_training_steps"] == length
        )


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_missing_key_that_auto_can_fill_says_so(kind: str, tmp_path: Path) -> None:
    """Each required parameter of each schedule is left out, then written as the message says."""
    fields = {
        name: field for name, field in SCHEDULES[kind].model_fields.items() if field.is_required()
    }
    alternatives = {"min_lr": 0.0} if issubclass(SCHEDULES[kind], CosineWithMinLR) else {}
    params = {
        name: "auto" if f"scheduler.params.{name}" in AUTO else 1 for name in fields
    } | alternatives
    complete = changed(scheduler={"type": kind, "params": params})
    RunConfig.load(written(tmp_path, complete), ["zero_tp.training.steps=2000"], world_size=4)
    for name in fields:
        key = f"scheduler.params.{name}"
        others = {other: value for other, value in params.items() if other != name}
        with pytest.raises(ConfigError) as caught:
            RunConfig.load(
                written(tmp_path, changed(scheduler={"type": kind, "params": others})), world_size=4
            )
        remedy = (
            f'write "auto" ({AUTO[key]}) or a value'
            if key in AUTO
            else "add it (docs/config.md describes it)"
        )
        assert str(caught.value) == f"{key}: required, but not given; {remedy}"


def test_auto_values(tmp_path: Path) -> None:
    config = changed(
        train_micro_batch_size_per_gpu="auto",
        train_batch_size=64,
        gradient_clipping="auto",
        bf16__enabled="auto",
        fp16__enabled="auto",
        optimizer__params__eps="auto",
        zero_optimization__reduce_bucket_size="auto",
    )
    config["scheduler"] = {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": "auto", "warmup_num_steps": "auto", "warmup_max_lr": "auto"},
    }
    loaded = RunConfig.load(written(tmp_path, config), world_size=4)
    resolved = loaded.engine_settings.written()
    assert loaded.micro_batch == 16 and loaded.dtype == "bf16"
    # The device decides, and the allocator of a CPU.
    assert {key for key, value in leaves(loaded.resolved()) if value == "auto"} == {
        "zero_tp.compile",
        "zero_tp.training.keep_freed_memory",
    }
    assert resolved["gradient_clipping"] == 1.0
    assert resolved["optimizer"]["params"]["eps"] == 1e-8
    assert resolved["zero_optimization"]["reduce_bucket_size"] == 64 * 64
    assert resolved["scheduler"]["params"] == {
        "total_num_steps": 101,
        "warmup_num_steps": 1,
        "warmup_max_lr": 3e-4,
    }


@pytest.mark.parametrize(
    "key", ["zero_optimization.stage", "zero_tp.training.steps", "tensorboard.job_name"]
)
def test_an_auto_that_nothing_resolves_is_named(key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f'^{key}: "auto"'):
        RunConfig.load(written(tmp_path), [f"{key}=auto"])


def test_overrides_are_json_or_else_strings(tmp_path: Path) -> None:
    overrides = (
        "zero_optimization.stage=3",
        "zero_tp.data.train=data/other",
        'zero_tp.data.validation={"a": 1, "b": 0.5}',
        "zero_tp.logging.interval=10",
        "zero_tp.logging.interval=20",
    )
    config = RunConfig.load(written(tmp_path), overrides)
    assert config.zero_stage == 3
    assert config.zero_tp.data.train == {"data/other": 1.0}
    assert config.zero_tp.data.validation == {"a": 1.0, "b": 0.5}
    assert config.zero_tp.logging.interval == 20


@given(
    data=st.integers(1, 64),
    micro=st.integers(1, 64),
    accumulation=st.integers(1, 64),
    given=st.sampled_from(
        [("total", "micro"), ("total", "accumulation"), ("micro", "accumulation")]
    ),
)
@settings(max_examples=50, deadline=None)
def test_any_two_batch_sizes_give_the_third(
    data: int, micro: int, accumulation: int, given: tuple[str, ...]
) -> None:
    keys = {
        "total": "train_batch_size",
        "micro": "train_micro_batch_size_per_gpu",
        "accumulation": "gradient_accumulation_steps",
    }
    sizes = {"total": micro * accumulation * data, "micro": micro, "accumulation": accumulation}
    batch = resolve_batch({keys[name]: sizes[name] for name in given}, data)
    assert (batch.total, batch.micro, batch.accumulation) == tuple(sizes.values())
