"""The types pass: `TypedConfig` has every key of DeepSpeed's part with its type and default."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

from zero_tp.config.deepspeed import OFF_BLOCKS, ZERO, wrong_keys
from zero_tp.config.optimizer import check_optimizer
from zero_tp.config.resolve import dtype_name, look_up, wrong_autos
from zero_tp.config.schedule import check_scheduler
from zero_tp.config.schema import ZeroTP
from zero_tp.errors import ConfigError
from zero_tp.validation import Problems, validate


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
        layers: of the model, where the config names one.
    """

    values: dict[str, Any]
    complete: dict[str, Any]
    zero_tp: ZeroTP
    door: Door = Door.RUN
    layers: int | None = None

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
        return int(self[f"{ZERO}.stage"])

    @property
    def dtype(self) -> str:
        """Return "fp32", "bf16" or "fp16"."""
        return dtype_name(self.values)

    def offloads(self, block: str) -> bool:
        """Tell whether `offload_optimizer` or `offload_param` moves anything."""
        return self[f"{ZERO}.{block}.device"] not in (None, "none")

    def on_nvme(self, block: str) -> bool:
        return bool(self[f"{ZERO}.{block}.device"] == "nvme")


def check_types(values: dict[str, Any], door: Door = Door.RUN, auto_keys: Sequence[str] = ()) -> dict[str, Any]:
    """Return DeepSpeed's part converted to its types, with the default of every key that is not written.

    Args:
        auto_keys: keys without a value yet.

    Raises:
        ConfigErrors: each key that has an unknown name, a wrong value, or one that is refused whatever the others are.
    """
    from zero_tp.config.config_file import ConfigFile

    problems, complete = Problems(), dict[str, Any]()
    with problems:
        known = {key: value for key, value in values.items() if key not in OFF_BLOCKS}
        complete = validate(ConfigFile, known, "", [*wrong_keys(values), *wrong_autos(values)]).model_dump(
            by_alias=True
        )
    for name, check in (("optimizer", check_optimizer), ("scheduler", check_scheduler)):
        if isinstance(values.get(name), dict):
            with problems:
                complete.setdefault(name, {})["params"] = check(values).model_dump()
    if "optimizer" not in values and door is not Door.TRAINER:
        remedy = 'as in {"type": "AdamW", "params": {"lr": 3e-4}}'
        problems.errors.append(ConfigError("optimizer", "required, but not given", remedy))
    problems.errors = [error for error in problems.errors if error.key not in auto_keys]
    problems.raise_all()
    return complete
