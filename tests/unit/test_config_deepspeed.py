"""DeepSpeed's keys are ours: these tests fail when a new DeepSpeed reads other keys than we know."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.runtime import config as ds
from deepspeed.runtime import lr_schedules

from zero_tp.config import RunConfig, optimizer
from zero_tp.config import deepspeed as keys
from zero_tp.validation import Block

PRESETS = Path(__file__).parents[2] / "ds_configs"
WORLD_SIZES = {
    "quickstart": 4,
    "gpt2_124m_zero1": 4,
    "gpt2_124m_zero2": 4,
    "gpt2_124m_zero3": 4,
    "gpt2_124m_zero3_offload": 4,
    "gpt2_355m": 8,
    "gpt2_2.5b": 16,
    "gpt2_8.3b": 512,
    "llama_135m": 8,
    "qwen3_0.6b": 8,
    "llama3_8b": 64,
    "pythia_410m": 8,
}


class Recorder(dict[str, Any]):
    """A dict that notes the keys it is asked for, present or not."""

    def __init__(self, content: dict[str, Any] | None = None) -> None:
        super().__init__(content or {})
        self.asked: set[str] = set()

    def __copy__(self) -> Recorder:
        return self

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def keys(self) -> Any:
        return self


def keys_read(config: dict[str, Any]) -> Recorder:
    recorder = Recorder(config)
    ds.DeepSpeedConfig(recorder)
    return recorder


def test_top_level_keys() -> None:
    read = keys_read({"train_batch_size": 1}).asked
    removed_or_renamed = {key for key in (*keys.REMOVED, *keys.RENAMED) if "." not in key}
    ours = set(keys.known_keys()) - {"zero_tp"} | removed_or_renamed
    assert read - ours == set(), "DeepSpeed reads keys that zero_tp does not know"
    # read by the engine or outside DeepSpeedConfig.__init__
    assert ours - read == {"sequence_parallel_size"}, "DeepSpeed no longer reads these"


@pytest.mark.parametrize("name", keys.OWN_BLOCKS)
def test_keys_of_blocks_that_deepspeed_reads_with_get(name: str) -> None:
    block = Recorder()
    keys_read({"train_batch_size": 1, name: block})
    assert block.asked == set(keys.OWN_BLOCKS[name].model_fields)


@pytest.mark.parametrize(("name", "model"), [("writer", keys.CheckpointWriter), ("parallel_write", keys.ParallelWrite)])
def test_keys_within_the_checkpoint_block(name: str, model: type[Block]) -> None:
    block = Recorder()
    keys_read({"train_batch_size": 1, "checkpoint": {name: block}})
    assert block.asked == set(model.model_fields)


@pytest.mark.parametrize(
    ("name", "model"), [("optimizer", optimizer.OptimizerBlock), ("scheduler", optimizer.TypedBlock)]
)
def test_keys_of_optimizer_and_scheduler(name: str, model: type[Block]) -> None:
    block = Recorder({"type": "none"})
    keys_read({"train_batch_size": 1, name: block})
    assert block.asked == set(model.model_fields)


def test_removed_keys() -> None:
    zero = {f"zero_optimization.{key}" for key in ds._REMOVED_ZERO_CONFIG_KEYS}
    assert set(keys.REMOVED) == set(ds._REMOVED_TOP_LEVEL_CONFIG_KEYS) | zero


def test_deprecated_keys_of_zero_are_the_renamed_ones() -> None:
    fields = keys.deepspeed_models()["zero_optimization"].model_fields
    old = {name for name, field in fields.items() if (field.json_schema_extra or {}).get("deprecated")}  # type: ignore[union-attr]
    assert {f"zero_optimization.{name}" for name in old} == {key for key in keys.RENAMED if "." in key}


def test_all_optimizers_of_deepspeed_are_known() -> None:
    known = {name.lower() for name in (*optimizer.OPTIMIZERS, *optimizer.REFUSED_OPTIMIZERS)}
    assert set(ds.DEEPSPEED_OPTIMIZERS) <= known


@pytest.mark.parametrize("name", optimizer.SCHEDULERS)
def test_parameters_of_schedulers(name: str) -> None:
    parameters = set(inspect.signature(getattr(lr_schedules, name).__init__).parameters)
    by_the_engine = {"self", "optimizer", "last_batch_iteration"}
    assert parameters - by_the_engine == set(optimizer.scheduler_params(name).model_fields)


def test_all_schedulers_of_deepspeed_are_known() -> None:
    assert set(optimizer.SCHEDULERS) == set(lr_schedules.VALID_LR_SCHEDULES)


POPPED = {"torch_adam", "adam_w_mode"}  # read by DeepSpeed, which chooses the class by them
GIVEN_BY_DEEPSPEED = {"self", "params", "model_params", "adam_w_mode", "adamw_mode"}
NOT_AMSGRAD = {"amsgrad"}  # raises in FusedAdam, and is ignored by DeepSpeed's CPU optimizers
NOT_FOR_TRAINING = {"capturable", "differentiable", "decoupled_weight_decay"}


@pytest.mark.parametrize(
    ("name", "torch_adam", "offload", "theirs", "left_out"),
    [
        ("adam", True, False, torch.optim.Adam, NOT_FOR_TRAINING),
        ("adamw", True, True, torch.optim.AdamW, NOT_FOR_TRAINING),
        ("adamw", False, False, FusedAdam, NOT_AMSGRAD),
        ("adam", False, True, DeepSpeedCPUAdam, NOT_AMSGRAD),
        ("adagrad", False, False, torch.optim.Adagrad, NOT_FOR_TRAINING),
        ("adagrad", False, True, DeepSpeedCPUAdagrad, NOT_AMSGRAD),
        ("lion", False, False, FusedLion, set()),
        ("lion", False, True, DeepSpeedCPULion, set()),
        ("sgd", False, True, torch.optim.SGD, NOT_FOR_TRAINING),
    ],
)
def test_parameters_of_optimizers(name: str, torch_adam: bool, offload: bool, theirs: Any, left_out: set[str]) -> None:
    parameters = set(inspect.signature(theirs.__init__).parameters)
    ours = optimizer.optimizer_params(name, torch_adam, offload).model_fields
    assert parameters - GIVEN_BY_DEEPSPEED - left_out == set(ours) - POPPED
    assert ours["lr"].is_required()


def test_every_preset_has_a_world_size_here() -> None:
    assert {path.stem for path in PRESETS.glob("*.json")} == set(WORLD_SIZES)


@pytest.mark.parametrize("name", WORLD_SIZES)
def test_presets_load_and_deepspeed_accepts_them(name: str) -> None:
    config = RunConfig.load(PRESETS / f"{name}.json", world_size=WORLD_SIZES[name])
    given = config.deepspeed_config()
    given["train_batch_size"] //= config.data_parallel  # without ranks, the parser counts one replica
    parsed = ds.DeepSpeedConfig(given)
    assert parsed.train_micro_batch_size_per_gpu == config.micro_batch
    assert parsed.gradient_accumulation_steps == config.accumulation
    assert parsed.zero_optimization_stage == config.zero_stage
    assert parsed.bfloat16_config.enabled == (config.dtype == "bf16")
