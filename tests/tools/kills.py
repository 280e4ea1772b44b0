"""Kills commands at random points of everything that they do, and compares what is left with what was never killed.

    python -m tests.tools.kills [--kills 20] [--seed N]

Each time a moment of a training run (its start, a step, a save, the pruning after one), of an export, of prepare_data
or of an evaluation is drawn, and a process gets SIGKILL there: in a run a rank, or all ranks as when the machine goes.
What is under its final name is then whole. The run is started again until it is done: every logged loss and the last
checkpoint must equal those of the run that went through, bit for bit; what the other commands write at last, what they
wrote undisturbed. Every fifth step of a run is skipped, its last one among them. About 5 seconds a kill on an idle
machine; it needs nobody, and is not part of the test command. Kills under real launchers are in
tests/process/test_promises.py, starts with another accumulation in tests/checkpoint/test_reshape.py.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import json
import os
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.support.launched import environment, free_port, furnish, metrics_of
from tests.support.skipping_rank import EVERY
from tests.support.waits import patience, wait_until
from tests.tools.fuzz import commands
from zero_tp.checkpoint.directory import (
    TEMPORARY,
    check_content,
    checkpoints_of,
    complete_steps,
    read_manifest,
    step_directory,
)
from zero_tp.data.content import content_path
from zero_tp.data.show import SPLITS

WORLD, AIM = 2, 3
MOMENTS = ("start", "step", "save", "prune")
TRAINING = 0.6  # the share of kills that training gets
LIMIT = 180.0
END_SECONDS = 5.0  # until the ranks that are left are killed, as a launcher does


# --- a training run ---------------------------------------------------------------------------------------------------


SCRIPT = "tests/support/skipping_rank.py"


def settings(run: Path, steps: int, **changes: Any) -> list[str]:
    """Return the words of a start."""
    values = {
        "zero_tp.training.steps": steps,
        "zero_tp.checkpoint.interval": 1,
        "zero_tp.model.n_embd": 256,  # saves that take long enough to be hit
        "zero_tp.data.validation": None,
        "zero_tp.evaluation": {},
        "scheduler.params.total_num_steps": 10_000,
        **changes,
    }
    words = [word for key, value in values.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    return ["--deepspeed_config", "small.json", "--output-dir", str(run), *words]


class Ranks:
    """The ranks of a start, forks of this process: what they import costs nothing."""

    def __init__(self, workplace: Path, arguments: list[str]) -> None:
        self.errors = workplace / "errors.txt"
        self.errors.write_bytes(b"")
        world = {"WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1"}
        world |= {"MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
        self.processes = []
        for rank in map(str, range(WORLD)):
            variables = {**world, "RANK": rank, "LOCAL_RANK": rank}
            child = commands.start(SCRIPT, arguments, workplace, variables, self.errors)
            self.processes.append(psutil.Process(child))

    def check_running(self) -> None:
        running = all(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in self.processes)
        assert running, f"the run ended by itself: {self.errors.read_text()}"

    def kill(self, chance: random.Random) -> None:
        """Kill a rank or all of them, then end those that are left as a launcher does."""
        for process in chance.choice(([chance.choice(self.processes)], self.processes)):
            process.kill()
        for end in (psutil.Process.terminate, psutil.Process.kill):
            for process in self.processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    end(process)
            _, alive = psutil.wait_procs(self.processes, timeout=patience(END_SECONDS))
        assert not alive, f"left behind: {alive}"

    def finish(self) -> None:
        """Wait until the run has ended by itself, as it should."""
        for process in self.processes:
            assert process.wait(patience(LIMIT)) == 0, self.errors.read_text()


def wait_for(moment: str, ranks: Ranks, run: Path, chance: random.Random, start_seconds: float) -> None:
    """Wait for a random point of the moment; assertion: the run has not ended by itself."""

    def newest() -> int:
        return (complete_steps(run) or [0])[-1]

    def wait(condition: Callable[[], bool], what: str) -> None:
        def look() -> bool:
            ranks.check_running()
            return condition()

        wait_until(look, LIMIT, f"no {what} came", 0.001)

    if moment == "start":
        time.sleep(chance.random() * start_seconds)
        return
    goal = newest() + chance.randint(1, AIM)
    wait(lambda: newest() >= goal, "step")
    if moment == "step":
        time.sleep(chance.random() * 0.3)
    elif moment == "save":
        wait((checkpoints_of(run) / TEMPORARY).exists, "save")
        time.sleep(chance.random() * 0.03)
    else:
        before = newest()
        wait(lambda: newest() > before, "commit")  # the old ones go now
        time.sleep(chance.random() * 0.005)


def losses(run: Path) -> dict[int, float]:
    """The loss of each step, as last logged."""
    return {line["step"]: line["loss"] for line in metrics_of(run) if "loss" in line}


def contents(checkpoint: Path) -> dict[str, str]:
    """SHA-256 of every file of a checkpoint, read anew and held against the manifest."""
    files = read_manifest(checkpoint).files
    check_content(checkpoint, files)
    return {name: hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() for name in files}


# --- the other commands -----------------------------------------------------------------------------------------------


@dataclass
class Written:
    """What a command writes under a final name, in two variants that replace each other.

    Attributes:
        variants: the arguments of both. whole: what each leaves when nothing kills it, and how long it takes.
    """

    script: str
    variants: tuple[list[str], list[str]]
    output: Path
    whole: list[Any] = field(default_factory=list)
    seconds: float = 0.0

    def run(self, variant: int, workplace: Path, limit: float = LIMIT) -> commands.Ended:
        return commands.run(self.script, self.variants[variant], workplace, limit=limit)

    def prepare(self, workplace: Path) -> None:
        """Write both variants undisturbed."""
        for variant in (0, 1):
            ended = self.run(variant, workplace)
            assert ended.status == 0, ended.err
            self.seconds = ended.seconds
            self.whole.append(held(self.output))
        assert self.whole[0] != self.whole[1], f"{self.script} writes the same twice: {self.whole[0]}"

    def killed(self, workplace: Path, chance: random.Random) -> bool:
        """Kill the command at a random moment; what was there or is new is whole. Whether it was killed in time."""
        ended = self.run(chance.randrange(2), workplace, chance.random() * self.seconds * 1.1 / patience(1))
        assert ended.status in (None, 0), ended.err
        assert held(self.output) in self.whole, f"{self.output} is neither what it was nor what it was to be"
        return ended.status is None


def held(path: Path) -> dict[str, str]:
    """SHA-256 of every file at or below a path; of a JSON file its figures, without how long they took. Files that
    remember a corpus's hash hold times, and are left out."""
    files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    files = [each for each in files if each not in {content_path(path / split) for split in SPLITS}]
    return {str(each.relative_to(path.parent)): _digest(each) for each in files}


def _digest(file: Path) -> str:
    if file.suffix != ".json":
        return hashlib.sha256(file.read_bytes()).hexdigest()
    return json.dumps(_untimed(json.loads(file.read_text())), sort_keys=True)


def _untimed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _untimed(each) for key, each in value.items() if "second" not in key and "time" not in key}
    return value


def others(workplace: Path) -> Iterator[Written]:
    """The commands that write, on a small run of two checkpoints."""
    run, out = workplace / "runs" / "small", workplace / "out"
    out.mkdir()
    Ranks(workplace, settings(run, 4, **{"zero_tp.model.n_embd": 64})).finish()
    lines = [json.dumps({"text": f"Line {number}: " + "a few words of text. " * 20}) for number in range(400)]
    (workplace / "lines.jsonl").write_text("\n".join(lines))
    prepare = ["--input", "lines.jsonl", "--tokenizer", "data/tokenizer", "--output", "out/data", "--overwrite"]
    yield Written("launch/prepare_data.py", (prepare, [*prepare, "--seed", "2"]), out / "data")
    steps = [str(step_directory(run, step)) for step in (3, 4)]
    first, second = (["to-hf", step, "--output", "out/export", "--overwrite"] for step in steps)
    yield Written("launch/convert.py", (first, second), out / "export")
    figures = ["--tasks", "perplexity", "--data", "perplexity=data/validation.jsonl", "--output", "out/figures.json"]
    first, second = (["--model", step, *figures, "--limit", "4"] for step in steps)
    yield Written("eval/zero_shot.py", (first, second), out / "figures.json")


# --- all together -----------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="how often to kill (default: 20)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    os.environ.update(environment())
    importlib.import_module("tests.support.preloaded")
    folder = Path(tempfile.mkdtemp(prefix="zero_tp-kills-"))  # no TemporaryDirectory: a fork's end would remove it
    try:
        kill_and_compare(furnish(folder), options.kills, random.Random(options.seed))
    finally:
        shutil.rmtree(folder)


def kill_and_compare(workplace: Path, kills: int, chance: random.Random) -> None:
    """Kill as often, then finish everything and compare."""
    counted, inside = Counter[str](), 0
    whole, killed = (workplace / "runs" / name for name in ("whole", "killed"))
    written = list(others(workplace))
    for each in written:
        each.prepare(workplace)
    begun = time.monotonic()
    Ranks(workplace, settings(killed, 1)).finish()
    start_seconds = (time.monotonic() - begun) / patience(1)
    while sum(counted.values()) < kills:
        if chance.random() >= TRAINING:
            command = chance.choice(written)
            if not command.killed(workplace, chance):
                continue  # it was faster
            what = command.script
        else:
            moment, background = chance.choice(MOMENTS), chance.random() < 0.5
            ranks = Ranks(workplace, settings(killed, 10**6, **{"zero_tp.checkpoint.async": background}))
            wait_for(moment, ranks, killed, chance, start_seconds)
            ranks.kill(chance)
            inside += (checkpoints_of(killed) / TEMPORARY).exists()
            contents(step_directory(killed, complete_steps(killed)[-1]))
            what = f"{moment}, saving in the {'background' if background else 'foreground'}"
        counted[what] += 1
        print(f"kill {sum(counted.values())}: {what}", flush=True)
    last = -(-(complete_steps(killed)[-1] + 3) // EVERY) * EVERY  # a step that is skipped
    for run in (killed, whole):
        Ranks(workplace, settings(run, last, **{"zero_tp.checkpoint.interval": last})).finish()
    assert losses(killed) == losses(whole) and len(losses(whole)) > 1, (losses(killed), losses(whole))
    assert contents(step_directory(killed, last)) == contents(step_directory(whole, last))
    for each in written:
        for variant in (0, 1):  # each goes on from what it had read when it was killed, and leaves nothing of it
            assert each.run(variant, workplace).status == 0 and held(each.output) == each.whole[variant]
    left = {each.name for each in (workplace / "out").iterdir()} - {each.output.name for each in written}
    assert not left, f"left behind: {sorted(left)}"
    print(", ".join(f"{count} × {what}" for what, count in sorted(counted.items())))
    print(f"{sum(counted.values())} kills, {inside} of them left a save half written")
    print(f"{len(losses(whole))} losses and the last checkpoint are equal to those of a run that was never killed")


if __name__ == "__main__":
    main()
