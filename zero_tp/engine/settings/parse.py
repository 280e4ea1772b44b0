"""Check a config's keys and their combinations, and return its typed sections."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from zero_tp.base.errors import ConfigError
from zero_tp.base.settings.deepspeed import ConfigFile, DeepSpeedSettings
from zero_tp.base.settings.optimizer import check_optimizer
from zero_tp.base.settings.recompute import RecomputePolicy
from zero_tp.base.settings.refused import key_errors, use_current_names
from zero_tp.base.settings.resolve import suggest_auto, unresolvable_autos
from zero_tp.base.settings.schedule import check_scheduler
from zero_tp.base.settings.schema import Parallel
from zero_tp.base.validation import ErrorCollector, validate
from zero_tp.engine.settings.rule import Combination, EntryPoint
from zero_tp.engine.settings.rules import refuse


def parse_settings(
    values: dict[str, Any],
    entry_point: EntryPoint = EntryPoint.RUN,
    auto_keys: Sequence[str] = (),
) -> DeepSpeedSettings:
    """Return the sections of DeepSpeed's part of a config, each key checked by itself.

    Args:
        values: the part, without `zero_tp`.
        auto_keys: keys without a value yet.

    Raises:
        ConfigErrors: all keys that are wrong by themselves.
    """
    # A file's errors are reported together, so that its author mends them in one pass.
    collector = ErrorCollector()
    sections: dict[str, Any] = {}
    with collector:
        errors = [*key_errors(values), *unresolvable_autos(values)]
        file = validate(ConfigFile, values, "", errors)
        # Only the file's keys: DeepSpeed gets those alone (`written`), and has its own default for
        # any other.
        sections = {name: getattr(file, name) for name in file.model_fields_set - {"zero_tp"}}
    if isinstance(values.get("optimizer"), dict):
        with collector:
            sections["optimizer"] = check_optimizer(values)
    if isinstance(values.get("scheduler"), dict):
        with collector:
            sections["scheduler"] = check_scheduler(values)
    if "optimizer" not in values and entry_point is not EntryPoint.TRAINER:
        remedy = 'as in {"type": "AdamW", "params": {"lr": 3e-4}}'
        error = ConfigError("optimizer", "required, but not given", remedy)
        collector.errors.append(error)
    # Their "auto" was removed from `values`, so a required one looks missing.
    collector.errors = [error for error in collector.errors if error.key not in auto_keys]
    # `TrainingEngine` accepts no "auto", and transformers' Trainer has others.
    if entry_point is EntryPoint.RUN:
        collector.errors = [suggest_auto(error) for error in collector.errors]
    collector.raise_all()
    # Each section was validated above. `model_construct` keeps which keys were written.
    return DeepSpeedSettings.model_construct(set(sections), **sections)


def check_settings(
    values: dict[str, Any],
    parallel: Parallel,
    entry_point: EntryPoint,
    recompute: RecomputePolicy | None = None,
    layers: int | None = None,
) -> Combination:
    """Return the checked settings of a DeepSpeed config that has no `zero_tp` block.

    Args:
        layers: number of the model's layers; without it, `recompute` is not compared with them.

    Raises:
        ConfigErrors: all keys that are wrong by themselves or, if there are none, all refused
            combinations.
    """
    values = copy.deepcopy(values)
    use_current_names(values)
    settings = parse_settings(values, entry_point)
    policy = recompute or RecomputePolicy(mode="none")
    checked = Combination(settings, parallel, policy, entry_point=entry_point, layers=layers)
    # Only now: a rule reads typed values, and a wrong type would be reported as a wrong
    # combination.
    refuse(checked)
    return checked
