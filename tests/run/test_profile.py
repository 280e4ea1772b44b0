"""`--profile-steps` records what a start still trains of its steps, and says where that is
nothing.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.support.checkpoint_runs import build, steps_of, write_config
from tests.support.pools import Pools
from tests.support.run_log import train_state
from zero_tp.base.errors import UserError
from zero_tp.run.profiler import StepProfiler, step_range


def profiled(path: str, run: str, steps: tuple[int, int], begin: int, end: int) -> list[list[str]]:
    """What the profiler prints after each of the steps of a start that begins at `begin`, and at
    its end.
    """
    profiler, lines, printed = StepProfiler(*steps), list[str](), []
    state = train_state(Path(run), steps=end, step=begin)
    state.engine, _ = build(path)
    state.print = lines.append
    profiler.on_start(state)
    for state.step in range(begin, end + 1):
        profiler.on_step_begin(state)
        steps_of(state.engine, state.step, state.step)
        profiler.on_step_end(state)
        printed.append(lines.copy())
        lines.clear()
    profiler.on_end(state)
    return [*printed, lines]


def test_a_run_that_is_resumed_between_the_steps_is_recorded_from_there(
    ranks: Pools, tmp_path: Path
) -> None:
    path = str(write_config(tmp_path / "run.json", 1, "fp32", 1))
    begun, (ended,), *after = ranks(1).run(profiled, path, str(tmp_path / "run"), (2, 4), 3, 5)[0]
    assert begun == [] and after == [[], []]
    trace = tmp_path / "run" / "profile" / "steps_3-4.json.gz"
    assert ended == f"profile of steps 3 to 4: {trace}"
    names = [
        event["name"] for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    ]
    assert "aten::mm" in names and "[memory]" in names
    assert "aten::mm" in (trace.parent / "steps_3-4.txt").read_text()

    late, stopped = (
        ranks(1).run(profiled, path, str(tmp_path / "none"), (2, 4), n, n)[0] for n in (5, 3)
    )
    assert late == [
        ["--profile-steps: steps 2 to 4 came before this start; nothing is recorded"],
        [],
    ]
    assert stopped == [[], ["--profile-steps: the run ended at step 3; no profile was written"]]
    assert not (tmp_path / "none").exists()


def test_steps_that_a_run_does_not_have_are_refused() -> None:
    assert step_range("3:5", 5) == (3, 5)
    for text in ("3:5", "3:2", "0:1", "3"):
        with pytest.raises(
            UserError, match=rf"^--profile-steps {text}: write FIRST:LAST, from 1 to .*steps, 4$"
        ):
            step_range(text, 4)
