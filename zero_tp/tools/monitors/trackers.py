"""Send logged values to accelerate's trackers, under the run's name and with its config.

A resumed run continues there.

One adapter serves DeepSpeed's monitor blocks and `zero_tp.logging.trackers`. DeepSpeed's engine
does not get the blocks: its own monitor writes only the learning rate, names no run and starts a
second one on a resume.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import queue
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

from zero_tp.base.errors import ConfigError, first_line, one_line
from zero_tp.run.callback import Callback, Metrics, TrainState
from zero_tp.run.config import RunConfig
from zero_tp.tools.monitors.csv_files import CsvFiles
from zero_tp.tools.monitors.run_info import Options, RunInfo, Values

PROJECT = "zero_tp"
CLOSE_SECONDS = 10.0
CLOSE_SECONDS_AFTER_ERROR = 1.0
MAX_QUEUED = 10_000
"""Most lines that wait for a tracker: a service that never answers must not fill the memory."""


@dataclass(frozen=True)
class Service:
    """How accelerate's tracker of a service is opened and fed.

    Attributes:
        package: to install; also the tracker's name in accelerate.
        arguments: maps (run, options, id of the resumed run) to the tracker's arguments, of which
            None is left out.
        run_id: reads the run's id from the service's own object; if None, a resumed run is a new
            run of the service.
        setup: called at each start; if None, the first start stores the config as parameters.
        finite_only: drop values that are not finite. ClearML would write 0 for NaN.
        step_is_value: log "step" as a value, because W&B drops the repeated steps of a resumed run.
    """

    package: str
    arguments: Callable[[RunInfo, Options, str | None], dict[str, Any]]
    run_id: Callable[[Any], object] | None = None
    setup: Callable[[Any, RunInfo, Options], None] | None = None
    finite_only: bool = False
    step_is_value: bool = False


class Tracker:
    """Accelerate's tracker of a service, opened for a run."""

    def __init__(self, name: str, service: Service, options: Options, run: RunInfo) -> None:
        """Open the tracker; `name` is its name, or its block's, in the config."""
        from accelerate import tracking

        # accelerate's own logger needs accelerate's state, which would choose a device and set
        # thread counts.
        logger: Any = logging.getLogger(tracking.__name__)
        logger.warning_once = logger.warning
        tracking.logger = logger
        # A start from step 0 is a new run of the service.
        run_id = run.saved_id(name) if run.step else None
        arguments = service.arguments(run, options, run_id)
        # Comet's `run_name` has no default.
        arguments = {
            key: value for key, value in arguments.items() if value is not None or key == "run_name"
        }
        # accelerate's class without an Accelerator, which would need accelerate's state too.
        tracker = tracking.LOGGER_TYPE_TO_CLASS[service.package](**arguments)
        tracker.main_process_only = False  # only rank 0 opens it
        tracker.start()
        if service.setup is not None:
            service.setup(tracker, run, options)
        elif run_id is None:
            tracker.store_init_configuration(run.parameters())
        # After the start, because only then the service has given an id.
        if service.run_id is not None:
            run.save_run_id(name, service.run_id(tracker.tracker))
        self._tracker = tracker
        self._service = service

    def log(self, values: Values, step: int) -> None:
        if self._service.finite_only:
            values = {name: value for name, value in values.items() if math.isfinite(value)}
        if self._service.step_is_value:
            self._tracker.log({**values, "step": step})
        elif values:
            self._tracker.log(values, step=step)

    def finish(self) -> None:
        self._tracker.finish()


def _tensorboard(run: RunInfo, block: Options, run_id: str | None) -> dict[str, Any]:
    return {
        "run_name": block.get("job_name") or run.name,
        "logging_dir": str(block.get("output_path") or run.directory / "tensorboard"),
        # Readers then hide values that an earlier start wrote for the steps that are trained again.
        "purge_step": run.step + 1,
    }


def _log_config_as_text(tracker: Any, run: RunInfo, block: Options) -> None:
    """Log the config as text: TensorBoard would show parameters as a second run."""
    config = json.dumps(run.public_config(), indent=2, ensure_ascii=False)
    tracker.log({"config": textwrap.indent(config, "    ")}, step=run.step)


def _wandb(run: RunInfo, block: Options, run_id: str | None) -> dict[str, Any]:
    return {
        **{
            # accelerate calls a project `run_name`; the default is that of DeepSpeed's block.
            "run_name": block.get("project", "deepspeed"),
            "group": block.get("group"),
            "entity": block.get("team"),
        },
        **{"name": run.name, "dir": str(run.directory), "config": run.public_config()},
        **{"id": run_id, "resume": run_id and "allow"},
    }


def _define_step_axis(tracker: Any, run: RunInfo, block: Options) -> None:
    # W&B's own step must rise, and a resumed run trains some steps again: so the axis is a logged
    # value.
    tracker.tracker.define_metric("step")
    tracker.tracker.define_metric("*", step_metric="step")


def _comet(run: RunInfo, block: Options, run_id: str | None) -> dict[str, Any]:
    names = ("workspace", "api_key", "experiment_key", "mode", "online")
    arguments = {"run_name": block.get("project")} | {name: block.get(name) for name in names}
    return arguments | ({"experiment_key": run_id, "mode": "get_or_create"} if run_id else {})


def _name_experiment(tracker: Any, run: RunInfo, block: Options) -> None:
    tracker.tracker.set_name(block.get("experiment_name") or run.name)
    tracker.store_init_configuration(run.parameters())


def _clearml(run: RunInfo, options: Options, run_id: str | None) -> dict[str, Any]:
    """Give each start a task of its own, without hooks in argparse and torch.

    ClearML sends values from a thread. By default it forks a process, which would survive a killed
    rank and keep open the sockets that the rank's peers wait on.
    """
    from clearml.config import config_obj

    config_obj.set_overrides({"sdk": {"development": {"report_use_subprocess": False}}})
    hooks = {"auto_connect_arg_parser": False, "auto_connect_frameworks": False}
    return {
        "run_name": PROJECT,
        "task_name": run.name,
        "reuse_last_task_id": False,
        **hooks,
        **options,
    }


def _dvclive(run: RunInfo, options: Options, run_id: str | None) -> dict[str, Any]:
    """Give each run its own directory: DVCLive deletes other runs' files. In it, dvc.yaml would
    grow with each step.
    """
    paths = {"dir": str(run.directory / "dvclive"), "dvcyaml": str(run.directory / "dvc.yaml")}
    return {**paths, "exp_name": run.name, "resume": True if run_id else None, **options}


BLOCKS = {
    "tensorboard": Service("tensorboard", _tensorboard, setup=_log_config_as_text),
    "wandb": Service("wandb", _wandb, lambda run: run.id, _define_step_axis, step_is_value=True),
    "comet": Service("comet_ml", _comet, lambda experiment: experiment.get_key(), _name_experiment),
}
"""DeepSpeed's blocks that accelerate has a tracker for."""
SERVICES = {
    "mlflow": Service(
        "mlflow",
        lambda run, options, run_id: {
            "experiment_name": PROJECT,
            "run_name": run.name,
            "run_id": run_id,
            **options,
        },
        lambda run: run.info.run_id,
    ),
    "aim": Service(
        "aim",
        lambda run, options, run_id: {"run_name": run.name, "run_hash": run_id, **options},
        lambda run: run.hash,
    ),
    "clearml": Service("clearml", _clearml, finite_only=True),
    "dvclive": Service("dvclive", _dvclive, lambda live: live.dir),
    "swanlab": Service(
        "swanlab",
        lambda run, options, run_id: {
            **{
                "run_name": PROJECT,
                "experiment_name": run.name,
                "id": run_id,
                "resume": run_id and "allow",
            },
            **options,
        },
        lambda run: run.id,
    ),
    "trackio": Service(
        "trackio",
        lambda run, options, run_id: {
            **{"run_name": PROJECT, "name": run_id or run.name, "resume": run_id and "allow"},
            **options,
        },
        lambda run: run.name,
    ),
}
"""The trackers of `zero_tp.logging.trackers`."""


OpenTracker = Callable[[RunInfo], Tracker | CsvFiles]


def trackers_of(config: RunConfig) -> dict[str, tuple[str | None, OpenTracker]]:
    """Return the trackers of a run by their keys in the config.

    Each has the package that it needs, and a function that opens it.
    """
    raw = config.resolved()
    trackers: dict[str, tuple[str | None, OpenTracker]] = {
        name: (service.package, partial(Tracker, name, service, raw[name]))
        for name, service in BLOCKS.items()
        if raw.get(name, {}).get("enabled")
    }
    if raw.get("csv_monitor", {}).get("enabled"):
        trackers["csv_monitor"] = None, partial(CsvFiles, raw["csv_monitor"])
    for name, options in config.zero_tp.logging.trackers.items():
        service = SERVICES[name]
        trackers[f"zero_tp.logging.trackers.{name}"] = (
            service.package,
            partial(Tracker, name, service, options),
        )
    return trackers


def check_installed(config: RunConfig) -> None:
    """Check that the packages of the run's trackers are installed, without importing them."""
    for key, (package, _) in trackers_of(config).items():
        if package is not None and find_spec(package) is None:
            raise ConfigError(
                key,
                f"the package {package} is not installed",
                f"pip install {package}, or leave it out",
            )


class TrackerThread(threading.Thread):
    """Open a tracker and log to it in the background.

    A service that does not answer must not block a step.

    Args:
        key: in the config.
        open_tracker: called in the thread.
        report: takes one line about the first call that failed.

    Attributes:
        queue: (values, step) to log; None ends the thread after the queued values.
    """

    def __init__(
        self,
        key: str,
        open_tracker: Callable[[], Tracker | CsvFiles],
        report: Callable[[str], None],
    ) -> None:
        super().__init__(name=f"tracker {key}", daemon=True)
        self.key = key
        self._open = open_tracker
        self._report = report
        self._has_failed = self._has_dropped = False
        self.queue: queue.SimpleQueue[tuple[Values, int] | None] = queue.SimpleQueue()

    def log(self, values: Values, step: int) -> None:
        """Queue values for the tracker, or drop them and report the first time if MAX_QUEUED
        lines wait.
        """
        # The caller is a step: it must neither wait nor fail.
        if self.queue.qsize() < MAX_QUEUED:
            self.queue.put((values, step))
        elif not self._has_dropped:
            self._has_dropped = True
            self._report(
                f"{self.key} does not answer: values are lost from step {step} on; training "
                "continues"
            )

    def run(self) -> None:
        with self._tolerate():
            # Opening connects to the service. If it fails, the outer block ends the thread, and
            # later lines are not queued (`Trackers.on_log`). A line that fails loses only itself.
            tracker = self._open()
            while (line := self.queue.get()) is not None:
                with self._tolerate():
                    tracker.log(*line)
            tracker.finish()

    @contextlib.contextmanager
    def _tolerate(self) -> Iterator[None]:
        """Report the first error and continue.

        Each library has its own error classes, and some call `sys.exit`.
        """
        try:
            yield
        except (Exception, SystemExit) as error:
            if not self._has_failed:
                self._has_failed = True
                self._report(
                    f"{self.key} failed ({one_line(first_line(error), 300)}); training continues"
                )


class Trackers(Callback):
    """Send each line of metrics.jsonl to the trackers that the config names, on rank 0.

    Nulls are left out.
    """

    def on_start(self, state: TrainState) -> None:
        self._threads: list[TrackerThread] = []
        if state.is_rank_zero:
            run = RunInfo(state.directory, state.config, state.step)
            for key, (_, open_tracker) in trackers_of(state.config).items():
                self._threads.append(TrackerThread(key, partial(open_tracker, run), state.print))
                self._threads[-1].start()

    def on_log(self, state: TrainState, values: Metrics) -> None:
        numbers = {
            name: value for name, value in values.items() if value is not None and name != "step"
        }
        for thread in filter(TrackerThread.is_alive, self._threads):
            thread.log(numbers, int(values["step"] or 0))

    def on_end(self, state: TrainState) -> None:
        """Close all trackers together within 10 s.

        A failed run waits 1 s, because its error is printed afterwards.
        """
        seconds = CLOSE_SECONDS if state.error is None else CLOSE_SECONDS_AFTER_ERROR
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            # Every thread gets its end before any is waited for, so all close at the same time.
            thread.queue.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for thread in self._threads:
            if thread.is_alive():
                state.print(
                    f"{thread.key}: not done {seconds:.0f} s after the run; its last values are "
                    "lost"
                )
