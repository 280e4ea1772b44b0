"""Errors are one line, in words that a person without Python understands, and escaped for terminals."""

from __future__ import annotations

import pytest

from tests.tools.fuzz.commands import LONGEST_REFUSAL, broken_style
from zero_tp.base.errors import UserError, error_line, first_line, shown, visible


class RepositoryNotFoundError(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (TypeError(), "type error"),
        (RepositoryNotFoundError(), "repository not found"),
        (KeyError("text"), '"text" is missing'),
        (KeyError("no task of this name"), "no task of this name"),
        (
            TypeError("expected str, bytes or os.PathLike object, not NoneType"),
            "expected a string, bytes or os.PathLike object, not null",
        ),
        (AttributeError("'float' object has no attribute 'removesuffix'"), "a number is of the wrong kind"),
        (TypeError("string indices must be integers, not 'str'"), "string indices must be integers, not a string"),
        (TypeError("TaskConfig.__init__() got an unexpected keyword argument 'doc'"), "unknown key 'doc'"),
        (
            ValueError("Special token bos_token has to be either str or AddedToken but got: <class 'int'>"),
            "Special token bos_token has to be either str or AddedToken but got: an integer",
        ),
        (
            ValueError("Validation error for field 'use_cache': Field 'use_cache' expected bool, got str (value: 'x')"),
            "use_cache: expected true or false, got a string (value: 'x')",
        ),
        (
            ValueError("Field 'tp' with value 0.5 doesn't match any type in (<class 'int'>, NoneType). Errors: more"),
            "Field 'tp' with value 0.5 doesn't match any type in (an integer, null). Errors: more",
        ),
        (ValueError("ValueError: x is <class 'int'>"), "x is an integer"),
        (ValueError("it failed because:\n  no memory\n"), "it failed because: no memory"),
        (ValueError("word " * 100), ("word " * 100)[:199] + "…"),
    ],
)
def test_a_librarys_error_is_in_plain_words(error: Exception, words: str) -> None:
    assert first_line(error) == words
    assert broken_style(words) is None


def test_a_value_that_json_cannot_hold_is_shown_as_its_kind() -> None:
    endless: list[object] = []
    endless.append(endless)
    assert [shown({(1,): 2}), shown(endless), shown(10**5000)] == ["an object", "an array", "an integer"]


def test_the_style_of_refusals_has_no_names_of_python() -> None:
    assert broken_style("a: 5 is no string; write a string") is None
    assert "NoneType" in (broken_style("a: got NoneType") or "")
    assert "TypeError" in (broken_style("a: can't be read (TypeError)") or "")
    assert "characters" in (broken_style("too long " * 50) or "")
    assert broken_style("a" * LONGEST_REFUSAL * 2 + ": no such file") is None, "a path of the user's"


def test_what_acts_on_a_terminal_is_escaped() -> None:
    assert visible("a\x1b[31mb\u202e\x9b\n\tc\xa0\u3000é") == "a\\x1b[31mb\\u202e\\x9b\n\tc\xa0\u3000é"
    assert error_line(UserError("key \x1b]0;x\x07 \x85 of\x00 it")) == "error: key \\x1b]0;x\\x07 of\\x00 it"
    assert shown({"\x7f": "\x1b"}) == '{"\\x7f": "\\u001b"}'
    assert len(error_line("x" * 10_000)) < 2_000
