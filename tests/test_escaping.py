"""What acts on a terminal is escaped in messages."""

from __future__ import annotations

from zero_tp.errors import UserError, error_line, shown, visible


def test_what_acts_on_a_terminal_is_escaped() -> None:
    assert visible("a\x1b[31mb\u202e\x9b\n\tc\xa0\u3000é") == "a\\x1b[31mb\\u202e\\x9b\n\tc\xa0\u3000é"
    assert error_line(UserError("key \x1b]0;x\x07 \x85 of\x00 it")) == "error: key \\x1b]0;x\\x07 of\\x00 it"
    assert shown({"\x7f": "\x1b"}) == '{"\\x7f": "\\u001b"}'
    assert len(error_line("x" * 10_000)) < 2_000
