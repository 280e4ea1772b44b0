"""What a person can cause: errors that are one clear line and end a command with exit status 2."""

from __future__ import annotations


class UserError(ValueError):
    """Bad input. Its text is one line: what is wrong, where (key, file, value), and the remedy.

    Commands print it without a traceback and exit with status 2.
    """
