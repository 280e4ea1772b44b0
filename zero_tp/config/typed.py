"""The types pass: `TypedConfig` has every key of DeepSpeed's part with its type and default."""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING, Any

from zero_tp.config.deepspeed import check_names
from zero_tp.config.optimizer import check_optimizer
from zero_tp.config.resolve import dtype_name, look_up, refuse_auto
from zero_tp.config.schedule import check_scheduler
from zero_tp.config.schema import ZeroTP
from zero_tp.validation import check_keys, validate

if TYPE_CHECKING:
    from zero_tp.config.config_file import ConfigFile


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
        complete: the same, converted to the types, with the default of every key that is not written.
        zero_tp: the `zero_tp` block; of a config without one, its `parallel` and `recompute` alone.
        door: where the config came in.
    """

    values: dict[str, Any]
    complete: dict[str, Any]
    zero_tp: ZeroTP
    door: Door = Door.RUN

    @classmethod
    def parse(cls, values: dict[str, Any], zero_tp: ZeroTP, door: Door = Door.RUN) -> TypedConfig:
        """Type DeepSpeed's part, in which no "auto" is left, and `params` of optimizer and scheduler.

        Raises:
            ConfigError: see `check_types`, `check_optimizer` and `check_scheduler`.
        """
        blocks = check_types(values)
        complete = blocks.model_dump(by_alias=True)
        if blocks.optimizer is not None:
            offload = blocks.zero_optimization.offload_optimizer
            params = check_optimizer(blocks.optimizer, offload is not None and offload.device != "none")
            complete["optimizer"]["params"] = params.model_dump()
        if blocks.scheduler is not None:
            complete["scheduler"]["params"] = check_scheduler(blocks.scheduler).model_dump()
        return cls(values, complete, zero_tp, door)

    def __getitem__(self, key: str) -> Any:
        """Return the value at a dotted key of DeepSpeed's part, or its default.

        None where the optimizer or scheduler has no such argument, or its block is absent.
        """
        return look_up(self.complete, key)

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
        rate_names = {"OneCycle": "cycle_max_lr", "LRRangeTest": "lr_range_test_min_lr"}
        rate = self[f"scheduler.params.{rate_names.get(self['scheduler.type'], 'warmup_max_lr')}"]
        return self.number("optimizer.params.lr") if rate is None else float(rate)


def check_types(values: dict[str, Any]) -> ConfigFile:
    """Return a config as typed blocks, `params` of optimizer and scheduler as they are written.

    Raises:
        ConfigError: the first key with an unknown name or a wrong value, "auto" among them.
    """
    from zero_tp.config.config_file import ConfigFile

    check_names(values)
    check_keys(ConfigFile, values, "")
    refuse_auto(values)
    return validate(ConfigFile, values, "")
