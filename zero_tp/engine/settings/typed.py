"""Check the types of DeepSpeed's keys, and complete them with defaults."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zero_tp.base.errors import ConfigError
from zero_tp.base.settings.deepspeed import ZERO, key_errors
from zero_tp.base.settings.optimizer import check_optimizer
from zero_tp.base.settings.resolve import dtype_name, look_up, suggest_auto, unresolvable_autos
from zero_tp.base.settings.schedule import check_scheduler
from zero_tp.base.settings.schema import ZeroTP
from zero_tp.base.validation import ErrorCollector, validate


class EntryPoint(enum.Enum):
    """The interface that a config was passed to: a run's file, `TrainingEngine` or `ZeroTPTrainer`."""

    RUN = "run"
    ENGINE = "engine"
    TRAINER = "trainer"


@dataclasses.dataclass(frozen=True)
class TypedConfig:
    """A config with valid names and types and without "auto".

    Attributes:
        values: DeepSpeed's part of the file, with "auto" and batch sizes filled in.
        complete: the same, converted to its types, with a default for every other key.
        zero_tp: the `zero_tp` block; if the config has none, only `parallel` and `recompute` are set.
        entry_point: the interface that the config was passed to.
        layers: number of the model's layers, if the config has a model.
    """

    values: dict[str, Any]
    complete: dict[str, Any]
    zero_tp: ZeroTP
    entry_point: EntryPoint = EntryPoint.RUN
    layers: int | None = None

    def __getitem__(self, key: str) -> Any:
        """Return the value at a dotted key of DeepSpeed's part, or its default.

        None if the optimizer or scheduler has no such argument or its block is absent.
        """
        return look_up(self.complete, key)

    def number(self, key: str) -> float:
        """Return the number at a dotted key, its default, or 0."""
        return self[key] or 0

    @property
    def stage(self) -> int:
        return int(self[f"{ZERO}.stage"])

    @property
    def dtype(self) -> str:
        """Return "fp32", "bf16" or "fp16"."""
        return dtype_name(self.values)

    def offloads(self, block: str) -> bool:
        """Return whether `offload_optimizer` or `offload_param` is on."""
        return self[f"{ZERO}.{block}.device"] not in (None, "none")

    def on_nvme(self, block: str) -> bool:
        return bool(self[f"{ZERO}.{block}.device"] == "nvme")

    @property
    def nvme_paths(self) -> dict[str, Path]:
        """Return the directories of the offload blocks whose device is "nvme", by the block's name."""
        blocks = filter(self.on_nvme, ("offload_optimizer", "offload_param"))
        return {block: self[f"{ZERO}.{block}.nvme_path"] for block in blocks}


def check_types(
    values: dict[str, Any], entry_point: EntryPoint = EntryPoint.RUN, auto_keys: Sequence[str] = ()
) -> dict[str, Any]:
    """Return DeepSpeed's part converted to its types, with a default for every other key.

    Args:
        values: the part; the `params` in it are converted in place.
        auto_keys: keys without a value yet.
    """
    from zero_tp.engine.settings.config_file import ConfigFile

    collector, complete = ErrorCollector(), dict[str, Any]()
    with collector:
        errors = [*key_errors(values), *unresolvable_autos(values)]
        complete = validate(ConfigFile, values, "", errors).model_dump(by_alias=True)
    for name, check in (("optimizer", check_optimizer), ("scheduler", check_scheduler)):
        if isinstance(values.get(name), dict):
            with collector:
                params = check(values)
                complete.setdefault(name, {})["params"] = params.model_dump()
                # Some of DeepSpeed's constructors refuse 1e3 for an integer.
                values[name]["params"] = params.model_dump(mode="json", exclude_unset=True)
    if "optimizer" not in values and entry_point is not EntryPoint.TRAINER:
        remedy = 'as in {"type": "AdamW", "params": {"lr": 3e-4}}'
        collector.errors.append(ConfigError("optimizer", "required, but not given", remedy))
    collector.errors = [error for error in collector.errors if error.key not in auto_keys]
    if entry_point is EntryPoint.RUN:  # `TrainingEngine` accepts no "auto", and transformers' Trainer has others
        collector.errors = [suggest_auto(error) for error in collector.errors]
    collector.raise_all()
    return complete
