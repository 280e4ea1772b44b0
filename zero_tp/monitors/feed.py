"""Each monitor is fed by a thread of its own: one that fails or hangs costs its own lines and nothing else."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from zero_tp.config import RunConfig
from zero_tp.errors import first_line, one_line
from zero_tp.monitors.sinks import Sink, Start, chosen
from zero_tp.training.callback import Callback, Metrics, TrainState

MOST_WAITING = 10_000
SLOW_SECONDS = 60.0
LEAVE_SECONDS, FAILED_LEAVE_SECONDS = 10.0, 1.0


class _Feed(threading.Thread):
    """A thread opens one monitor and gives it what is logged, in order.

    Attributes:
        notes: lines for a person, each told once.
        given, taken: how many lines it was given, and the monitor has taken.
    """

    def __init__(self, name: str, opened: Callable[[], Sink]):
        super().__init__(name=f"monitor {name}", daemon=True)
        self.key, self._opened = name, opened
        self.notes: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.given = self.taken = 0
        self._waiting: queue.SimpleQueue[tuple[int, dict[str, float]] | None] = queue.SimpleQueue()
        self._since: float | None = None
        self._told = set[str]()

    def run(self) -> None:
        sink: Sink | None = None
        with self._calling("could not be opened"):
            sink = self._opened()
        while (line := self._waiting.get()) is not None:
            if sink is not None:
                with self._calling("did not take what was logged"):
                    sink.log(line[1], step=line[0])
                    self.taken += 1
        if sink is not None:
            with self._calling("could not be closed"):
                sink.finish()

    @contextlib.contextmanager
    def _calling(self, failed: str) -> Iterator[None]:
        """Let no failure of a call end this thread, and say it once; each library has errors of its own."""
        self._since = time.monotonic()
        try:
            yield
        except (Exception, SystemExit) as error:
            self._tell(f"{failed} ({one_line(first_line(error), 300)}); the run goes on")
        finally:
            self._since = None

    def _tell(self, what: str) -> None:
        if what not in self._told:
            self._told.add(what)
            self.notes.put(f"{self.key}: {what}")

    def put(self, step: int, values: dict[str, float]) -> None:
        """Give it a line, without waiting."""
        self.given += 1
        since = self._since
        if since is not None and time.monotonic() - since > SLOW_SECONDS:
            self._tell(f"no answer for {SLOW_SECONDS:.0f} s; the run goes on")
        if self._waiting.qsize() < MOST_WAITING:
            self._waiting.put((step, values))
        else:
            self._tell(f"{MOST_WAITING:,} lines wait for it; the run goes on without the next ones")

    def end(self) -> None:
        """Give it nothing more."""
        self._waiting.put(None)

    def outcome(self, waited: float) -> Iterator[str]:
        """Yield what there is to say in the end."""
        if self.is_alive():
            yield f"{self.key}: not done {waited:.0f} s after the run; it is left behind"
        if lost := self.given - self.taken:
            yield f"{self.key}: {lost} {'lines were' if lost > 1 else 'line was'} lost"


class Monitors:
    """All that a run logs goes to each of its monitors. Rank 0 has them."""

    def __init__(self, opened: Mapping[str, Callable[[], Sink]]):
        """Open them, each on its thread.

        Args:
            opened: how, by the key that asks for it.
        """
        self._feeds = [_Feed(name, each) for name, each in opened.items()]
        for feed in self._feeds:
            feed.start()

    @classmethod
    def of(cls, config: RunConfig, run: Path, step: int) -> Monitors:
        """Open those that the config asks for, for a run that goes on from `step`."""
        start = Start(run, step, config.global_batch, config.resolved())
        return cls({name: partial(opened, start) for name, (_, opened) in chosen(config).items()})

    def write(self, values: Mapping[str, float | int | None]) -> None:
        """Give each a line of metrics.jsonl. What is not known is left out; numbers that are not finite stay."""
        known = {name: value for name, value in values.items() if value is not None and name != "step"}
        for feed in self._feeds:
            feed.put(int(values["step"] or 0), known)

    def notes(self) -> Iterator[str]:
        """Yield what is to be said of them, a line each and each once."""
        for feed in self._feeds:
            while not feed.notes.empty():
                yield feed.notes.get()

    def close(self, *, failing: bool) -> Iterator[str]:
        """End them all together within 10 s, and yield what is to be said.

        Args:
            failing: an error waits to be told; it doesn't wait longer than 1 s.
        """
        seconds = FAILED_LEAVE_SECONDS if failing else LEAVE_SECONDS
        for feed in self._feeds:
            feed.end()
        deadline = time.monotonic() + seconds
        for feed in self._feeds:
            feed.join(max(0.0, deadline - time.monotonic()))
        yield from self.notes()
        for feed in self._feeds:
            yield from feed.outcome(seconds)


class Trackers(Callback):
    """Send what a run logs to the trackers that its config names, on rank 0."""

    def __init__(self) -> None:
        self._monitors: Monitors | None = None

    def on_start(self, state: TrainState) -> None:
        if state.is_rank_zero:
            self._monitors = Monitors.of(state.config, state.directory, state.step)

    def on_log(self, state: TrainState, values: Metrics) -> None:
        if self._monitors is not None:
            self._monitors.write(values)
            for note in self._monitors.notes():
                state.print(note)

    def on_end(self, state: TrainState) -> None:
        if self._monitors is not None:
            for note in self._monitors.close(failing=state.error is not None):
                state.print(note)
