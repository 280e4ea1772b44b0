"""Log how far each optimizer group's weights moved in a step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from zero_tp.engine.param_groups import divide_parameters
from zero_tp.engine.zero.fragments import Fragment
from zero_tp.engine.zero.states import MASTER
from zero_tp.parallel.collectives import all_reduce
from zero_tp.parallel.gradients import is_counted, sum_of_squares
from zero_tp.run.callback import Callback, TrainState


class UpdateNorms(Callback):
    """Log the norm of the change of each group's masters, with rate, decay and QK-clip, in each
    logged step; of a step that was skipped it is 0.

    The groups are numbered in the order of `zero-tp check`. In a logged step a rank has a copy of
    its masters from the end of backward to the end of the update. One all-reduce of a number a
    group over the world.
    """

    def on_start(self, state: TrainState) -> None:
        config, engine = state.config, state.engine
        assert config.settings.optimizer is not None, "a run's config has one"
        params = config.settings.optimizer.params
        groups = divide_parameters(engine.model, config.zero_tp.param_groups, params)
        self._count = len(groups)
        self._group_of = {
            name: number for number, group in enumerate(groups) for name in group.names
        }
        self._before: list[tuple[Fragment, Tensor]] = []
        self._logs = False
        # At the start of the update: backward has freed its activations.
        enter = engine.on_phase
        engine.on_phase = lambda phase: self._enter(state, phase, enter)

    def _enter(self, state: TrainState, phase: str, enter: Callable[[str], None] | None) -> None:
        if enter is not None:
            enter(phase)
        if phase == "update" and self._logs:
            states = state.engine.zero.states()
            self._before = [
                (piece, states.get(piece, MASTER).clone()) for piece in self._pieces(state)
            ]

    def _pieces(self, state: TrainState) -> list[Fragment]:
        """Return the pieces of masters that this rank counts, so that each element counts once."""
        engine = state.engine
        return [
            engine.zero.checkpoint_slice(fragment)
            for fragment in engine.zero.states().fragments
            if is_counted(engine.model.get_parameter(fragment.name), state.topology)
        ]

    def on_step_begin(self, state: TrainState) -> None:
        self._logs = (
            state.is_due(state.config.zero_tp.logging.measured_interval) or state.is_last_step
        )

    @torch.no_grad()
    def on_step_end(self, state: TrainState) -> None:
        if not self._logs:
            return
        states = state.engine.zero.states()
        sums = torch.zeros(self._count, dtype=torch.float64, device=state.engine.device)
        for piece, before in self._before:
            change = before.sub_(states.get(piece, MASTER))
            sums[self._group_of[piece.name]] += sum_of_squares(change).to(sums.device)
        self._before.clear()
        group = None if state.topology.world == 1 else torch.distributed.group.WORLD
        norms = all_reduce(sums, group).sqrt().tolist()
        state.log(
            {
                "step": state.step,
                **{f"update_norm/group_{number}": norm for number, norm in enumerate(norms)},
            }
        )
