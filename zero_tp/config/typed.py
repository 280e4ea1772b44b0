"""A typed config is what passes fill and refuse read: every key of DeepSpeed's part with its type and default."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from pydantic import BaseModel

from zero_tp.config.deepspeed import check_names, config_model
from zero_tp.config.optimizer import check_optimizer, check_scheduler
from zero_tp.config.resolve import dtype_name, look_up, refuse_auto
from zero_tp.config.schema import ZeroTP
from zero_tp.validation import check_keys, validate


class Door(enum.Enum):
    """Where a config came in: a run's file, `TrainingEngine` in Python, or `ZeroTPTrainer`."""

    RUN = "run"
    ENGINE = "engine"
    TRAINER = "trainer"


@dataclasses.dataclass(frozen=True)
class TypedConfig:
    """A config without "auto" whose names and types are right.

    Attributes:
        values: DeepSpeed's part as it is written.
        blocks: the same as an instance of `config_model()`, with the default of every key that is not written.
        zero_tp: the `zero_tp` block; of a config without one, its `parallel` and `recompute` alone.
        door: where it came in.
    """

    values: dict[str, Any]
    blocks: Any
    zero_tp: ZeroTP
    door: Door = Door.RUN

    @classmethod
    def parse(cls, values: dict[str, Any], zero_tp: ZeroTP, door: Door = Door.RUN) -> TypedConfig:
        """Type DeepSpeed's part, in which no "auto" is left, the arguments of optimizer and scheduler too.

        Raises:
            ConfigError: see `check_types`.
        """
        return cls(values, _with_typed_params(check_types(values)), zero_tp, door)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what was parsed: the class of `blocks` is made at run time."""
        return TypedConfig.parse, (self.values, self.zero_tp, self.door)

    def __getitem__(self, key: str) -> Any:
        """Return the value at a dotted key of DeepSpeed's part, or its default.

        None where the optimizer or scheduler has no such argument, or its block is absent.
        """
        value = self.blocks
        for part in key.split("."):
            fields = type(value).model_fields if isinstance(value, BaseModel) else {}
            value = getattr(value, next((name for name in fields if fields[name].alias == part), part), None)
        return value

    def number(self, key: str) -> float:
        """Return the number at a dotted key, or its default; 0 where there is none."""
        return self[key] or 0

    def written(self, key: str, default: Any = None) -> Any:
        """Return the value that is written at a dotted key, or `default` where it is absent or null."""
        value = look_up(self.values, key)
        return default if value is None else value

    @property
    def stage(self) -> int:
        return int(self["zero_optimization.stage"])

    @property
    def dtype(self) -> str:
        """Return "fp32", "bf16" or "fp16"."""
        return dtype_name(self.values)

    def offloads(self, block: str) -> bool:
        """Tell whether `offload_optimizer` or `offload_param` moves anything."""
        return self[f"zero_optimization.{block}.device"] not in (None, "none")

    def on_nvme(self, block: str) -> bool:
        return bool(self[f"zero_optimization.{block}.device"] == "nvme")

    @property
    def highest_rate(self) -> float:
        """Return the highest rate that the run trains at; of a range test, which has none, the lowest."""
        own = {"OneCycle": "cycle_max_lr", "LRRangeTest": "lr_range_test_min_lr"}
        rate = self[f"scheduler.params.{own.get(self['scheduler.type'], 'warmup_max_lr')}"]
        return self.number("optimizer.params.lr") if rate is None else float(rate)


def check_types(values: dict[str, Any]) -> Any:
    """Return a config as an instance of `config_model()`, `params` of optimizer and scheduler as they are written.

    Raises:
        ConfigError: the first key with an unknown name or a wrong value, "auto" among them.
    """
    check_names(values)
    check_keys(config_model(), values, "")
    refuse_auto(values)
    return validate(config_model(), values, "")


def _with_typed_params(blocks: Any) -> Any:
    """Return the blocks with the `params` of optimizer and scheduler typed by the classes that get them."""
    optimizer, scheduler = blocks.optimizer, blocks.scheduler
    offload = blocks.zero_optimization.offload_optimizer
    typed = {}
    if optimizer is not None:
        params = check_optimizer(optimizer, offload is not None and offload.device != "none")
        typed["optimizer"] = optimizer.model_copy(update={"params": params})
    if scheduler is not None:
        typed["scheduler"] = scheduler.model_copy(update={"params": check_scheduler(scheduler)})
    return blocks.model_copy(update=typed)
