"""Garbage is collected between steps and nowhere else."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest

from tests.support.run_log import train_state
from zero_tp.run.run_callbacks import COLLECTION_INTERVAL, GarbageCollection


class Ring:
    """Garbage that only a collection frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.slow
def test_a_run_collects_after_its_first_step_and_at_each_fiftieth() -> None:
    state, callback, before = train_state(Path("run")), GarbageCollection(), gc.get_freeze_count()
    callback.on_start(state)
    assert not gc.isenabled()
    rings: list[weakref.ref[Ring]] = []
    alive = 0  # rings since the last collection
    for state.step in range(7, 2 * COLLECTION_INTERVAL + 1):
        rings.append(weakref.ref(Ring()))
        # Lives through a collection.
        lasting = Ring() if state.step == COLLECTION_INTERVAL else None
        callback.on_step_end(state)
        alive = 0 if state.step in (7, COLLECTION_INTERVAL, 2 * COLLECTION_INTERVAL) else alive + 1
        assert sum(ring() is not None for ring in rings) == alive, state.step
        if lasting is not None:
            rings.append(weakref.ref(lasting))
            del lasting
            alive += 1
    assert gc.get_freeze_count() > before
    callback.on_end(state)
    assert gc.isenabled() and gc.get_freeze_count() == 0
    gc.disable()
    try:  # a collector that was off stays off
        callback.on_start(state)
        callback.on_end(state)
        assert not gc.isenabled()
    finally:
        gc.enable()
