"""Garbage is collected between steps and nowhere else."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.run_log import train_state
from zero_tp.training.run_callbacks import COLLECTION_INTERVAL, GarbageCollection


class Ring:
    """Garbage that only a collection frees."""

    def __init__(self) -> None:
        self.itself = self


@contextmanager
def collected_between_steps() -> Iterator[Callable[[int], None]]:
    """Open a run's garbage collection and yield the function that ends a step."""
    state, callback = train_state(Path("run")), GarbageCollection()

    def end(step: int) -> None:
        state.step = step
        callback.on_step_end(state)

    callback.on_start(state)
    try:
        yield end
    finally:
        callback.on_end(state)


def test_a_run_collects_after_its_first_step_and_at_each_fiftieth() -> None:
    before = gc.get_freeze_count()
    with collected_between_steps() as collect:
        assert not gc.isenabled()
        rings: list[weakref.ref[Ring]] = []
        since = 0  # the last collection
        for step in range(7, 2 * COLLECTION_INTERVAL + 1):
            rings.append(weakref.ref(Ring()))
            lasting = Ring() if step == COLLECTION_INTERVAL else None  # lives through a collection
            collect(step)
            since = 0 if step in (7, COLLECTION_INTERVAL, 2 * COLLECTION_INTERVAL) else since + 1
            assert sum(ring() is not None for ring in rings) == since, step
            if lasting is not None:
                rings.append(weakref.ref(lasting))
                del lasting
                since += 1
        assert gc.get_freeze_count() > before
    assert gc.isenabled() and gc.get_freeze_count() == 0


@pytest.mark.parametrize("enabled", [True, False])
def test_an_error_leaves_it_as_it_was(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(KeyError), collected_between_steps() as collect:
            collect(1)
            raise KeyError
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
