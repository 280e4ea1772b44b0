"""Tell the watchdog thread what a run is doing."""

from __future__ import annotations

from zero_tp.process.watch import Watch
from zero_tp.training.callback import Callback, TrainState


class Watchdog(Callback):
    """Enter each phase in the rank's `Watch`, which ends the rank when a phase hangs."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def on_start(self, state: TrainState) -> None:
        state.engine.mark = self.watch.mark

    def on_step_begin(self, state: TrainState) -> None:
        self.watch.enter("step", state.step)

    def on_evaluate(self, state: TrainState) -> None:
        self.watch.enter("evaluation", state.step)

    def on_save(self, state: TrainState) -> None:
        self.watch.enter("save", state.step)
