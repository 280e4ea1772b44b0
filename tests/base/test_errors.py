"""Errors are one line, and escaped for terminals."""

from __future__ import annotations

import sys

import pytest

from tests.tools.fuzz.commands import LONGEST_REFUSAL, broken_style
from zero_tp.base.errors import UserError, error_line, first_line, show_text, shown, visible


class RepositoryNotFoundError(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (TypeError(), "TypeError"),
        (RepositoryNotFoundError(), "RepositoryNotFoundError"),
        (KeyError("text"), '"text" is missing'),
        (KeyError("no task of this name"), "no task of this name"),
        (
            AttributeError("'float' object has no attribute 'x'\nmore"),
            "'float' object has no attribute 'x'",
        ),
        (ValueError("it failed because:\n  no memory\n"), "it failed because: no memory"),
        (ValueError("word " * 100), ("word " * 100)[:199] + "…"),
    ],
)
def test_a_librarys_error_is_its_first_line(error: Exception, words: str) -> None:
    assert first_line(error) == words
    assert broken_style(words) is None


def test_a_value_that_json_cannot_hold_is_shown_as_its_kind() -> None:
    endless: list[object] = []
    endless.append(endless)
    assert [shown({(1,): 2}), shown(endless), shown(10**5000)] == [
        "an object",
        "an array",
        "an integer",
    ]


def test_the_style_of_refusals_is_short() -> None:
    assert broken_style("a: 5 is no string; write a string") is None
    assert "characters" in (broken_style("too long " * 50) or "")
    assert broken_style("a" * LONGEST_REFUSAL * 2 + ": no such file") is None, (
        "a path of the user's"
    )


def test_what_acts_on_a_terminal_is_escaped() -> None:
    assert (
        visible("a\x1b[31mb\u202e\x9b\n\tc\xa0\u3000é") == "a\\x1b[31mb\\u202e\\x9b\n\tc\xa0\u3000é"
    )
    assert (
        error_line(UserError("key \x1b]0;x\x07 \x85 of\x00 it"))
        == "error: key \\x1b]0;x\\x07 of\\x00 it"
    )
    assert shown({"\x7f": "\x1b"}) == '{"\\x7f": "\\u001b"}'
    assert len(error_line("x" * 10_000)) < 2_000


def test_text_is_printed_as_it_is_but_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "a\x1b[31m\u202eb\xad\u200f\ufeff\tc\r\nd\re\x85"
    show_text(text)
    assert capsys.readouterr().out == f"{text}\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    show_text(text)
    expected = "a\\x1b[31m\\u202eb\xad\u200f\ufeff\tc\r\nd\\re\\x85\n"
    assert capsys.readouterr().out == expected
