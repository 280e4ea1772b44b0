"""Read small JSON files, and write small text files whole or not at all."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from zero_tp.errors import ConfigError, shown


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` by a file that holds `text`. A reader finds the old file or the new one, also after a crash.

    Raises:
        OSError: the disk is full, or the directory is missing or cannot be written.
    """
    temporary = path.with_name(path.name + ".new")
    try:
        with temporary.open("w") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

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
