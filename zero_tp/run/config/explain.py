"""Explain one key of a run's file: its value, where the value comes from, and what reads it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from zero_tp.base.errors import ConfigError, did_you_mean, shown
from zero_tp.base.settings.keys import apply_overrides, look_up
from zero_tp.base.settings.refused import FIXED, REFUSED_KEYS, use_current_names
from zero_tp.base.settings.resolve import AUTO
from zero_tp.base.strict_json import read_json

if TYPE_CHECKING:
    from zero_tp.run.config import RunConfig

READERS = {
    "zero_tp.model": "zero_tp.model.architectures",
    "zero_tp.attention": "zero_tp.model.attention",
    "zero_tp.parallel": "zero_tp.parallel.topology",
    "zero_tp.recompute": "zero_tp.model.recompute",
    "zero_tp.objective": "zero_tp.data.masked",
    "zero_tp.data": "zero_tp.data.samples",
    "zero_tp.data.validation": "zero_tp.data.validation_samples",
    "zero_tp.tokenizer": "zero_tp.run.checkpoint",
    "zero_tp.training": "zero_tp.run.loop",
    "zero_tp.training.guard_interval": "zero_tp.engine.guards",
    "zero_tp.training.guard_gradients": "zero_tp.engine.guards",
    "zero_tp.training.spike": "zero_tp.engine.zero.veto",
    "zero_tp.training.ema": "zero_tp.engine.zero.weight_average",
    "zero_tp.training.qk_clip": "zero_tp.engine.qk_clip",
    "zero_tp.training.on_nonfinite": "zero_tp.run.run_callbacks",
    "zero_tp.training.timeout_minutes": "zero_tp.run.process.watch",
    "zero_tp.param_groups": "zero_tp.engine.param_groups",
    "zero_tp.compile": "zero_tp.parallel.elementwise",
    "zero_tp.checkpoint": "zero_tp.run.checkpoint",
    "zero_tp.evaluation": "zero_tp.run.run_callbacks",
    "zero_tp.evaluation.task": "zero_tp.tools.evaluation",
    "zero_tp.logging": "zero_tp.run.step_logger",
    "zero_tp.logging.trackers": "zero_tp.tools.monitors",
    "zero_tp": "zero_tp.run.config",
    "optimizer": "zero_tp.engine.zero",
    "scheduler": "zero_tp.engine.zero.lr_schedules",
    "activation_checkpointing": "zero_tp.model.recompute",
    "tensorboard": "zero_tp.tools.monitors",
    "wandb": "zero_tp.tools.monitors",
    "csv_monitor": "zero_tp.tools.monitors",
    "comet": "zero_tp.tools.monitors",
}
"""Beginning of a key → the module or package that reads it. DeepSpeed reads the others."""

Lines = Iterator[tuple[str, str]]
Schema = dict[str, Any]


def explain(config: RunConfig, overrides: Sequence[str], key: str) -> str:
    """Return the description of a dotted key of a valid config.

    Args:
        overrides: the `--set KEY=VALUE` with which the config was loaded.

    Raises:
        ConfigError: there is no such key.
    """
    lines = [
        ("key", key),
        *(_refused(key) if key in REFUSED_KEYS else _known(config, overrides, key)),
    ]
    return "\n".join(f"{name:<10} {text}" for name, text in lines)


def _refused(key: str) -> Lines:
    yield "value", f"none: the key is refused, {REFUSED_KEYS[key]}"


def _known(config: RunConfig, overrides: Sequence[str], key: str) -> Lines:
    from zero_tp.run.config.json_schema import json_schema

    resolved = config.resolved()
    schema = json_schema()
    keys = dict(_keys(schema, schema["$defs"], resolved, ""))
    if key not in keys:
        raise ConfigError(key, "is not a key of a run's file", did_you_mean(key, keys))
    yield from _value(config, overrides, key, keys[key], resolved)
    if key in FIXED:
        value, reason = FIXED[key]
        yield "fixed", f"{shown(value)}: {reason}"
    if key in AUTO:
        yield '"auto"', AUTO[key]
    if "description" in keys[key]:
        yield "means", keys[key]["description"]
    yield "read by", _reader(key)
    yield from _rules(config, key)


def _keys(
    node: Schema, definitions: Schema, values: Any, path: str
) -> Iterator[tuple[str, Schema]]:
    """Yield each dotted key below a schema's node, with its own node.

    Args:
        values: the config's values there; of the cases by `type`, those of another type are left
            out.
    """
    if "$ref" in node:
        yield from _keys(
            definitions.get(node["$ref"].rpartition("/")[2], {}), definitions, values, path
        )
    for inner in node.get("anyOf", ()):
        yield from _keys(inner, definitions, values, path)
    for case in node.get("allOf", ()):
        if _is_case(case["if"]["properties"], values):
            yield from _keys(case["then"], definitions, values, path)
    for name, inner in node.get("properties", {}).items():
        yield f"{path}{name}", inner if isinstance(inner, dict) else {}
        if isinstance(inner, dict):
            yield from _keys(inner, definitions, look_up(values, name), f"{path}{name}.")


def _is_case(patterns: Schema, values: Any) -> bool:
    for name, inner in patterns.items():
        value = look_up(values, name)
        if value is not None and not re.search(inner["pattern"], str(value)):
            return False
    return True


def _value(
    config: RunConfig, overrides: Sequence[str], key: str, node: Schema, resolved: Any
) -> Lines:
    """Yield the value, its source and its default."""
    written = read_json(config.path)
    changed = dict[str, Any]()
    # Both get the overrides: `written` has the file below them, `changed` nothing else.
    for values in (written, changed):
        apply_overrides(values, overrides)
        use_current_names(values)
    parent = key.rpartition(".")[0]
    block = look_up(resolved, parent) if parent else resolved
    default = node.get("default")
    if default is None and parent == "zero_tp.model":
        # The schema has no defaults of model fields; transformers' class has.
        default = getattr(config.hf_config(), key.rpartition(".")[2], None)
    if block is not None and not isinstance(block, dict):
        yield "value", f"part of {parent}, which is {shown(block)}"
        return
    is_filled = look_up(resolved, key) is not None
    yield "value", shown(look_up(resolved, key) if is_filled else default)
    if (word := look_up(written, key)) is None:
        yield "from", "the default"
    else:
        source = "--set" if look_up(changed, key) is not None else str(config.path)
        yield "from", f'"auto" in {source}' if word == "auto" else source
    if default is not None:
        yield "default", shown(default)


def _reader(key: str) -> str:
    # The longest beginning is the most specific one.
    names = [name for name in READERS if key == name or key.startswith((f"{name}.", f"{name}_"))]
    return READERS[max(names, key=len)] if names else "DeepSpeed"


def _rules(config: RunConfig, key: str) -> Lines:
    """Yield each rule about the key, whether or not it applies to this config."""
    from zero_tp.engine.settings.rules import rules

    for rule in rules(config.combination):
        if any(fnmatchcase(key, pattern) for pattern in rule.keys.split()):
            yield rule.kind, rule.reason
