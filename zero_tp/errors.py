"""What a person can cause: errors that are one clear line and end a command with exit status 2."""

from __future__ import annotations


class UserError(ValueError):
    """Bad input. Its text is one line: what is wrong, where (key, file, value), and the remedy.

    Commands print it without a traceback and exit with status 2.
    """


def first_line(error: BaseException) -> str:
    """What a library's error says, as part of a line: its first line, with what that introduces by a colon, or its kind
    where it says nothing."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return " ".join(lines) if lines[0].endswith(":") else lines[0]
