"""Errors that a user can cause, each one line, and the exit statuses of commands and ranks."""

from __future__ import annotations

import difflib
import errno
import io
import json
import re
import sys
import textwrap
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

BAD_INPUT = 2
INTERRUPTED = 130  # 128 + SIGINT, what a shell reports
_LONGEST = 1_500  # most characters of an error's line
_LONGEST_KEY = 160
_LONGEST_LIST = 160
_LONGEST_CAUSE = 200
# C0 but tab, line break and a carriage return before one; C1; controls of the direction of text.
_ACTS_ON_TERMINALS = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]|\r(?!\n)"
)
_JSON_KINDS = {
    **{
        "NoneType": "null",
        "bool": "true or false",
        "int": "an integer",
        "float": "a number",
        "Decimal": "a number",
    },
    **{"str": "a string", "list": "an array", "tuple": "an array", "dict": "an object"},
}


class UserError(ValueError):
    """Bad input: one line with the problem, its place (key, file, value) and the remedy.

    Commands print it without a traceback and exit with status 2.
    """

    @property
    def errors(self) -> Sequence[UserError]:
        """Return the errors of which it consists, itself alone by default."""
        return [self]

    def __reduce__(self) -> Any:
        """Pickle as a plain `UserError` with the same message, for other ranks.

        By default an exception is made again from its `args`, one message here, which the
        constructors of subclasses do not take.
        """
        return UserError, (str(self),)


class ConfigError(UserError):
    """A config that can't be run, in one line: `KEY: what is wrong; the remedy`.

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
    """Return `text` with control characters of terminals escaped (`\\x1b`).

    Line breaks, tabs, blanks and the two zero-width joiners stay.
    """
    if text.isprintable():
        return text
    return "".join(
        letter if _is_visible(letter) else letter.encode("unicode_escape").decode()
        for letter in text
    )


def _is_visible(letter: str) -> bool:
    return (
        # The joiners belong to scripts such as Persian's, and to emoji.
        letter.isprintable() or letter in "\n\t\u200c\u200d" or unicodedata.category(letter) == "Zs"
    )


def show(*lines: str, file: TextIO | None = None) -> None:
    """Print lines to standard output, or to `file`, as a terminal can show them.

    Names of files, models and corpora may hold control characters, which would act on a terminal.
    """
    for line in lines:
        print(visible(line), file=file, flush=True)


def show_text(text: str) -> None:
    """Print text of a corpus or a model: as it is, but on a terminal without what would act on it.

    Those are control characters and the marks that reorder a line.
    """
    if sys.stdout.isatty():
        text = _ACTS_ON_TERMINALS.sub(
            lambda match: match.group().encode("unicode_escape").decode(), text
        )
    print(text, flush=True)


def escape_unencodable_output() -> None:
    """Let standard output escape characters that its encoding lacks, such as non-UTF-8 bytes of
    file names.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def one_line(text: str, limit: int | None = None) -> str:
    """Return `text` in one line, with single blanks, unprintable characters escaped, cut after
    `limit` characters.
    """
    line = visible(" ".join(text.split()))
    return line if limit is None or len(line) <= limit else line[: limit - 1] + "…"


def error_line(error: object, limit: int = _LONGEST) -> str:
    """Return the error's line as it is printed, cut after `limit` characters."""
    return f"error: {one_line(str(error), limit)}"


def write_stderr(text: str) -> None:
    """Write lines to stderr at once, over a progress bar if there is one."""
    if not text:
        return
    try:
        # Carriage return and erase: a progress bar leaves the cursor at the end of its line.
        clear = "\r\x1b[K" if sys.stderr.isatty() else ""
        sys.stderr.write(f"{clear}{text}\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        # The terminal or pipe is closed, but the run must still end.
        return


def as_user_error(error: OSError) -> UserError | None:
    """Return a `UserError` for an OSError that names a file or reports a full disk; None for any
    other.
    """
    # A write to a full disk names no file; any other error without one is of a pipe or socket.
    if error.filename is None and error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return None
    user_error = UserError(
        f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)
    )
    user_error.__cause__ = error
    return user_error


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error, for use inside another line.

    All lines are joined if the first one ends with a colon ("… because:"). Without a message, it is
    the name of the error's class. The result is cut after `_LONGEST_CAUSE` characters.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, KeyError) and len(error.args) == 1:
        key = error.args[0]
        text = key if isinstance(key, str) and key.count(" ") > 2 else f"{shown(key)} is missing"
    elif not lines:
        text = type(error).__name__
    else:
        text = " ".join(lines) if lines[0].endswith(":") else lines[0]
    return one_line(text, _LONGEST_CAUSE)


def json_kind(name: str) -> str:
    """Return what JSON calls values of the Python type of this name."""
    return _JSON_KINDS.get(name, name)


def did_you_mean(wrong: str, valid: Iterable[str]) -> str:
    """Return `did you mean "NAME"?`, or the list of valid names when none is near.

    A candidate may be a dotted path (`parallel.tensor`). Its last part is compared too, to find a
    key that is in the wrong block.
    """
    names = list(dict.fromkeys(valid))
    by_spelling: dict[str, str] = {}
    for name in names:
        by_spelling.setdefault(name.lower(), name)
    # The last part is compared in a second pass, so that a key of this block wins against one of
    # another block.
    for name in names:
        by_spelling.setdefault(name.rsplit(".", 1)[-1].lower(), name)
    near = (
        difflib.get_close_matches(wrong.lower(), by_spelling, n=1, cutoff=0.8)
        or sorted(
            (spelling for spelling in by_spelling if len(wrong) > 4 and wrong.lower() in spelling),
            key=len,
        )
        or difflib.get_close_matches(wrong.lower(), by_spelling, n=1, cutoff=0.6)
    )
    if near:
        return f'did you mean "{by_spelling[near[0]]}"?'
    listed = sorted(name for name in names if "." not in name)
    cut = textwrap.shorten(", ".join(listed), _LONGEST_LIST, placeholder=" …")
    return f"valid: {cut}" + (" (docs/config.md has all)" if cut.endswith("…") else "")


def shown(value: object) -> str:
    """Return a value for an error message: as JSON, unprintable characters escaped, cut after 60
    characters.

    A value of YAML that JSON can't represent is shown as its kind (`an object`).
    """
    try:
        # As JSON, because that is what the user has written: true, and not True.
        text = visible(json.dumps(value, ensure_ascii=False, default=str))
    # A date as a key, a list in itself, or an integer of 5,000 digits.
    except (TypeError, ValueError, RecursionError):
        return json_kind(type(value).__name__)
    return text if len(text) <= 60 else text[:57] + "..."
