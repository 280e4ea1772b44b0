"""Check during training that tensor parallel ranks have equal replicas."""

from __future__ import annotations

from zero_tp.training.callback import Callback, TrainState
from zero_tp.training.guards import check_replicas


class ReplicaGuard(Callback):
    """Compare the replicated parameters every `guard_interval` steps (see `check_replicas`)."""

    def on_step_end(self, state: TrainState) -> None:
        if state.is_due(state.config.zero_tp.training.guard_interval):
            check_replicas(state.engine.model, state.topology, state.step)
