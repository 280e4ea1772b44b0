"""The types pass: `TypedConfig` has every key of DeepSpeed's part with its type and default."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

from zero_tp.config.deepspeed import wrong_names
from zero_tp.config.optimizer import check_optimizer, offloads_optimizer
from zero_tp.config.resolve import dtype_name, look_up, wrong_autos
from zero_tp.config.schedule import check_scheduler
from zero_tp.config.schema import ZeroTP
from zero_tp.validation import ConfigModel, Problems, validate

ZERO, ACTIVATIONS = "zero_optimization", "activation_checkpointing"
OPTIMIZER, SCHEDULER = "optimizer.params", "scheduler.params"


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
        """Type DeepSpeed's part, in which no "auto" is left.

        Raises:
            ConfigErrors: see `check_types`.
        """
        return cls(values, check_types(values), zero_tp, door)

    def __getitem__(self, key: str) -> Any:
        """Return the value at a dotted key of DeepSpeed's part, or its default.

        None where the optimizer or scheduler has no such argument, or its block is absent.
        """
        return look_up(self.complete, key)

    def number(self, key: str) -> float:
        """Return the number at a dotted key, or its default; 0 where there is none."""
        return self[key] or 0

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


def check_types(values: dict[str, Any], auto_keys: Sequence[str] = ()) -> dict[str, Any]:
    """Return DeepSpeed's part converted to its types, with the default of every key that is not written.

    Args:
        auto_keys: keys without a value yet.

    Raises:
        ConfigErrors: each key with an unknown name or a wrong value; see also `check_optimizer` and `check_scheduler`.
    """
    from zero_tp.config.config_file import ConfigFile

    problems, complete, params = Problems(), dict[str, Any](), dict[str, ConfigModel]()
    with problems:
        file = validate(ConfigFile, values, "", [*wrong_names(values), *wrong_autos(values)])
        complete = file.model_dump(by_alias=True)
    if isinstance(values.get("optimizer"), dict):
        with problems:
            params["optimizer"] = check_optimizer(values["optimizer"], offloads_optimizer(values))
    if isinstance(values.get("scheduler"), dict):
        with problems:
            params["scheduler"] = check_scheduler(values["scheduler"])
    problems.errors = [error for error in problems.errors if error.key not in auto_keys]
    problems.raise_all()
    for name, block in params.items():
        complete[name]["params"] = block.model_dump()
    return complete
