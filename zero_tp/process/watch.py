"""A rank's watch knows what the rank is doing, tells the other ranks, and ends it when nothing goes on any more.

Ranks that hang wait for one that does not come: in a collective, whose own limit says neither where the others are nor
which of them is late. So each rank counts its marks (each rank sets the same ones in the same order), a thread of its
own puts the newest into the job's key-value store, and the first rank to reach its limit reads them all. Where the
others do not wait for a rank that is gone (while a checkpoint is written, or under NCCL), its silence ends the job. No
collective is involved, and nothing here waits without end.
"""

from __future__ import annotations

import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from zero_tp.process import garbage
from zero_tp.process.across import within
from zero_tp.process.positions import ANSWER_SECONDS, TELL_SECONDS, Heard, Position, report
from zero_tp.strict_json import parse_json

LIMIT_SECONDS = 0.25  # between two looks at the limit of a phase
MOST_ASKING = 8  # of all ranks for all positions at once: a thousand would each be sent a thousand
WINDOW_SECONDS = 60.0  # between two looks at the other ranks
LOOKS = 3  # at least, in turn without a new word, after which a rank is silent
LEAVE_SECONDS = 2.0  # to tell the others that the work is done

_LIBRARY = Path(__file__).resolve().parents[1]
_WAITING = (f"torch{os.sep}distributed", f"deepspeed{os.sep}comm")


class Watch:
    """The watch of one rank: `begin` starts it, `enter` and `mark` say what the rank does.

    Attributes:
        end: called with why the job ends, by a thread of the watch; it ends the process.
    """

    def __init__(self) -> None:
        self.end: Callable[[str], object] | None = None
        self._window, self._limits = WINDOW_SECONDS, dict[str, float]()
        self._position = Position()
        self._store: Any = None
        self._connection: Callable[[], Any] = lambda: None
        self._rank, self._world = 0, 1
        self._heartbeat: float | None = None
        self._left = threading.Event()
        self._teller = threading.Thread(target=self._tell, name="watch store", daemon=True)
        self._progress: Callable[[], str] = lambda: ""
        self._main = threading.main_thread().ident
        self._zero = time.monotonic()
        self._tell_seconds = TELL_SECONDS

    # --- what the rank says -------------------------------------------------------------------------------------------

    def begin(self, limits: Mapping[str, float | None], rank: int, world: int, heartbeat: float | None = None) -> None:
        """Start to watch.

        Args:
            limits: how long each phase may go without a mark [seconds]; a phase that is not there, or None, for ever.
            heartbeat: how long a rank may say nothing once its start is over [seconds]; None: for ever.
        """
        self._limits = {phase: limit for phase, limit in limits.items() if limit is not None}
        self._rank, self._world = rank, world
        self._heartbeat = heartbeat
        self._window = min(self._window, (heartbeat or math.inf) / LOOKS)
        self._tell_seconds = min(TELL_SECONDS, self._window / 2, *(limit / 4 for limit in self._limits.values()))
        self.enter("start")
        threading.Thread(target=self._look, name="watch", daemon=True).start()

    def connect(self, groups: Sequence[str]) -> None:
        """Begin to tell the other ranks, once the process groups are there.

        Args:
            groups: names of the process groups, in the order of their creation.
        """
        from zero_tp.process.flight_recorder import collective_progress  # here: it loads torch

        self._progress = partial(collective_progress, groups)
        self._connection, connected = _connection(), self._clock()
        self._zero += connected  # all ranks are here at the same time
        self._position = replace(self._position, since=self._position.since - connected)
        self._teller.start()

    def leave(self) -> None:
        """Watch no more: the work is done. The others are told, so that they do not wait for a word."""
        self.enter("end")
        self._left.set()
        if self._teller.is_alive():
            self._teller.join(LEAVE_SECONDS)

    def fail(self, text: str) -> None:
        """End this rank, from any thread; `text` says why."""
        if self.end is not None and not self._left.is_set():
            self.end(text)

    def enter(self, phase: str, step: int = 0) -> None:
        """Say that the rank enters a phase: start, step, save or evaluation."""
        before = self._position
        steps = before.steps + (phase == "step")
        self._position = replace(
            before, count=before.count + 1, phase=phase, step=step, doing="", since=self._clock(), steps=steps
        )

    def mark(self, doing: str) -> None:
        """Say what the rank does next in its phase."""
        before = self._position
        self._position = replace(before, count=before.count + 1, doing=doing, since=self._clock())

    # --- its threads --------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Look at the position, again and again, until a limit is reached."""
        entered, count = time.monotonic(), -1
        while not self._left.wait(LIMIT_SECONDS):
            position = self._position
            if position.count != count:  # by the monotonic clock, which nobody sets
                entered, count = time.monotonic(), position.count
            limit = self._limits.get(position.phase)
            if limit is not None and time.monotonic() - entered > limit:
                self.fail(self._hung(position, limit))
                return

    def _tell(self) -> None:
        """Tell the others where this rank is, and look at them once a window: the first rank at all, they at it.

        A turn that has no answer in time leaves its connection behind, and the next one makes another.
        """
        others = [rank for rank in range(self._world) if (rank == 0) != (self._rank == 0)]
        heard = Heard(self._window, self._heartbeat)
        looked = turn = time.monotonic()
        while True:
            leaving = self._left.is_set()  # before the last word
            looks = bool(others) and not leaving and turn - looked >= self._window
            try:
                self._store, now = within(ANSWER_SECONDS, self._turn, self._store, others if looks else ())
                lost = heard.silence(now, self._clock()) if looks and self._position.steps > 1 else ""
                heard.unanswered, looked = 0.0, turn if looks else looked
            except (RuntimeError, OSError):  # what torch raises for a store that is gone, or does not answer
                self._store, lost = None, ""
                if self._position.steps > 1:
                    lost = heard.no_answer(time.monotonic() - turn + self._tell_seconds)
            if lost:
                self.fail(lost)
            if lost or leaving:
                return
            self._left.wait(self._tell_seconds)
            turn = time.monotonic()

    def _clock(self) -> float:
        return time.monotonic() - self._zero

    def _own(self) -> Position:
        place, waiting = _place(self._main)
        return replace(
            self._position,
            place=place,
            waiting=waiting,
            told=self._clock(),
            every=self._tell_seconds,
            host=socket.gethostname(),
            collectives=self._progress(),
        )

    def _turn(self, store: Any, ranks: Sequence[int]) -> tuple[Any, dict[int, Position]]:
        """Tell the others where this rank is and ask where `ranks` are → (the store, which may be a new one; where)."""
        store = store or self._connection()
        self._say(store)
        return store, self._told_by(store, ranks) if ranks else {}

    def _say(self, store: Any) -> None:
        store.set(str(self._rank), json.dumps(asdict(self._own())))

    def _told_by(self, store: Any, ranks: Sequence[int]) -> dict[int, Position]:
        """Return the newest positions of ranks that have said one, and this rank's. Two requests, once all have."""
        ranks = [rank for rank in ranks if rank != self._rank]
        if not store.check([str(rank) for rank in ranks]):
            ranks = [rank for rank in ranks if store.check([str(rank)])]
        told = store.multi_get([str(rank) for rank in ranks]) if ranks else []
        found = {rank: Position(**parse_json(each.decode())) for rank, each in zip(ranks, told, strict=True)}
        return {self._rank: self._own(), **found}

    def _hung(self, position: Position, limit: float) -> str:
        everyone, store = {self._rank: self._own()}, self._store

        def ask() -> None:
            try:
                self._say(store)
                crowded = store.add("asked", 1) > MOST_ASKING
                time.sleep(self._tell_seconds)  # who has come no further either says so meanwhile
                if crowded:  # the first ones end the job meanwhile
                    time.sleep(ANSWER_SECONDS)
                everyone.update(self._told_by(store, range(self._world)))
            except RuntimeError:
                no_store()

        def no_store() -> None:
            everyone[self._rank] = replace(everyone[self._rank], host=f"{socket.gethostname()}; no store")

        if store is None:
            no_store()
        else:
            asking = threading.Thread(target=ask, daemon=True)
            asking.start()
            asking.join(2 * ANSWER_SECONDS + self._tell_seconds)
        return report(dict(everyone), self._world, position, limit)


def _place(thread: int | None) -> tuple[str, bool]:
    """Return (the function that a thread is in, with this library's that called it; whether it waits for ranks)."""
    frame = _frames().get(thread or 0)
    if frame is None:
        return "its end", False
    name, file = frame.f_code.co_name, frame.f_code.co_filename
    waiting = name == "wait" or any(part in file for part in _WAITING)
    while frame is not None and not Path(frame.f_code.co_filename).is_relative_to(_LIBRARY):
        frame = frame.f_back
    if frame is None:
        return f"{name} ({Path(file).name})", waiting
    at = f"{Path(frame.f_code.co_filename).relative_to(_LIBRARY.parent)}:{frame.f_lineno}"
    caller = frame.f_code.co_name
    return f"{name} ({at})" if name == caller else f"{name}, called by {caller} ({at})", waiting


def _frames() -> dict[int, Any]:
    """Return each thread's innermost frame, without a garbage collection meanwhile.

    Python 3.11 makes frame objects under a lock, and a collection that one starts there waits for that lock, for ever,
    where the garbage has a `threading.local` (CPython's issue 106883).
    """
    garbage.hold()
    try:
        return sys._current_frames()
    finally:
        garbage.release()


def _connection() -> Callable[[], Any]:
    """Return what connects to the job's store: the main thread may wait in its own connection for minutes.

    It raises OSError or RuntimeError where nothing answers.
    """
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return lambda: dist.PrefixStore("zero_tp/watch", store)
    address = store.host, store.port  # the store itself ends with its process group

    def connect() -> Any:
        socket.create_connection(address, timeout=ANSWER_SECONDS).close()  # torch's own attempts are loud
        own = dist.TCPStore(*address, timeout=timedelta(seconds=ANSWER_SECONDS), wait_for_workers=False)
        return dist.PrefixStore("zero_tp/watch", own)

    return connect
