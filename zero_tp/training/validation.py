"""Log the validation loss of a run."""

from __future__ import annotations

from collections.abc import Mapping

from zero_tp.training.callback import Callback, TrainState
from zero_tp.training.lines import format_figure
from zero_tp.training.metrics import perplexity


class Validation(Callback):
    """Log the loss [nats] and the objective's other figures over `evaluation.batches` of the validation corpora."""

    def on_evaluate(self, state: TrainState) -> None:
        samples, config, topology = state.inputs.validation, state.config, state.topology
        if samples is None:
            return
        limit = config.zero_tp.evaluation.batches * config.global_batch
        batches = samples.batches(limit, config.micro_batch, topology.data_rank, topology.data)
        self.log(state, state.engine.evaluate([batch.to(state.engine.device) for batch in batches]))

    def log(self, state: TrainState, figures: Mapping[str, float]) -> None:
        """Print and log the figures; a loss without other figures gets its perplexity."""
        values = dict(figures) if len(figures) > 1 else {**figures, "perplexity": perplexity(figures["loss"])}
        shown = (f"{name.replace('_', ' ')} {format_figure(name, value)}" for name, value in values.items())
        state.print(f"validation at step {state.step}: {', '.join(shown)}")
        state.log({"step": state.step, **{f"validation_{name}": value for name, value in values.items()}})
