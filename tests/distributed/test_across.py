"""One of several machines says why a job ends, and the ranks of all end: here two "machines" of a rank each."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil
import pytest

from tests.launched import ROOT, environment, free_port
from tests.tiers import THOROUGH, in_tiers
from tests.waits import patience

RANK = """
import os, signal, sys, time
from zero_tp.errors import UserError
from zero_tp.process.lifecycle import run_rank

def main():
    if sys.argv[2] == "refused before the last listens" and os.environ["RANK"] == "3":
        time.sleep(4)
    import torch, torch.distributed as dist
    if sys.argv[2] in ("connected", "headless"):
        dist.init_process_group("gloo")
        number = torch.ones(1)
        dist.all_reduce(number)
        assert number.item() == 2
        if sys.argv[2] == "headless":
            time.sleep(4)  # the other one has found the store
            if os.environ["RANK"] == "0":
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(number) if sys.argv[1] == "waits" else time.sleep(600)
        if not sys.argv[1]:
            return 0
    if os.environ["RANK"] not in sys.argv[1]:
        dist.all_reduce(number) if sys.argv[2] == "connected" else time.sleep(600)
    if sys.argv[2].startswith("refused"):
        raise UserError("data/train.bin: no such file")
    raise ValueError("wrong")

run_rank(main, False)
"""


def start(rank: int, port: int, failing: str, how: str, beside: int = 1) -> subprocess.Popen[str]:
    """A rank below a launcher of its own, as on one of two machines of `beside` ranks each."""
    names: dict[str, int | str] = {
        "RANK": rank,
        "LOCAL_RANK": rank % beside,
        "WORLD_SIZE": 2 * beside,
        "LOCAL_WORLD_SIZE": beside,
        "GROUP_RANK": rank // beside,
    }
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return subprocess.Popen(
        ["sh", "-c", '"$@"; exit $?', "-", sys.executable, "-c", RANK, failing, how],
        env=environment() | {name: str(value) for name, value in names.items()},
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )


CASES = [("1", "refused"), ("0", "refused"), ("01", "refused"), ("0", "failed"), ("1", "failed")]
CASES += [("0", "connected"), ("1", "connected")]


@THOROUGH
def test_ranks_meet_at_the_store_that_is_listened_at() -> None:
    port = free_port()
    ranks = [start(rank, port, "", "connected") for rank in range(2)]
    assert [rank.communicate(timeout=patience(60))[1] for rank in ranks] == ["", ""]
    assert [rank.returncode for rank in ranks] == [0, 0]


@pytest.mark.parametrize(("failing", "how"), in_tiers(CASES, [("1", "refused")]))
def test_one_machine_says_why_and_all_end(failing: str, how: str) -> None:
    port, begun = free_port(), time.monotonic()
    ranks = [start(rank, port, failing, how) for rank in range(2)]
    told = ""
    for rank in ranks:
        told += rank.communicate(timeout=patience(60))[1]
    assert time.monotonic() - begun < patience(60)
    host = os.uname().nodename
    if how == "refused":
        assert told == f"{host}: error: data/train.bin: no such file\n"
        assert [rank.returncode for rank in ranks] == [2, 2]
    else:
        assert told.count("rank ") == told.count(f"rank {failing}")
        assert told.splitlines()[-1] == f"rank {failing} ({host}) failed: ValueError: wrong"
        assert [rank.returncode for rank in ranks] == [1, 1]


@THOROUGH
def test_the_first_machine_stays_until_every_rank_of_the_other_has_heard() -> None:
    port = free_port()
    ranks = [start(rank, port, "01", "refused before the last listens", beside=2) for rank in range(4)]
    told = "".join(rank.communicate(timeout=patience(40))[1] for rank in ranks)
    assert told == f"{os.uname().nodename}: error: data/train.bin: no such file\n"
    assert [rank.returncode for rank in ranks] == [2] * 4


@THOROUGH
@pytest.mark.parametrize("what", ["waits", "is ended by its launcher"])
def test_the_end_of_the_first_machine_is_said(what: str) -> None:
    port = free_port()
    first, second = (start(rank, port, what, "headless") for rank in range(2))
    first.wait(patience(60))
    if what != "waits":
        time.sleep(1)
        (rank,) = psutil.Process(second.pid).children()
        rank.terminate()
    told = second.communicate(timeout=patience(60))[1]
    assert told == f"error: {os.uname().nodename} has lost the ranks' store at 127.0.0.1:{port}, and with it rank 0\n"
    assert second.returncode != 0
