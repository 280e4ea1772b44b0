"""Write a run's checkpoints and report how each write ended."""

from __future__ import annotations

from zero_tp.checkpoint.directory import step_directory
from zero_tp.checkpoint.save import run_saver
from zero_tp.errors import UserError
from zero_tp.training.callback import Callback, TrainState


class CheckpointCallback(Callback):
    """Save a checkpoint whenever one is due.

    A failed save is logged and training continues, because earlier checkpoints stay valid.

    Raises:
        UserError: the final checkpoint could not be written, or another launch has taken the run directory over.
    """

    def on_start(self, state: TrainState) -> None:
        inputs = state.inputs
        self.saver = run_saver(
            state.engine.zero,
            state.config,
            state.directory,
            tokenizer=inputs.recorded_tokenizer,
            corpora=inputs.corpora,
            validation=inputs.validation_corpora,
            parent=state.parent,
            check_owner=state.check_owner,
        )

    def on_step_end(self, state: TrainState) -> None:
        if state.failure is not None:
            self.saver.wait()  # a save in the background still gets its name
        self._report_finished_save(state)

    def on_save(self, state: TrainState) -> None:
        self.saver.wait()
        self._report_finished_save(state)
        self.saver.save(state.step)
        if state.is_last_step:
            self.saver.wait()
        self._report_finished_save(state, final=state.is_last_step)

    def _report_finished_save(self, state: TrainState, *, final: bool = False) -> None:
        outcome = self.saver.outcome()
        if outcome is None:
            return
        step, problem = outcome
        notes, self.saver.notes = self.saver.notes, []
        for note in notes:
            state.print(note)
        if not problem:
            removed = ", ".join(f"step {step}" for step in self.saver.removed)
            reason = f" (checkpoint.keep is {state.config.zero_tp.checkpoint.keep})"
            saved = f"saved {step_directory(state.directory, step)}"
            state.print(saved + (f"; removed {removed}{reason}" if removed else ""))
            return
        message = f"step {step} was not saved: {problem}; the checkpoints before it are intact"
        if final:
            raise UserError(f"{message}: make room, and start the same command again to go on from there")
        state.print(f"{message}, training goes on")
