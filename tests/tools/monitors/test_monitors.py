"""What a run logs goes to its trackers: every value, under the run's name, on through a resumed
run.
"""

from __future__ import annotations

import json
import math
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.monitor_runs import LINES, config_of, start_state
from tests.tiers import THOROUGH
from zero_tp.base.errors import UserError
from zero_tp.base.settings.schema import BLOCK_OF, TRACKERS
from zero_tp.run.config import RunConfig
from zero_tp.tools.monitors.csv_files import CsvFiles
from zero_tp.tools.monitors.run_info import RUN_IDS, RunInfo
from zero_tp.tools.monitors.trackers import SERVICES, Trackers


def log(config: RunConfig, run: Path, lines: list[dict[str, Any]], step: int = 0) -> list[str]:
    """Log lines in a start of a run that resumes from `step`; return what its trackers printed."""
    state, trackers = start_state(config, run, step), Trackers()
    trackers.on_start(state)
    for line in lines:
        trackers.on_log(state, line)
    trackers.on_end(state)
    printed: list[str] = state.printed
    return printed


def test_every_value_has_a_csv_file_that_a_resumed_run_goes_on_in(tmp_path: Path) -> None:
    """As DeepSpeed's monitor names and writes them."""
    config, run = config_of(tmp_path, "csv_monitor.enabled=true"), tmp_path / "runs" / "mine"
    run.parent.mkdir()
    assert log(config, run, LINES) == []
    files = run / "csv" / "mine"
    with (files / "loss.csv").open("a") as torn:
        torn.write("4,")
    assert log(config, run, [{"step": 3, "loss": 1.5}], step=2) == []
    assert (files / "loss.csv").read_text() == "step,loss\n1,2.5\n2,nan\n3,1.5\n"
    assert (files / "lambada_accuracy.csv").read_text() == "step,accuracy\n2,0.5\n"
    assert (files / "skipped_steps.csv").read_text() == "step,skipped_steps\n1,0\n2,1\n"
    assert (files / "mfu.csv").read_text() == "step,mfu\n", "what was not known was not written"
    placed = config_of(
        tmp_path, "csv_monitor.enabled=true", f"csv_monitor.output_path={tmp_path}/out"
    )
    CsvFiles({"output_path": tmp_path / "out"}, RunInfo(run, placed, 0)).log({"loss": 1.0}, step=9)
    assert log(placed, run, LINES[:1]) == []
    assert (tmp_path / "out" / "mine" / "loss.csv").read_text() == "step,loss\n1,2.5\n", (
        "a new run's"
    )
    (tmp_path / "runs" / "other").mkdir()
    shared = {"output_path": tmp_path / "out", "job_name": "mine"}
    with pytest.raises(
        UserError, match="out/mine has another run's values; set another job_name, or remove it"
    ):
        CsvFiles(shared, RunInfo(run.with_name("other"), placed, 0))
    own = {
        "own.csv": b"name,value\nrow,1\n",
        "notes.csv": b"step,what\n7,more data\n",
        "old.csv": b"\xff,\n",
        "e.csv": b"",
    }
    for name, content in own.items():
        (tmp_path / "out" / "mine" / name).write_bytes(content)
    (tmp_path / "out" / "mine" / "plots.csv").mkdir()
    assert log(placed, run, LINES[:1]) == []
    assert {name: (tmp_path / "out" / "mine" / name).read_bytes() for name in own} == own, (
        "a person's files"
    )


def test_deepspeed_does_not_write_beside_us(tmp_path: Path) -> None:
    config = config_of(tmp_path, "csv_monitor.enabled=true", "tensorboard.enabled=true")
    assert not {"csv_monitor", "tensorboard"} & config.engine_settings.written().keys()
    assert config.resolved()["csv_monitor"] == {"enabled": True}


@THOROUGH
def test_tensorboard_reads_every_value_and_the_config(tmp_path: Path) -> None:
    """By TensorBoard's own reader, which leaves out what a resumed run has trained again."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config, run = config_of(tmp_path, "tensorboard.enabled=true"), tmp_path / "mine"
    assert log(config, run, LINES) == []
    assert log(config, run, [{"step": 3, "loss": 1.5}, {"step": 4, "loss": 1.25}], step=2) == []
    read = EventAccumulator(str(run / "tensorboard" / "mine"))
    read.Reload()
    losses = [(event.step, event.value) for event in read.Scalars("loss")]
    assert [step for step, _ in losses] == [1, 2, 3, 4]
    assert (
        losses[0][1] == 2.5
        and math.isnan(losses[1][1])
        and [value for _, value in losses[2:]] == [1.5, 1.25]
    )
    assert [(event.step, event.value) for event in read.Scalars("lambada/accuracy")] == [(2, 0.5)]
    assert {*read.Tags()["scalars"]} == {
        "loss",
        "skipped_steps",
        "validation_loss",
        "lambada/accuracy",
        "mfu",
    }
    (text, *_) = read.Tensors("config/text_summary")
    shown = text.tensor_proto.string_val[0].decode()
    assert json.loads(shown) == config.resolved()
    assert log(config, run, [{"step": 1, "loss": 3.5}]) == []
    read = EventAccumulator(str(run / "tensorboard" / "mine"))
    read.Reload()
    assert [(event.step, event.value) for event in read.Scalars("loss")] == [(1, 3.5)], (
        "a start from step 0 again"
    )


class Recorder:
    """Stands for the object that a service's library returns for a run."""

    def __init__(self, calls: list[tuple[str, Any]]) -> None:
        self.calls, self.id = calls, "run-1"

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def record(*arguments: Any, **options: Any) -> Any:
            self.calls.append((name, (*arguments, options)))
            return self.id if name == "get_key" else None

        return record


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, Any]]]:
    """What wandb and comet_ml were called with: modules with their interface stand for both."""
    made: list[tuple[str, Any]] = []
    for name, begin in (("wandb", "init"), ("comet_ml", "start")):
        module: Any = types.ModuleType(name)
        module.__spec__ = types.SimpleNamespace(name=name)
        module.__version__ = "3.58.8"

        def start(_begin: str = begin, **options: Any) -> Recorder:
            made.append((_begin, options))
            return Recorder(made)

        setattr(module, begin, start)
        monkeypatch.setitem(sys.modules, name, module)
    yield made


@THOROUGH
def test_wandb_has_the_runs_name_and_config_and_goes_on_in_it(
    tmp_path: Path, calls: list[tuple[str, Any]]
) -> None:
    config = config_of(
        tmp_path,
        "wandb.enabled=true",
        "wandb.team=us",
        "wandb.project=ours",
        "comet.api_key=secret",
    )
    run = tmp_path / "mine"
    assert log(config, run, LINES) == []
    (_, began), *rest = calls
    assert began["project"] == "ours" and began["entity"] == "us" and began["name"] == "mine"
    assert "id" not in began and began["config"].pop("comet") == {}, "others see the config"
    assert began["config"] == {
        key: value for key, value in config.resolved().items() if key != "comet"
    }
    logged = [arguments[0] for name, arguments in rest if name == "log"]
    assert logged[0] == {"loss": 2.5, "skipped_steps": 0, "step": 1}
    assert logged[2] == {"validation_loss": 2.25, "lambada/accuracy": 0.5, "step": 2}
    assert [name for name, _ in rest][-1] == "finish" and len(logged) == len(LINES)
    assert json.loads((run / RUN_IDS).read_text()) == {"wandb": "run-1"}
    calls.clear()
    assert log(config, run, LINES, step=2) == []
    assert calls[0][1]["id"] == "run-1" and calls[0][1]["resume"] == "allow"
    calls.clear()
    assert log(config, run, LINES) == []
    assert "id" not in calls[0][1], "begun anew, it is another run"


@THOROUGH
def test_comet_gets_each_value(tmp_path: Path, calls: list[tuple[str, Any]]) -> None:
    config = config_of(tmp_path, "comet.enabled=true", "comet.api_key=secret")
    assert log(config, tmp_path / "mine", LINES) == []
    assert calls[0][0] == "start" and ("set_name", ("mine", {})) in calls
    assert calls[0][1]["api_key"] == "secret" and "secret" not in str(calls[1:]), (
        "others see the parameters"
    )
    metrics = [
        (arguments[0], arguments[2]["step"]) for name, arguments in calls if name == "log_metric"
    ]
    known = [{name: value for name, value in line.items() if value is not None} for line in LINES]
    assert metrics == [(name, line["step"]) for line in known for name in line if name != "step"]
    (parameters,) = [arguments[0] for name, arguments in calls if name == "log_parameters"]
    assert parameters["zero_tp.training.steps"] == config.zero_tp.training.steps


def test_the_trackers_are_those_of_accelerate() -> None:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    assert {*TRACKERS, *BLOCK_OF} == LOGGER_TYPE_TO_CLASS.keys() and SERVICES.keys() == {*TRACKERS}
