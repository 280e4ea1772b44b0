"""Read JSON strictly: no duplicate keys, NaN or Infinity; errors have a line and column."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

from zero_tp.base.errors import ConfigError, shown
from zero_tp.base.files import read_regular

_MAX_DIGITS = 100
_MAX_LEVELS = 100


class InvalidJson(ValueError):
    """A text is not strict JSON; the message says where."""


class InvalidUnicode(InvalidJson):
    """A text, or a string in it, is not UTF-8."""


def parse_json(text: bytes | str) -> Any:
    """Return the value of a UTF-8 JSON text.

    Raises:
        InvalidUnicode: it is not UTF-8, or a string has an unpaired surrogate.
        InvalidJson: it is not JSON (with line and column), has a key twice, NaN or Infinity, an
            integer of more than 100 digits, or more than 100 levels.
    """
    try:
        decoded = text.decode("utf-8") if isinstance(text, bytes) else text
        value = json.loads(
            decoded,
            object_pairs_hook=_unique_keys,
            parse_float=_finite_float,
            parse_constant=_finite_float,
            parse_int=_bounded_int,
        )
    except json.JSONDecodeError as error:
        raise InvalidJson(
            f"not valid JSON: {error.msg} at line {error.lineno} column {error.colno}"
        ) from None
    except UnicodeDecodeError as error:
        raise InvalidUnicode(f"not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise InvalidJson("not valid JSON: nested too deeply") from None
    _check_levels_and_strings(value, _MAX_LEVELS)
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Python's json would keep the last value of a repeated key silently.
    unique = dict(pairs)
    if len(unique) < len(pairs):
        duplicate = next(
            key for key, count in Counter(key for key, _ in pairs).items() if count > 1
        )
        raise InvalidJson(f"the key {shown(duplicate)} appears twice in one object")
    return unique


def _finite_float(number: str) -> float:
    # Python's json accepts NaN and Infinity, and reads 1e999 as infinity; other JSON programs
    # refuse such a file.
    if not math.isfinite(float(number)):
        raise InvalidJson(f"{number[:60]} is not a finite number")
    return float(number)


def _bounded_int(number: str) -> int:
    # Beyond 4,300 digits Python raises an error of its own, without a place in the file.
    if len(number) > _MAX_DIGITS:
        raise InvalidJson(f"an integer of {len(number.lstrip('-')):,} digits")
    return int(number)


def _check_levels_and_strings(value: Any, levels: int) -> None:
    """Refuse deep nesting, which recursion could not walk, and strings that UTF-8 cannot encode."""
    if not levels:
        raise InvalidJson("not valid JSON: nested too deeply")
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise InvalidUnicode(
                f"unpaired surrogate at character {error.start} of a string"
            ) from None
    elif isinstance(value, (dict, list)):
        for inner in (*value, *value.values()) if isinstance(value, dict) else value:
            _check_levels_and_strings(inner, levels - 1)


def parse_object(text: bytes) -> dict[str, Any]:
    """Return the object of a JSON text. An array, a number or a string raises InvalidJson, too;
    see `parse_json`.
    """
    value = parse_json(text)
    if not isinstance(value, dict):
        raise InvalidJson(f"holds {shown(value)}, not an object")
    return value


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises what `read_regular` and `parse_object` do."""
    return parse_object(read_regular(path))


def read_json(
    path: Path, remedy: str = "give the path of a JSON config, or a name of ds_configs"
) -> dict[str, Any]:
    """Return the object in a JSON file that the user has named.

    Args:
        remedy: for a missing or unreadable file.
    """
    try:
        return read_object(path)
    except FileNotFoundError:
        raise ConfigError(str(path), "no such file", remedy) from None
    except OSError as error:
        raise ConfigError(str(path), f"can't be read ({error.strerror or error})", remedy) from None
    except InvalidJson as error:
        raise ConfigError(str(path), str(error), "correct the file") from None
