"""Real libraries keep every value that a run logs: read back by their own readers, or from their
own files.
"""

from __future__ import annotations

import json
import math
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.launched import ROOT, run
from tests.support.mistakes import written
from tests.support.monitor_runs import LINES, config_of
from zero_tp.tools.monitors import trackers as callback

pytestmark = pytest.mark.heavy

START = """
import json, os, sys
from pathlib import Path
from tests.support.monitor_runs import start_state
from zero_tp.config import RunConfig
from zero_tp.monitors import trackers as callback

def main():
    path, run, step, lines, overrides, callback.CLOSE_SECONDS = json.loads(sys.argv[1])
    state = started(RunConfig.load(path, overrides, world_size=4), Path(run), step)
    trackers = callback.Trackers()
    trackers.on_start(state)
    for line in lines:
        trackers.on_log(state, line)
    trackers.on_end(state)
    for line in state.printed:
        print("printed:", line)
    sys.stdout.flush()
    os._exit(0)  # as a rank does

main()
"""

RECORDS = """
import json
from pathlib import Path

def values_of(lines):
    found = {}
    for step, values in lines:
        for name, value in values.items():
            found.setdefault(name, []).append([step, value])
    return found
"""
"""Each reader prints [[name of the run, its training.steps, {value's name: [[step, value],
...]}], ...], by age.
"""

STEPS = "zero_tp.training.steps"

MLFLOW = f"""
from mlflow import MlflowClient
client, found = MlflowClient(), []
(experiment,) = [each for each in client.search_experiments() if each.name == "zero_tp"]
for run in client.search_runs([experiment.experiment_id]):
    assert run.info.status == "FINISHED"
    history = {{name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}}
    values = {{name: [[each.step, each.value] for each in history[name]] for name in history}}
    found.append([run.info.run_name, int(run.data.params["{STEPS}"]), values])
print(json.dumps(found))
"""  # noqa: E501

WANDB = """
from wandb.proto import wandb_internal_pb2

def records(data):  # LevelDB's log format, after seven bytes
    at, parts = 7, b""
    while at + 7 <= len(data):
        left, length, kind = 32768 - at % 32768, int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if left < 7 or kind == 0:
            at += left
            continue
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield parts
            parts = b""

runs = {}
for path in sorted(Path("mine").glob("wandb/offline-run-*/*.wandb")):
    for data in records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.HasField("run") and record.run.run_id not in runs:
            config = {each.key: json.loads(each.value_json) for each in record.run.config.update}
            assert record.run.project == "deepspeed"
            runs[record.run.run_id] = (record.run.display_name, config["zero_tp"]["training"]["steps"], lines := [])
        if record.HasField("history"):
            items = {(each.key or each.nested_key[0]): json.loads(each.value_json) for each in record.history.item}
            numbers = {name: float(value) for name, value in items.items() if not name.startswith("_")}
            lines.append((numbers.pop("step"), numbers))
print(json.dumps([[name, steps, values_of(lines)] for name, steps, lines in runs.values()]))
"""  # noqa: E501

AIM = f"""
from aim import Repo
from aim.sdk.index_manager import RepoIndexManager
repository, found = Repo("."), []
for name in repository.list_all_runs():
    RepoIndexManager.get_index_manager(repository).index(name)  # as `aim up` does
for run in Repo(".").iter_runs():
    metrics = [each for each in run.metrics() if not each.name.startswith("__system__")]
    values = {{each.name: [[step, value] for step, (value, *_) in each.data] for each in metrics}}
    assert run.end_time is not None
    found.append([run.name, run["hparams"]["{STEPS}"], values])
print(json.dumps(found))
"""

CLEARML = f"""
found = []
for task in sorted(Path("home/.clearml/cache/offline").glob("*/task.json"), key=lambda path: path.stat().st_mtime):
    about = json.loads(task.read_text())
    (steps,) = [
        int(line.split("=")[1])
        for line in about["configuration"]["General"]["value"].splitlines()
        if line.startswith('"{STEPS}"')
    ]
    events = [each for line in (task.parent / "metrics.jsonl").open() for each in json.loads(line)]
    values = values_of((each["iter"], {{each["metric"]: each["value"]}}) for each in events)
    found.append([about["name"], steps, {{name: each for name, each in values.items() if not name.startswith(":")}}])
print(json.dumps(found))
"""  # noqa: E501

DVCLIVE = f"""
import csv, yaml
files = Path("mine/dvclive/plots/metrics")
values = {{}}
for path in files.rglob("*.tsv"):
    _, *rows = csv.reader(path.open(), delimiter="\\t")
    values[str(path.relative_to(files).with_suffix(""))] = [[int(step), float(value)] for step, value in rows]
steps = yaml.safe_load(Path("mine/dvclive/params.yaml").read_text())["{STEPS}"]
plots = [{{"dvclive/plots/metrics": {{"x": "step"}}}}]
shown = {{"params": ["dvclive/params.yaml"], "metrics": ["dvclive/metrics.json"], "plots": plots}}
assert yaml.safe_load(Path("mine/dvc.yaml").read_text()) == shown
print(json.dumps([["mine", steps, values]]))
"""  # noqa: E501

SWANLAB = f"""
import yaml
from swanlab.proto.swanlab.record.v1.record_pb2 import Record
from swanlab.sdk.internal.core_python.store import DataStoreReader
runs = {{}}
for path in sorted(Path("swanlog").glob("*/*.swanlab")):
    reader = DataStoreReader()
    reader.open(path)
    for data in reader:
        record = Record()
        record.ParseFromString(data)
        if record.HasField("start") and record.start.id not in runs:
            assert record.start.project == "zero_tp"
            config = yaml.safe_load((path.parent / "files" / "config.yaml").read_text())
            runs[record.start.id] = (record.start.name, config["{STEPS}"]["value"], lines := [])
        if record.HasField("scalar"):
            lines.append((record.scalar.step, {{record.scalar.key: record.scalar.value.number}}))
print(json.dumps([[name, steps, values_of(lines)] for name, steps, lines in runs.values()]))
"""

TRACKIO = f"""
from trackio.sqlite_storage import SQLiteStorage
found = []
for run in SQLiteStorage.get_run_records("zero_tp"):
    lines = SQLiteStorage.get_logs("zero_tp", run["name"], run_id=run["id"])
    config = SQLiteStorage.get_run_config("zero_tp", run["name"], run_id=run["id"])
    numbers = [{{name: value for name, value in line.items() if name != "timestamp"}} for line in lines]
    found.append([run["name"], config["{STEPS}"], values_of((line.pop("step"), line) for line in numbers)])
print(json.dumps(found))
"""  # noqa: E501


@dataclass(frozen=True)
class Library:
    """How a library is installed, told to need no server, asked for in a config and read.

    Attributes:
        goes_on: a resumed run is one there, or else two.
        finite: NaN isn't shown.
    """

    package: str
    reader: str
    overrides: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    goes_on: bool = True
    finite: bool = False


def only(name: str) -> tuple[str, ...]:
    return (f'zero_tp.logging.trackers=["{name}"]',)


LIBRARIES = {
    "mlflow": Library("mlflow-skinny", MLFLOW, only("mlflow"), {"MLFLOW_ALLOW_FILE_STORE": "true"}),
    "wandb": Library("wandb", WANDB, ("wandb.enabled=true",), {"WANDB_MODE": "offline"}),
    "aim": Library("aim", AIM, only("aim")),
    "clearml": Library(
        "clearml", CLEARML, only("clearml"), {"CLEARML_OFFLINE_MODE": "1"}, False, True
    ),
    "dvclive": Library("dvclive", DVCLIVE, only("dvclive")),
    "swanlab": Library("swanlab", SWANLAB, only("swanlab"), {"SWANLAB_MODE": "offline"}),
    "trackio": Library("trackio", TRACKIO, only("trackio"), {"TRACKIO_DIR": "trackio"}),
}


class Workplace:
    """A directory with its own home, in which a run is started and read with a library that is
    installed there.
    """

    def __init__(self, library: Library, directory: Path):
        self.library, self.directory = library, directory
        packages, home = directory / "packages", directory / "home"
        home.mkdir()
        (directory / "mine").mkdir()
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--target",
            str(packages),
            library.package,
        ]
        subprocess.run(pip, check=True, timeout=500, capture_output=True)
        self.variables = {
            "HOME": str(home),
            "PYTHONPATH": f"{ROOT}:{packages}",
            **library.environment,
        }
        self.variables |= {"MLFLOW_TRACKING_URI": (directory / "mlruns").as_uri()}

    def python(self, *words: str, **environment: str) -> str:
        variables = self.variables | environment
        found = run([sys.executable, "-c", *words], self.directory, limit=200, variables=variables)
        assert found.returncode == 0, found.stderr
        return found.stdout

    def start(
        self,
        step: int,
        lines: list[dict[str, Any]],
        script: str = START,
        leave: float = 100,
        **environment: str,
    ) -> list[str]:
        """Return what the trackers printed; the end waits `leave` seconds for them."""
        paths = str(written(self.directory)), str(self.directory / "mine")
        words = json.dumps([*paths, step, lines, self.library.overrides, leave])
        return [
            line
            for line in self.python(script, words, **environment).splitlines()
            if line.startswith("printed:")
        ]


def values_of(lines: list[dict[str, Any]], finite: bool) -> dict[str, list[tuple[int, str]]]:
    """What a library is to hold: a number as text, so that NaN equals NaN."""
    found: dict[str, list[tuple[int, str]]] = {}
    for line in lines:
        for name, value in line.items():
            if name != "step" and value is not None and (math.isfinite(value) or not finite):
                found.setdefault(name, []).append((line["step"], str(float(value))))
    return found


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_real_library_keeps_every_value(name: str, tmp_path: Path) -> None:
    """Under the run's name, with its config, and in the same run once that goes on."""
    library = LIBRARIES[name]
    place = Workplace(library, tmp_path)
    assert place.start(0, LINES[:3]) == []
    assert place.start(2, LINES[3:]) == []
    *_, told = place.python(RECORDS + library.reader).splitlines()
    steps = config_of(tmp_path).zero_tp.training.steps
    expected = [LINES] if library.goes_on else [LINES[:3], LINES[3:]]
    found = json.loads(told)
    assert [each[:2] for each in found] == [["mine", steps]] * len(expected)
    read = [
        {key: [(step, str(float(value))) for step, value in each[2][key]] for key in each[2]}
        for each in found
    ]
    assert read == [values_of(lines, library.finite) for lines in expected]


def test_an_mlflow_server_that_never_answers_stops_no_run(tmp_path: Path) -> None:
    place = Workplace(LIBRARIES["mlflow"], tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = f"http://127.0.0.1:{listener.getsockname()[1]}"
        told = place.start(0, LINES, leave=callback.CLOSE_SECONDS, MLFLOW_TRACKING_URI=server)
    tracker = "zero_tp.logging.trackers.mlflow"
    assert told == [f"printed: {tracker}: not done 10 s after the run; its last values are lost"]


def test_clearml_forks_no_rank(tmp_path: Path) -> None:
    """A process that outlives a rank would keep the sockets open on which the rank's peers wait."""
    script = START.replace(
        "    trackers.on_end(state)",
        """
    import psutil, time
    while trackers._threads[0].queue.qsize():
        time.sleep(0.1)
    print("printed: children", [each.name() for each in psutil.Process().children()])
    trackers.on_end(state)""",
    )
    assert Workplace(LIBRARIES["clearml"], tmp_path).start(0, LINES, script) == [
        "printed: children []"
    ]
