"""A script's own callbacks are called at every event of a run, in their place, as docs/python.md
says.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.support.launched import ROOT, run, said
from tests.support.run_log import train_state
from zero_tp import Callback, TrainState
from zero_tp.run import loop
from zero_tp.run.checkpoint.directory import complete_steps

STOP_EARLY = (ROOT / "examples" / "stop_early.py").read_text()
RECORDER = """
class Recorder(Callback):
    def __init__(self, name):
        self.name = name

def record(event):
    def method(self, state, values=None):
        with open("events.txt", "a") as file:
            print(self.name, event, state.step, *([len(values)] if values else []), file=file)
    return method

for event in ("on_start", "on_step_begin", "on_step_end", "on_evaluate", "on_save", "on_log", "on_end"):
    setattr(Recorder, event, record(event))
"""  # noqa: E501


@pytest.mark.thorough
def test_the_example_of_the_page_stops_a_run_that_records_its_events(workplace: Path) -> None:
    script = STOP_EARLY.replace(
        "[StopEarly(5.0)]", "[Recorder('first'), StopEarly(100.0), Recorder('second')]"
    )
    (workplace / "stop_early.py").write_text(
        script.replace("\n\nif __name__", f"{RECORDER}\n\nif __name__")
    )
    options = ["--set", "zero_tp.parallel.tensor=1", "--set", "zero_tp.evaluation.interval=1"]
    done = run(
        [
            sys.executable,
            "stop_early.py",
            "--deepspeed_config",
            "small.json",
            "--output-dir",
            "run\x1b[31m",
            *options,
        ],
        workplace,
    )
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    lines = said(done.stdout)
    begins = (
        "1/8 ",
        "step 1: the loss is below 100.0",
        "validation at step 1",
        "saved run",
        "stopped after step 1",
    )
    assert [begin for line in lines for begin in begins if line.lstrip().startswith(begin)] == list(
        begins
    )
    events = [
        *(
            "on_start 0",
            "on_step_begin 1",
            "on_log 1 13",
            "on_step_end 1",
            "on_log 1 3",
            "on_evaluate 1",
            "on_save 1",
        ),
        "on_end 1",
    ]
    recorded = (workplace / "events.txt").read_text().splitlines()
    orders = [
        ["second", "first"] if event.startswith("on_end") else ["first", "second"]
        for event in events
    ]
    assert recorded == [
        f"{name} {event}" for event, names in zip(events, orders, strict=True) for name in names
    ]


TAKE_OVER = """
from pathlib import Path
from zero_tp.run.checkpoint.run_directory import RunOwner

class TakeOver(Callback):
    def on_step_end(self, state):
        if state.step == 4:
            RunOwner(state.directory)
"""


@pytest.mark.thorough
def test_a_run_that_another_launch_takes_over_ends_with_one_line(workplace: Path) -> None:
    """It has saved step 3, and would save step 6."""
    script = STOP_EARLY.replace("[StopEarly(5.0)]", "[TakeOver()]")
    (workplace / "taken.py").write_text(
        script.replace("\n\nif __name__", f"{TAKE_OVER}\n\nif __name__")
    )
    words = ["taken.py", "--deepspeed_config", "small.json", "--output-dir", "taken"]
    done = run([sys.executable, *words, "--set", "zero_tp.parallel.tensor=1"], workplace)
    assert done.returncode == 2
    (line,) = said(done.stderr)
    assert re.fullmatch(
        r"error: taken: another launch \(process \d+ on .*\) has taken the run over; .*", line
    ), line
    assert complete_steps(workplace / "taken") == [3]


@pytest.mark.parametrize(
    ("step", "line"), [(1, "stopped after step 1, as requested"), (2, "next: zero-tp report ")]
)
def test_a_run_of_two_steps_ends_after_a_request_to_stop(
    step: int,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """After its last step there is nothing to resume."""
    state = train_state(tmp_path / "\x1b[31mred", steps=2)
    state.inputs.read_ahead = lambda topology, last: state.requests.accepting()
    monkeypatch.setattr(
        loop, "_run_step", lambda state, _: setattr(state, "stop", state.step == step)
    )
    monkeypatch.setattr("torch.distributed.barrier", lambda: None)
    loop.train(state, [])
    printed = capsys.readouterr().out
    assert printed.startswith(line) and "\x1b" not in printed


class Failing(Callback):
    """Fails in one event, and notes what ended the run."""

    def __init__(self, event: str = "") -> None:
        self.ended_by: list[BaseException | None] = []
        if event:
            setattr(self, event, self._fail)

    def _fail(self, state: TrainState) -> None:
        raise KeyError("failed")

    def on_end(self, state: TrainState) -> None:
        self.ended_by.append(state.error)


@pytest.mark.parametrize("event", ["on_start", "on_step_begin"])
def test_an_error_ends_every_callback_that_has_started(event: str, tmp_path: Path) -> None:
    state = train_state(tmp_path)
    state.inputs.read_ahead = lambda topology, last: state.requests.accepting()
    before, failing, after = Failing(), Failing(event), Failing()
    with pytest.raises(KeyError, match="failed") as raised:
        loop.train(state, [before, failing, after])
    assert before.ended_by == [raised.value]
    started = event == "on_step_begin"
    assert failing.ended_by == after.ended_by == ([raised.value] if started else [])
