"""Batches that are read ahead of the step."""

from __future__ import annotations

import threading

import pytest

from zero_tp.base.errors import UserError
from zero_tp.data.read_ahead import ReadAhead


def test_reading_ahead_gives_what_reading_gives() -> None:
    read, there = list[int](), threading.Event()

    def reading(step: int) -> list[int]:
        read.append(step)
        if step == 4:
            raise UserError("step 4 can't be read")
        if step == 3:
            there.set()
        return [step]

    with ReadAhead(reading, 3) as ahead:
        assert ahead.take(2) == [2] and there.wait(60), "it reads while nobody asks"
        assert ahead.take(3) == [3] and ahead.take(2) == [2]
    assert sorted(read) in ([2, 2, 3], [2, 2, 3, 3]), "and not beyond the last"
    with ReadAhead(reading, 9) as ahead:
        assert ahead.take(3) == [3]
        with pytest.raises(UserError, match="step 4"):
            ahead.take(4)
