"""Keys of earlier versions. A saved or written config with such a key at its default still
opens.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zero_tp.base.errors import ConfigError, shown
from zero_tp.base.settings.keys import look_up
from zero_tp.base.validation import ConfigErrors


@dataclass(frozen=True)
class RemovedKey:
    """A key that this version does not have.

    Attributes:
        default: its last default, whose meaning every run has now.
        remedy: what to write instead of another value.
    """

    default: Any
    remedy: str


REMOVED_KEYS: dict[str, RemovedKey] = {
    "zero_tp.parallel.fused_products": RemovedKey(
        False,
        "leave it out: gathers and scatters then overlap with the GEMMs, and sums differ in the "
        "last bits",
    ),
}
"""Dotted keys of a config file that were removed."""


def drop_removed_keys(
    config: dict[str, Any], removed: Mapping[str, RemovedKey] = REMOVED_KEYS
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return a copy of a config without its removed keys, and a note on each of them.

    Raises:
        ConfigErrors: each removed key whose value is not its default.
    """
    config = copy.deepcopy(config)
    notes: list[str] = []
    errors: list[ConfigError] = []
    for key, entry in removed.items():
        parent, _, name = key.rpartition(".")
        block = look_up(config, parent) if parent else config
        if not isinstance(block, dict) or name not in block:
            continue
        value = block.pop(name)
        # JSON's false is not 0, though Python's is.
        if type(value) is type(entry.default) and value == entry.default:
            notes.append(f"{key}: was removed; {shown(value)}, its default, changes nothing")
        else:
            errors.append(
                ConfigError(key, f"{shown(value)}, but this key was removed", entry.remedy)
            )
    if errors:
        raise ConfigErrors(errors)
    return config, tuple(notes)
