"""The monitors of DeepSpeed's blocks and accelerate's trackers are opened under a run's name, with its config.

DeepSpeed's own monitor writes the learning rate alone, gives a run no name, and begins anew when it is resumed, so its
engine doesn't get the blocks (`RunConfig.deepspeed_config`).
"""

from __future__ import annotations

import csv
import json
import logging
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from zero_tp.config import RunConfig
from zero_tp.config.resolve import leaves
from zero_tp.errors import ConfigError
from zero_tp.files import write_atomically
from zero_tp.strict_json import read_object

IDENTITIES = "monitors.json"
"""In a run's directory: by which name each service knows the run, to go on in it when the run is resumed."""
PROJECT = "zero_tp"
"""Where trackers put a run, unless their arguments say otherwise."""


class Sink(Protocol):
    """A sink takes what is logged; accelerate's trackers are some."""

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        """Take the values of a step."""

    def finish(self) -> None:
        """Take no more, and leave nothing unwritten."""


@dataclass(frozen=True)
class Start:
    """A start of a run is what a monitor is opened with.

    Attributes:
        run: its directory, whose name is the run's.
        step: that it goes on from; 0 for a new run.
        batch: samples of a step.
        config: the run's, resolved.
    """

    run: Path
    step: int
    batch: int
    config: dict[str, Any]
    _remembering: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    @property
    def name(self) -> str:
        return self.run.resolve().name

    def flat_config(self) -> dict[str, Any]:
        """Return the config with dotted keys; what is no string or number is written as JSON."""
        return {
            key: value if isinstance(value, (str, int, float)) else json.dumps(value)
            for key, value in leaves(self.config)
        }

    def identity(self, monitor: str) -> str | None:
        """Return by which name a service knows the run that is resumed, if it has told."""
        if self.step == 0:
            return None
        found = self._identities().get(monitor)
        return found if isinstance(found, str) else None

    def remember(self, monitor: str, identity: object) -> None:
        """Keep that name for the run's next start."""
        with self._remembering:
            known = {**self._identities(), monitor: str(identity)}
            write_atomically(self.run / IDENTITIES, json.dumps(known, indent=2) + "\n")

    def _identities(self) -> dict[str, Any]:
        try:
            return read_object(self.run / IDENTITIES)
        except FileNotFoundError:
            return {}


# --- the monitors -----------------------------------------------------------------------------------------------------


class CsvFiles:
    """One file a value, of lines `step,value`, named as DeepSpeed's monitor names them; later steps are cut off.

    Args:
        directory: of the files; made if missing.
        last_step: that the files keep: those after it are trained again.
    """

    def __init__(self, directory: Path, last_step: int):
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        for path in directory.glob("*.csv"):
            with path.open(newline="") as file:
                header, *rows = list(csv.reader(file)) or [[]]
            kept = [row for row in rows if len(row) == 2 and row[0].isdecimal() and int(row[0]) <= last_step]
            if kept != rows:
                write_atomically(path, "".join(f"{','.join(row)}\n" for row in (header, *kept)))

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Append a line to each value's file, which begins with a header."""
        for name, value in values.items():
            path = self.directory / f"{name.replace('/', '_').replace(' ', '_')}.csv"
            new = not path.exists()
            with path.open("a", newline="") as file:
                lines = csv.writer(file, lineterminator="\n")
                if new:
                    lines.writerow(["step", name.rsplit("/", 1)[-1]])
                lines.writerow([step, value])

    def finish(self) -> None:
        """Nothing is left to write."""


class Thinned:
    """Each value passes at most once in so many samples, as DeepSpeed's block `comet` says."""

    def __init__(self, sink: Sink, interval: int, batch: int):
        self.sink, self.interval, self.batch = sink, interval, batch
        self._passed: dict[str, int] = {}

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Pass on the values whose turn it is."""
        samples = (step or 0) * self.batch
        due = {name for name in values if samples - self._passed.get(name, -self.interval) >= self.interval}
        self._passed |= dict.fromkeys(due, samples)
        if due:
            self.sink.log({name: values[name] for name in values if name in due}, step=step)

    def finish(self) -> None:
        """End what is behind."""
        self.sink.finish()


class Unnumbered:
    """W&B drops a step that is smaller than one before, as a resumed run's are; here "step" is a value like others."""

    def __init__(self, tracker: Any):
        self.sink = tracker
        tracker.tracker.define_metric("step")
        tracker.tracker.define_metric("*", step_metric="step")

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Pass the values on, and their step beside them."""
        self.sink.log({**values, "step": step})

    def finish(self) -> None:
        """End what is behind."""
        self.sink.finish()


class _Log(logging.LoggerAdapter[logging.Logger]):
    """A logger without accelerate's state, whose making would choose a device and threads beside the run's own."""

    warning_once = logging.LoggerAdapter.warning


def _tracker(kind: str, /, **arguments: Any) -> Any:
    """Return a tracker of accelerate's that is started; it takes no part in accelerate's own launching."""
    from accelerate import tracking

    if not isinstance(tracking.logger, _Log):
        tracking.logger = _Log(logging.getLogger(tracking.__name__), {})
    tracker = tracking.LOGGER_TYPE_TO_CLASS[kind](**arguments)
    tracker.main_process_only = False  # the caller is the main process
    tracker.start()
    return tracker


def _given(**arguments: Any) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if value is not None}


def _directory(block: Mapping[str, Any], start: Start, kind: str) -> tuple[Path, str]:
    """Return DeepSpeed's `output_path` and `job_name`; left out, they are the run's own."""
    return Path(block.get("output_path") or start.run / kind), block.get("job_name") or start.name


def _tensorboard(block: Mapping[str, Any], start: Start) -> Sink:
    path, name = _directory(block, start, "tensorboard")
    # Readers then leave out what an earlier start wrote after the step that this one goes on from.
    later = {"purge_step": start.step + 1} if start.step else {}
    tracker: Any = _tracker("tensorboard", run_name=name, logging_dir=str(path), **later)
    shown = json.dumps(start.config, indent=2, ensure_ascii=False)
    tracker.log({"config": "".join(f"    {line}\n" for line in shown.splitlines())}, step=start.step)
    sink: Sink = tracker
    return sink


def _csv(block: Mapping[str, Any], start: Start) -> Sink:
    path, name = _directory(block, start, "csv")
    return CsvFiles(path / name, start.step)


def _wandb(block: Mapping[str, Any], start: Start) -> Sink:
    known = start.identity("wandb")
    again = {"id": known, "resume": "allow"} if known else {}
    chosen = _given(group=block.get("group"), entity=block.get("team"))
    chosen |= {"name": start.name, "dir": str(start.run), "config": start.config, **again}
    tracker = _tracker("wandb", run_name=block.get("project", "deepspeed"), **chosen)
    start.remember("wandb", tracker.tracker.id)
    return Unnumbered(tracker)


def _comet(block: Mapping[str, Any], start: Start) -> Sink:
    known = start.identity("comet")
    again = {"experiment_key": known, "mode": "get_or_create"} if known else {}
    names = ("workspace", "api_key", "experiment_key", "mode", "online")
    tracker = _tracker(
        "comet_ml", run_name=block.get("project"), **_given(**{name: block.get(name) for name in names}) | again
    )
    tracker.tracker.set_name(block.get("experiment_name") or start.name)
    tracker.store_init_configuration(start.flat_config())
    start.remember("comet", tracker.tracker.get_key())
    return Thinned(tracker, block.get("samples_log_interval", 100), start.batch)


class Finite:
    """ClearML writes 0 for NaN, so what is not finite doesn't reach it."""

    def __init__(self, sink: Sink):
        self.sink = sink

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Pass on the values that are finite."""
        self.sink.log({name: value for name, value in values.items() if math.isfinite(value)}, step=step)

    def finish(self) -> None:
        """End what is behind."""
        self.sink.finish()


@dataclass(frozen=True)
class Service:
    """A tracker's arguments say the run's name, and which of its runs to go on in.

    Attributes:
        begun: the arguments of a start of a run.
        identity: by which name the service knows the run that is started; None: each start is a run of its own.
        resumed: the arguments, of that name, to go on in the run.
        once: it takes a run's config only once.
        takes: what stands before it.
    """

    begun: Callable[[Start], dict[str, Any]]
    identity: Callable[[Any], Any] | None = None
    resumed: Callable[[str], dict[str, Any]] = lambda _: {}
    once: bool = False
    takes: Callable[[Sink], Sink] = lambda sink: sink


def _clearml_arguments(start: Start) -> dict[str, Any]:
    """A run gets a task of its own, and no hooks in argparse and torch.

    ClearML would fork the rank, for a process that sends; a rank that is killed would leave it behind with the
    sockets that its peers wait on. The task is sent by a thread instead.
    """
    from clearml.config import config_obj

    config_obj.set_overrides({"sdk": {"development": {"report_use_subprocess": False}}})
    hooks = {"auto_connect_arg_parser": False, "auto_connect_frameworks": False}
    return {"run_name": PROJECT, "task_name": start.name, "reuse_last_task_id": False, **hooks}


def _dvclive_arguments(start: Start) -> dict[str, Any]:
    """Runs of one directory would delete each other's files; dvc.yaml stands beside them, or it grows at each step."""
    return {"dir": str(start.run / "dvclive"), "dvcyaml": str(start.run / "dvc.yaml"), "exp_name": start.name}


SERVICES = {
    "mlflow": Service(
        lambda start: {"experiment_name": PROJECT, "run_name": start.name},
        lambda run: run.info.run_id,
        lambda known: {"run_id": known},
        once=True,
    ),
    "aim": Service(lambda start: {"run_name": start.name}, lambda run: run.hash, lambda known: {"run_hash": known}),
    "clearml": Service(_clearml_arguments, takes=Finite),
    "dvclive": Service(_dvclive_arguments, lambda live: live.dir, lambda _: {"resume": True}),
    "swanlab": Service(
        lambda start: {"run_name": PROJECT, "experiment_name": start.name},
        lambda run: run.id,
        lambda known: {"id": known, "resume": "allow"},
    ),
    "trackio": Service(
        lambda start: {"run_name": PROJECT, "name": start.name},
        lambda run: run.name,
        lambda known: {"name": known, "resume": "allow"},
    ),
}
"""accelerate's trackers beside those of DeepSpeed's blocks."""


def _service(name: str, arguments: Mapping[str, Any], start: Start) -> Sink:
    service, known = SERVICES[name], start.identity(name)
    again = service.resumed(known) if known else {}
    tracker: Any = _tracker(name, **service.begun(start) | again | dict(arguments))
    if not (known and service.once):
        tracker.store_init_configuration(start.flat_config())
    if service.identity is not None:
        start.remember(name, service.identity(tracker.tracker))
    return service.takes(tracker)


BLOCKS: dict[str, tuple[str | None, Callable[[Mapping[str, Any], Start], Sink]]] = {
    "tensorboard": ("tensorboard", _tensorboard),
    "wandb": ("wandb", _wandb),
    "comet": ("comet_ml", _comet),
    "csv_monitor": (None, _csv),
}
"""DeepSpeed's blocks: the package that each needs, and how it is opened."""


def chosen(config: RunConfig) -> dict[str, tuple[str | None, Callable[[Start], Sink]]]:
    """Return the monitors of a run by their keys: the package that each needs, and how it is opened."""
    raw = config.resolved()
    blocks = {name: raw[name] for name in BLOCKS if raw.get(name, {}).get("enabled")}
    found: dict[str, tuple[str | None, Callable[[Start], Sink]]] = {}
    for name, block in blocks.items():
        package, opened = BLOCKS[name]
        found[name] = package, partial(opened, block)
    for name, arguments in config.zero_tp.logging.trackers.items():
        found[f"zero_tp.logging.trackers.{name}"] = name, partial(_service, name, arguments)
    return found


def check_installed(config: RunConfig) -> None:
    """Check that the packages of the run's monitors are there. None is imported.

    Raises:
        ConfigError: naming the first that isn't.
    """
    for key, (package, _) in chosen(config).items():
        if package is not None and find_spec(package) is None:
            raise ConfigError(key, f"the package {package} is not installed", f"pip install {package}, or leave it out")
