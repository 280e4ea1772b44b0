"""End a run whose loss or gradients stay non-finite."""

from __future__ import annotations

import math

from zero_tp.errors import UserError
from zero_tp.training.callback import Callback, TrainState

SKIPS_IN_A_ROW = 10


class SkippedSteps(Callback):
    """Report each skipped step; fail the run after 10 in a row, or at the first with `on_nonfinite` "stop".

    In fp16 an overflow of the gradients with a finite loss only lowers the loss scale and does not count.
    """

    def on_step_end(self, state: TrainState) -> None:
        engine, step = state.engine, state.step
        if not engine.skipped:
            state.skipped_in_a_row = 0
            return
        loss, scale = engine.loss, engine.zero.loss_scale
        if scale is not None and scale.reduced and math.isfinite(loss):
            state.print(f"step {step} was skipped: its gradients overflow; the loss scale is {scale.value:g}")
            return
        state.skipped_in_a_row += 1
        if state.config.zero_tp.training.on_nonfinite == "stop":
            reason = 'zero_tp.training.on_nonfinite is "stop"'
        elif state.skipped_in_a_row > SKIPS_IN_A_ROW:
            reason = f"{state.skipped_in_a_row} steps in a row were"
        else:
            state.print(f"step {step} was skipped: its loss or gradients are not finite")
            return
        state.failure = UserError(
            f"step {step}: loss {loss}, gradients not finite ({reason}); progress since the last checkpoint is lost: "
            "lower optimizer.params.lr, or look at the data of this step"
        )
