"""A dataclass makes a parser, and the parser makes the dataclass."""

from __future__ import annotations

import argparse
from dataclasses import MISSING, dataclass
from pathlib import Path

from zero_tp.base.options import add_options, from_options, option


@dataclass(frozen=True)
class Settings:
    name: str = option(MISSING, "required where it is used")
    limit: int | None = option(None, "a number", metavar="N")
    share: float = option(0.5, "a fraction", "--fraction")
    files: tuple[Path, ...] = option((), "files", metavar="FILE")
    kind: str = option("a", "one of two", choices=("a", "b"))
    strict: bool = option(False, "a switch")
    hidden: int = 7


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_options(parser, Settings)
    return parser.parse_args(words, argparse.Namespace(hidden=7))


def test_every_type_is_parsed_as_the_field_has_it() -> None:
    words = "--name x --limit 3 --fraction 0.25 --files p q --files r --kind b --strict"
    parsed = from_options(Settings, parse(*words.split()))
    assert parsed == Settings("x", 3, 0.25, (Path("p"), Path("q"), Path("r")), "b", True)


def test_defaults_are_those_of_the_fields() -> None:
    assert parse().name is None
    for _ in range(2):  # no list is shared
        assert from_options(Settings, parse("--name", "x", "--files", "p")).files == (Path("p"),)
    assert from_options(Settings, parse("--name", "x")) == Settings("x")


def test_a_part_of_the_options_goes_to_a_group() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser.add_argument_group("some"), Settings, ["strict", "limit"])
    text = parser.format_help()
    assert "some:" in text and "a switch" in text and "--limit N" in text and "--kind" not in text
