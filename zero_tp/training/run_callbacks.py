"""The callbacks of every run, in the order in which the loop calls them."""

from __future__ import annotations

from collections.abc import Sequence

from zero_tp.training.callback import Callback, TrainState
from zero_tp.training.checkpointing import CheckpointCallback
from zero_tp.training.garbage_collection import GarbageCollection
from zero_tp.training.metrics_file import MetricsFile
from zero_tp.training.replica_guard import ReplicaGuard
from zero_tp.training.skipped_steps import SkippedSteps
from zero_tp.training.step_logger import StepLogger
from zero_tp.training.validation import Validation
from zero_tp.training.watchdog import Watchdog


def run_callbacks(state: TrainState, others: Sequence[Callback] = ()) -> list[Callback]:
    """Return the run's callbacks with `others` after its log and validation, before its guards and checkpoints."""
    watchdog = [] if state.watch is None else [Watchdog(state.watch)]
    log = [StepLogger(), MetricsFile(), Validation()]
    return [*watchdog, *log, *others, SkippedSteps(), GarbageCollection(), ReplicaGuard(), CheckpointCallback()]
