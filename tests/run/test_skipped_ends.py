"""Whatever step a run ends with, its end is saved, or its exit status says that it is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.launched import run
from tests.tiers import THOROUGH
from zero_tp.run.checkpoint.directory import complete_steps, read_manifest, step_directory

RANK = """
import os, signal, sys, time
from tests.support.skipping_rank import skip_steps

skipped, stopped = eval(sys.argv.pop(1)), int(sys.argv.pop(1))
skip_steps(skipped.__contains__)

from zero_tp.engine.engine import TrainingEngine

run_step = TrainingEngine.run_step

def step_with_signal(engine, *arguments, **options):
    run_step(engine, *arguments, **options)
    if engine.deepspeed_engine.global_steps == stopped:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)  # the thread that listens takes it

TrainingEngine.run_step = step_with_signal
from zero_tp.commands import start
start("pretrain", prog="python -m zero_tp.pretrain")
"""
"""One rank, whose gradients are not finite in some steps, and which gets SIGTERM in one."""


def pretrained(
    workplace: Path, name: str, skipped: str, *settings: str, stopped: int = 0
) -> subprocess.CompletedProcess[str]:
    settings = ("parallel.tensor=1", "evaluation.interval=null", "data.validation=null", *settings)
    words = [word for setting in settings for word in ("--set", f"zero_tp.{setting}")]
    command = [sys.executable, "-c", RANK, skipped, str(stopped)]
    return run(
        [*command, "--deepspeed_config", "small.json", "--output-dir", name, *words], workplace
    )


@THOROUGH
def test_the_last_step_and_that_of_a_stop_are_saved_although_they_were_skipped(
    workplace: Path,
) -> None:
    settings = ("training.steps=4", "checkpoint.interval=null")
    for name, skipped, stopped, last in (
        ("last-skipped", "{3, 4}", 0, 4),
        ("stop-skipped", "{2}", 2, 2),
    ):
        done = pretrained(workplace, name, skipped, *settings, stopped=stopped)
        assert done.returncode == 0 and (f"stopped after step {last}" in done.stdout) == bool(
            stopped
        ), done.stderr
        assert complete_steps(workplace / name) == [last]
    counters = read_manifest(step_directory(workplace / "last-skipped", 4)).progress.counters
    assert (counters["global_steps"], counters["skipped_steps"]) == (4, 2)
    again = pretrained(
        workplace, "last-skipped", "{}", "training.steps=5", "checkpoint.interval=null"
    )
    assert again.returncode == 0 and "resuming step 4" in again.stdout, again.stdout + again.stderr


@THOROUGH
def test_a_save_in_the_background_ends_before_a_run_that_gives_up(workplace: Path) -> None:
    settings = (
        "training.steps=20",
        "checkpoint.interval=2",
        "checkpoint.async=true",
        'training.on_nonfinite="stop"',
    )
    done = pretrained(workplace, "gave-up", "range(3, 99)", *settings)
    assert done.returncode == 2 and done.stderr.count("error: step 3: ") == 1, (
        done.stdout + done.stderr
    )
    assert "saved gave-up/checkpoints/step_00000002" in done.stdout
    assert complete_steps(workplace / "gave-up") == [2]
