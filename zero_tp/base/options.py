"""Options of a command: a frozen dataclass whose fields make the parser and its help.

@dataclass(frozen=True)
class Settings:
    limit: int | None = option(None, "only the first N examples", metavar="N")

add_options(parser, Settings)                  # --limit N
settings = from_options(Settings, parser.parse_args())
"""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from collections.abc import Sequence
from typing import Any, TypeVar

Settings = TypeVar("Settings")
OPTION = "option"


@dataclasses.dataclass(frozen=True)
class Option:
    """How a field is given on the command line.

    Attributes:
        flags: by default the field's name, `--field-name`.
        extra: further arguments of argparse's `add_argument`.
    """

    help: str
    flags: tuple[str, ...]
    extra: dict[str, Any]

    def all_flags(self, name: str) -> tuple[str, ...]:
        return self.flags or (f"--{name.replace('_', '-')}",)


def option(default: Any, help: str, *flags: str, **extra: Any) -> Any:
    """Return a dataclass field with its default, help text and flags."""
    metadata = {OPTION: Option(help, flags, extra)}
    return dataclasses.field(default=default, metadata=metadata)


def options_of(settings: type[Any]) -> dict[str, Option]:
    """Return the options of a dataclass by the names of their fields."""
    fields = dataclasses.fields(settings)
    return {field.name: field.metadata[OPTION] for field in fields if OPTION in field.metadata}


def add_options(
    parser: argparse._ActionsContainer, settings: type[Any], names: Sequence[str] | None = None
) -> None:
    """Add the options of a dataclass to a parser, or to a group of its options.

    Args:
        names: fields to add; by default all that have an option.
    """
    kinds = typing.get_type_hints(settings)
    options = options_of(settings)
    defaults = {field.name: field.default for field in dataclasses.fields(settings)}
    for name in options if names is None else names:
        one = options[name]
        extra: dict[str, Any] = {"default": _parsed(defaults[name]), **_converter(kinds[name])}
        parser.add_argument(*one.all_flags(name), dest=name, help=one.help, **extra | one.extra)


def _parsed(default: Any) -> Any:
    """Return a field's default as argparse has it: it extends lists, and a required field is
    None.
    """
    if isinstance(default, tuple):
        return list(default)
    return None if default is dataclasses.MISSING else default


def from_options(settings: type[Settings], namespace: argparse.Namespace) -> Settings:
    """Return the settings that were parsed."""
    fields = dataclasses.fields(settings)  # type: ignore[arg-type]
    values = {field.name: getattr(namespace, field.name) for field in fields}
    for name, value in values.items():
        if isinstance(value, list):
            values[name] = tuple(value)
    return settings(**values)


def _converter(kind: Any) -> dict[str, Any]:
    """Return argparse's arguments for a type: bool, one type or None, or a tuple of one type."""
    if kind is bool:
        return {"action": "store_true"}
    if typing.get_origin(kind) is tuple:
        # `extend`, so that an option given twice has the values of both.
        return {"type": typing.get_args(kind)[0], "nargs": "+", "action": "extend"}
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        kind = next(part for part in typing.get_args(kind) if part is not type(None))
    return {"type": kind}
