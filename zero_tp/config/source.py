"""The JSON file and its `--set KEY=VALUE` overrides, before anything is known about the keys."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zero_tp.errors import ConfigError, shown


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ConfigError: the file is missing or unreadable, is not JSON (with line and column), holds a key twice, holds
            NaN or Infinity, or is not an object.
    """

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                raise ConfigError(str(path), f'the key "{key}" appears twice in one object', "keep one of them")
            seen[key] = value
        return seen

    def finite(text: str) -> float:
        if not math.isfinite(float(text)):
            raise ConfigError(str(path), f"{text} is not a finite number", "write a finite number")
        return float(text)

    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            str(path), "no such file", "give the path of a JSON config, as those in ds_configs/"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), f"can't be read ({error})", "give the path of a JSON config") from None
    try:
        value = json.loads(text, object_pairs_hook=without_duplicates, parse_float=finite, parse_constant=finite)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise ConfigError(str(path), f"not valid JSON: {error.msg} at {where}", "mend the file there") from None
    except RecursionError:
        raise ConfigError(str(path), "not valid JSON: nested too deeply", "mend the file") from None
    if not isinstance(value, dict):
        raise ConfigError(str(path), f"holds {shown(value)}, not an object", "one file is one JSON object {...}")
    return value


def apply_overrides(config: dict[str, Any], overrides: Sequence[str]) -> None:
    """Write each `KEY=VALUE` into `config`, later ones last. VALUE is JSON, or else a string.

    Raises:
        ConfigError: no `=`, an empty part in KEY, or KEY passes through something that is not an object.
    """
    for override in overrides:
        key, equals, text = override.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            raise ConfigError("--set", f"{shown(override)} is not KEY=VALUE", "as in --set zero_tp.parallel.tensor=4")
        target = config
        for depth, part in enumerate(parts[:-1], start=1):
            target = target.setdefault(part, {})
            if not isinstance(target, dict):
                inside = ".".join(parts[:depth])
                raise ConfigError(key, f"{inside} is {shown(target)}, not an object", f"set {inside} itself")
        target[parts[-1]] = _value(text)


def _value(text: str) -> Any:
    def finite(number: str) -> float:
        if not math.isfinite(float(number)):
            raise ValueError(number)
        return float(number)

    try:
        return json.loads(text, parse_float=finite, parse_constant=finite)
    except (ValueError, RecursionError):
        return text
