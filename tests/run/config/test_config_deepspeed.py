"""DeepSpeed's keys are ours: these tests fail when a new DeepSpeed reads other keys than we
know.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime import config as ds
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.constants import GRADIENT_CLIPPING_DEFAULT
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from pydantic import ValidationError
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION, SchedulerType

from tests.support.mistakes import changed, written
from zero_tp.base.settings import deepspeed as sections
from zero_tp.base.settings import optimizer, schedule
from zero_tp.base.settings import refused as keys
from zero_tp.base.settings.deepspeed import ZERO, ConfigFile
from zero_tp.base.settings.schema import Parallel
from zero_tp.base.shipped import config_names, find_config
from zero_tp.base.validation import ConfigErrors, ConfigModel, nested_model
from zero_tp.engine.settings.parse import check_settings
from zero_tp.engine.settings.rule import EntryPoint
from zero_tp.engine.zero.facts import deepspeed_clips
from zero_tp.engine.zero.zero_engine import deepspeed_dict
from zero_tp.run.config import ConfigError, RunConfig

TYPED: dict[str, Any] = {
    ZERO: DeepSpeedZeroConfig,
    "bf16": DeepSpeedBF16Config,
    "fp16": DeepSpeedFP16Config,
    "tensorboard": TensorBoardConfig,
    "wandb": WandbConfig,
    "csv_monitor": CSVConfig,
    "comet": CometConfig,
    "comms_logger": CommsLoggerConfig,
}
WORLD_SIZES = (4, 8, 16, 64, 280, 512, 1024)


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
    ours = {*ConfigFile.model_fields, *(key for key in keys.REFUSED_KEYS if "." not in key)} - {
        "zero_tp"
    }
    assert read - ours == set(), "DeepSpeed reads keys that zero_tp does not know"
    # read by the engine or outside DeepSpeedConfig.__init__
    assert ours - read == {"sequence_parallel_size"}, "DeepSpeed no longer reads these"


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("activation_checkpointing", sections.ActivationCheckpointing),
        ("data_types", sections.DataTypes),
        ("aio", sections.Aio),
        ("flops_profiler", sections.FlopsProfiler),
        ("optimizer", optimizer.OptimizerBlock),
        ("scheduler", schedule.SchedulerBlock),
    ],
)
def test_keys_of_blocks_that_deepspeed_reads_with_get(name: str, model: type[ConfigModel]) -> None:
    block = Recorder({"type": "none"} if "type" in model.model_fields else {})
    keys_read({"train_batch_size": 1, name: block})
    assert block.asked == set(model.model_fields)


@pytest.mark.parametrize("name", TYPED)
def test_blocks_that_deepspeed_types_have_its_names_and_defaults(name: str) -> None:
    """`overlap_comm` and `timers` aside: the first depends on the stage, the second is off here."""
    ours, theirs = sections.Sections.model_fields[name].default, TYPED[name]()
    defaults = {
        key: value
        for key, value in theirs.model_dump(by_alias=True).items()
        if f"{name}.{key}" not in keys.REFUSED_KEYS
    }
    defaults.pop("overlap_comm", None)
    assert ours.model_dump(exclude={"overlap_comm"}) == defaults
    for block in ("offload_param", "offload_optimizer") if name == ZERO else ():
        annotation = theirs.__class__.model_fields[block].annotation
        deepspeeds, section = (
            nested_model(annotation),
            nested_model(type(ours).model_fields[block].annotation),
        )
        assert deepspeeds is not None and section is not None
        assert section().model_dump() == deepspeeds().model_dump()
    for stage in (0, 1, 2, 3):
        assert sections.Zero(stage=stage).overlaps == DeepSpeedZeroConfig(stage=stage).overlap_comm


def test_gradients_are_clipped_at_deepspeeds_default_if_no_key_says_otherwise() -> None:
    """In a run's file and in a script's dict, at every stage."""
    base = {"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    for stage in (0, 1, 2, 3):
        config = {**base, ZERO: {"stage": stage}}
        settings = check_settings(config, Parallel(), EntryPoint.ENGINE).settings
        assert settings.gradient_clipping == GRADIENT_CLIPPING_DEFAULT
        clipped = deepspeed_dict(settings, 1).get("gradient_clipping", GRADIENT_CLIPPING_DEFAULT)
        assert clipped == (GRADIENT_CLIPPING_DEFAULT if deepspeed_clips(stage) else 0.0)


def test_a_number_in_quotes_is_refused_by_what_it_is() -> None:
    config = {"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    with pytest.raises(ConfigErrors) as caught:
        check_settings(config | {ZERO: {"stage": "2"}}, Parallel(), EntryPoint.ENGINE)
    assert str(caught.value) == f'{ZERO}.stage: "2" is text; write 2 without quotes'


def test_a_directory_is_kept_as_written() -> None:
    """A resumed run compares it with the saved one."""
    block = {"device": "nvme", "nvme_path": "./states/"}
    config = {"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    zero = {"stage": 3, "offload_optimizer": block}
    settings = check_settings(config | {ZERO: zero}, Parallel(), EntryPoint.ENGINE).settings
    assert settings.written()[ZERO]["offload_optimizer"] == block


def test_the_loss_scale_is_checked_as_deepspeed_checks_it() -> None:
    for values in (
        {"loss_scale_window": 0},
        {"min_loss_scale": 0},
        {"loss_scale": -1.0},
        {"loss_scale": math.inf},
    ):
        for model in (sections.FP16, DeepSpeedFP16Config):
            with pytest.raises(ValidationError):
                model(**{"enabled": True, **values})
    assert sections.FP16(enabled=True, loss_scale=8.0, loss_scale_window=0).loss_scale_window == 0
    assert (
        DeepSpeedFP16Config(enabled=True, loss_scale=8.0, loss_scale_window=0).loss_scale_window
        == 0
    )


def test_keys_that_deepspeed_has_removed_or_renamed_are_refused() -> None:
    fields = DeepSpeedZeroConfig.model_fields
    old = {
        name for name, field in fields.items() if (field.json_schema_extra or {}).get("deprecated")
    }
    refused = {
        *ds._REMOVED_TOP_LEVEL_CONFIG_KEYS,
        *(f"zero_optimization.{key}" for key in ds._REMOVED_ZERO_CONFIG_KEYS),
    }
    assert refused | {f"zero_optimization.{name}" for name in old} <= keys.REFUSED_KEYS.keys()


def test_all_optimizers_and_schedules_are_known() -> None:
    known = {name.lower() for name in (*optimizer.OPTIMIZERS, *optimizer.REFUSED_OPTIMIZERS)}
    assert set(ds.DEEPSPEED_OPTIMIZERS) <= known
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
BY_THE_ENGINE = {
    "params",
    "model_params",
    "adamw_mode",
    "optimizer",
    "last_batch_iteration",
    "last_epoch",
}
REFUSED = {
    "torch": {"capturable", "differentiable"},
    "deepspeed": {"amsgrad"},
    "transformers": {"num_stable_steps"},
}
"""Arguments that a file can't give, by the library of the constructor."""


NAMED = {
    schedule.WarmupDecayLR: {"warmup_max_lr"},
    schedule.WarmupStableDecay: {"num_training_steps"},
}
"""Arguments that a file must give though they have defaults."""


@pytest.mark.parametrize(("model", "constructor"), CONSTRUCTORS)
def test_params_are_the_constructor_s_arguments_with_its_defaults(
    model: type[ConfigModel], constructor: Any
) -> None:
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
    # The engine gives its own weight_decay.
    same = arguments.keys() - required - named - {"weight_decay"} - CHOICE
    assert {name: fields[name].default for name in same} == {name: arguments[name] for name in same}


CHOICE = {"torch_adam", "adam_w_mode"}  # DeepSpeed chooses the class of an Adam by them


@pytest.mark.parametrize(
    ("name", "torch_adam", "offload", "model"),
    [
        ("adam", True, False, optimizer.TorchAdam),
        ("adamw", True, True, optimizer.TorchAdam),
        ("adamw", False, False, optimizer.FusedAdam),
        ("adam", False, True, optimizer.CPUAdam),
        ("sgd", False, False, optimizer.SGD),
        ("sgd", False, True, optimizer.SGD),
    ],
)
def test_the_class_that_deepspeed_builds(
    name: str, torch_adam: bool, offload: bool, model: type[ConfigModel]
) -> None:
    assert optimizer.params_model(name, torch_adam, offload) is model


CHOSEN: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    ({"lr": 0.1}, "none", {"torch_adam": True, "fused": True}),
    ({"lr": 0.1, "torch_adam": True}, "none", {"fused": True}),
    ({"lr": 0.1, "torch_adam": True, "foreach": True}, "none", {}),
    ({"lr": 0.1, "torch_adam": True, "fused": False}, "none", {}),
    ({"lr": 0.1, "torch_adam": False}, "none", {}),
    ({"lr": 0.1, "bias_correction": False}, "none", {}),
    ({"lr": 0.1}, "cpu", {}),
]
"""Arguments of an Adam, where its states are offloaded, and the arguments that zero_tp adds."""


@pytest.mark.parametrize(
    ("name", "given", "offload", "added"),
    [
        ("SGD", {"lr": 0.1}, "none", {}),
        *((name, *case) for name in ("Adam", "AdamW") for case in CHOSEN),
    ],
)
def test_an_adam_needs_no_compiler(
    name: str, given: dict[str, Any], offload: str, added: dict[str, Any]
) -> None:
    raw: dict[str, Any] = {
        "optimizer": {"type": name, "params": dict(given)},
        "zero_optimization": {"offload_optimizer": {"device": offload}},
    }
    optimizer.choose_implementation(raw)
    assert raw["optimizer"]["params"] == given | added
    optimizer.check_optimizer(raw)


def preset(path: Path) -> RunConfig:
    """Load a shipped config for the first of WORLD_SIZES that it fits."""
    for world in WORLD_SIZES[:-1]:
        with contextlib.suppress(ConfigError):
            return RunConfig.load(path, world_size=world)
    return RunConfig.load(path, world_size=WORLD_SIZES[-1])


@pytest.mark.parametrize("name", config_names())
def test_presets_load_and_deepspeed_accepts_them(name: str) -> None:
    config = preset(find_config(name))
    given = config.engine_settings.written()
    # Without ranks, the parser counts one replica.
    given["train_batch_size"] //= config.data_parallel
    parsed = ds.DeepSpeedConfig(given)
    assert parsed.train_micro_batch_size_per_gpu == config.micro_batch
    assert parsed.gradient_accumulation_steps == config.accumulation
    assert parsed.zero_optimization_stage == config.zero_stage
    assert parsed.bfloat16_config.enabled == (config.dtype == "bf16")


def test_the_shorter_names_that_deepspeed_accepts_are_accepted(tmp_path: Path) -> None:
    """All aliases of DeepSpeed's config, at every entry point; a key under both names is
    refused.
    """
    aliases = {
        name: str(field.alias)
        for name, field in DeepSpeedZeroConfig.model_fields.items()
        if field.alias
    }
    assert aliases == keys.CURRENT_NAMES
    base = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    for name, alias in aliases.items():
        value = DeepSpeedZeroConfig.model_fields[name].default
        zero = {"stage": 3, name: value}
        assert getattr(DeepSpeedZeroConfig(**zero), name) == value
        settings = {**base, ZERO: dict(zero)}
        checked = check_settings(settings, Parallel(), EntryPoint.ENGINE).settings
        assert getattr(checked.zero_optimization, alias) == value
        assert checked.written()[ZERO] == {"stage": 3, alias: value}
        assert settings == {**base, ZERO: zero}, "the caller's"
        with pytest.raises(
            ConfigError,
            match=rf"{ZERO}\.{name}: is another name of {alias}, which is given too; keep",
        ):
            check_settings({**base, ZERO: {**zero, alias: value}}, Parallel(), EntryPoint.ENGINE)
    config = {
        **changed({}),
        ZERO: {"stage": 3, "prefetch_bucket_size": "auto", "max_live_parameters": 7},
    }
    values = RunConfig.load(written(tmp_path, config), world_size=2).engine_settings.written()[ZERO]
    assert values["stage3_max_live_parameters"] == 7 and isinstance(
        values["stage3_prefetch_bucket_size"], int
    )
