"""Machines, links and clocks that fail while a run trains: it ends in a bounded time, says why, and loses no save."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cluster.nodes import SHARED, Rack
from tests.cluster.starts import STARTS, Ended, alone, no_ssh, torchrun
from tests.cluster.test_ends import LONG, kill_all, none_left, process_of, say_once, trained
from tests.cluster.test_starting import STEPS, losses
from tests.waits import patience
from zero_tp.checkpoint.directory import complete_steps

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]
__all__ = ["none_left"]

LIMIT, START, MEET, KILLS = 15, 20, 15, 20
LIMITED = [*LONG, "--set", f'zero_tp.training.timeout_minutes={{"step": {LIMIT / 60}}}']
FOUND = LIMIT + 35
"""Seconds of an idle machine from a fault to the end of all ranks: the limit, the store's answers, and the way out."""
SLEEP = """
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_nanosleep(clockid_t clock, int flags, const struct timespec *until, struct timespec *left) {
    return syscall(SYS_clock_nanosleep, clock, flags, until, left) ? 22 : 0;
}
"""
"""Python sleeps by a call that faketime 0.9.10 gives a time of another clock."""
AHEAD = ["env", "FAKETIME_DONT_FAKE_MONOTONIC=1", "faketime", "-f", "+1h"]
AHEAD += ["bash", "-c", f'LD_PRELOAD={SHARED}/sleep.so:$LD_PRELOAD exec "$@"', "-"]


def hangs(ended: Ended, waiting: str) -> None:
    assert 0 not in ended.statuses
    say_once(ended, "error: no progress in step")
    say_once(ended, f"by zero_tp.training.timeout_minutes: {waiting}")


@pytest.fixture(scope="module")
def ahead(slurm: Rack, workplace: Path) -> Sequence[str]:
    """What stands before a command whose clock shows an hour later."""
    (workplace / "sleep.c").write_text(SLEEP)
    slurm.nodes[0].shell(f"cc -shared -fPIC -o {SHARED}/sleep.so {SHARED}/sleep.c")
    told = slurm.nodes[0].run(*AHEAD, "date", "+%s").stdout
    assert int(told) == pytest.approx(time.time() + 3600, abs=60)
    return AHEAD


@pytest.mark.parametrize("name", ["torchrun", "sbatch"])
def test_a_rank_that_is_stopped_is_named(name: str, slurm: Rack, workplace: Path) -> None:
    run = f"runs/stopped_{name}"
    launch = trained(STARTS[name](slurm, *LIMITED, "--output-dir", run), workplace / run)
    begun = time.monotonic()
    process_of(3, slurm.nodes[1]).suspend()
    ended = launch.ended()
    hangs(ended, "ranks 0, 1 and 2 wait for rank 3")
    assert "rank 3 (node2) in " in ended.output
    assert time.monotonic() - begun < patience(FOUND + 35), "the launcher waits for 30 s before it kills"


def test_a_link_that_is_down_is_found(slurm: Rack, workplace: Path) -> None:
    launch = trained(torchrun(slurm, *LIMITED, "--output-dir", "runs/unplugged"), workplace / "runs/unplugged")
    begun = time.monotonic()
    slurm.shell("ip link set node2 down")
    try:
        status = launch.processes[0].wait(patience(180))
        found = time.monotonic() - begun
    finally:
        slurm.shell("ip link set node2 up")
    launch.ended()
    hangs(Ended([status], launch.output(0)), "ranks 0 and 1 wait for ranks 2 and 3")
    assert found < patience(FOUND)
    assert "error: no progress in step" in launch.output(1), "which cannot know what the first machine says"


def test_packets_that_are_lost_and_late_only_cost_time(slurm: Rack, workplace: Path) -> None:
    words = ["--deepspeed_config", "small.json", "--set", "zero_tp.training.steps=2", "--output-dir"]
    assert alone(slurm, *words, "runs/lossy_alone").ended().statuses == [0]
    with slurm.bad_link(slurm.nodes[1], loss=0.3, delay=0.2):
        ended = torchrun(slurm, *words, "runs/lossy").ended(900)
    assert ended.statuses == [0, 0], ended.output
    assert losses(workplace / "runs/lossy") == losses(workplace / "runs/lossy_alone")


def test_clocks_that_differ_by_an_hour_change_nothing(slurm: Rack, workplace: Path, ahead: Sequence[str]) -> None:
    """Not under torchrun, whose agents compare their clocks."""
    words = ["--deepspeed_config", "small.json", "--output-dir"]
    assert alone(slurm, *words, "runs/clock_alone").ended().statuses == [0]
    for done in (STEPS // 2, STEPS):
        until = ["--set", f"zero_tp.training.steps={done}"]
        ended = no_ssh(slurm, *words, "runs/clock", *until, before=ahead).ended()
        assert ended.statuses == [0, 0], ended.output
    assert losses(workplace / "runs/clock") == losses(workplace / "runs/clock_alone")


def test_a_rank_whose_clock_is_off_is_named_when_it_stops(slurm: Rack, workplace: Path, ahead: Sequence[str]) -> None:
    run = "runs/stopped_ahead"
    launch = trained(no_ssh(slurm, *LIMITED, "--output-dir", run, before=ahead), workplace / run)
    process_of(3, slurm.nodes[1]).suspend()
    ended = launch.ended()
    hangs(ended, "ranks 0, 1 and 2 wait for rank 3")
    assert "rank 3 (node2) in " in ended.output


def test_the_end_of_the_first_machine_ends_the_others(slurm: Rack, workplace: Path) -> None:
    launch = trained(torchrun(slurm, *LIMITED, "--output-dir", "runs/headless"), workplace / "runs/headless")
    begun = time.monotonic()
    kill_all(slurm.nodes[0])
    ended = launch.ended()
    assert time.monotonic() - begun < patience(FOUND)
    assert 0 not in ended.statuses
    told = re.findall(r"\(node2\) failed: |node2: error: |error: node2 has lost", launch.output(1))
    assert told, launch.output(1)


def test_a_machine_that_dies_at_any_time_costs_what_was_not_saved(slurm: Rack, workplace: Path, seed: int) -> None:
    """A run is launched again and again, and each time a machine dies: while agents meet, or ranks start or train."""
    chance, name, run = random.Random(seed), "runs/killed", workplace / "runs/killed"
    words = ["--deepspeed_config", "small.json", "--set", "scheduler.params.total_num_steps=1000"]
    limits = {"start": START / 60} | dict.fromkeys(("step", "save", "evaluation"), LIMIT / 60)
    limited = [*words, "--set", f"zero_tp.training.timeout_minutes={json.dumps(limits)}", "--output-dir", name]
    limited += ["--set", "zero_tp.checkpoint.interval=1"]
    begun = time.monotonic()
    ended = torchrun(slurm, *limited, "--set", "zero_tp.training.steps=1", meet=MEET).ended()
    assert ended.statuses == [0, 0], ended.output
    late, saved = 2 * (time.monotonic() - begun), 1
    for number in chance.sample(range(KILLS), KILLS):
        launch = torchrun(slurm, *limited, "--set", "zero_tp.training.steps=100000", meet=MEET)
        time.sleep((number + chance.random()) / KILLS * late)
        kill_all(chance.choice(slurm.nodes))
        ended = launch.ended(START + MEET + 35)
        assert 0 not in ended.statuses
        resumed = re.findall(r"^resuming step (\d+)", ended.output, re.MULTILINE)
        assert resumed in ([], [str(saved)]), ended.output
        told = [int(step) for step in re.findall(rf"saved {name}/checkpoints/step_(\d+)", ended.output)]
        kept = complete_steps(run)[-1]
        assert kept >= max([saved, *told]), "a save is lost"
        saved = kept
    assert saved > 1, "no launch has trained"
    until = ["--set", f"zero_tp.training.steps={saved + 4}", "--output-dir"]
    for start, directory in ((torchrun, name), (alone, f"{name}_alone")):
        ended = start(slurm, *words, *until, directory).ended()
        assert set(ended.statuses) == {0}, ended.output
    assert losses(run) == losses(workplace / f"{name}_alone")
