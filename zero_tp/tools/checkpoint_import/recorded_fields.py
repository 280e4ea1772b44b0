"""What a trainer recorded of its model, and the Hugging Face config that is made of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from zero_tp.base.constants import MODEL_KEY
from zero_tp.base.errors import ConfigError, UserError, shown
from zero_tp.base.validation import with_keys
from zero_tp.model.architectures.configs import TOKEN_IDS, config_from_block

REMEDY = "give a config.json of the model with --config"


class RecordedFields:
    """Fields of which a missing or a wrong one is an error that names it.

    Dots in a name stand for nested objects.

    Args:
        path: of what the user has to look at.
        prefix: of the names in errors.
    """

    def __init__(self, fields: Mapping[str, Any], path: Path, prefix: str = "") -> None:
        self.fields = fields
        self.path = path
        self.prefix = prefix

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field; the default if it is missing or None."""
        value: Any = self.fields
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return default if value is None else value

    def __getitem__(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise UserError(f"{self.path}: has no {self.prefix}{name}; {REMEDY}")
        return value

    def size(self, name: str, default: int | None = None) -> int:
        """Return a positive integer."""
        value = self[name] if default is None else self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._wrong(name, value, "is no size")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number; YAML takes 1e-5 for a text."""
        value = self[name] if default is None else self.get(name, default)
        try:
            return float(value)
        except (TypeError, ValueError):
            raise self._wrong(name, value, "is no number") from None

    def require(self, name: str, values: tuple[Any, ...], default: Any = None) -> None:
        """Refuse a field of another value."""
        value = self.get(name, default)
        if value not in values:
            raise self._wrong(name, value, "no family is derived from it")

    def _wrong(self, name: str, value: Any, problem: str) -> UserError:
        return UserError(f"{self.path}: {self.prefix}{name} {shown(value)}: {problem}; {REMEDY}")


def derive_config(model_type: str, path: Path, fields: Mapping[str, Any]) -> PretrainedConfig:
    """Return a Hugging Face config without tokens' ids, which belong to a tokenizer.

    Args:
        path: of what the fields were made of.

    Raises:
        UserError: the family has no such values.
    """
    ids = dict.fromkeys(TOKEN_IDS)
    try:
        return config_from_block({"model_type": model_type, **fields, **ids})
    except ConfigError as error:
        own = with_keys(error, lambda name: name.removeprefix(f"{MODEL_KEY}."))
        raise UserError(f"{path}: {own}; {REMEDY}") from error
