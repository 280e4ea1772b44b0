"""What the first session on a device measures, in two parts that can be cut and repeated.

    python -m benchmarks.device --full [--before DIR] [--part A|B] --output DIR
    python -m benchmarks.device --full --tiny --output DIR      # the same code on CPU

Part A: versions, attention's kernel, clocks; then a dense model and one with experts, each trained
in turns by an older tree (`--before`), this one and transformers' class, and a profile of a step of
each. Part B: the tests of tests/cuda that compare runs, micro-batch 16, pieces of a step.

Each result is written to DIR/device-full.json as it comes; a second run skips what is there and
repeats what failed. A part ends after `--seconds`, and says what it left out.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.dated import ROOT
from benchmarks.device import ROWS, settings

FILE = "device-full.json"
MODELS = ("1.3b", "olmoe-6-layers")
STEPS = 10
MEMORY_MARGIN = 1.1
CACHE = Path(tempfile.gettempdir(), "zero_tp_compile_cache")
HERE = Path(__file__).resolve().parent
PARITY = (
    "gpt2 ZeRO-1 none no offload × 3 bf16",
    "grouped queries ZeRO-2 selective no offload × 3 fp32 compiled",
    "experts ZeRO-3 none no offload × 1 bf16 compiled",
)
PARITY_TEST = "tests/cuda/test_training.py::test_a_run_trains_the_plain_model"
TESTS = {
    # pytest escapes what is not ASCII.
    **{
        f"parity: {name}": f"{PARITY_TEST}[{name.encode('unicode_escape').decode()}]"
        for name in PARITY
    },
    "a NaN step": "tests/cuda/test_nonfinite.py",
    "stop and resume": "tests/cuda/test_resume.py",
    "several ranks on one device": "tests/cuda/test_one_device.py",
}


class LeftOut(Exception):
    """The part's time ended before this result came."""


class Item(NamedTuple):
    """A result to measure: `measure` takes the seconds that are left."""

    name: str
    measure: Callable[[float], dict[str, Any]]


class Results:
    """The file of results, by name.

    Attributes:
        records: a failed one has "failed", its reason.
    """

    def __init__(self, directory: Path):
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / FILE
        self.records: dict[str, dict[str, Any]] = {}
        if self._path.exists():
            self.records = json.loads(self._path.read_text())

    def has(self, name: str) -> bool:
        """Return whether a result is there; a failed one is measured again."""
        return name in self.records and "failed" not in self.records[name]

    def add(self, name: str, record: dict[str, Any]) -> None:
        """Add a result to the file, which is whole at any moment."""
        self.records[name] = record
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(self.records, indent=1, ensure_ascii=False) + "\n")
        part.replace(self._path)


def environment(tree: Path, options: argparse.Namespace) -> dict[str, str]:
    """Return the variables of a process that runs a tree's code and writes nothing into it."""
    # What is installed elsewhere, but not this tree before the older one.
    others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = [str(tree), *(path for path in others if path and Path(path).resolve() != ROOT)]
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONPYCACHEPREFIX": str(CACHE / "bytecode"),
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(CACHE)),
    }
    return variables | (CPU if options.tiny else {})


CPU = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "ZERO_TP_TESTED_DEVICE": "cpu"}


def run_python(
    words: list[str], limit: float, tree: Path, options: argparse.Namespace
) -> subprocess.CompletedProcess[str]:
    """Run Python in a directory of its own.

    Raises:
        LeftOut: it did not end within `limit` seconds; nothing of it still runs.
    """
    with tempfile.TemporaryDirectory() as directory:
        process = subprocess.Popen(
            [sys.executable, "-P", *words],
            cwd=directory,
            env=environment(tree, options),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            output, errors = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            raise LeftOut from None
        finally:
            end_session(process)
    return subprocess.CompletedProcess(words, process.returncode, output, errors)


def end_session(process: subprocess.Popen[str]) -> None:
    """Kill a process and what it has started."""
    family = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
    for child in family:  # ranks have sessions of their own
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    with contextlib.suppress(ProcessLookupError):  # all have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def json_of(
    words: list[str], tree: Path, options: argparse.Namespace, limit: float
) -> dict[str, Any]:
    """Return what a program prints as its last line, or why it failed."""
    done = run_python(words, limit, tree, options)
    if done.returncode:
        return {"failed": reason(done.stderr), "output": done.stderr[-3000:]}
    record: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return record


def reason(errors: str) -> str:
    """Return the last line of an error's traceback."""
    lines = re.findall(r"^(?:\[rank\d+\]: ?)?([\w.]*Error\b.*)", errors, re.MULTILINE)
    return lines[-1] if lines else (errors.strip().splitlines() or ["no output"])[-1]


def test_result(nodes: str, options: argparse.Namespace, limit: float) -> dict[str, Any]:
    """Run tests of tests/cuda."""
    node = str(ROOT / nodes)
    words = ["-m", "pytest", "-m", "cuda", "-s", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    done = run_python(
        [*words, f"--rootdir={ROOT}", f"-c{ROOT / 'setup.cfg'}", node], limit, ROOT, options
    )
    record = {"output": (done.stdout + done.stderr)[-3000:]}
    return record if done.returncode == 0 else {"failed": reason(done.stdout), **record}


# ---- contenders ----------------------------------------------------------------------------------


class Contender:
    """A process of benchmarks/device_contender.py. It imports at once, and builds when asked."""

    def __init__(self, words: list[str], tree: Path, options: argparse.Namespace):
        self._directory = tempfile.TemporaryDirectory()
        self._log = Path(self._directory.name) / "log"
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(HERE / "device_contender.py"), *words],
            cwd=self._directory.name,
            env=environment(tree, options),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=os.open(self._log, os.O_WRONLY | os.O_CREAT),
            text=True,
            start_new_session=True,
        )

    def ask(self, request: str, limit: float) -> dict[str, Any]:
        """Return the answer, or why the process ended instead.

        Raises:
            LeftOut: it takes longer than `limit` seconds.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print(request, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            return self._failure()
        ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, limit))
        if not ready:
            raise LeftOut
        line = self._process.stdout.readline()
        if not line:
            return self._failure()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failure(self) -> dict[str, Any]:
        self._process.wait()
        errors = self._log.read_text()
        return {"failed": reason(errors), "output": errors[-3000:]}

    def close(self) -> None:
        end_session(self._process)
        self._directory.cleanup()


class Pool:
    """The contenders of a model. They stay alive between their turns while memory allows."""

    def __init__(self, model: str, options: argparse.Namespace):
        self._options = options
        self._files = tempfile.TemporaryDirectory()
        self._config = Path(self._files.name) / "config.json"
        self._config.write_text(json.dumps(settings(ROWS[model], options)))
        trees = {"this": ROOT, "transformers": ROOT}
        before = {} if options.before is None else {"before": options.before.resolve()}
        self.trees: dict[str, Path] = before | trees
        self._alive: dict[str, Contender] = {}
        self._peak_gib = 0.0

    def start(self, name: str, *changes: str) -> Contender:
        """Return a contender, started if it does not run."""
        if name not in self._alive:
            # On CPU the compiler would take most of the time.
            changes += ("zero_tp.compile=false",) * self._options.tiny
            words = [str(self._config), *(f"--set={change}" for change in changes)]
            words += ["--transformers"] * (name == "transformers")
            self._alive[name] = Contender(words, self.trees[name], self._options)
        return self._alive[name]

    def stop(self, name: str) -> None:
        if name in self._alive:
            self._alive.pop(name).close()

    def turn(self, name: str, limit: float) -> dict[str, Any]:
        """Let a contender train; "kept" is whether it stays alive."""
        record = self.ask(name, f"time {self._options.steps}", limit)
        self._peak_gib = max(self._peak_gib, record.get("reserved_gib", 0.0))
        # Another of this size must fit beside it.
        needed = MEMORY_MARGIN * self._peak_gib
        record["kept"] = "failed" not in record and record.get("free_gib", needed) >= needed
        if not record["kept"]:
            self.stop(name)
        return record

    def ask(self, name: str, request: str, limit: float) -> dict[str, Any]:
        """Return a contender's answer; one that gives none is stopped."""
        if not self._alive:
            # All import while the first builds its engine.
            for other in self.trees:
                self.start(other)
        try:
            answer = self.start(name).ask(request, limit)
        except LeftOut:
            self.stop(name)
            raise
        if "failed" in answer:
            self.stop(name)
        return answer

    def close(self) -> None:
        for name in [*self._alive]:
            self.stop(name)
        self._files.cleanup()


def trained(model: str, results: Results, options: argparse.Namespace) -> Iterator[Item]:
    """Yield the turns and profiles of a model's contenders: a third round if all stay alive."""
    with closing(Pool(model, options)) as pool:
        for number in range(1, 4):
            turns = [f"{model}, {name}, round {number}" for name in pool.trees]
            earlier = [record for name, record in results.records.items() if model in name]
            if number == 3 and not all(record.get("kept", True) for record in earlier):
                return
            for name, turn in zip(pool.trees, turns, strict=True):
                # Before its turn, after which it may have to end.
                if number == 1:
                    yield Item(f"{model}, {name}, profile", partial(pool.ask, name, "profile"))
                yield Item(turn, partial(pool.turn, name))


def large_micro_batch(options: argparse.Namespace, limit: float) -> dict[str, Any]:
    """Train this tree with twice the row's samples."""
    model = MODELS[0]
    size = 2 * settings(ROWS[model], options)["train_micro_batch_size_per_gpu"]
    with closing(Pool(model, options)) as pool:
        pool.start("this", f"train_micro_batch_size_per_gpu={size}")
        return pool.turn("this", limit)


# ---- the parts -----------------------------------------------------------------------------------


def part_a(results: Results, options: argparse.Namespace) -> Iterator[Item]:
    """Yield the facts, then turns and profiles of each model."""
    facts = partial(json_of, ["-m", "benchmarks.device_facts"], ROOT, options)
    yield Item("versions, attention, clocks", facts)
    for model in MODELS:
        yield from trained(model, results, options)


def part_b(results: Results, options: argparse.Namespace) -> Iterator[Item]:
    """Yield the runs that are compared, then times; what comes last is cut first."""
    for name, nodes in TESTS.items():
        yield Item(name, partial(test_result, nodes, options))
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node=4", "--standalone"]
    words = [*launcher, "-m", "benchmarks.device_gloo"]
    yield Item("gloo's collectives", partial(json_of, words, ROOT, options))
    yield Item("micro-batch 16", partial(large_micro_batch, options))
    before = {} if options.before is None else {"before": options.before.resolve()}
    for name, tree in (before | {"this": ROOT}).items():
        words = [str(HERE / "device_pieces.py"), name]
        yield Item(f"pieces, {name}", partial(json_of, words, tree, options))


PARTS = {"A": part_a, "B": part_b}


def line_of(name: str, record: dict[str, Any]) -> str:
    if "failed" in record:
        return f"{name:<70}failed: {record['failed']}"
    figures = ""
    if "milliseconds" in record:
        times = record["milliseconds"]
        figures = f"{statistics.median(times):.1f} ms ({min(times):.1f} to {max(times):.1f})"
    elif "busy_ms" in record:
        figures = f"busy {record['busy_ms']:.1f} of {record['span_ms']:.1f} ms"
    return f"{name:<70}{figures or 'done'}"


def run_part(part: str, results: Results, options: argparse.Namespace) -> list[str]:
    """Measure what a part lacks until its time ends; return what is left out."""
    end = time.monotonic() + options.seconds
    left_out = []
    for item in PARTS[part](results, options):
        if results.has(item.name):
            continue
        begin = time.monotonic()
        if begin >= end:
            left_out.append(item.name)
            continue
        try:
            record = item.measure(end - begin)
        except LeftOut:
            left_out.append(item.name)
            continue
        record["seconds"] = time.monotonic() - begin
        results.add(item.name, record)
        print(line_of(item.name, record), flush=True)
    return left_out


def run_full(options: argparse.Namespace) -> None:
    """Run the parts; the exit status is 1 if something failed or was left out."""
    results = Results(options.output)
    parts = [options.part] if options.part else [*PARTS]
    left_out = list(itertools.chain(*(run_part(part, results, options) for part in parts)))
    failed = [name for name, record in results.records.items() if "failed" in record]
    for words, names in (("left out, run again for", left_out), ("failed", failed)):
        if names:
            print(f"{words}: {'; '.join(names)}")
    sys.exit(1 if left_out or failed else 0)
