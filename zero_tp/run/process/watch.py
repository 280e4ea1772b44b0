"""Watchdog: end a rank that makes no progress, or if another one is silent.

The store may be silent, too.

Each rank counts its progress marks (`enter`, `mark`). In every round a thread writes the rank's
status to the job's store. The first rank whose limit passes reads the statuses of all ranks and
prints them. A rank can die while no other rank waits for it, for example during a checkpoint; its
silence then ends the job. The watchdog uses no collectives. Three threads of a rank take part:

    MainThread    enter("step", 17), mark("forward"), mark("backward"), then hangs in a collective
    watchdog      each round: adds up the time without a mark, asks store_0 to exchange statuses
    store_0       writes {"count": 52, "phase": "step", "message_number": 60, …}, reads the others'

Rank 1 is stopped with SIGSTOP. With rounds of 5 s and a heartbeat of 60 s, rank 0 sees:

    message_number of rank 1    60  61  61  61  …  61
    its silent seconds           0   0   5  10  …  60, which ends the job
"""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from zero_tp.parallel.topology import name_ranks
from zero_tp.run.process.hang_report import (
    RankStatus,
    describe_frame,
    describe_hang,
    dump_flight_recorder,
)

if TYPE_CHECKING:
    import torch.distributed as dist

ROUND_SECONDS = 5.0  # the longest round of a small job
ANSWER_SECONDS = 10.0  # limit of one answer of the store
REQUESTS_PER_SECOND = 500  # limit of all ranks' requests to the store
REPORT_ROUNDS = 3  # rounds that the reporting rank waits for the other ranks' statuses with frames


class Watchdog:
    """Watch one rank: `begin` starts it, `enter` and `mark` set the rank's phase and its work.

    Attributes:
        on_end: called in a thread with the reason why the rank must end, "" if another rank prints
            it.
    """

    def __init__(self) -> None:
        self.on_end: Callable[[str], object] | None = None
        self._status = RankStatus(host=socket.gethostname())
        self._mark_time = time.monotonic()
        self._steps = 0
        self._limits = dict[str, float]()
        self._heartbeat: float | None = None
        self._rank = 0
        self._world = 1
        self._round_seconds = ROUND_SECONDS
        self._store: Any = None
        # A request to a dead machine's store never returns.
        self._requests = ThreadPoolExecutor(1, "store")
        self._messages = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._main = threading.main_thread().ident or 0

    def begin(
        self,
        limits: Mapping[str, float | None],
        rank: int,
        world: int,
        heartbeat: float | None = None,
    ) -> None:
        """Start to watch.

        Args:
            limits: how long each phase may go without a mark [seconds]; a phase that is None or
                missing has no limit.
            heartbeat: how long a rank or the store may be silent after the first step [seconds];
                None: no limit.
        """
        self._limits = {phase: limit for phase, limit in limits.items() if limit is not None}
        self._rank = rank
        self._world = world
        self._heartbeat = heartbeat
        # A hang is noticed at most a quarter of its limit late, and six messages have to be missing
        # before a rank counts as silent.
        fastest = min(
            ROUND_SECONDS, (heartbeat or 60) / 6, *(limit / 4 for limit in self._limits.values())
        )
        # One store answers all ranks: with 5,000 of them, a round takes 10 s instead of 5.
        self._round_seconds = max(fastest, world / REQUESTS_PER_SECOND)
        self.enter("start")
        self._thread.start()

    def connect(self, store: dist.Store) -> None:
        """Start to write to the job's store.

        From now on only the watchdog may use this client of it.
        """
        # A client answers one request at a time (`activeOpLock_` of torch's TCPStore). With the
        # clients of the process groups, a request that waits for a key would block the watchdog.
        self._store = store
        self._exchange(())  # only a rank that has written once can be reported as silent

    def leave(self) -> None:
        """Stop watching, because the work is done; a last message tells the other ranks."""
        # A rank in this phase may stop writing: its silence is no fault.
        self.enter("end")
        self._stopped.set()
        # Bounded, because the last exchange may find the store gone: rank 0 may have left first.
        self._thread.join(2.0)

    def enter(self, phase: str, step: int = 0) -> None:
        """Set the phase of this rank: start, step, save or evaluation."""
        self._steps += phase == "step"
        self._set(
            replace(self._status, count=self._status.count + 1, phase=phase, step=step, doing="")
        )

    def mark(self, doing: str) -> None:
        """Set the work that this rank begins in its phase."""
        self._set(replace(self._status, count=self._status.count + 1, doing=doing))

    def _set(self, status: RankStatus) -> None:
        # One assignment of a new object, so that the thread never reads half of a change, and sees
        # by its identity that there was one.
        self._status = status
        self._mark_time = time.monotonic()

    # --- the thread -------------------------------------------------------------------------------

    def _watch(self) -> None:
        """In every round, exchange statuses and check the limits.

        Rank 0 checks all other ranks; they check rank 0.
        """
        # Rank 0 reads N statuses and each other rank one, so the store's work grows with N. If each
        # rank read all others, it would grow with N².
        others = [rank for rank in range(self._world) if (rank == 0) != (self._rank == 0)]
        before = dict[int, RankStatus]()
        silent_seconds = dict.fromkeys(others, 0.0)
        own = self._status
        idle = 0.0
        unanswered = 0.0
        clock = time.monotonic()
        while not self._stopped.wait(self._round_seconds):
            # Cap the time of a round, so that time under SIGSTOP does not count as a hang or as
            # silence.
            passed = min(time.monotonic() - clock, self._round_seconds + ANSWER_SECONDS)
            clock = time.monotonic()
            previous = own
            own = self._status
            has_progressed = own is not previous  # `enter` and `mark` replace the status
            idle = 0.0 if has_progressed else idle + passed
            statuses = self._exchange(others)
            unanswered = unanswered + passed if statuses is None else 0.0
            # Only whether a message is new counts. Times of other machines are not compared,
            # because their clocks may differ.
            for rank, status in (statuses or {}).items():
                is_repeated = (
                    rank in before
                    and before[rank].message_number == status.message_number
                    and status.phase != "end"
                )
                silent_seconds[rank] = (
                    silent_seconds[rank] + self._round_seconds if is_repeated else 0.0
                )
            before = before if statuses is None else statuses
            limit = self._limits.get(own.phase)
            heartbeat = (
                self._heartbeat if self._heartbeat is not None and self._steps > 1 else float("inf")
            )
            if limit is not None and idle > limit:
                return self._end(self._describe_hang(limit))
            if max(silent_seconds.values(), default=0.0) >= heartbeat:
                return self._end(self._describe_silence(before, silent_seconds))
            if unanswered > heartbeat:
                return self._end(
                    f"error: {own.host} has had no answer from the job's store for "
                    f"{self._heartbeat_limit()}: the "
                    "store's host (rank 0's, or torchrun's rendezvous host), its network or the "
                    "process has stopped"
                )
        self._exchange(())

    def _end(self, text: str) -> None:
        # A rank that has left in the meantime has done its work.
        if self.on_end is not None and not self._stopped.is_set():
            self.on_end(text)

    def _describe_hang(self, limit: float) -> str:
        """Return the report of all ranks.

        "" if another rank's limit has passed before: that rank reports.
        """
        # First, and on every rank whose limit passes: the report may end the job before another one
        # has written.
        recorder = dump_flight_recorder(self._rank)
        # The store adds atomically, so exactly one rank gets 1.
        order = None if self._store is None else self._ask(partial(self._store.add, "hangs", 1))
        is_first = order in (None, 1)
        ranks: Sequence[int] = range(self._world) if is_first else ()
        before = dict[int, RankStatus]()
        statuses = dict[int, RankStatus]()
        if order is not None:  # without a store this rank reports its own status
            before = self._exchange(ranks) or {}
            # The first one waits for frames: a rank adds its frame only after half of its limit.
            # The others go on writing until the first one must have read them, and then end
            # silently.
            for _ in range(
                REPORT_ROUNDS + (0 if is_first else math.ceil(ANSWER_SECONDS / self._round_seconds))
            ):
                time.sleep(self._round_seconds)
                statuses = self._exchange(ranks) or {}
        if not is_first:
            return ""
        repeated = {
            rank
            for rank in before
            if rank in statuses and before[rank].message_number == statuses[rank].message_number
        }
        # Ranks that have never written, or whose message has not changed in these rounds.
        silent_ranks = (set(range(self._world)) - statuses.keys() | repeated) - {self._rank}
        own = self._current_status()
        hang = describe_hang({**statuses, self._rank: own}, silent_ranks, self._world, own, limit)
        return "\n".join([*recorder, hang])

    def _describe_silence(
        self, statuses: Mapping[int, RankStatus], silent_seconds: Mapping[int, float]
    ) -> str:
        # Ranks of one machine fall silent together, but were read up to two rounds apart.
        least = (self._heartbeat or 0) - 2 * self._round_seconds
        lost = [rank for rank in sorted(silent_seconds) if silent_seconds[rank] >= least]
        lines = [f"rank {rank} {statuses[rank].describe()}" for rank in lost]
        hosts = ", ".join(sorted({statuses[rank].host for rank in lost}))
        error = (
            f"error: no heartbeat from {name_ranks(lost)} ({hosts}) for {self._heartbeat_limit()}"
        )
        return "\n".join([*lines, f"{error}: the machine, its network or the process has stopped"])

    def _heartbeat_limit(self) -> str:
        return (
            f"{(self._heartbeat or 0) / 60:.3g} minutes (the limit: "
            "zero_tp.training.timeout_minutes.heartbeat)"
        )

    def _current_status(self) -> RankStatus:
        """Return the status now, with the frame once half of the phase's limit has passed."""
        seconds = time.monotonic() - self._mark_time
        limit = self._limits.get(self._status.phase)
        status = replace(self._status, seconds=seconds, message_number=self._messages)
        if limit is None or seconds <= limit / 2:
            return status
        frame, waiting = describe_frame(self._main)
        return replace(status, frame=frame, waiting=waiting)

    # --- the job's store --------------------------------------------------------------------------

    def _exchange(self, ranks: Sequence[int]) -> dict[int, RankStatus] | None:
        """Write this rank's status and return those of `ranks`.

        None: the store does not answer.
        """
        return {} if self._store is None else self._ask(partial(self._write_and_read, ranks))

    def _write_and_read(self, ranks: Sequence[int]) -> dict[int, RankStatus]:
        # One key a rank, written again each round: the store does not grow.
        self._store.set(str(self._rank), json.dumps(asdict(self._current_status())))
        self._messages += 1
        return self._read(ranks)

    def _read(self, ranks: Sequence[int]) -> dict[int, RankStatus]:
        """Return the statuses of those ranks that have written one.

        If one has not, each rank costs a request more.
        """
        # `multi_get` waits for keys that are missing, so ask for them before.
        if not self._store.check([str(rank) for rank in ranks]):
            ranks = [rank for rank in ranks if self._store.check([str(rank)])]
        values = self._store.multi_get([str(rank) for rank in ranks]) if ranks else []
        return {
            rank: RankStatus(**json.loads(value)) for rank, value in zip(ranks, values, strict=True)
        }

    def _ask(self, request: Callable[[], Any]) -> Any:
        """Return the store's answer to `request`.

        None: it is gone or does not answer in time.
        """
        try:
            # The request itself cannot be ended. Its thread may hang for ever, and the watchdog
            # goes on without an answer.
            return self._requests.submit(request).result(ANSWER_SECONDS)
        except (RuntimeError, TimeoutError):
            return None
