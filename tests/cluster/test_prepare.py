"""Slurm's jobs on two machines, and Ray's tasks on one, prepare the same corpus as one process."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.nodes import SHARED, Rack
from tests.cluster.slurm import VARIABLES
from tests.support.corpora import content_of, texts_of, write_jsonl
from tests.support.launched import ROOT
from tests.support.waits import wait_until
from zero_tp.data import PrepareSettings, prepare

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

EXECUTOR = {"partition": "all", "time": "1:00:00", "mem_per_cpu_gb": 1}


SCRIPT = [
    sys.executable,
    str(ROOT / "launch/prepare_cluster.py"),
    "--tasks",
    "3",
    "--validation-fraction",
    "0.1",
]


def prepare_here(folder: Path, deduplicate: bool) -> tuple[list[Path], Path, list[str]]:
    """Write `folder`/one: without deduplication by one process, else by datatrove's local executor.

    Returns:
        The inputs, the tokenizer, and the command that is to write the same.
    """
    texts = texts_of(random.Random(1), 200)
    inputs = [write_jsonl(folder / f"{i}.jsonl", texts[i::4]) for i in range(4)]
    tokenizer = (
        prepare(inputs[:1], folder / "first", PrepareSettings("bpe:300")).output / "tokenizer"
    )
    script = [*SCRIPT, *(("--min-tokens", "5") if deduplicate else ("--no-deduplicate",))]
    if deduplicate:
        run_here(script, inputs, tokenizer, folder / "one")
    else:
        prepare(inputs, folder / "one", PrepareSettings(str(tokenizer), 0.1))
    return inputs, tokenizer, script


def run_here(
    script: list[str], inputs: list[Path], tokenizer: Path, output: Path, *more: str
) -> None:
    words = [
        *script,
        "--input",
        *map(str, inputs),
        "--tokenizer",
        str(tokenizer),
        "--output",
        str(output),
        *more,
    ]
    subprocess.run(
        words, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True, capture_output=True
    )


@pytest.mark.parametrize("deduplicate", [False, True])
def test_ray_tasks_write_the_bytes_of_this_machine(tmp_path: Path, deduplicate: bool) -> None:
    assert importlib.util.find_spec("ray"), "pip install ray"
    inputs, tokenizer, script = prepare_here(tmp_path, deduplicate)
    run_here(script, inputs, tokenizer, tmp_path / "ray", "--executor", "ray")
    assert content_of(tmp_path / "ray") == content_of(tmp_path / "one")


@pytest.mark.parametrize("deduplicate", [False, True])
def test_slurm_jobs_write_the_bytes_of_this_machine(
    slurm: Rack, workplace: Path, tmp_path: Path, deduplicate: bool
) -> None:
    first, folder = slurm.nodes[0], workplace / f"prepared_{deduplicate}"
    folder.mkdir()
    inputs, tokenizer, script = prepare_here(tmp_path, deduplicate)
    for path in inputs:
        shutil.copy(path, folder)
    shutil.copytree(tokenizer, folder / "tokenizer")
    seen = f"{SHARED}/{folder.name}"
    words = [
        "--input",
        f"{seen}/*.jsonl",
        "--tokenizer",
        f"{seen}/tokenizer",
        "--output",
        f"{seen}/out",
    ]
    words += ["--executor", "slurm", "--executor-arguments", json.dumps(EXECUTOR)]
    queued = first.run(*script, *words, variables=VARIABLES)
    assert queued.returncode == 0 and "queued" in queued.stdout, queued.stdout

    def jobs() -> str:
        return first.run("squeue", "-h", "-l", variables=VARIABLES).stdout

    def logs() -> str:
        return "\n".join([jobs(), *(path.read_text() for path in folder.rglob("slurm_logs/*"))])

    wait_until(lambda: (folder / "out/report.json").exists() or not jobs(), 180, logs, 1)
    assert (folder / "out/report.json").exists(), logs()
    assert content_of(folder / "out") == content_of(tmp_path / "one")
    assert len(list(folder.glob("out.work/*/parts/0000[0-2]"))) == 3
