"""Ranks on several machines hear, by the job's store, that one of them ends the job, and one machine says why.

Not every launcher ends the other machines' ranks when one fails (pdsh and srun wait for all of them), and before the
ranks are connected, or under NCCL, no broken connection tells them either. It imports no torch before `main` does.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from zero_tp.process.environment import AGENT_STORE, RankEnvironment

POLL_SECONDS = 1.0
ASKED_PER_SECOND = 2000  # the store, by all ranks
MEET_SECONDS = 10.0  # for the first machine, whose start may take longer
HEARD_SECONDS = 4.0  # less than what a rank has to leave in
ANSWER_SECONDS = 2.0  # for what the store answers at once, unless its machine is gone without closing connections
LOST_SECONDS = 60.0  # from the store's end to the end of a rank that still works: it goes with the first rank


class Across:
    """The end of a job across its machines, as one rank takes part in it. On one machine it does nothing.

    Attributes:
        ended: whether this rank knows that the job ends.
        place: ` (HOST)`, to stand behind a rank's number, where there are several machines.

    The store is that of `torch.distributed`: rank 0's, or torchrun's agent's. Rank 0 opens it here where a failure
    comes before the ranks are connected.
    """

    def __init__(self, environment: RankEnvironment) -> None:
        self.several = environment.several_nodes
        self._host = socket.gethostname()
        self.place = f" ({self._host})" if self.several else ""
        self._name = f"{self._host} {environment.job}"
        self._first = environment.node == 0
        self._others = environment.world - (environment.local_world or 0)
        self._serves = environment.rank == 0 and os.environ.get(AGENT_STORE) != "True"
        self._key = f"zero_tp/end/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._store: Any = None
        self._lock, self._acknowledged = threading.Lock(), False
        self._pause = max(POLL_SECONDS, environment.world / ASKED_PER_SECOND)
        self.ended = False
        self._deadline: float | None = None

    def named(self, text: str) -> str:
        """Return an error with the machine that says it: what one lacks, the others may have."""
        return f"{self._host}: {text}" if self.several else text

    def claim(self, status: int, seconds: float = MEET_SECONDS) -> bool:
        """Tell the other machines that the job ends; return whether it is this one's to say why.

        Args:
            status: what their ranks end with.
            seconds: how long to look for the store, and to wait for its answer. Where there is none, this machine
                speaks. Other threads than the main one ask for less than MEET_SECONDS, and never import torch.
        """
        prompt = seconds < MEET_SECONDS
        if not self.several or (prompt and not _loaded()):
            return True
        if not os.environ.get("MASTER_PORT"):  # which no machine has then
            return self._first
        try:
            store = self._open(seconds)
            claimed = within(seconds, store.compare_set, self._key, "", f"{status} {self._name}")
        except (RuntimeError, OSError):  # torch's errors of a store that is not there, or gone
            return True
        self.ended = True
        with contextlib.suppress(RuntimeError, OSError):  # gone since: rank 0 waits for a bounded time
            within(seconds, self._acknowledge, store)
        return bool(claimed.decode().partition(" ")[2] == self._name)

    def listen(self, ended: Callable[[int], object], lost: Callable[[str], object]) -> None:
        """Start to listen, on a thread, once torch is there.

        Args:
            ended: called with the status to end with, when another machine has said why.
            lost: called with a text, when the store has been gone for a minute.
        """
        if self.several:
            threading.Thread(target=self._listen, args=(ended, lost), name="other machines", daemon=True).start()

    def lost_store(self) -> str:
        """Return that the store, which this rank had found, is gone; "" where it answers or was never found."""
        try:
            if self.several and self._store is not None:
                within(ANSWER_SECONDS, self._store.check, [self._key])
            return ""
        except (RuntimeError, TimeoutError):
            return self._told_lost()

    def _told_lost(self) -> str:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        return f"error: {self._host} has lost the ranks' store at {address}, and with it rank 0"

    def linger(self, seconds: float = HEARD_SECONDS) -> None:
        """Wait until the others have heard of the end, if the store goes with this process. The first limit holds."""
        self._deadline = self._deadline or time.monotonic() + seconds
        try:
            while self._serves and self.ended and self._store is not None and time.monotonic() < self._deadline:
                if self._store.add(f"{self._key}/heard", 0) >= self._others:
                    return
                time.sleep(0.05)
        except RuntimeError:
            return

    def _listen(self, ended: Callable[[int], object], lost: Callable[[str], object]) -> None:
        while not _loaded() or "MASTER_PORT" not in os.environ:
            time.sleep(POLL_SECONDS)
        try:
            store = self._open(None)
            while not store.check([self._key]):
                time.sleep(self._pause)
            status, _, name = store.get(self._key).decode().partition(" ")
            self._acknowledge(store)
            self.ended = True
        except (RuntimeError, OSError):
            time.sleep(LOST_SECONDS)
            lost(self._told_lost())
            return
        if name != self._name:
            ended(int(status))

    def _acknowledge(self, store: Any) -> None:
        """Tell rank 0, once, that this rank of another machine has heard: either thread may be the one that does."""
        with self._lock:
            told, self._acknowledged = self._acknowledged, True
        if not (self._first or told):
            store.add(f"{self._key}/heard", 1)

    def _open(self, seconds: float | None) -> Any:
        """Return the store, by a connection of its own, once something listens there; for ever with None.

        Raises:
            OSError: nothing does.
        """
        import torch.distributed as dist

        address, port = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT") or 0)
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            try:
                with self._lock:
                    if self._store is None and not self._serves:  # torch's own attempts are loud
                        socket.create_connection((address, port), timeout=2).close()
                    if self._store is None:
                        limit = timedelta(seconds=MEET_SECONDS)
                        self._store = dist.TCPStore(
                            address,
                            port,
                            is_master=self._serves,
                            timeout=limit,
                            wait_for_workers=False,
                            multi_tenant=True,
                        )
                    return self._store
            except OSError:
                if deadline is not None and time.monotonic() > deadline:
                    raise
                time.sleep(0.2)


def within(seconds: float, ask: Callable[..., Any], *given: Any) -> Any:
    """Return `ask(*given)`, which may wait for TCP's own end: many minutes.

    Raises:
        TimeoutError: it took longer than `seconds`; its thread goes on, and ends with the process.
    """
    answers: list[Any] = []

    def run() -> None:
        try:
            answers.append(ask(*given))
        except Exception as error:  # raised by who asks
            answers.append(error)

    asking = threading.Thread(target=run, name="other machines' answer", daemon=True)
    asking.start()
    asking.join(seconds)
    if not answers:
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    if isinstance(answers[0], Exception):
        raise answers[0]
    return answers[0]


def _loaded() -> bool:
    """Tell whether torch has been imported to its end: two threads that import it at once abort the process."""
    modules = [sys.modules.get(name) for name in ("torch", "torch.distributed")]
    return not any(module is None or getattr(module.__spec__, "_initializing", False) for module in modules)
