"""Apply the rules about combinations of keys; docs/config.md lists them."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Literal

from zero_tp.base.errors import ConfigError
from zero_tp.base.settings.deepspeed import DeepSpeedSettings
from zero_tp.base.settings.keys import leaves
from zero_tp.base.validation import ConfigErrors
from zero_tp.engine.settings import training_rules, zero_rules
from zero_tp.engine.settings.rule import Combination, Rule


def refuse(config: Combination) -> None:
    """Raise a ConfigErrors with each refusal that applies to the config."""
    _refuse(rules(config))


def refuse_experts(settings: DeepSpeedSettings, expert: int) -> None:
    """Raise a ConfigErrors with what is refused under expert parallelism of a degree."""
    _refuse(zero_rules.expert_rules(settings, expert))


def check_average(settings: DeepSpeedSettings, decay: float | None) -> None:
    """Check that an average of the weights, if a decay is set, can be kept with these settings.

    Raises:
        ConfigError: says why it cannot.
    """
    if decay is None:
        return
    if not 0 < decay < 1:
        raise ConfigError("ema", f"{decay} is no decay between 0 and 1", "give one such as 0.999")
    _refuse(zero_rules.average_rules(settings, is_used=True))


def _refuse(judged: Iterable[Rule]) -> None:
    errors = [rule.error for rule in judged if rule.applies and rule.kind == "refused"]
    if errors:
        raise ConfigErrors(errors)


def notes(config: Combination, *kinds: Literal["no effect", "note"]) -> list[str]:
    """Return a line for each reason, with the keys that have no effect or are unusual ("note")."""
    # Only keys that somebody has written: a default without effect is nobody's mistake.
    written = config.settings.written()
    if config.zero_tp is not None:
        written["zero_tp"] = config.zero_tp.model_dump(by_alias=True, exclude_unset=True)
    lines: dict[str, list[str]] = {}
    for kind in kinds:
        keys = [key for key, value in leaves(written) if value is not None]
        for rule in rules(config):
            patterns = rule.keys.split() if rule.applies and rule.kind == kind else ()
            named = [key for key in keys if any(fnmatchcase(key, pattern) for pattern in patterns)]
            if named:
                lines.setdefault(rule.reason, []).extend(named)
                # A key has one line, with the reason of the first rule that names it.
                keys = [key for key in keys if key not in named]
    return [f"{', '.join(named)}: {reason}" for reason, named in lines.items()]


def rules(config: Combination) -> list[Rule]:
    """Return every rule, including those that do not apply to this config."""
    return [
        *training_rules.gradient_rules(config.settings),
        *training_rules.optimizer_rules(config),
        *training_rules.schedule_rules(config),
        *(
            ()
            if config.zero_tp is None
            else training_rules.run_rules(config.settings, config.zero_tp)
        ),
        *training_rules.activation_rules(config),
        *zero_rules.offload_rules(config),
        *zero_rules.zero_rules(config.settings),
        *zero_rules.expert_rules(config.settings, config.parallel.expert),
        *zero_rules.log_rules(config.settings),
    ]
