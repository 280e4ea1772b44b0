"""Send what a run logs to its trackers. A tracker that fails or hangs loses its own values and stops no training."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

from zero_tp.errors import first_line, one_line
from zero_tp.monitors.trackers import CsvFiles, RunInfo, Tracker, Values, trackers_of
from zero_tp.training.callback import Callback, Metrics, TrainState

CLOSE_SECONDS, CLOSE_SECONDS_AFTER_ERROR = 10.0, 1.0


class TrackerThread(threading.Thread):
    """Open a tracker and log to it beside training: a service that does not answer must not block a step.

    Args:
        key: in the config.
        open_tracker: called in the thread.
        report: takes one line about the first call that failed.

    Attributes:
        queue: (values, step) to log; None ends the thread after what is queued.
    """

    def __init__(self, key: str, open_tracker: Callable[[], Tracker | CsvFiles], report: Callable[[str], None]) -> None:
        super().__init__(name=f"tracker {key}", daemon=True)
        self.key, self._open, self._report, self._has_failed = key, open_tracker, report, False
        self.queue: queue.SimpleQueue[tuple[Values, int] | None] = queue.SimpleQueue()

    def run(self) -> None:
        with self._tolerate():
            tracker = self._open()
            while (line := self.queue.get()) is not None:
                with self._tolerate():
                    tracker.log(*line)
            tracker.finish()

    @contextlib.contextmanager
    def _tolerate(self) -> Iterator[None]:
        """Report the first error of the library's, whose classes are its own; some libraries even exit."""
        try:
            yield
        except (Exception, SystemExit) as error:
            if not self._has_failed:
                self._has_failed = True
                self._report(f"{self.key} failed ({one_line(first_line(error), 300)}); the run goes on")


class Trackers(Callback):
    """Send each line of metrics.jsonl to the trackers that the config names, on rank 0. Unknown values are left out."""

    def on_start(self, state: TrainState) -> None:
        self._threads: list[TrackerThread] = []
        if state.is_rank_zero:
            run = RunInfo(state.directory, state.config, state.step)
            for key, (_, open_tracker) in trackers_of(state.config).items():
                self._threads.append(TrackerThread(key, partial(open_tracker, run), state.print))
                self._threads[-1].start()

    def on_log(self, state: TrainState, values: Metrics) -> None:
        known = {name: value for name, value in values.items() if value is not None and name != "step"}
        for thread in self._threads:
            thread.queue.put((known, int(values["step"] or 0)))

    def on_end(self, state: TrainState) -> None:
        """Close all trackers together within 10 s. A run that failed waits 1 s, so that its error is seen."""
        seconds = CLOSE_SECONDS if state.error is None else CLOSE_SECONDS_AFTER_ERROR
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.queue.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for thread in self._threads:
            if thread.is_alive():
                state.print(f"{thread.key}: not done {seconds:.0f} s after the run; its last values are lost")
