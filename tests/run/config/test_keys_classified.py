"""Every key of a run's file is one of: trained and compared, only timing, refused, or noted as
without effect.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from tests.support.keys import (
    CELLS,
    SET_BY_OTHER_KEYS,
    ZERO,
    all_keys,
    cell,
    other_values,
    timing,
    trained,
)
from tests.support.launched import ROOT
from tests.support.matrix import config_of, once_for_equals
from tests.support.mistakes import with_changes, written
from zero_tp.base.settings.refused import CURRENT_NAMES
from zero_tp.run.config import ConfigError, RunConfig
from zero_tp.run.config.model_block import check_model

WORLD = 4
KEYS, TRAINED = all_keys(), trained()
OTHERS = sorted(key for key in KEYS if key not in TRAINED and timing(key) is None)
ENABLED = (
    "fp16",
    "bf16",
    "flops_profiler",
    "comms_logger",
    "tensorboard",
    "wandb",
    "csv_monitor",
    "comet",
)


def loaded(config: dict[str, Any], folder: Path) -> RunConfig:
    return RunConfig.load(written(folder, config), world_size=WORLD)


@pytest.fixture(scope="module", autouse=True)
def checked_once() -> Iterator[None]:
    """The model depends on no key of DeepSpeed's: it is checked once."""
    with patch("zero_tp.run.config.check_keys.check_model", once_for_equals(check_model)):
        yield


def bases(key: str) -> list[dict[str, Any]]:
    """Configs in which a key may act: at each ZeRO stage, with and without TP, with its block
    on.
    """
    configs = []
    for tensor in ("TP 1", "TP 2"):
        for stage in ("ZeRO-0", "ZeRO-1", "ZeRO-2", "ZeRO-3"):
            config = config_of(
                cell(tensor=tensor, stage=stage, sequence="SP" if tensor == "TP 2" else "no SP")
            )
            block = key.partition(".")[0]
            if block in ENABLED:
                config = with_changes(config, {f"{block}.enabled": True})
            if key.startswith((f"{ZERO}.offload_optimizer.", f"{ZERO}.offload_param.")):
                if stage != "ZeRO-3":
                    continue
                config = with_changes(config, {key.rpartition(".")[0]: {"device": "cpu"}})
                config["optimizer"]["params"].pop("torch_adam", None)
            if key.startswith("scheduler.params."):
                config |= one_cycle()
            if key in (
                "optimizer.params.bias_correction",
                "optimizer.params.fp32_optimizer_states",
            ):
                config["optimizer"]["params"] = {"lr": 0.1, "torch_adam": False}
                if key.endswith("states") and stage == "ZeRO-0":
                    continue
                if key.endswith("states"):
                    config = with_changes(config, {f"{ZERO}.offload_optimizer": {"device": "cpu"}})
            configs.append(config)
    return configs


def test_keys_are_of_one_kind() -> None:
    assert not [key for key in TRAINED if timing(key)]
    assert len(KEYS) > 200
    unknown = {key for key in TRAINED if not key.startswith("zero_tp")} - KEYS.keys()
    assert unknown == {
        "optimizer",
        "optimizer.params",
        ZERO,
        f"{ZERO}.offload_optimizer",
        f"{ZERO}.offload_param",
    }


@pytest.mark.parametrize("key", OTHERS)
def test_a_key_that_is_not_trained_is_refused_or_noted(key: str, tmp_path: Path) -> None:
    """Whatever the stage and TP: each value but one, the default, which may stand anywhere."""
    for config in bases(key):
        accepted = []
        for value in other_values(KEYS[key]):
            try:
                run = loaded(with_changes(config, {key: value}), tmp_path)
            except ConfigError as error:
                assert str(error).startswith((f"{key}: ", f"{key.rpartition('.')[0]}: ")), error
            else:
                noted = (
                    ",".join(line.partition(": ")[0] for line in run.without_effect())
                    .replace(" ", "")
                    .split(",")
                )
                if key not in noted:
                    accepted.append(value)
        assert len(accepted) <= 1, accepted


def test_cells_that_are_trained_are_accepted_and_have_an_effect(tmp_path: Path) -> None:
    for settings, changes in CELLS.values():
        config = config_of(settings)
        config = with_changes(config, changes)
        noted = " ".join(loaded(config, tmp_path).without_effect())
        assert not [key for key in changes if key in noted], noted


def test_what_other_tests_train_is_named_there() -> None:
    for key, test in SET_BY_OTHER_KEYS.items():
        name = key.rpartition(".")[2]
        assert name in (ROOT / test).read_text(), (key, test)


def test_a_field_of_deepspeed_has_one_name(tmp_path: Path) -> None:
    """Its models take a field's own name beside the documented one: here both are one key, and
    no refusal misses it.
    """
    fields = DeepSpeedZeroConfig.model_fields
    assert {
        name for name, field in fields.items() if field.alias not in (None, name)
    } == CURRENT_NAMES.keys()
    stage3 = config_of(cell(stage="ZeRO-3"))
    for documented in CURRENT_NAMES.values():
        stage3[ZERO].pop(documented, None)

    def outcome(name: str) -> Any:
        try:
            return loaded(
                with_changes(stage3, {f"{ZERO}.{name}": 1}), tmp_path
            ).engine_settings.written()
        except ConfigError as error:
            return str(error)

    for short, documented in CURRENT_NAMES.items():
        assert outcome(short) == outcome(documented)
    both = {f"{ZERO}.max_live_parameters": 1, f"{ZERO}.stage3_max_live_parameters": 1}
    with pytest.raises(
        ConfigError, match="is another name of stage3_max_live_parameters, which is given too"
    ):
        loaded(with_changes(stage3, both), tmp_path)


HOST = {"device": "cpu"}


def schedule(kind: str, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": kind, "params": params}}


def one_cycle(**params: Any) -> dict[str, Any]:
    return schedule("OneCycle", cycle_min_lr=0.0, cycle_max_lr=0.1, **params)


@pytest.mark.parametrize(
    ("stage", "changes", "keys"),
    [
        (2, {f"{ZERO}.stage3_max_live_parameters": 1}, f"{ZERO}.stage3_max_live_parameters"),
        (2, {f"{ZERO}.sub_group_size": 1}, f"{ZERO}.sub_group_size"),
        (0, {f"{ZERO}.overlap_comm": True}, f"{ZERO}.overlap_comm"),
        (0, {f"{ZERO}.reduce_bucket_size": 9}, f"{ZERO}.reduce_bucket_size"),
        (3, {f"{ZERO}.parameter_alignment": True}, f"{ZERO}.parameter_alignment"),
        (2, {f"{ZERO}.ignore_unused_parameters": False}, f"{ZERO}.ignore_unused_parameters"),
        (2, {f"{ZERO}.allgather_bucket_size": 2000}, f"{ZERO}.allgather_bucket_size"),
        (
            2,
            {f"{ZERO}.offload_optimizer": {"device": "none", "pin_memory": True}},
            f"{ZERO}.offload_optimizer.pin_memory",
        ),
        (
            3,
            {f"{ZERO}.offload_optimizer": {**HOST, "buffer_count": 5}},
            f"{ZERO}.offload_optimizer.buffer_count",
        ),
        (
            3,
            {f"{ZERO}.offload_param": {**HOST, "max_in_cpu": 5}},
            f"{ZERO}.offload_param.max_in_cpu",
        ),
        (
            1,
            {"fp16": {"enabled": False, "hysteresis": 3, "loss_scale": 8}},
            "fp16.hysteresis fp16.loss_scale",
        ),
        (1, {"fp16": {"enabled": True, "hysteresis": 3, "loss_scale": 8}}, "fp16.hysteresis"),
        (1, {"bf16.immediate_grad_update": True}, "bf16.immediate_grad_update"),
        (
            1,
            {"bf16.enabled": True, "bf16.immediate_grad_update": True},
            "bf16.immediate_grad_update",
        ),
        (
            1,
            {
                "bf16.enabled": True,
                "data_types.grad_accum_dtype": "fp32",
                f"{ZERO}.reduce_scatter": False,
            },
            f"{ZERO}.reduce_scatter",
        ),
        (1, {"timers.throughput.synchronized": True}, "timers.throughput.synchronized"),
        (
            1,
            {"comet.project": "a", "flops_profiler.profile_step": 2},
            "flops_profiler.profile_step comet.project",
        ),
        (1, {"aio.block_size": 1024}, "aio.block_size"),
        (
            1,
            {"activation_checkpointing.number_checkpoints": 4},
            "activation_checkpointing.number_checkpoints",
        ),
        (
            0,
            {"prescale_gradients": True, "gradient_predivide_factor": 2.0},
            "gradient_predivide_factor",
        ),
        (
            0,
            {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "dampening": 0.5}}},
            "optimizer.params.dampening",
        ),
        (1, {"zero_allow_untested_optimizer": True}, "zero_allow_untested_optimizer"),
        (1, one_cycle(cycle_momentum=False, cycle_min_mom=0.5), "scheduler.params.cycle_min_mom"),
        (1, one_cycle(decay_step_size=5), "scheduler.params.decay_step_size"),
    ],
)
def test_keys_without_effect_are_noted(
    stage: int, changes: dict[str, Any], keys: str, tmp_path: Path
) -> None:
    """Alone: the other keys of these configs act."""
    config = config_of(cell(stage=f"ZeRO-{stage}"))
    if any("offload_optimizer" in key for key in changes):
        del config["optimizer"]["params"]["torch_adam"]
    config = with_changes(config, changes)
    noted = {
        key
        for line in loaded(config, tmp_path).without_effect()
        for key in line.partition(": ")[0].split(", ")
    }
    assert noted == set(keys.split())


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        (schedule("WarmupLR", warmup_max_lr=0.5, warmup_num_steps=1), "optimizer.params.lr"),
        (
            schedule("WarmupCosineLR", total_num_steps=2, warmup_num_steps=1),
            "scheduler.params.total_num_steps",
        ),
        (
            schedule("WarmupLR", warmup_num_steps=1000),
            "scheduler.type scheduler.params.warmup_num_steps",
        ),
        (one_cycle(), "optimizer.params.lr scheduler.type"),
        ({"scheduler.type": "WarmupLR"}, "scheduler.type"),
        ({"comms_logger.enabled": True}, "comms_logger.enabled"),
        ({"flops_profiler.enabled": True}, "flops_profiler.enabled"),
        (schedule("WarmupLR", warmup_num_steps=1), ""),
        ({}, ""),
    ],
)
def test_unusual_values_are_noted(changes: dict[str, Any], keys: str, tmp_path: Path) -> None:
    config = config_of(cell())
    config = with_changes(config, changes)
    lines = loaded(config, tmp_path).cautions()
    assert [key for line in lines for key in line.partition(": ")[0].split(", ")] == keys.split()
