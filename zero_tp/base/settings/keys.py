"""Dotted keys of a config: override, check, look up and list the values that they name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from zero_tp.base.errors import ConfigError, shown
from zero_tp.base.strict_json import InvalidJson, parse_json

MAX_NUMBER = 2**53


def apply_overrides(config: dict[str, Any], overrides: Sequence[str]) -> None:
    """Write each `KEY=VALUE` into `config`, later ones last. VALUE is JSON, or else a string."""
    for override in overrides:
        key, equals, text = override.partition("=")
        # `stages[1].steps`, as errors write it.
        parts = re.sub(r"\[(\d+)\]", r".\1", key.strip()).split(".")
        if not equals or not all(parts):
            raise ConfigError(
                "--set",
                f"{shown(override)} is not KEY=VALUE",
                "as in --set zero_tp.parallel.tensor=4",
            )
        target: Any = config
        for depth, part in enumerate(parts[:-1], start=1):
            if isinstance(target, list):
                target = target[_item_number(key, target, part)]
            else:
                target = target.setdefault(part, {})
            is_parent_of_item = isinstance(target, list) and parts[depth].isdecimal()
            if not isinstance(target, dict) and not is_parent_of_item:
                inside = ".".join(parts[:depth])
                raise ConfigError(
                    key, f"{inside} is {shown(target)}, not an object", f"set {inside} itself"
                )
        last: Any = parts[-1]
        if isinstance(target, list):
            last = _item_number(key, target, last)
        try:
            # JSON first, so that 4 and true have their types; a name without quotation marks stays
            # a string.
            target[last] = parse_json(text)
        except InvalidJson:
            target[last] = text


def _item_number(key: str, items: list[Any], part: str) -> int:
    """Return the index of a list's item in a dotted key."""
    if int(part) >= len(items):
        raise ConfigError(key, f"the list has {len(items)} items, from 0 on", "use a smaller index")
    return int(part)


def check_leaves(value: Any, path: str = "") -> None:
    """Refuse numbers beyond 2^53, which not every JSON program reads exactly, and NUL
    characters.
    """
    if isinstance(value, (int, float)) and not -MAX_NUMBER <= value <= MAX_NUMBER:
        raise ConfigError(
            path,
            f"{shown(value)} is beyond 2^53 (9.0e15), the largest number of a run",
            "write it smaller",
        )
    if isinstance(value, str) and "\0" in value:
        raise ConfigError(path, f"{shown(value)} has a NUL character", "write it without")
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, part in inner:
        check_leaves(str(key), path)
        check_leaves(part, f"{path}.{key}" if path else str(key))


def look_up(config: Any, path: str) -> Any:
    """Return the value at a dotted path, or None if a key on it is missing."""
    for part in path.split("."):
        if not isinstance(config, dict) or part not in config:
            return None
        config = config[part]
    return config


def leaves(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value of nested objects with its dotted path; an object without keys is a value
    too.
    """
    if isinstance(config, dict) and config:
        for key, inner in config.items():
            yield from leaves(inner, f"{path}.{key}" if path else key)
    else:
        yield path, config


def parent_block(values: dict[str, Any], path: str) -> tuple[Any, str]:
    """Return the object that contains the key of a dotted path, and the key."""
    block, _, name = path.rpartition(".")
    return (look_up(values, block) if block else values), name
