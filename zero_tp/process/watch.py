"""A rank's watchdog ends the rank when its phase makes no progress, or when another rank or the store is silent.

Each rank counts its marks; all ranks set the same ones in the same order. Once a round, a thread writes the newest to
the job's store. The first rank whose limit passes reads those of all ranks from there. A rank can be gone while nobody
waits for it, for example during a checkpoint; then its silence ends the job. No collective is involved.
"""

from __future__ import annotations

import gc
import json
import math
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_tp.topology import name_ranks

if TYPE_CHECKING:
    import torch.distributed as dist

ROUND_SECONDS = 5.0  # at most
ANSWER_SECONDS = 10.0  # of the store
REQUESTS_PER_SECOND = 500  # to the store, by all ranks
REPORT_ROUNDS = 3  # in which all ranks reach their limits and write where they are

_LIBRARY = Path(__file__).resolve().parents[1]
_WAITING = (f"torch{os.sep}distributed", f"deepspeed{os.sep}comm")


@dataclass(frozen=True)
class RankStatus:
    """What a rank does, as it writes it to the store.

    Attributes:
        count: number of its marks, which tells who is behind whom.
        phase, step, doing: in words.
        seconds: since the newest mark.
        message: number of this message.
        frame: the function that its main thread is in, once half of a limit has passed.
        waiting: whether that function waits for other ranks; None before.
        collectives: likewise, what each process group has enqueued and completed (`collective_progress`).
    """

    count: int = 0
    phase: str = "start"
    step: int = 0
    doing: str = ""
    host: str = ""
    seconds: float = 0.0
    message: int = 0
    frame: str = ""
    waiting: bool | None = None
    collectives: str = ""

    def describe(self) -> str:
        where = f"{self.phase}{f' {self.step}' if self.step else ''}{f', {self.doing}' if self.doing else ''}"
        counts = f"; collectives enqueued/completed: {self.collectives}" if self.collectives else ""
        return f"({self.host}) in {where} for {self.seconds:.0f} s{f', at {self.frame}' if self.frame else ''}{counts}"


class Watchdog:
    """Watch one rank: `begin` starts it, `enter` and `mark` set the rank's phase and its work.

    Attributes:
        end: called in a thread with the reason why the rank ends, "" if another rank prints it.
    """

    def __init__(self) -> None:
        self.end: Callable[[str], object] | None = None
        self._status, self._marked, self._steps = RankStatus(host=socket.gethostname()), time.monotonic(), 0
        self._limits = dict[str, float]()
        self._heartbeat: float | None = None
        self._rank, self._world = 0, 1
        self._round_seconds = ROUND_SECONDS
        self._groups: Sequence[str] = ()
        self._store: Any = None
        self._requests = ThreadPoolExecutor(1, "store")  # a store whose machine is gone never answers
        self._messages = 0
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._main = threading.main_thread().ident or 0

    def begin(self, limits: Mapping[str, float | None], rank: int, world: int, heartbeat: float | None = None) -> None:
        """Start to watch.

        Args:
            limits: how long each phase may go without a mark [seconds]; None, or no entry: for ever.
            heartbeat: how long a rank or the store may be silent from the second step on [seconds]; None: for ever.
        """
        self._limits = {phase: limit for phase, limit in limits.items() if limit is not None}
        self._rank, self._world, self._heartbeat = rank, world, heartbeat
        fastest = min(ROUND_SECONDS, (heartbeat or 60) / 6, *(limit / 4 for limit in self._limits.values()))
        self._round_seconds = max(fastest, world / REQUESTS_PER_SECOND)
        self.enter("start")
        self._thread.start()

    def connect(self, store: dist.Store, groups: Sequence[str] = ()) -> None:
        """Begin to write to the job's store, by a connection that nothing else uses any more.

        Args:
            groups: names of this rank's process groups, in the order of their creation.
        """
        self._store, self._groups = store, groups
        self._exchange(())  # other ranks miss only a rank that they have seen

    def leave(self) -> None:
        """Stop watching, because the work is done; a last message tells the other ranks."""
        self.enter("end")
        self._left.set()
        self._thread.join(2.0)

    def enter(self, phase: str, step: int = 0) -> None:
        """Set the phase of this rank: start, step, save or evaluation."""
        self._steps += phase == "step"
        self._set(replace(self._status, count=self._status.count + 1, phase=phase, step=step, doing=""))

    def mark(self, doing: str) -> None:
        """Set what this rank does next in its phase."""
        self._set(replace(self._status, count=self._status.count + 1, doing=doing))

    def _set(self, status: RankStatus) -> None:
        self._status, self._marked = status, time.monotonic()

    # --- the thread -------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Once a round, exchange statuses and look at the limits. Rank 0 looks at all other ranks, and they at it."""
        others = [rank for rank in range(self._world) if (rank == 0) != (self._rank == 0)]
        before, silent = dict[int, RankStatus](), dict.fromkeys(others, 0.0)
        own, idle, unanswered, clock = self._status, 0.0, 0.0, time.monotonic()
        while not self._left.wait(self._round_seconds):
            # A process that is stopped is not late: a round counts as no longer than it can take.
            passed = min(time.monotonic() - clock, self._round_seconds + ANSWER_SECONDS)
            clock = time.monotonic()
            last, own = own, self._status
            idle = idle + passed if own is last else 0.0
            statuses = self._exchange(others)
            unanswered = unanswered + passed if statuses is None else 0.0
            for rank, status in (statuses or {}).items():
                same = rank in before and before[rank].message == status.message and status.phase != "end"
                silent[rank] = silent[rank] + self._round_seconds if same else 0.0
            before = before if statuses is None else statuses
            limit = self._limits.get(own.phase)
            heartbeat = self._heartbeat if self._heartbeat is not None and self._steps > 1 else float("inf")
            if limit is not None and idle > limit:
                return self._end(self._describe_hang(limit))
            if max(silent.values(), default=0.0) >= heartbeat:
                return self._end(self._describe_silence(before, silent))
            if unanswered > heartbeat:
                return self._end(
                    f"error: {own.host} has had no answer from the ranks' store for {self._heartbeat_limit()}: its "
                    "machine (the first rank's, or torchrun's rendezvous), the network to it or its process has stopped"
                )
        self._exchange(())

    def _end(self, text: str) -> None:
        if self.end is not None and not self._left.is_set():
            self.end(text)

    def _describe_hang(self, limit: float) -> str:
        """Return the statuses of all ranks, and who waits for whom; "" if another rank was first to ask for them."""
        recorded = _dump_flight_recorder(self._rank)
        order = None if self._store is None else self._ask(partial(self._store.add, "limits", 1))
        is_first = order in (None, 1)
        ranks: Sequence[int] = range(self._world) if is_first else ()
        before, statuses = dict[int, RankStatus](), dict[int, RankStatus]()
        if order is not None:  # else this rank reports what it knows
            before = self._exchange(ranks) or {}
            # Other ranks reach their limits and write where they are; the first one prints it.
            for _ in range(REPORT_ROUNDS + (0 if is_first else math.ceil(ANSWER_SECONDS / self._round_seconds))):
                time.sleep(self._round_seconds)
                statuses = self._exchange(ranks) or {}
        if not is_first:
            return ""
        repeated = {rank for rank in before if rank in statuses and before[rank].message == statuses[rank].message}
        silent = (set(range(self._world)) - statuses.keys() | repeated) - {self._rank}
        own = self._newest()
        hang = describe_hang({**statuses, self._rank: own}, silent, self._world, own, limit)
        return "\n".join([*recorded, hang])

    def _describe_silence(self, statuses: Mapping[int, RankStatus], silent: Mapping[int, float]) -> str:
        # The ranks of one machine were not all read just before they fell silent.
        lost = [rank for rank in sorted(silent) if silent[rank] >= (self._heartbeat or 0) - 2 * self._round_seconds]
        lines = [f"rank {rank} {statuses[rank].describe()}" for rank in lost]
        hosts = ", ".join(sorted({statuses[rank].host for rank in lost}))
        error = f"error: no word from {name_ranks(lost)} ({hosts}) for {self._heartbeat_limit()}"
        return "\n".join([*lines, f"{error}: the machine, its network or the process has stopped"])

    def _heartbeat_limit(self) -> str:
        return f"{(self._heartbeat or 0) / 60:.3g} minutes, by zero_tp.training.timeout_minutes.heartbeat"

    def _newest(self) -> RankStatus:
        """Return the status as it is now; if the phase makes little progress, with what this rank waits for."""
        seconds, limit = time.monotonic() - self._marked, self._limits.get(self._status.phase)
        status = replace(self._status, seconds=seconds, message=self._messages)
        if limit is None or seconds <= limit / 2:
            return status
        frame, waiting = _describe_frame(self._main)
        counts = "" if self._store is None else collective_progress(self._groups)
        return replace(status, frame=frame, waiting=waiting, collectives=counts)

    # --- the job's store --------------------------------------------------------------------------------------------

    def _exchange(self, ranks: Sequence[int]) -> dict[int, RankStatus] | None:
        """Write this rank's status and return those of `ranks`; None if the store does not answer."""
        return {} if self._store is None else self._ask(partial(self._write_and_read, ranks))

    def _write_and_read(self, ranks: Sequence[int]) -> dict[int, RankStatus]:
        self._store.set(str(self._rank), json.dumps(asdict(self._newest())))
        self._messages += 1
        return self._read(ranks)

    def _read(self, ranks: Sequence[int]) -> dict[int, RankStatus]:
        """Return the newest statuses of those ranks that have written one. Two requests, once all have."""
        if not self._store.check([str(rank) for rank in ranks]):
            ranks = [rank for rank in ranks if self._store.check([str(rank)])]
        values = self._store.multi_get([str(rank) for rank in ranks]) if ranks else []
        return {rank: RankStatus(**json.loads(value)) for rank, value in zip(ranks, values, strict=True)}

    def _ask(self, request: Callable[[], Any]) -> Any:
        """Return the store's answer to `request`; None if the store is gone or does not answer in time."""
        try:
            return self._requests.submit(request).result(ANSWER_SECONDS)
        except (RuntimeError, TimeoutError):
            return None


def describe_hang(
    statuses: Mapping[int, RankStatus], silent: set[int], world: int, status: RankStatus, limit: float
) -> str:
    """Return a line for each rank, and as the last line who waits for whom.

    Args:
        silent: ranks that write no more.
        status: of the rank whose limit has passed.
        limit: in seconds.
    """
    lines = [
        f"rank {rank} {statuses[rank].describe()}{', silent since' if rank in silent else ''}"
        for rank in sorted(statuses)
    ]
    least = min(status.count for status in statuses.values())
    last = [rank for rank in sorted(statuses) if statuses[rank].count == least]
    behind = sorted(silent) or [rank for rank in last if statuses[rank].waiting is False] or last
    waiting = sorted(set(range(world)) - set(behind))
    who = "no rank is behind another"
    if waiting:
        who = f"{name_ranks(waiting)} wait{'s' if len(waiting) == 1 else ''} for {name_ranks(behind)}"
    where = f"{status.phase}{f' {status.step}' if status.step else ''}"
    limits = f"{limit / 60:.3g} minutes, by zero_tp.training.timeout_minutes"
    return "\n".join([*lines, f"error: no progress in {where} for {limits}: {who}"])


def _describe_frame(thread: int) -> tuple[str, bool]:
    """Return (a thread's function, with the function of this library that called it; whether it waits for ranks)."""
    collects = gc.isenabled()
    gc.disable()  # Python 3.11 hangs in a collection that begins while frames are listed (CPython's issue 106883)
    frame = sys._current_frames().get(thread)
    if collects:
        gc.enable()
    if frame is None:
        return "its end", False
    name, file = frame.f_code.co_name, frame.f_code.co_filename
    waiting = name == "wait" or any(part in file for part in _WAITING)
    for caller, line in traceback.walk_stack(frame):
        path = Path(caller.f_code.co_filename)
        if path.is_relative_to(_LIBRARY):
            place = f"({path.relative_to(_LIBRARY.parent)}:{line})"
            return (
                f"{name} {place}" if caller is frame else f"{name}, called by {caller.f_code.co_name} {place}",
                waiting,
            )
    return f"{name} ({Path(file).name})", waiting


def collective_progress(groups: Sequence[str]) -> str:
    """Return how many collectives each process group has enqueued and completed: `TP 42/41, DP 7/7`.

    torch's flight recorder counts them, unless `TORCH_FR_BUFFER_SIZE` is 0. It waits for no device.

    Args:
        groups: names in the order of their creation, by which the recorder numbers them.
    """
    from torch._C import _distributed_c10d

    status: dict[str, Any] = {}
    # A build with NCCL records NCCL's collectives apart from those of the other backends.
    for dump in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        if hasattr(_distributed_c10d, dump):
            status |= json.loads(getattr(_distributed_c10d, dump)(False)).get("pg_status", {})
    names = dict(enumerate(groups))
    return ", ".join(
        f"{names.get(int(number), f'group {number}')} "
        f"{counts['last_enqueued_collective']}/{counts['last_completed_collective']}"
        for number, counts in sorted(status.items(), key=lambda group: int(group[0]))
    )


def _dump_flight_recorder(rank: int) -> list[str]:
    """Write torch's record of NCCL's collectives where torch writes it too, for `torchfrtrace` → a line about it."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized() or "nccl" not in distributed.get_backend():
        return []
    from torch._C._distributed_c10d import _dump_nccl_trace  # type: ignore[attr-defined]

    path = Path(f"{os.environ.get('TORCH_NCCL_DEBUG_INFO_TEMP_FILE', '/tmp/nccl_trace_rank_')}{rank}")
    try:
        path.write_bytes(_dump_nccl_trace())
    except OSError as error:
        return [f"the flight recorder could not be written to {path} ({error.strerror})"]
    return [f"the flight recorder of rank {rank} is in {path}"]
