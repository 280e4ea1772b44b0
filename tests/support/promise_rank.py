"""One rank of the jobs in test_promises.py: it runs steps without training until its case ends
it.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

from zero_tp.base.errors import UserError
from zero_tp.run.process import watch as watch_module
from zero_tp.run.process.environment import RankEnvironment
from zero_tp.run.process.lifecycle import run_rank
from zero_tp.run.process.signals import Requests
from zero_tp.run.process.watch import Watchdog

CASE = sys.argv[sys.argv.index("--case") + 1]
LIMITS = {"hang": 2.0, "hang in an exchange": 2.0}
HEARTBEAT = {"silence": 3.0}
watch_module.ANSWER_SECONDS = 2.0  # of the 10 seconds that a loaded network may take

environment, requests, watch = RankEnvironment.of_this_process(), Requests(), Watchdog()


def main() -> int:
    rank, world = environment.rank, environment.world
    if CASE == "wrong input":
        raise UserError("zero_tp.training.steps is -1: it must be at least 1")
    environment.export()
    if CASE == "writer" and rank == 0:
        from zero_tp.run.checkpoint.run_directory import run_directory

        with run_directory(Path("run")):
            raise AssertionError("the test holds it")
    environment.store.join()
    if CASE == "wrong input on one rank" and rank == 1:
        raise UserError("local rank 1 has no device")
    import torch
    import torch.distributed as dist

    environment.store.wait_until_all_ready(timedelta(minutes=5))
    dist.init_process_group("gloo")
    watch.begin({"step": LIMITS.get(CASE)}, rank, world, HEARTBEAT.get(CASE))
    watch.connect(environment.store.join())
    with requests.accepting():
        for step in itertools.count(1):
            watch.enter("step", step)
            if "exchange" in CASE:
                exchange(step)
            dist.all_reduce(torch.ones(1000))
            stop, save = requests.all_reduce(torch.device("cpu"))
            if rank == 0 and (step == 5 or save or stop):
                print(
                    "five steps"
                    if step == 5
                    else f"{'stopped' if stop else 'saved'} at step {step}",
                    flush=True,
                )
            if stop:
                break
            if step == 10 and rank == 1:
                fail_or_hang()
            if step == 10 and CASE == "exception during a long step":
                time.sleep(300)
            time.sleep(0.01)
    watch.leave()
    return 0


def exchange(step: int) -> None:
    """Send rows to the experts of both ranks and back. In step 10 rank 1 sends their sizes only."""
    import torch

    from zero_tp.parallel.expert_exchange import AllToAllExperts

    ends = torch.tensor([1, 2, 3, 4], dtype=torch.int32)
    experts = AllToAllExperts(ends, torch.distributed.group.WORLD)
    while step == 10 and environment.rank == 1:
        if CASE == "killed in an exchange":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.1)
    experts.start_combine(experts.start_dispatch(torch.ones(4, 3)).wait()).wait()


def fail_or_hang() -> None:
    if CASE == "exception during a long step" or (
        CASE == "restart" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    ):
        raise ArithmeticError("the loss is not finite\nat step 10")
    while CASE == "hang" or CASE == "stuck":
        time.sleep(0.1)


run_rank(main, False, environment, requests, watch)
