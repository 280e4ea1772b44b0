"""The one error of this package."""

from __future__ import annotations

from zero_tp.errors import UserError


class ConfigError(UserError):
    """A config that can't be run as written. Its text is one line: `KEY: what is wrong; the remedy`.

    Args:
        key: dotted path of the key in the JSON file, or the file's own path.
        problem: what is wrong with it, values included.
        remedy: the nearest valid name, or what to write instead.
    """

    def __init__(self, key: str, problem: str, remedy: str = "") -> None:
        self.key = key
        self.problem = problem
        self.remedy = remedy
        text = f"{key}: {problem}" + (f"; {remedy}" if remedy else "")
        super().__init__(" ".join(text.split()))
