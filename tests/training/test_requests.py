"""No request of a training run is lost."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from zero_tp.process import signals
from zero_tp.process.signals import Requests


def test_a_request_that_comes_while_flags_are_reduced_is_answered_at_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The slowest rank may keep the others waiting there for seconds."""
    requests, arriving = Requests(), [True, False, False]

    def reduce(flags: list[bool], device: torch.device) -> SimpleNamespace:
        requests.save = requests.save or arriving.pop(0)
        return SimpleNamespace(read=lambda: flags)

    monkeypatch.setattr(signals, "_all_reduce_flags", reduce)
    answers = [requests.all_reduce(torch.device("cpu")) for _ in range(3)]
    assert answers == [(False, False), (False, True), (False, False)]
