"""Slurm's jobs on two machines prepare the same corpus as one machine."""

from __future__ import annotations

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


@pytest.mark.parametrize("deduplicate", [False, True])
def test_slurm_jobs_write_the_bytes_of_this_machine(
    slurm: Rack, workplace: Path, tmp_path: Path, deduplicate: bool
) -> None:
    """Without deduplication those of one process, else those of datatrove's local executor."""
    first, texts, folder = slurm.nodes[0], texts_of(random.Random(1), 200), workplace / f"prepared_{deduplicate}"
    folder.mkdir()
    inputs = [write_jsonl(tmp_path / f"{i}.jsonl", texts[i::4]) for i in range(4)]
    tokenizer = prepare(inputs[:1], tmp_path / "first", PrepareSettings("bpe:300")).output / "tokenizer"
    for path in inputs:
        shutil.copy(path, folder)
    shutil.copytree(tokenizer, folder / "tokenizer")
    script = [sys.executable, str(ROOT / "launch/prepare_cluster.py"), "--tasks", "3", "--validation-fraction", "0.1"]
    script += ["--min-tokens", "5"] if deduplicate else ["--no-deduplicate"]
    if deduplicate:
        here = [*script, "--input", *map(str, inputs), "--tokenizer", str(tokenizer), "--output", str(tmp_path / "one")]
        subprocess.run(here, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True, capture_output=True)
    else:
        prepare(inputs, tmp_path / "one", PrepareSettings(str(tokenizer), 0.1))

    seen = f"{SHARED}/{folder.name}"
    words = ["--input", f"{seen}/*.jsonl", "--tokenizer", f"{seen}/tokenizer", "--output", f"{seen}/out"]
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
