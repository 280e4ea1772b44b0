"""Errors that a person can cause are one clear line; commands and ranks exit with the statuses below."""

from __future__ import annotations

import contextlib
import difflib
import io
import json
import re
import sys
import textwrap
import unicodedata
from collections.abc import Iterable, Iterator
from functools import partial

BAD_INPUT = 2
_LONGEST = 1_500  # characters of an error's line
_LONGEST_KEY, _LONGEST_LIST, _LONGEST_CAUSE = 160, 160, 200
_JSON_KINDS = {
    **{"NoneType": "null", "bool": "true or false", "int": "an integer", "float": "a number"},
    **{"str": "a string", "list": "an array", "tuple": "an array", "dict": "an object"},
}
_CLASS_WORDS: dict[type[BaseException], str] = {
    TypeError: "a value of the wrong kind",
    MemoryError: "not enough memory",
    EOFError: "the end of a file, where more is expected",
}
_TYPE = rf"({'|'.join(_JSON_KINDS)})"
_PYTHON_PHRASES = (
    (rf"argument of type '{_TYPE}' is not iterable", "{0}, where another kind of value is expected"),
    (
        rf"'{_TYPE}' object (?:has no attribute '\w+'|is not \w+|cannot be \w.*)",
        "{0}, where another kind of value is expected",
    ),
    (r"expected str, bytes or os.PathLike object, not (\w+)", "{0}, where a path is expected"),
    (rf"unhashable type: '{_TYPE}'", "{0}, where a name is expected"),
    (rf"(?:\w+ )?indices must be integers(?: or slices)?, not '?{_TYPE}'?", "{0}, where an integer is expected"),
    (
        r"(?:Validation error for field '\w+': )?Field '(\w+)' expected (\w+), got (\w+)(?: \(value: .*?\))?",
        "{0}: expected {1}, got {2}",
    ),
    (r"<class '(?:\w+\.)*(\w+)'>", "{0}"),
    (rf"'{_TYPE}'", "{0}"),
    (r"\b(NoneType)\b", "{0}"),
    (r"(?:\w+\.)?\w+\(\) got an unexpected keyword argument ('.*?')", "unknown key {0}"),
    (r"Expected YAML dict from .*, got (\w+)$", "an object is expected, not {0}"),
    (r"either str or AddedToken but got: ", "a string, but is "),
    (
        r"(?:Validation error for field '\w+': )?Field '(\w+)' with value (.*?) doesn't match any type in \((.*?)\).*",
        "{0}: expected one of ({2}), got {1}",
    ),
)
"""Patterns of what Python says of values of the wrong type, and the words instead."""
INTERRUPTED = 130  # 128 + SIGINT, what a shell reports


class UserError(ValueError):
    """A UserError reports bad input. Its text is one line: what is wrong, where (key, file, value), and the remedy.

    Commands print it without a traceback and exit with status 2.
    """


class ConfigError(UserError):
    """A ConfigError refuses a config that can't be run. Its text is one line: `KEY: what is wrong; the remedy`.

    Args:
        key: dotted path of the key in the JSON file, or the file's own path.
        problem: what is wrong with it, values included.
        remedy: the nearest valid name, or what to write instead.
    """

    def __init__(self, key: str, problem: str, remedy: str = "") -> None:
        self.key = key
        self.problem = problem
        self.remedy = remedy
        text = f"{one_line(key, _LONGEST_KEY)}: {problem}" + (f"; {remedy}" if remedy else "")
        super().__init__(one_line(text))


def visible(text: str) -> str:
    """Return `text` as a terminal may show it: what acts on it instead of being seen is escaped (`\\x1b`).

    Line breaks, tabs and every kind of blank stay, and the two joiners that scripts need.
    """
    if text.isprintable():
        return text
    return "".join(letter if _seen(letter) else letter.encode("unicode_escape").decode() for letter in text)


def _seen(letter: str) -> bool:
    return letter.isprintable() or letter in "\n\t\u200c\u200d" or unicodedata.category(letter) == "Zs"


@contextlib.contextmanager
def _named(file: str) -> Iterator[None]:
    """Let a system's error within say what it was about."""
    try:
        yield
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            error.filename = error.filename or file
        raise


class VisibleOutput(io.TextIOWrapper):
    """A text stream shows what a terminal would obey: names of files and libraries' texts may hold anything.

    It writes where another stream does, which is kept: its end would close the file.
    """

    def __init__(self, other: io.TextIOWrapper):
        super().__init__(other.buffer, other.encoding, errors="backslashreplace", line_buffering=other.line_buffering)
        self._other = other

    def write(self, text: str) -> int:
        with _named("standard output"):
            super().write(visible(text))
        return len(text)

    def flush(self) -> None:
        with _named("standard output"):
            super().flush()


def show_visibly() -> None:
    """Have all that this process prints from now on go through `VisibleOutput`."""
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper) and not isinstance(out, VisibleOutput):
        out.flush()
        sys.stdout = VisibleOutput(out)


def one_line(text: str, limit: int | None = None) -> str:
    """Return `text` with its lines and blanks joined by single blanks, what doesn't print escaped, and cut after
    `limit` characters."""
    line = visible(" ".join(text.split()))
    return line if limit is None or len(line) <= limit else line[: limit - 1] + "…"


def error_line(error: object, limit: int = _LONGEST) -> str:
    """Return the one line that a person reads of `error`, its text cut after `limit` characters."""
    return f"error: {one_line(str(error), limit)}"


def of_a_file(error: OSError) -> UserError | None:
    """Return what a person is told of a system's error that names a file; None where it names none."""
    if error.filename is None:
        return None
    told = UserError(f"{error.filename}: {error.strerror}")
    told.__cause__ = error
    return told


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error in a person's words, for use inside another line.

    An error that begins with an introduction ("… because:") gives all its lines, joined. An error without a text gives
    the name of its class, in words. The text is cut after `_LONGEST_CAUSE` characters.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, KeyError) and len(error.args) == 1:
        key = error.args[0]
        text = key if isinstance(key, str) and key.count(" ") > 2 else f"{shown(key)} is missing"
    elif not lines:
        text = class_in_words(error)
    else:
        text = " ".join(lines) if lines[0].endswith(":") else lines[0]
    return one_line(in_json_words(text), _LONGEST_CAUSE)


def class_in_words(error: BaseException) -> str:
    """Return the name of an error's class in words: `repository not found` of RepositoryNotFoundError."""
    if type(error) in _CLASS_WORDS:
        return _CLASS_WORDS[type(error)]
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", type(error).__name__)
    return " ".join(words[:-1] if len(words) > 2 and words[-1] == "Error" else words).lower()


def in_json_words(text: str) -> str:
    """Return a library's text with JSON's names for Python's types, and without the names of its exceptions."""
    text = re.sub(r"(Class validation error for validator '\w+': )?\b\w+Error: ", "", text)
    for pattern, words in _PYTHON_PHRASES:
        text = re.sub(pattern, partial(_with_json_kind, words), text)
    return text


def _with_json_kind(words: str, match: re.Match[str]) -> str:
    return words.format(*map(json_kind, match.groups()))


def json_kind(name: str) -> str:
    """Return what JSON calls values of the Python type of this name."""
    return _JSON_KINDS.get(name, name)


def did_you_mean(wrong: str, valid: Iterable[str]) -> str:
    """Return `did you mean "NAME"?`, or the list of valid names when none is near.

    A candidate may be a dotted path (`parallel.tensor`): its last part counts as a name too, so that a right name in
    the wrong block leads to the right one.
    """
    names = list(dict.fromkeys(valid))
    by_spelling: dict[str, str] = {}
    for name in names:
        by_spelling.setdefault(name.lower(), name)
    for name in names:
        by_spelling.setdefault(name.rsplit(".", 1)[-1].lower(), name)
    near = (
        difflib.get_close_matches(wrong.lower(), by_spelling, n=1, cutoff=0.8)
        or sorted((spelling for spelling in by_spelling if len(wrong) > 4 and wrong.lower() in spelling), key=len)
        or difflib.get_close_matches(wrong.lower(), by_spelling, n=1, cutoff=0.6)
    )
    if near:
        return f'did you mean "{by_spelling[near[0]]}"?'
    listed = sorted(name for name in names if "." not in name)
    cut = textwrap.shorten(", ".join(listed), _LONGEST_LIST, placeholder=" …")
    return f"valid: {cut}" + (" (docs/config.md has all)" if cut.endswith("…") else "")


def shown(value: object) -> str:
    """Return a JSON value as an error message shows it: as JSON, what doesn't print escaped, and cut after 60
    characters. A value of YAML that JSON can't hold is shown as its kind (`an object`)."""
    try:
        text = visible(json.dumps(value, ensure_ascii=False, default=str))
    except (TypeError, ValueError, RecursionError):  # a date as a key, a list in itself, an integer of 5,000 digits
        return json_kind(type(value).__name__)
    return text if len(text) <= 60 else text[:57] + "..."
