"""Kill commands at random points, finish them, and compare their output with that of commands that
were never killed.

    python -m tests.tools.kills [--kills 20] [--seed N]

Each kill draws a command: a training run, an export, prepare_data or an evaluation. A run is killed
at its start, in a step, in a save or in the pruning after one: one rank, or all of them as when the
machine fails. After each kill, what has its final name must be complete. At the end the run is
started until it is done: every logged loss and the last checkpoint must equal those of an
undisturbed run bit for bit, and so must the outputs of the other commands. The run skips every
fifth step, its last one included. A kill takes about 5 seconds on an idle machine. Not covered
here: kills under real launchers (tests/run/process/test_promises.py), starts with another
accumulation (tests/run/checkpoint/test_reshape.py).
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
from zero_tp.data.indexed import content_path
from zero_tp.run.checkpoint.directory import (
    TEMPORARY,
    check_content,
    checkpoints_directory,
    complete_steps,
    read_manifest,
    step_directory,
)
from zero_tp.tools.corpus.show import SPLITS

WORLD, AIM = 2, 3
MOMENTS = ("start", "step", "save", "prune")
TRAINING = 0.6  # the share of kills that training gets
LIMIT = 180.0
END_SECONDS = 5.0  # until the ranks that are left are killed, as a launcher does


# --- a training run -------------------------------------------------------------------------------


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
    words = [
        word for key, value in values.items() for word in ("--set", f"{key}={json.dumps(value)}")
    ]
    return ["--deepspeed_config", "small.json", "--output-dir", str(run), *words]


class Ranks:
    """The ranks of a start, forks of this process: what they import costs nothing."""

    def __init__(self, workplace: Path, arguments: list[str]) -> None:
        self.errors = workplace / "errors.txt"
        self.errors.write_bytes(b"")
        world = {
            "WORLD_SIZE": str(WORLD),
            "LOCAL_WORLD_SIZE": str(WORLD),
            "MASTER_ADDR": "127.0.0.1",
        }
        world |= {"MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
        self.processes = []
        for rank in map(str, range(WORLD)):
            variables = {**world, "RANK": rank, "LOCAL_RANK": rank}
            child = commands.start(SCRIPT, arguments, workplace, variables, self.errors)
            self.processes.append(psutil.Process(child))

    def check_running(self) -> None:
        running = all(
            each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in self.processes
        )
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


def wait_for(
    moment: str, ranks: Ranks, run: Path, chance: random.Random, start_seconds: float
) -> None:
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
        wait((checkpoints_directory(run) / TEMPORARY).exists, "save")
        time.sleep(chance.random() * 0.03)
    else:
        before = newest()
        wait(lambda: newest() > before, "commit")  # the old ones go now
        time.sleep(chance.random() * 0.005)


def losses(run: Path) -> dict[int, float]:
    """Return the loss of each step, as last logged."""
    return {line["step"]: line["loss"] for line in metrics_of(run) if "loss" in line}


def checkpoint_digests(checkpoint: Path) -> dict[str, str]:
    """Return the SHA-256 of every file of a checkpoint, after a check against its manifest."""
    files = read_manifest(checkpoint).files
    check_content(checkpoint, files)
    return {name: hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() for name in files}


# --- the other commands ---------------------------------------------------------------------------


@dataclass
class WritingCommand:
    """A command that replaces its output, in two variants.

    Attributes:
        variants: the arguments of both.
        undisturbed: the digests of what each writes when nothing kills it.
        seconds: how long that takes.
    """

    script: str
    variants: tuple[list[str], list[str]]
    output: Path
    undisturbed: list[Any] = field(default_factory=list)
    seconds: float = 0.0

    def run(self, variant: int, workplace: Path, limit: float = LIMIT) -> commands.Ended:
        return commands.run(self.script, self.variants[variant], workplace, limit=limit)

    def prepare(self, workplace: Path) -> None:
        """Write both variants undisturbed."""
        for variant in (0, 1):
            ended = self.run(variant, workplace)
            assert ended.status == 0, ended.err
            self.seconds = ended.seconds
            self.undisturbed.append(file_digests(self.output))
        assert self.undisturbed[0] != self.undisturbed[1], (
            f"{self.script} writes the same twice: {self.undisturbed[0]}"
        )

    def kill(self, workplace: Path, chance: random.Random) -> bool:
        """Kill the command at a random moment and check its output → whether it was killed
        before its end.
        """
        ended = self.run(
            chance.randrange(2), workplace, chance.random() * self.seconds * 1.1 / patience(1)
        )
        assert ended.status in (None, 0), ended.err
        assert file_digests(self.output) in self.undisturbed, (
            f"{self.output} is neither what it was nor what it was to be"
        )
        return ended.status is None


def file_digests(path: Path) -> dict[str, str]:
    """Return the SHA-256 of every file at or below a path; of a JSON file its fields without times.

    Files that remember a corpus's hash hold times, and are left out.
    """
    files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    files = [each for each in files if each not in {content_path(path / split) for split in SPLITS}]
    return {str(each.relative_to(path.parent)): _digest(each) for each in files}


def _digest(file: Path) -> str:
    if file.suffix != ".json":
        return hashlib.sha256(file.read_bytes()).hexdigest()
    return json.dumps(_untimed(json.loads(file.read_text())), sort_keys=True)


def _untimed(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: _untimed(each)
            for key, each in value.items()
            if "second" not in key and "time" not in key
        }
    return value


def writing_commands(workplace: Path) -> Iterator[WritingCommand]:
    """Prepare a corpus, export and evaluate checkpoints of a small run."""
    run, out = workplace / "runs" / "small", workplace / "out"
    out.mkdir()
    Ranks(workplace, settings(run, 4, **{"zero_tp.model.n_embd": 64})).finish()
    lines = [
        json.dumps({"text": f"Line {number}: " + "a few words of text. " * 20})
        for number in range(400)
    ]
    (workplace / "lines.jsonl").write_text("\n".join(lines))
    prepare = [
        "--input",
        "lines.jsonl",
        "--tokenizer",
        "data/tokenizer",
        "--output",
        "out/data",
        "--overwrite",
    ]
    yield WritingCommand(
        "launch/prepare_data.py", (prepare, [*prepare, "--seed", "2"]), out / "data"
    )
    steps = [str(step_directory(run, step)) for step in (3, 4)]
    first, second = (["to-hf", step, "--output", "out/export", "--overwrite"] for step in steps)
    yield WritingCommand("launch/convert.py", (first, second), out / "export")
    figures = [
        "--tasks",
        "perplexity",
        "--data",
        "perplexity=data/validation.jsonl",
        "--output",
        "out/figures.json",
    ]
    first, second = (["--model", step, *figures, "--limit", "4"] for step in steps)
    yield WritingCommand("eval/zero_shot.py", (first, second), out / "figures.json")


# --- all together ---------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20, help="how often to kill (default: 20)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    os.environ.update(environment())
    importlib.import_module("tests.support.preloaded")
    # No TemporaryDirectory: a fork's end would remove it.
    folder = Path(tempfile.mkdtemp(prefix="zero_tp-kills-"))
    try:
        kill_and_compare(furnish(folder), options.kills, random.Random(options.seed))
    finally:
        shutil.rmtree(folder)


def kill_and_compare(workplace: Path, kills: int, chance: random.Random) -> None:
    """Kill so many times, then run everything to its end and compare."""
    counted, inside = Counter[str](), 0
    undisturbed, killed = (workplace / "runs" / name for name in ("undisturbed", "killed"))
    writers = list(writing_commands(workplace))
    for each in writers:
        each.prepare(workplace)
    begin = time.monotonic()
    Ranks(workplace, settings(killed, 1)).finish()
    start_seconds = (time.monotonic() - begin) / patience(1)
    while sum(counted.values()) < kills:
        if chance.random() >= TRAINING:
            command = chance.choice(writers)
            if not command.kill(workplace, chance):
                continue  # it was faster
            what = command.script
        else:
            moment, background = chance.choice(MOMENTS), chance.random() < 0.5
            ranks = Ranks(
                workplace, settings(killed, 10**6, **{"zero_tp.checkpoint.async": background})
            )
            wait_for(moment, ranks, killed, chance, start_seconds)
            ranks.kill(chance)
            inside += (checkpoints_directory(killed) / TEMPORARY).exists()
            checkpoint_digests(step_directory(killed, complete_steps(killed)[-1]))
            what = f"{moment}, saving in the {'background' if background else 'foreground'}"
        counted[what] += 1
        print(f"kill {sum(counted.values())}: {what}", flush=True)
    last = -(-(complete_steps(killed)[-1] + 3) // EVERY) * EVERY  # a step that is skipped
    for run in (killed, undisturbed):
        Ranks(workplace, settings(run, last, **{"zero_tp.checkpoint.interval": last})).finish()
    assert losses(killed) == losses(undisturbed) and len(losses(undisturbed)) > 1, (
        losses(killed),
        losses(undisturbed),
    )
    assert checkpoint_digests(step_directory(killed, last)) == checkpoint_digests(
        step_directory(undisturbed, last)
    )
    for each in writers:
        # Each goes on from what it had read when it was killed, and leaves nothing of it.
        for variant in (0, 1):
            assert (
                each.run(variant, workplace).status == 0
                and file_digests(each.output) == each.undisturbed[variant]
            )
    left = {each.name for each in (workplace / "out").iterdir()} - {
        each.output.name for each in writers
    }
    assert not left, f"left behind: {sorted(left)}"
    print(", ".join(f"{count} × {what}" for what, count in sorted(counted.items())))
    print(f"{sum(counted.values())} kills, {inside} of them left a save half written")
    print(
        f"{len(losses(undisturbed))} losses and the last checkpoint are equal to those of a run "
        "that was never killed"
    )


if __name__ == "__main__":
    main()
