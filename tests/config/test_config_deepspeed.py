"""DeepSpeed's keys are ours: these tests fail when a new DeepSpeed reads other keys than we know."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime import config as ds
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION, SchedulerType

from zero_tp.config import RunConfig, optimizer, schedule
from zero_tp.config import deepspeed as keys
from zero_tp.config.config_file import ConfigFile
from zero_tp.validation import ConfigModel

PRESETS = Path(__file__).parents[2] / "ds_configs"
WORLD_SIZES = {
    "quickstart": 4,
    "gpt2_124m_zero1": 4,
    "gpt2_124m_zero2": 4,
    "gpt2_124m_zero3": 4,
    "gpt2_124m_zero3_offload": 4,
    "gpt2_124m_zero3_nvme": 4,
    "gpt2_124m_cpu_checkpointing": 4,
    "gpt2_124m_contiguous": 4,
    "gpt2_124m_fp16": 4,
    "gpt2_355m": 8,
    "gpt2_2.5b": 16,
    "gpt2_8.3b": 512,
    "llama_135m": 8,
    "llama_135m_wsd": 8,
    "qwen3_0.6b": 8,
    "llama3_8b": 64,
    "pythia_410m": 8,
    "olmoe_small": 4,
    "olmoe_1b_7b": 8,
    "qwen1.5_moe_a2.7b": 16,
    "qwen3_30b_a3b": 32,
    "mixtral_8x7b": 64,
    "bert_small": 4,
    "bert_336m": 8,
    "bert_1.3b": 8,
    "bert_3.9b": 8,
    "papers/gpt2_1.2b": 64,
    "papers/gpt2_4.2b": 256,
    "papers/gpt_22b": 8,
    "papers/gpt_175b": 64,
    "papers/gpt_530b": 280,
    "papers/gpt_1t": 512,
    "papers/zero_7.5b": 64,
    "papers/zero_128b": 1024,
    "papers/zero_1t": 1024,
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
    ours = {*ConfigFile.model_fields, *keys.OFF_BLOCKS} - {"zero_tp"} | removed_or_renamed
    assert read - ours == set(), "DeepSpeed reads keys that zero_tp does not know"
    # read by the engine or outside DeepSpeedConfig.__init__
    assert ours - read == {"sequence_parallel_size"}, "DeepSpeed no longer reads these"


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("activation_checkpointing", keys.ActivationCheckpointing),
        ("data_types", keys.DataTypes),
        ("aio", keys.Aio),
        ("flops_profiler", keys.FlopsProfiler),
        ("optimizer", optimizer.OptimizerBlock),
        ("scheduler", schedule.SchedulerBlock),
    ],
)
def test_keys_of_blocks_that_deepspeed_reads_with_get(name: str, model: type[ConfigModel]) -> None:
    block = Recorder({"type": "none"} if "type" in model.model_fields else {})
    keys_read({"train_batch_size": 1, name: block})
    assert block.asked == set(model.model_fields)


def test_removed_keys() -> None:
    zero = {f"zero_optimization.{key}" for key in ds._REMOVED_ZERO_CONFIG_KEYS}
    assert set(keys.REMOVED) == set(ds._REMOVED_TOP_LEVEL_CONFIG_KEYS) | zero


def test_deprecated_keys_of_zero_are_the_renamed_ones() -> None:
    fields = DeepSpeedZeroConfig.model_fields
    old = {name for name, field in fields.items() if (field.json_schema_extra or {}).get("deprecated")}
    old |= {name for name, field in fields.items() if field.alias not in (None, name)}
    assert {f"zero_optimization.{name}" for name in old} == {key for key in keys.RENAMED if "." in key}


def test_all_optimizers_of_deepspeed_are_known() -> None:
    known = {name.lower() for name in (*optimizer.OPTIMIZERS, *optimizer.REFUSED_OPTIMIZERS)}
    assert set(ds.DEEPSPEED_OPTIMIZERS) <= known


WARMUP = {"warmup_num_steps", "warmup_type"}
SCHEDULER_PARAMETERS: dict[str, set[str]] = {
    "LRRangeTest": {f"lr_range_test_{name}" for name in ("min_lr", "step_size", "step_rate", "staircase")},
    "OneCycle": {
        *("cycle_min_lr", "cycle_max_lr", "cycle_first_step_size", "cycle_second_step_size", "decay_step_size"),
        *("cycle_first_stair_count", "cycle_second_stair_count", "cycle_momentum", "cycle_min_mom", "cycle_max_mom"),
        *("decay_lr_rate", "decay_mom_rate"),
    },
    "WarmupLR": {*WARMUP, "warmup_min_lr", "warmup_max_lr"},
    "WarmupDecayLR": {*WARMUP, "warmup_min_lr", "warmup_max_lr", "total_num_steps"},
    "WarmupCosineLR": {*WARMUP, "warmup_min_ratio", "cos_min_ratio", "total_num_steps"},
}
"""As DeepSpeed's documentation of `scheduler` lists them."""


@pytest.mark.parametrize("name", SCHEDULER_PARAMETERS)
def test_parameters_of_schedulers(name: str) -> None:
    assert set(schedule.SCHEDULES[name].model_fields) == SCHEDULER_PARAMETERS[name]


def test_all_schedules_are_known() -> None:
    assert set(schedule.DEEPSPEED_SCHEDULES) == set(lr_schedules.VALID_LR_SCHEDULES)
    known = {*schedule.TRANSFORMERS_SCHEDULES, *schedule.REFUSED_SCHEDULES}
    assert known == {kind.value for kind in TYPE_TO_SCHEDULER_FUNCTION}


CONSTRUCTORS: tuple[tuple[type[ConfigModel], Any], ...] = (
    (optimizer.TorchAdam, torch.optim.AdamW),
    (optimizer.FusedAdam, FusedAdam),
    (optimizer.CPUAdam, DeepSpeedCPUAdam),
    (optimizer.SGD, torch.optim.SGD),
    *((model, getattr(lr_schedules, name)) for name, model in schedule.DEEPSPEED_SCHEDULES.items()),
    *(
        (model, TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(name)])
        for name, model in schedule.TRANSFORMERS_SCHEDULES.items()
    ),
)
BY_THE_ENGINE = {"params", "model_params", "adamw_mode", "optimizer", "last_batch_iteration", "last_epoch"}
REFUSED = {
    "torch": {"capturable", "differentiable"},
    "deepspeed": {"amsgrad"},
    "transformers": {"num_stable_steps"},
}
"""Arguments that a file can't give, by the library of the constructor."""


NAMED = {schedule.WarmupDecayLR: {"warmup_max_lr"}, schedule.WarmupStableDecay: {"num_training_steps"}}
"""Arguments that a file must give though they have defaults."""


@pytest.mark.parametrize(("model", "constructor"), CONSTRUCTORS)
def test_params_are_the_constructor_s_arguments_with_its_defaults(model: type[ConfigModel], constructor: Any) -> None:
    refused = BY_THE_ENGINE | REFUSED[constructor.__module__.partition(".")[0]]
    arguments = {
        name: parameter.default
        for name, parameter in inspect.signature(constructor).parameters.items()
        if name not in refused
    }
    fields = model.model_fields
    assert fields.keys() - CHOICE == arguments.keys() - CHOICE
    required = {name for name, default in arguments.items() if default is inspect.Parameter.empty}
    named = {"lr"} if "lr" in fields else NAMED.get(model, set())
    assert {name for name, field in fields.items() if field.is_required()} == required | named
    same = arguments.keys() - required - named - {"weight_decay"} - CHOICE  # the engine gives its own weight_decay
    assert {name: fields[name].default for name in same} == {name: arguments[name] for name in same}


TORCH = {"lr", "weight_decay", "maximize", "foreach", "fused"}
TORCH_ADAM = {*TORCH, "betas", "eps", "amsgrad"}
ADAM = {"lr", "betas", "eps", "weight_decay", "bias_correction"}
CHOICE = {"torch_adam", "adam_w_mode"}  # DeepSpeed chooses the class of an Adam by them
ON_CPU, ON_DEVICE = "fp32_optimizer_states", "set_grad_none"


@pytest.mark.parametrize(
    ("name", "torch_adam", "offload", "parameters"),
    [
        ("adam", True, False, TORCH_ADAM | CHOICE),
        ("adamw", True, True, TORCH_ADAM | CHOICE),
        ("adamw", False, False, ADAM | CHOICE | {ON_DEVICE}),
        ("adam", False, True, ADAM | CHOICE | {ON_CPU}),
        ("sgd", False, False, TORCH | {"momentum", "dampening", "nesterov"}),
        ("sgd", False, True, TORCH | {"momentum", "dampening", "nesterov"}),
    ],
)
def test_parameters_of_optimizers(name: str, torch_adam: bool, offload: bool, parameters: set[str]) -> None:
    """As documented: torch's are those of training; amsgrad fails in DeepSpeed's Adam, or does nothing."""
    ours = optimizer.optimizer_params(name, torch_adam, offload).model_fields
    assert set(ours) == parameters
    assert ours["lr"].is_required()


@pytest.mark.parametrize(
    ("given", "offload", "added"),
    [
        ({"lr": 0.1}, "none", {"torch_adam": True, "fused": True}),
        ({"lr": 0.1, "torch_adam": True}, "none", {"fused": True}),
        ({"lr": 0.1, "torch_adam": True, "foreach": True}, "none", {}),
        ({"lr": 0.1, "torch_adam": True, "fused": False}, "none", {}),
        ({"lr": 0.1, "torch_adam": False}, "none", {}),
        ({"lr": 0.1, "bias_correction": False}, "none", {}),
        ({"lr": 0.1}, "cpu", {}),
    ],
)
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_an_adam_needs_no_compiler(name: str, given: dict[str, Any], offload: str, added: dict[str, Any]) -> None:
    raw: dict[str, Any] = {
        "optimizer": {"type": name, "params": dict(given)},
        "zero_optimization": {"offload_optimizer": {"device": offload}},
    }
    optimizer.choose_implementation(raw)
    assert raw["optimizer"]["params"] == given | added
    optimizer.check_optimizer(raw)


def test_other_optimizers_are_left_as_they_are() -> None:
    others: list[dict[str, Any]] = [{"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}, {}]
    for values in others:
        filled = copy.deepcopy(values)
        optimizer.choose_implementation(filled)
        assert filled == values


def test_every_preset_has_a_world_size_here() -> None:
    found = {str(path.relative_to(PRESETS).with_suffix("")) for path in PRESETS.rglob("*.json")}
    assert found == set(WORLD_SIZES)


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
