"""Kills commands at random points of everything that they do, and compares what is left with what was never killed.

    python -m tests.tools.kills [--kills 20] [--seed N]

Each time a moment of a training run (its start, a step, a save, the pruning after one), of an export, of prepare_data
or of an evaluation is drawn, and a process gets SIGKILL there: in a run a rank, all ranks as when the machine goes, or
DeepSpeed's launch.py of a real launch. What is under its final name is then whole. The run is started again until it is
done: every logged loss and the last checkpoint must equal those of the run that went through, bit for bit; what the
other commands write at last, what they wrote undisturbed. Every fifth step of a run is skipped, its last one among
them. A second run takes another accumulation at each start; its losses must be those of an undisturbed run within
rounding. About 5 seconds a kill on an idle machine, 15 of a launch; it needs nobody, and is not part of the test
command.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import json
import math
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.support.launched import environment, free_port, furnish, launch, metrics_of
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
TRAINING, LAUNCHES = 0.6, 0.05
"""The share of kills that training gets, and of them those under a real launcher."""
LIMIT = 180.0
END_SECONDS = 5.0  # until the ranks that are left are killed, as a launcher does


# --- a training run ---------------------------------------------------------------------------------------------------


SCRIPT = "tests/support/skipping_rank.py"
ROWS = 4  # of a global batch
ACCUMULATIONS = (1, 2, 4)
LEAST, FARTHER = 1e-5, 100.0


def settings(run: Path, steps: int, *, accumulation: int | None = None, **changes: Any) -> list[str]:
    """The words of a start. With an accumulation there is no dropout, which draws for each micro-batch."""
    if accumulation is not None:
        sizes = {"gradient_accumulation_steps": accumulation, "train_micro_batch_size_per_gpu": ROWS // accumulation}
        changes |= sizes | {f"zero_tp.model.{name}_pdrop": 0.0 for name in ("embd", "attn", "resid")}
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


@dataclass
class Ranks:
    """The ranks of a start: forks of this process, or children of DeepSpeed's launcher."""

    processes: list[psutil.Process]
    launcher: subprocess.Popen[bytes] | None = None
    launchers: list[psutil.Process] = field(default_factory=list)
    errors: Path | None = None

    def running(self) -> bool:
        if self.launcher is not None:
            return self.launcher.poll() is None
        return all(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in self.processes)

    def kill(self, target: str, chance: random.Random) -> None:
        """Kill a rank, the launcher's launch.py, or everything, and see to it that nothing is left."""
        everyone = [*self.launchers, *self.processes]
        victims = {"rank": [chance.choice(self.processes)], "launch.py": self.launchers[-1:], "machine": everyone}[
            target
        ]
        _signal(victims, signal.SIGKILL)
        if self.launcher is None:
            _signal(everyone, signal.SIGTERM)
            _gone(self.processes, END_SECONDS)
            _signal(everyone, signal.SIGKILL)
        alive = _gone(everyone, 60)
        assert not alive, f"left behind: {alive}"
        if self.launcher is not None:
            self.launcher.wait(patience(LIMIT))

    def finished(self) -> None:
        """Wait until the run has ended by itself, as it should."""
        for process in self.processes:
            _, status = os.waitpid(process.pid, 0)
            assert status == 0, self.errors.read_text() if self.errors is not None else status


def _signal(processes: list[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _gone(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Wait for the processes' ends → those that are there still."""
    _, alive = psutil.wait_procs(processes, timeout=patience(seconds))
    return [each for each in alive if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


def start(workplace: Path, arguments: list[str]) -> Ranks:
    """Start the ranks as forks: what they import costs nothing."""
    port, errors = str(free_port()), workplace / "errors.txt"
    errors.write_bytes(b"")
    processes = []
    for rank in range(WORLD):
        of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD)}
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
        child = commands.start(SCRIPT, arguments, workplace, {**of_rank, **where}, errors)
        processes.append(psutil.Process(child))
    return Ranks(processes, errors=errors)


def start_launched(workplace: Path, arguments: list[str]) -> Ranks:
    """Start the ranks by DeepSpeed's launcher, and find them."""
    launcher = subprocess.Popen(
        [*launch(WORLD, script=SCRIPT), *arguments],
        cwd=workplace,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=(workplace / "errors.txt").open("wb"),
    )
    found = Ranks([], launcher, errors=workplace / "errors.txt")

    def complete() -> bool:
        found.processes, found.launchers = [], []
        for process in psutil.Process(launcher.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                words = " ".join(process.cmdline())
                if "deepspeed.launcher.launch" in words:
                    found.launchers.append(process)
                elif process.parent() in found.launchers and SCRIPT in words:
                    found.processes.append(process)
        return len(found.processes) == WORLD

    wait_until(complete, LIMIT, "the launcher starts no ranks", 0.2)
    return found


def wait_for(moment: str, ranks: Ranks, run: Path, chance: random.Random, start_seconds: float) -> None:
    """Wait for a random point of the moment; assertion: the run has not ended by itself."""
    newest = lambda: complete_steps(run)[-1] if complete_steps(run) else 0  # noqa: E731

    def arrives(there: Callable[[], object], what: str) -> None:
        def look() -> bool:
            assert ranks.running(), f"the run ended by itself: {ranks.errors.read_text() if ranks.errors else ''}"
            return bool(there())

        wait_until(look, LIMIT, f"no {what} came", 0.001)

    if moment == "start":
        time.sleep(chance.random() * start_seconds)
        return
    begun = newest()
    arrives(lambda: newest() >= begun + chance.randint(1, AIM), "step")
    if moment == "step":
        time.sleep(chance.random() * 0.3)
    elif moment == "save":
        arrives((checkpoints_of(run) / TEMPORARY).exists, "save")
        time.sleep(chance.random() * 0.03)
    else:
        before = newest()
        arrives(lambda: newest() > before, "commit")  # the old ones go now
        time.sleep(chance.random() * 0.005)


def losses(run: Path) -> dict[int, float]:
    """The loss of each step, as last logged."""
    return {line["step"]: line["loss"] for line in metrics_of(run) if "loss" in line}


def compare(found: dict[int, float], undisturbed: list[dict[int, float]]) -> int:
    """Compare the losses of a run with those of one that was never killed, bit for bit; or with those of several.

    Several differ in the order of their sums alone, which training amplifies: measured, equal to seven digits for 50
    steps, to two after 80. At each step a run may be FARTHER times as far as they have been from each other by then.

    Returns:
        The number of losses.
    """
    apart, wrong = 0.0, {}
    assert all(found.keys() == each.keys() for each in undisturbed) and found
    for step, loss in sorted(found.items()):
        expected = [each[step] for each in undisturbed]
        apart = max(apart, max(expected) / min(expected) - 1)
        allowed = max(LEAST, FARTHER * apart) if len(expected) > 1 else 0.0
        if not math.isclose(loss, expected[0], rel_tol=allowed, abs_tol=0.0):
            wrong[step] = (loss, expected)
    assert not wrong, wrong
    return len(found)


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
    start(workplace, settings(run, 4, **{"zero_tp.model.n_embd": 64})).finished()
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
    whole, killed, moved = (workplace / "runs" / name for name in ("whole", "killed", "moved"))
    written = list(others(workplace))
    for each in written:
        each.prepare(workplace)
    begun = time.monotonic()
    start(workplace, settings(killed, 1)).finished()
    start_seconds = (time.monotonic() - begun) / patience(1)
    start(workplace, settings(moved, 1, accumulation=ACCUMULATIONS[0])).finished()
    while sum(counted.values()) < kills:
        if chance.random() >= TRAINING:
            command = chance.choice(written)
            if not command.killed(workplace, chance):
                continue  # it was faster
            what = command.script
        else:
            moment, background = chance.choice(MOMENTS), chance.random() < 0.5
            run, accumulation = chance.choice([(killed, None), (moved, chance.choice(ACCUMULATIONS))])
            arguments = settings(run, 10**6, accumulation=accumulation, **{"zero_tp.checkpoint.async": background})
            launched = chance.random() < LAUNCHES
            ranks = (start_launched if launched else start)(workplace, arguments)
            wait_for(moment, ranks, run, chance, start_seconds)
            ranks.kill(chance.choice(("rank", "machine", *(["launch.py"] if launched else []))), chance)
            inside += (checkpoints_of(run) / TEMPORARY).exists()
            contents(step_directory(run, complete_steps(run)[-1]))
            what = f"{moment}, saving in the {'background' if background else 'foreground'}"
            what += f", {accumulation} micro-batches" if accumulation else ""
            what += " of a launch" if launched else ""
        counted[what] += 1
        print(f"kill {sum(counted.values())}: {what}", flush=True)
    compared = 0
    steady: dict[Path, int | None] = {workplace / "runs" / f"steady_{count}": count for count in ACCUMULATIONS}
    for one, others_of_it in ((killed, {whole: None}), (moved, steady)):
        last = -(-(complete_steps(one)[-1] + 3) // EVERY) * EVERY  # a step that is skipped
        for run, accumulation in ({one: next(iter(others_of_it.values()))} | others_of_it).items():
            changes = {"zero_tp.checkpoint.interval": last}
            start(workplace, settings(run, last, accumulation=accumulation, **changes)).finished()
        compared += compare(losses(one), [losses(run) for run in others_of_it])
        if one is killed:
            assert contents(step_directory(one, last)) == contents(step_directory(whole, last))
    for each in written:
        for variant in (0, 1):  # each goes on from what it had read when it was killed, and leaves nothing of it
            assert each.run(variant, workplace).status == 0 and held(each.output) == each.whole[variant]
    left = {each.name for each in (workplace / "out").iterdir()} - {each.output.name for each in written}
    assert not left, f"left behind: {sorted(left)}"
    print(", ".join(f"{count} × {what}" for what, count in sorted(counted.items())))
    print(f"{sum(counted.values())} kills, {inside} of them left a save half written")
    print(f"{compared} losses and the last checkpoint are equal to those of runs that were never killed")


if __name__ == "__main__":
    main()
