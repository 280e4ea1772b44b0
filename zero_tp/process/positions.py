"""A position is where a rank is in its work; those of all tell who waits for whom, and who is gone."""

from __future__ import annotations

import math
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from zero_tp.topology import name_ranks

TELL_SECONDS = 5.0  # from a rank's word to its next one
ANSWER_SECONDS = 10.0  # of the store


@dataclass(frozen=True)
class Position:
    """A position is where a rank is in its work.

    Attributes:
        count: of its marks, which tells who is behind whom.
        phase, step, doing: in words.
        since: when it came there [seconds since the ranks connected].
        place: the function that its main thread is in. waiting: whether that waits for other ranks.
        told: when this was said, by the same clock: those of machines may differ by hours. every: how often it says so.
        collectives: enqueued and completed ones of each process group (flight_recorder.py).
        steps: how often it began a step.
    """

    count: int = 0
    phase: str = "start"
    step: int = 0
    doing: str = ""
    since: float = 0.0
    place: str = ""
    waiting: bool = False
    told: float = 0.0
    every: float = TELL_SECONDS
    host: str = ""
    collectives: str = ""
    steps: int = 0

    def lost(self, now: float) -> bool:
        """Return whether the rank has not been heard of for so long that something is wrong."""
        return now - self.told > 3 * self.every

    def described(self, now: float) -> str:
        """Return the position in words."""
        what = f"{self.phase}{f' {self.step}' if self.step else ''}{f', {self.doing}' if self.doing else ''}"
        late = f", last heard of {now - self.told:.0f} s ago" if self.lost(now) else ""
        counts = f"; collectives enqueued/completed: {self.collectives}" if self.collectives else ""
        return f"({self.host}) in {what} for {now - self.since:.0f} s, at {self.place}{late}{counts}"


class Heard:
    """What one rank has heard of the others, look by look.

    Looks count, and no clock: where all were stopped together, the first that goes on finds old words everywhere.

    Args:
        window: between two looks, heartbeat: that a rank may say nothing [seconds]; None: for ever.
    """

    def __init__(self, window: float, heartbeat: float | None) -> None:
        self.unanswered = 0.0
        self._looks, self._heartbeat = math.ceil((heartbeat or 0) / window), heartbeat
        self._told, self._same = dict[int, float](), dict[int, int]()

    def silence(self, now: Mapping[int, Position], clock: float) -> str:
        """Return why the job ends once a rank's word has been the old one for all looks; else "".

        Call it when the start is over. A rank that has ended its work says no more.
        """
        for rank, position in now.items():
            same = position.told == self._told.get(rank) and position.phase != "end"
            self._same[rank] = self._same.get(rank, 0) + 1 if same else 0
            self._told[rank] = position.told
        if self._heartbeat is None or max(self._same.values()) < self._looks:
            return ""
        lost = sorted(rank for rank, times in self._same.items() if times >= self._looks - 1)  # a machine's ranks
        lines = [f"rank {rank} {now[rank].described(clock)}" for rank in lost]
        hosts = ", ".join(sorted({now[rank].host for rank in lost}))
        error = f"error: no word from {name_ranks(lost)} ({hosts}) for {self._limit()}: the machine, its network or the"
        return "\n".join([*lines, f"{error} process is gone, or stands still"])

    def no_answer(self, seconds: float) -> str:
        """Count a turn of so many seconds without an answer; return why the job ends after too many, else "".

        A turn counts no more than it can take: this rank may have been stopped in it.
        """
        self.unanswered += min(seconds, ANSWER_SECONDS + TELL_SECONDS)
        if self._heartbeat is None or self.unanswered < self._heartbeat:
            return ""
        return (
            f"error: {socket.gethostname()} has had no answer from the ranks' store for {self._limit()}: its machine "
            "(the first rank's, or torchrun's rendezvous), the network to it or its process is gone, or stands still"
        )

    def _limit(self) -> str:
        return f"{(self._heartbeat or 0) / 60:.3g} minutes, by zero_tp.training.timeout_minutes.heartbeat"


def report(everyone: Mapping[int, Position], world: int, position: Position, limit: float) -> str:
    """Return who waits for whom, a line for each rank, and the error as the last line."""
    now = max(each.told for each in everyone.values())
    lines = [f"rank {rank} {each.described(now)}" for rank, each in sorted(everyone.items())]
    unheard = [rank for rank in range(world) if rank not in everyone or everyone[rank].lost(now)]
    least = min(each.count for each in everyone.values())
    last = [rank for rank, each in everyone.items() if each.count == least]
    behind = unheard or [rank for rank in last if not everyone[rank].waiting] or last
    waiting = sorted(set(range(world)) - set(behind))
    if waiting:
        who = f"{name_ranks(waiting)} wait{'s' if len(waiting) == 1 else ''} for {name_ranks(sorted(behind))}"
    else:
        who = "no rank is behind another"
    where = f"{position.phase}{f' {position.step}' if position.step else ''}"
    limits = f"{limit / 60:.3g} minutes, by zero_tp.training.timeout_minutes"
    return "\n".join([*lines, f"error: no progress in {where} for {limits}: {who}"])
