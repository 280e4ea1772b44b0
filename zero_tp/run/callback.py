"""Callbacks watch and extend a training run.

Logging, validation and checkpoints are all callbacks. Guards of a step are in engine/guards.py.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from zero_tp.base.errors import first_line, one_line, visible, write_stderr
from zero_tp.run.process.signals import Requests

if TYPE_CHECKING:
    from zero_tp.engine.engine import TrainingEngine
    from zero_tp.parallel.topology import Topology
    from zero_tp.run.checkpoint.manifest import Parent
    from zero_tp.run.config import RunConfig
    from zero_tp.run.run_inputs import RunInputs

Metrics = Mapping[str, float | int | None]


class Callback:
    """React to the events of a training run; subclass it and override what you need.

    Each method is called on every rank, so it may contain collectives. Callbacks are called in
    their order, `on_end` in reverse. An exception ends the run.
    """

    def on_start(self, state: TrainState) -> None:
        """Prepare for the first step."""

    def on_step_begin(self, state: TrainState) -> None:
        """Prepare for `state.step`, before its batches are read."""

    def on_step_end(self, state: TrainState) -> None:
        """Handle the end of `state.step`.

        The optimizer has updated the weights, or has skipped the step.
        """

    def on_evaluate(self, state: TrainState) -> None:
        """Evaluate the model.

        Called after every `evaluation.interval` steps and after step `total_steps`.
        """

    def on_save(self, state: TrainState) -> None:
        """Prepare for a checkpoint of `state.step`, which is about to be written."""

    def on_log(self, state: TrainState, values: Metrics) -> None:
        """Handle one line of metrics.jsonl: "step" and numbers by name; None is unknown."""

    def on_end(self, state: TrainState) -> None:
        """Clean up, also when `state.error` ended the run.

        Called for each callback whose `on_start` returned.
        """


@dataclass
class TrainState:
    """State of a training run, which the loop shares with its callbacks.

    Attributes:
        inputs: the run's config, corpora, tokenizer and model config.
        engine: the model in DeepSpeed's engine.
        step: the step that is running, or the last completed one; 0 before the first step of a new
            run.
        parent: the checkpoint of another run that this run was started from.
        check_owner: raises a UserError on rank 0 if another launch has taken the run directory
            over.
        requests: set its `stop` or `save` to stop or save after this step; one rank is enough.
        skipped_in_a_row: number of steps up to this one that were skipped because loss or gradients
            were not finite.
        stop: this step is the last, because a rank requested it.
        failure: ends the run after this step's callbacks; a callback sets it on all ranks.
        error: the exception that ended the run, for `on_end`.
        lost_writes: how many writes to each log failed.
    """

    inputs: RunInputs
    engine: TrainingEngine
    step: int
    parent: Parent | None = None
    check_owner: Callable[[], None] = lambda: None
    requests: Requests = field(default_factory=Requests)
    callbacks: Sequence[Callback] = ()
    skipped_in_a_row: int = 0
    stop: bool = False
    failure: Exception | None = None
    error: BaseException | None = None
    lost_writes: Counter[str] = field(default_factory=Counter)

    @property
    def config(self) -> RunConfig:
        return self.inputs.config

    @property
    def directory(self) -> Path:
        return self.inputs.directory

    @property
    def topology(self) -> Topology:
        return self.engine.topology

    @property
    def is_rank_zero(self) -> bool:
        return self.topology.rank == 0

    @property
    def total_steps(self) -> int:
        return self.config.zero_tp.training.steps

    @property
    def is_last_step(self) -> bool:
        return self.stop or self.step >= self.total_steps

    def is_due(self, interval: int | None) -> bool:
        """Return whether `step` is a multiple of `interval`; never, if it is None."""
        return interval is not None and self.step % interval == 0

    @contextlib.contextmanager
    def averaged_weights(self) -> Iterator[str]:
        """Give the model its averaged weights (`training.ema`) inside the block, and return the
        prefix of their figures. Collective.
        """
        with self.engine.averaged_weights():
            yield "ema/"

    @property
    def evaluates_average(self) -> bool:
        """Return whether evaluations run a second time, on the averaged weights."""
        ema = self.config.zero_tp.training.ema
        return ema is not None and ema.evaluate

    def print(self, text: str) -> None:
        """Print one line on rank 0, above the progress bar."""
        if self.is_rank_zero:
            with self.tolerate_failed_write("standard output"):
                tqdm.write(visible(text), file=sys.stdout)
                sys.stdout.flush()

    def log(self, values: Metrics) -> None:
        """Add one line to metrics.jsonl and to the trackers; `values` needs a "step"."""
        for callback in self.callbacks:
            callback.on_log(self, values)

    @contextlib.contextmanager
    def tolerate_failed_write(self, target: str) -> Iterator[None]:
        """Count a failed write to a log, which stops no training.

        The first one to each target is reported.
        """
        try:
            yield
        except BrokenPipeError:
            raise  # the reader of the output has closed it
        except OSError as error:
            self.lost_writes[target] += 1
            if self.lost_writes[target] == 1:
                reason = one_line(error.strerror or first_line(error), 300)
                write_stderr(f"{target} could not be written ({reason}); training continues")
