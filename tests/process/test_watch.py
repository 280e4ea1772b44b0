"""A rank that hangs or is slow in real steps is named, through the job's store."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from tests.support.launched import environment, furnish, launch, said
from tests.support.pools import Pools
from tests.support.replicas import replica, rows
from tests.support.waits import patience, wait_until
from zero_tp.process.watch import Watchdog
from zero_tp.training.metrics_file import METRICS_FILE


def watched(engine: Any, watch: Watchdog, limit: float) -> list[str]:
    """Let the watch see the engine; what it reports at the limit, where in a run it would end the rank."""
    reports: list[str] = []
    watch.end = reports.append
    watch.begin({"step": limit}, engine.topology.rank, engine.topology.world)
    watch.connect(dist.PrefixStore("watch", dist.distributed_c10d._get_default_store()))
    engine.mark = watch.mark
    return reports


def hanging() -> list[str]:
    """What each rank reports when rank 2 stays for long in the forward of its third step."""
    engine, watch = replica(1, tensor=2), Watchdog()
    reports = watched(engine, watch, 1.5)

    def stay(*_: object) -> None:
        wait_until(lambda: reports, 60, "the watch saw nothing", 0.05)
        time.sleep(patience(1.0))  # the others come to their limits meanwhile

    for step in (1, 2, 3):
        watch.enter("step", step)
        if step == 3 and engine.topology.rank == 2:
            engine.model.transformer.layers[0].mlp.register_forward_hook(stay)
        engine.train_step(rows(engine, step))
    watch.leave()
    return reports


@pytest.mark.thorough
def test_a_rank_that_hangs_is_named_by_one(ranks: Pools) -> None:
    [report] = [report for reports in ranks(4).run(hanging) for report in reports if report]
    *lines, last = report.splitlines()
    assert [line.split(" (")[0] for line in lines] == [f"rank {number}" for number in range(4)]
    assert "in step 3, forward for" in lines[2] and "called by forward (zero_tp/models/" in lines[2]
    assert re.search(r"at .*\(zero_tp/parallel/collectives\.py:", lines[3])
    # Ranks 2 and 3 are a TP group: rank 3 has enqueued the collective that rank 2 does not come to.
    late, waiting = (re.findall(r"group \d+ (\d+)/(\d+)", lines[number]) for number in (2, 3))
    assert late[-1] == waiting[-1] or late[-2] == waiting[-2], "of one of the two groups"
    ahead = [now for before, now in zip(late, waiting, strict=True) if now[0] != before[0]]
    assert ahead and all(int(enqueued) > int(completed) for enqueued, completed in ahead)
    assert last == (
        "error: no progress in step 3 for 0.025 minutes, by zero_tp.training.timeout_minutes: "
        "ranks 0, 1 and 3 wait for rank 2"
    )


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("stopped", "limits", "error"),
    [
        (1, '{"step": 0.2}', r".* for 0\.2 minutes, by zero_tp\.training\.timeout_minutes: rank 0 waits for rank 1"),
        (1, '{"heartbeat": 0.5}', r"no word from rank 1 \(.+\) for 0\.5 minutes, by .*timeout_minutes\.heartbeat: .*"),
        (0, '{"heartbeat": 0.5}', r".+ has had no answer from the ranks' store for 0\.5 minutes, by .*\.heartbeat: .*"),
    ],
)
def test_a_run_with_a_stopped_rank_ends_by_its_limit(stopped: int, limits: str, error: str, tmp_path: Path) -> None:
    workplace = furnish(tmp_path)
    steps_alone = ("checkpoint.interval=null", "evaluation.interval=null", "training.steps=100000")
    settings = (*steps_alone, f"training.timeout_minutes={limits}")
    words = [word for setting in settings for word in ("--set", f"zero_tp.{setting}")]
    command = [*launch(2), "--deepspeed_config", "small.json", "--output-dir", "run", *words]
    launcher = subprocess.Popen(command, cwd=workplace, env=environment(), stderr=subprocess.PIPE, text=True)
    try:
        metrics, begun = workplace / "run" / METRICS_FILE, time.monotonic()
        while not (metrics.exists() and len(metrics.read_text().splitlines()) > 3):
            assert launcher.poll() is None and time.monotonic() - begun < patience(120)
            time.sleep(0.2)
        for process in psutil.Process(launcher.pid).children(recursive=True):
            parent = process.parent()
            of_launcher = parent is not None and "deepspeed.launcher.launch" in parent.cmdline()
            if of_launcher and process.environ().get("RANK") == str(stopped):
                process.suspend()
        _, errors = launcher.communicate(timeout=patience(150))
    finally:
        launcher.kill()  # the ranks end with it
    last = said(errors)
    assert launcher.returncode == 1
    [line] = [line for line in last if line.startswith("error: ")]
    assert re.fullmatch(f"error: {error}", line), errors
    if "step" in limits:
        positions = r"^rank [01] \(.*; collectives enqueued/completed: world \d+/\d+"
        assert len(re.findall(positions, errors, re.MULTILINE)) == 2, errors
    assert "Traceback" not in errors
