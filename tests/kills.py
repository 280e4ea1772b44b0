"""Kills a run inside its saves, again and again, and compares its losses with a run that was never killed.

    python -m tests.kills [--kills 20] [--seed N]

Each time a random process (a rank, DeepSpeed's launch.py, or all of them as when the machine goes) gets SIGKILL at a
random moment of a save, by turns with saves in the foreground and in the background. The run is started again until it
is done; every logged loss and the last checkpoint must equal those of the run that went through, bit for bit. Takes
about 15 seconds a kill; not part of the test command.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from tests.launched import environment, furnish, launch, metrics_of
from tests.waits import patience
from zero_tp.checkpoint.directory import (
    TEMPORARY,
    check_file,
    checkpoints_of,
    complete_steps,
    read_manifest,
    step_directory,
)

WORLD, STEPS_BETWEEN, TARGETS = 4, 3, ("rank", "launch.py", "machine")
LIMIT = 180.0


def start(workplace: Path, run: Path, steps: int, background: bool) -> subprocess.Popen[bytes]:
    settings = {
        "zero_tp.training.steps": steps,
        "zero_tp.checkpoint.interval": 1,
        "zero_tp.checkpoint.async": background,
        "zero_tp.evaluation.interval": 10**6,
        "zero_tp.model.n_embd": 256,  # saves that take long enough to be hit
        "zero_tp.data.validation": None,
        "scheduler.params.total_num_steps": 1000,
    }
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    command = [*launch(WORLD), "--deepspeed_config", "small.json", "--output-dir", str(run), *words]
    return subprocess.Popen(
        command, cwd=workplace, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


def family(launcher: subprocess.Popen[bytes]) -> dict[str, list[psutil.Process]]:
    """The processes of a launch by what they are."""
    processes = psutil.Process(launcher.pid).children(recursive=True)
    named: dict[str, list[psutil.Process]] = {"launch.py": [], "rank": []}
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            words = " ".join(process.cmdline())
            if "deepspeed.launcher.launch" in words:
                named["launch.py"].append(process)
            elif process.parent() in named["launch.py"] and "pretrain.py" in words:
                named["rank"].append(process)
    return named


def kill_inside_a_save(launcher: subprocess.Popen[bytes], run: Path, target: str, chance: random.Random) -> bool:
    """Wait for a save after the first few of this start, then kill at a random moment; False when the run ended."""
    begun = len(complete_steps(run)) and complete_steps(run)[-1]
    aim, started = begun + chance.randint(1, STEPS_BETWEEN), time.monotonic()
    writing = checkpoints_of(run) / TEMPORARY
    named: dict[str, list[psutil.Process]] = {}
    while not (named and writing.exists()):
        if launcher.poll() is not None:
            return False
        assert time.monotonic() - started < patience(LIMIT), "no save came"
        if not named and complete_steps(run) and complete_steps(run)[-1] >= aim:
            named = family(launcher)  # takes longer than a save: the next one is hit
        time.sleep(0.002)
    time.sleep(chance.random() * 0.03)
    victims = {
        "rank": [chance.choice(named["rank"])],
        "launch.py": named["launch.py"],
        "machine": [psutil.Process(launcher.pid), *named["launch.py"], *named["rank"]],
    }[target]
    everyone = [*named["launch.py"], *named["rank"]]
    for process in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    launcher.wait(patience(LIMIT))
    _, alive = psutil.wait_procs(everyone, timeout=patience(60))
    assert not alive, f"left behind: {alive}"
    return True


def losses(run: Path) -> dict[int, float]:
    """The loss of each step, as last logged."""
    return {line["step"]: line["loss"] for line in metrics_of(run) if "loss" in line}


def contents(checkpoint: Path) -> dict[str, str]:
    """SHA-256 of every file of a checkpoint, read anew and held against the manifest."""
    found = {}
    for name, written in read_manifest(checkpoint).files.items():
        check_file(checkpoint / name, written)
        found[name] = hashlib.sha256((checkpoint / name).read_bytes()).hexdigest()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="how often to kill (default: 20)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    options = parser.parse_args()
    print(f"seed {options.seed}")
    chance = random.Random(options.seed)
    steps = (STEPS_BETWEEN + 2) * options.kills + 5
    with tempfile.TemporaryDirectory() as folder:
        workplace = furnish(Path(folder))
        whole, killed = workplace / "runs" / "whole", workplace / "runs" / "killed"
        kills = inside = 0
        while kills < options.kills:
            target, background = TARGETS[kills % len(TARGETS)], bool(kills // len(TARGETS) % 2)
            launcher = start(workplace, killed, steps, background)
            if not kill_inside_a_save(launcher, killed, target, chance):
                sys.exit(f"the run ended by itself: {launcher.stderr.read().decode() if launcher.stderr else ''}")
            kills += 1
            unfinished = (checkpoints_of(killed) / TEMPORARY).exists()
            inside += unfinished
            done = complete_steps(killed)
            contents(step_directory(killed, done[-1]))
            where = "background" if background else "foreground"
            left = ", one left half written" if unfinished else ""
            print(f"kill {kills}: {target}, saving in the {where}; newest complete: step {done[-1]}{left}", flush=True)
        for run in (killed, whole):
            launcher = start(workplace, run, done[-1] + 3, False)
            _, errors = launcher.communicate(timeout=patience(LIMIT * 5))
            assert launcher.returncode == 0, errors.decode()
        found, expected = losses(killed), losses(whole)
        assert found == expected, {step: (found.get(step), expected.get(step)) for step in expected}
        last = done[-1] + 3
        assert contents(step_directory(killed, last)) == contents(step_directory(whole, last))
        print(f"{kills} kills, {inside} of them left a save half written")
        print(f"{len(expected)} losses and the last checkpoint are equal to those of a run that was never killed")


if __name__ == "__main__":
    main()
