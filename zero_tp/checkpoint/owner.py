"""One run, one writer: the launch that started last on a run directory owns it."""

from __future__ import annotations

import json
import os
import secrets
import socket
from pathlib import Path

from zero_tp.errors import UserError
from zero_tp.files import write_atomically
from zero_tp.strict_json import InvalidJson, parse_json

OWNER = "owner.json"


class TakenOver(UserError):
    """Another launch owns the run directory now."""


class RunOwner:
    """Own a run directory by a random token in RUN/owner.json.

    A lock keeps a second launch on the same machine out, but some network file systems grant it to each machine by
    itself. A launch on another machine therefore takes the run over, and this one ends before it writes again.

    Raises:
        OSError: the token cannot be written.
    """

    def __init__(self, run: Path) -> None:
        self.run, self.token = run, secrets.token_hex(16)
        owner = {"token": self.token, "host": socket.gethostname(), "pid": os.getpid()}
        write_atomically(run / OWNER, json.dumps(owner) + "\n")

    def check(self) -> None:
        """Check the token before a checkpoint or `latest` is renamed. A file that is gone is nobody's.

        Raises:
            TakenOver: another launch has written its own.
            OSError: the file cannot be read.
        """
        owner = read_owner(self.run)
        if owner is not None and owner.get("token") != self.token:
            who = f"process {owner.get('pid')} on {owner.get('host')}"
            raise TakenOver(f"{self.run}: another launch ({who}) has taken the run over; this one writes nothing more")


def read_owner(run: Path) -> dict[str, object] | None:
    """Return RUN/owner.json, None if there is none or it is not an object.

    Raises:
        OSError: it cannot be read.
    """
    try:
        with (run / OWNER).open("rb") as file:  # opening asks a network file system's server for the newest version
            owner = parse_json(file.read(2**16))
    except (FileNotFoundError, InvalidJson):
        return None
    return owner if isinstance(owner, dict) else None
