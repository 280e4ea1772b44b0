"""Whatever step a run ends with, its end is saved, or its exit status says that it is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.launched import run
from tests.tiers import THOROUGH
from zero_tp.checkpoint.directory import complete_steps, read_manifest, step_directory

RANK = """
import os, signal, sys, time
from tests.support.skipping_rank import skip_steps

skipped, stopped = eval(sys.argv.pop(1)), int(sys.argv.pop(1))
skip_steps(skipped.__contains__)

from zero_tp.training.engine import TrainingEngine

run_step = TrainingEngine.run_step

def step_with_signal(engine, *arguments, **options):
    run_step(engine, *arguments, **options)
    if engine.engine.global_steps == stopped:
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
    return run([*command, "--deepspeed_config", "small.json", "--output-dir", name, *words], workplace)


@THOROUGH
def test_the_last_step_is_saved_although_it_was_skipped(workplace: Path) -> None:
    done = pretrained(workplace, "last-skipped", "{3, 4}", "training.steps=4", "checkpoint.interval=null")
    assert done.returncode == 0, done.stderr
    directory = workplace / "last-skipped"
    assert complete_steps(directory) == [4]
    counters = read_manifest(step_directory(directory, 4)).progress.counters
    assert (counters["global_steps"], counters["skipped_steps"]) == (4, 2)
    again = pretrained(workplace, "last-skipped", "{}", "training.steps=5", "checkpoint.interval=null")
    assert again.returncode == 0 and "resuming step 4" in again.stdout, again.stdout + again.stderr


@THOROUGH
def test_the_step_of_a_stop_is_saved_although_it_was_skipped(workplace: Path) -> None:
    done = pretrained(workplace, "stop-skipped", "{2}", "training.steps=4", "checkpoint.interval=null", stopped=2)
    assert done.returncode == 0 and "stopped after step 2" in done.stdout, done.stdout + done.stderr
    assert complete_steps(workplace / "stop-skipped") == [2]


@THOROUGH
def test_a_save_in_the_background_ends_before_a_run_that_gives_up(workplace: Path) -> None:
    settings = ("training.steps=20", "checkpoint.interval=2", "checkpoint.async=true", 'training.on_nonfinite="stop"')
    done = pretrained(workplace, "gave-up", "range(3, 99)", *settings)
    assert done.returncode == 2 and done.stderr.count("error: step 3: ") == 1, done.stdout + done.stderr
    assert "saved gave-up/checkpoints/step_00000002" in done.stdout
    assert complete_steps(workplace / "gave-up") == [2]
