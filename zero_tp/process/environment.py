"""The environment variables that torch reads to find the other ranks, from whichever launcher started this one."""

from __future__ import annotations

import os
import socket

from zero_tp.errors import UserError
from zero_tp.process.processes import Place


def complete_environment(place: Place) -> None:
    """Set what the launcher left out: Slurm names ranks its own way, and a process alone has no launcher.

    Raises:
        UserError: several ranks and nothing says where they meet.
    """
    # Not only where they are unset: a WORLD_SIZE left in a shell would make a process alone wait for ranks.
    os.environ["RANK"] = str(place.rank)
    os.environ["WORLD_SIZE"] = str(place.world)
    os.environ["LOCAL_RANK"] = str(place.local_rank or 0)
    if place.world == 1:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", str(_free_port()))
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise UserError(f"{name} is not set: {place.world} ranks need it to meet; export it before srun")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
