"""Apply the rules about combinations of keys, and check a DeepSpeed config that no run's file holds."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any, Literal

from zero_tp.base.settings.deepspeed import use_current_names
from zero_tp.base.settings.recompute import RecomputePolicy
from zero_tp.base.settings.resolve import leaves
from zero_tp.base.settings.schema import Parallel, ZeroTP
from zero_tp.base.validation import ConfigErrors
from zero_tp.engine.settings.rules import rules
from zero_tp.engine.settings.typed import EntryPoint, TypedConfig, check_types
from zero_tp.parallel.topology import Topology


def notes(config: TypedConfig, *kinds: Literal["no effect", "note"]) -> list[str]:
    """Return a line for each reason, with the keys that have no effect or are unusual ("note")."""
    settings = {**config.values, "zero_tp": config.zero_tp.model_dump(by_alias=True, exclude_unset=True)}
    lines: dict[str, list[str]] = {}
    for kind in kinds:
        keys = [key for key, value in leaves(settings) if value is not None]
        for rule in rules(config):
            patterns = rule.keys.split() if rule.applies and rule.kind == kind else ()
            named = [key for key in keys if any(fnmatchcase(key, pattern) for pattern in patterns)]
            if named:
                lines.setdefault(rule.reason, []).extend(named)
                keys = [key for key in keys if key not in named]
    return [f"{', '.join(named)}: {reason}" for reason, named in lines.items()]


def refuse(config: TypedConfig) -> None:
    """Raise a ConfigErrors with each refusal that applies to the config."""
    errors = [rule.error for rule in rules(config) if rule.applies and rule.kind == "refused"]
    if errors:
        raise ConfigErrors(errors)


def check_deepspeed(
    values: dict[str, Any],
    topology: Topology,
    entry_point: EntryPoint,
    recompute: RecomputePolicy | None = None,
    layers: int | None = None,
) -> TypedConfig:
    """Return the typed form of a DeepSpeed config that has no `zero_tp` block, after every check.

    Args:
        values: shorter names of keys are replaced in place.
        layers: number of the model's layers; without it, `recompute` is not compared with them.
    """
    parallel = Parallel(tensor=topology.tensor, sequence=topology.sequence)
    policy = recompute or RecomputePolicy(mode="none")
    use_current_names(values)
    zero_tp = ZeroTP.model_construct(parallel=parallel, recompute=policy)  # type: ignore[call-arg]
    config = TypedConfig(values, check_types(values, entry_point), zero_tp, entry_point, layers)
    refuse(config)
    return config
