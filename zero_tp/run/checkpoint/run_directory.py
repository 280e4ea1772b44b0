"""A run's directory: its lock, its owner and its config."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zero_tp.base.errors import UserError
from zero_tp.base.files import lock, sync, write_atomically
from zero_tp.base.strict_json import InvalidJson, parse_json
from zero_tp.run.checkpoint.directory import checkpoints_directory

CONFIG = "config.json"
LOCK = ".lock"
OWNER = "owner.json"
PROCESS = "rank0.pid"


class OwnerChanged(UserError):
    """Another launch owns the run directory now."""


class RunOwner:
    """Own a run directory by a random token in RUN/owner.json.

    A lock refuses a second launch on the same machine. Some network file systems have no locks
    between machines, so a launch on another machine takes the run over, and this one ends before
    its next write.
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        self.token = secrets.token_hex(16)
        # Host and pid are for the message. The token decides, because two machines may have equal
        # pids.
        owner = {"token": self.token, "host": socket.gethostname(), "pid": os.getpid()}
        write_atomically(run / OWNER, json.dumps(owner) + "\n")

    def check(self) -> None:
        """Raise OwnerChanged if another launch has written its token.

        A missing file means no owner: a person may have removed it.
        """
        owner = read_owner(self.run)
        if owner is not None and owner.get("token") != self.token:
            process = f"process {owner.get('pid')} on {owner.get('host')}"
            raise OwnerChanged(
                f"{self.run}: another launch ({process}) has taken the run over; this one writes "
                "nothing more"
            )


def read_owner(run: Path) -> dict[str, object] | None:
    """Return RUN/owner.json; None if it is missing or not an object."""
    try:
        with (run / OWNER).open(
            "rb"
        ) as file:  # opening fetches the newest version on a network file system
            owner = parse_json(file.read(2**16))
    except (FileNotFoundError, InvalidJson):
        return None
    return owner if isinstance(owner, dict) else None


@contextlib.contextmanager
def run_directory(run: Path) -> Iterator[RunOwner]:
    """Make a run's directory, own it and write `rank0.pid` (for signals).

    Rank 0 enters it before ranks connect.
    """
    with contextlib.ExitStack() as stack:
        try:
            checkpoints_directory(run).mkdir(parents=True, exist_ok=True)
            # The kernel releases it when the process ends, however it ends. So no stale lock has to
            # be removed by hand.
            lock(stack.enter_context((run / LOCK).open("w")), fcntl.LOCK_EX | fcntl.LOCK_NB)
            # After the lock: a refused second launch must not take the run over.
            owner = RunOwner(run)
            # Replaced, not opened: this machine may still see a file that another machine has
            # removed.
            write_atomically(run / PROCESS, f"{os.getpid()}\n")
            stack.callback(_remove_process_file, run, owner)
        except BlockingIOError:
            raise UserError(
                f"{run}: another run is writing there; wait for it, or give another --output-dir"
            ) from None
        except OSError as error:
            raise UserError(
                f"{run}: cannot be a run's directory ({error.strerror}); give another --output-dir"
            ) from error
        yield owner


def _remove_process_file(run: Path, owner: RunOwner) -> None:
    """Remove `rank0.pid`, unless it is that of a launch that has taken the run over."""
    with contextlib.suppress(OwnerChanged, OSError):
        owner.check()
        (run / PROCESS).unlink(missing_ok=True)


def write_config(run: Path, resolved: dict[str, Any]) -> None:
    """Replace the run's config atomically and flush it."""
    write_atomically(run / CONFIG, json.dumps(resolved, indent=2) + "\n")
    sync(run, below=False)
