"""The training loop.

It runs steps, and decides when to evaluate, save and stop. All else is done by callbacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch.distributed as dist

from zero_tp.data.batch import ReadAhead
from zero_tp.run.callback import Callback, TrainState
from zero_tp.run.process.signals import Requests
from zero_tp.run.stages import StageChanges


def train(
    state: TrainState, callbacks: Sequence[Callback], requests: Requests | None = None
) -> None:
    """Train until the run's last step. Collective over all ranks.

    Args:
        state: from `zero_tp.run.start.start_training`, inside its block.
        callbacks: from `zero_tp.run.run_callbacks.run_callbacks`; without them nothing is logged or
            saved.
        requests: flags that signals raise: save, or save and stop.

    Raises:
        UserError: the loss is not finite and `on_nonfinite` is "stop", more than 10 steps in a row
            were skipped, or the last checkpoint cannot be written.
    """
    # A finished run that is started again: nothing is written, and no callback is called.
    if state.step >= state.total_steps:
        return
    if requests is not None:
        state.requests = requests
    state.callbacks = callbacks
    with ExitStack() as stack:
        for callback in state.callbacks:
            callback.on_start(state)
            # Only after `on_start` has returned: `on_end` would clean up what was never prepared.
            # The stack calls them in reverse.
            stack.push(partial(_end, callback, state))
        # After all `on_start`: until here SIGTERM ends the run at once, because there is nothing to
        # save.
        stack.enter_context(state.requests.accepting())
        # By `batches_from` of data/samples.py, in a thread.
        batches = stack.enter_context(state.inputs.read_ahead(state.topology, state.total_steps))
        stages = StageChanges(state)
        for step in range(state.step + 1, state.total_steps + 1):
            state.step = step
            stages.before_step(state)
            _run_step(state, batches)
            if state.stop:
                break
        if state.step < state.total_steps:
            state.print(
                f"stopped after step {state.step}, as requested; the same command resumes from "
                "there"
            )
        else:
            name = state.directory
            state.print(
                f"next: zero-tp report {name}, zero-tp convert to-hf {name} --output "
                f"exports/{name.name}"
            )
        # rank 0 hosts the store, and other ranks may still ask it about the last save
        dist.barrier()


def _end(
    callback: Callback, state: TrainState, kind: object, error: BaseException | None, trace: object
) -> None:
    state.error = error
    callback.on_end(state)


def _run_step(state: TrainState, batches: ReadAhead[list[Any]]) -> None:
    """Run one step, and the evaluation and the checkpoint that are due after it."""
    settings = state.config.zero_tp
    for callback in state.callbacks:
        callback.on_step_begin(state)
    state.engine.run_step(
        [batch.to(state.engine.device) for batch in batches.take(state.step)],
        guarded=state.step if state.is_due(settings.training.guard_interval) else None,
        guard_gradients=settings.training.guard_gradients,
    )
    for callback in state.callbacks:
        callback.on_step_end(state)
    # After all callbacks: the step is logged, and a save in the background gets its name.
    if state.failure is not None:
        raise state.failure
    if state.is_last_step or state.is_due(settings.evaluation.interval):
        for callback in state.callbacks:
            callback.on_evaluate(state)
    # After the evaluation, so that a request that comes during it is seen at this step.
    state.stop, save = state.requests.all_reduce(state.engine.device)
    if state.is_last_step or save or _is_save_due(state):
        for callback in state.callbacks:
            callback.on_save(state)


def _is_save_due(state: TrainState) -> bool:
    """Return whether a checkpoint is due by `checkpoint.interval`; never after a skipped step.

    The weights may be the reason for the non-finite loss, and their checkpoint would replace good
    ones.
    """
    if not state.is_due(state.config.zero_tp.checkpoint.interval):
        return False
    if state.skipped_in_a_row:
        state.print(
            f"step {state.step} is not saved: the last {state.skipped_in_a_row} steps were skipped"
        )
    return not state.skipped_in_a_row
