"""A run's directory belongs to one run at a time, and says what that run's start was.

A lock tells of the processes of one machine: some network file systems grant it to each machine by itself, and some
have none. So the owner also has a lease, a file `.lease.N`, which the file system's server grants to one alone, and
touches it. Each owner takes the next number and none is used again for a day, so that a machine with an old view of
the directory asks for a number that is taken.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from zero_tp.checkpoint.directory import checkpoints_of, complete_steps, find_checkpoint, read_manifest, step_directory
from zero_tp.checkpoint.manifest import Manifest
from zero_tp.errors import UserError
from zero_tp.files import lock, sync, write_atomically
from zero_tp.machine import VIEW_SECONDS, is_local, started, this_machine
from zero_tp.strict_json import InvalidJson, parse_json, read_object

CONFIG, LOCK, PROCESS = "config.json", ".lock", "rank0.pid"
BEAT_SECONDS = 10.0
SILENT_SECONDS = 20.0  # and as long as the view may lag: then an owner is gone
KEPT_SECONDS = 24 * 3600.0
_NAME = re.compile(r"\.lease\.(\d+)")


def saved_start(run: Path, given: Path | None = None) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Return (resolved config of the start, the model's config) of what would be resumed; None when nothing can be.

    The first stands in the checkpoint, and for those that were saved before it did in the run's own file.

    Args:
        given: a checkpoint or run to resume from, instead of this run's newest checkpoint that can be read.

    Raises:
        UserError: the file can't be read, or is not a JSON object.
    """
    manifest = _newest_manifest(run, given)
    model = None if manifest is None else copy.deepcopy(manifest.model)
    if manifest is not None and manifest.config is not None:
        return manifest.config, model
    path = run / CONFIG
    if not path.exists() or not complete_steps(run):
        return None, model
    try:
        return read_object(path), model
    except (InvalidJson, OSError) as error:
        raise UserError(f"{path}: not a run's config ({error}); give another --output-dir") from error


def _newest_manifest(run: Path, given: Path | None) -> Manifest | None:
    with contextlib.suppress(UserError):  # told when the run is resumed
        if given is not None:
            return read_manifest(find_checkpoint(given))
    for step in reversed(complete_steps(run)):
        with contextlib.suppress(UserError):  # the same
            return read_manifest(step_directory(run, step))
    return None


class Lease(contextlib.AbstractContextManager["Lease"]):
    """A lease of a directory, taken when it is made and given back at the end of the block."""

    def __init__(self, run: Path, lost: Callable[[str], object] = lambda text: None) -> None:
        """Take the lease.

        Where its owner is on another machine, and did not give it back, it takes up to 80 s to see that it is gone.

        Args:
            lost: called by a thread, with a text, if another owner takes the lease: this process was taken for dead.

        Raises:
            UserError: its owner lives.
            OSError: nothing can be written there.
        """
        self.run, self._lost = run, lost
        self._ended = threading.Event()
        self._number = self._take()
        threading.Thread(target=self._beat, name="lease", daemon=True).start()

    def __exit__(self, *raised: object) -> None:
        self._ended.set()
        with contextlib.suppress(OSError):  # it is seen that its owner is gone
            write_atomically(self._path(self._number), "{}\n")

    def _path(self, number: int) -> Path:
        return self.run / f".lease.{number}"

    def _numbers(self) -> list[int]:
        return sorted(int(match[1]) for name in os.listdir(self.run) if (match := _NAME.fullmatch(name)))

    def _take(self) -> int:
        own = {
            "machine": this_machine(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": started(os.getpid()),
        }
        number = max(self._numbers(), default=0)
        while True:
            if number and (owner := self._living(self._path(number))):
                raise UserError(
                    f"{self.run}: another run is writing there ({owner}); wait for it, or give another --output-dir"
                )
            number += 1
            try:
                with self._path(number).open("x") as file:
                    file.write(json.dumps(own) + "\n")
                    file.flush()
                    os.fsync(file.fileno())
            except FileExistsError:  # an owner that this machine did not see
                continue
            self._forget(number)
            return number

    def _forget(self, number: int) -> None:
        """Remove the leases of a day ago."""
        now = self._path(number).stat().st_mtime  # by the clock of the file system
        for before in self._numbers():
            with contextlib.suppress(FileNotFoundError):
                if before < number and self._path(before).stat().st_mtime < now - KEPT_SECONDS:
                    self._path(before).unlink()

    def _living(self, path: Path) -> str:
        """Return who holds a lease; "" where it was given back or its owner is gone, which may take a while to see."""
        seconds = SILENT_SECONDS + (0 if is_local(self.run) else VIEW_SECONDS)
        first, deadline, told = _seen(path), time.monotonic() + seconds, False
        while True:
            owner, beat = _seen(path)
            if owner == {}:
                return ""
            if owner is not None and owner.get("machine") == this_machine():
                pid = owner.get("pid")
                alive = isinstance(pid, int) and started(pid) == owner.get("started") != ""
                return f"process {pid}" if alive else ""
            who = owner.get("host") if owner else None
            if (owner, beat) != first:
                return str(who or "a process that has just started")
            if time.monotonic() > deadline:
                return ""
            if not told:
                told = True
                print(f"{self.run}: looking for up to {seconds:.0f} s whether its run on {who} still lives", flush=True)
            time.sleep(min(1.0, seconds / 20))

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError):  # a full or failing disk is told where something has to be written
                os.utime(self._path(self._number))
                if max(self._numbers(), default=0) > self._number:
                    self._ended.set()
                    self._lost(f"error: {self.run}: another run has taken it, as this one did not answer")


def _seen(path: Path) -> tuple[dict[str, Any] | None, int]:
    """Return (owner as the file says, time of its last touch); None for an owner that has not written yet."""
    try:
        with path.open("rb") as file:  # opening asks NFS' server for what it has
            text, beat = file.read(2**16), os.fstat(file.fileno()).st_mtime_ns
        owner = parse_json(text)
    except (InvalidJson, OSError):
        return None, 0
    return (owner if isinstance(owner, dict) else None), beat


@contextlib.contextmanager
def run_directory(run: Path, lost: Callable[[str], object] = lambda text: None) -> Iterator[None]:
    """Make a run's directory and hold it while the block runs; `rank0.pid` there names this process, for signals.

    One rank enters it, before any is connected. A lock tells the processes of this machine at once; see `Lease`.

    Args:
        lost: called by a thread, with a text, if another run takes it for abandoned and goes on there.

    Raises:
        UserError: it is a file, nothing can be written there, or another run holds it.
    """
    with contextlib.ExitStack() as held:
        try:
            checkpoints_of(run).mkdir(parents=True, exist_ok=True)
            lock(held.enter_context((run / LOCK).open("w")), fcntl.LOCK_EX | fcntl.LOCK_NB)
            held.enter_context(Lease(run, lost))
            # By a new file: this machine may still see one that another has removed, which it could not open.
            write_atomically(run / PROCESS, f"{os.getpid()}\n")
            held.callback((run / PROCESS).unlink, missing_ok=True)
        except BlockingIOError:
            raise UserError(f"{run}: another run is writing there; wait for it, or give another --output-dir") from None
        except OSError as error:
            raise UserError(
                f"{run}: cannot be a run's directory ({error.strerror}); give another --output-dir"
            ) from error
        yield


def write_config(run: Path, resolved: dict[str, Any]) -> None:
    """Replace the run's config at once; it is on the disk then.

    Raises:
        UserError: it cannot be written.
    """
    try:
        write_atomically(run / CONFIG, json.dumps(resolved, indent=2) + "\n")
        sync(run, below=False)
    except OSError as error:
        raise UserError(f"{run / CONFIG}: cannot be written ({error.strerror}); make room for it") from error
