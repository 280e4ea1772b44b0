"""A run's log and metrics file without a model: what `StepLogger`, `Validation` and
`MetricsFile` write.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from zero_tp.base.settings.timeline import StageSize, Timeline
from zero_tp.run.callback import Metrics, TrainState
from zero_tp.run.metrics_file import MetricsFile
from zero_tp.run.run_callbacks import Validation
from zero_tp.run.step_logger import RunProgress, StepLogger


def train_state(
    directory: Path, *, rank: int = 0, steps: int = 4, step: int = 0, figures: Sequence[str] = ()
) -> Any:
    """Return a state whose engine and config have what the log reads."""
    training = SimpleNamespace(steps=steps, stages=[])
    config: Any = SimpleNamespace(
        zero_tp=SimpleNamespace(training=training),
        accumulation=1,
        stages=[SimpleNamespace(accumulation=lambda samples: 1)],
        timeline=Timeline([StageSize(1, 1, steps=steps)]),
    )
    model = SimpleNamespace(figures=tuple(figures))
    engine: Any = SimpleNamespace(model=model, topology=SimpleNamespace(rank=rank))
    inputs: Any = SimpleNamespace(config=config, directory=directory)
    return TrainState(inputs, engine, step)


class RunLog:
    """Open the log of a run that resumes at `step`; close it at the end of the block."""

    def __init__(self, directory: Path, *, terminal: bool = False, **options: Any) -> None:
        self.state = train_state(directory, **options)
        self.logger, self.metrics, self.terminal = StepLogger(), MetricsFile(), terminal

    def __enter__(self) -> RunLog:
        self.state.callbacks = [self.logger, self.metrics]
        self.metrics.on_start(self.state)
        with ExitStack() as stack:
            for stream in (sys.stdout, sys.stderr):
                stack.enter_context(mock.patch.object(stream, "isatty", lambda: self.terminal))
            self.logger.open_bar(self.state)
        return self

    def log(self, record: tuple[Metrics, RunProgress]) -> None:
        self.state.step = int(record[0]["step"] or 0)
        self.logger.log(self.state, *record)

    def validation(self, step: int, figures: Mapping[str, float]) -> None:
        self.state.step = step
        Validation().log(self.state, figures)

    def __exit__(self, *error: object) -> None:
        self.metrics.on_end(self.state)
        self.logger.on_end(self.state)
