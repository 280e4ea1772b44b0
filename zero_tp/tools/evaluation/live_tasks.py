"""Zero-shot tasks during training, on the live model itself. They do not change the training."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from zero_tp.base.errors import UserError
from zero_tp.base.settings.schema import Evaluation
from zero_tp.data.tokenizer import load_tokenizer
from zero_tp.run.callback import Callback, TrainState
from zero_tp.run.step_logger import format_number
from zero_tp.tools.evaluation.eval_model import EvalModel, ParallelScorer
from zero_tp.tools.evaluation.model_directory import check_tokenizer
from zero_tp.tools.evaluation.settings import TaskOptions
from zero_tp.tools.evaluation.task import as_json
from zero_tp.tools.evaluation.zero_shot import make_tasks

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from zero_tp.engine.engine import TrainingEngine


class LiveTasks(Callback):
    """Evaluate a run's zero-shot tasks after each validation.

    With `training.ema.evaluate` the results of the averaged weights follow, as `ema/TASK/…`.

    Args:
        block: `zero_tp.evaluation` of the run's config.
        tokenizer: directory of the run's tokenizer.
        model_config: the model's Hugging Face config.
        positions: tokens of the longest window or context. A run trains no position beyond its
            sequence length.
    """

    def __init__(
        self,
        block: Evaluation,
        tokenizer: Path | None,
        model_config: PretrainedConfig,
        positions: int,
    ) -> None:
        if tokenizer is None:
            raise UserError(
                "zero_tp.evaluation.tasks: tasks need a tokenizer; set zero_tp.tokenizer to its "
                "directory"
            )
        include = Path(block.task_include_path) if block.task_include_path else None
        data = {task: Path(file) for task, file in block.task_data.items()}
        try:
            self._tokenizer = load_tokenizer(tokenizer)
            self._model_config = model_config
            self._positions = positions
            check_tokenizer(self._tokenizer, model_config, tokenizer)
            self._tasks = make_tasks(
                block.tasks, data, TaskOptions(limit=block.task_limit, include_path=include)
            )
            for task in self._tasks:
                task.check(positions, self._tokenizer)
        except UserError as error:
            # The error names options of `zero-tp evaluate`.
            message = (
                f"zero_tp.evaluation.tasks: {error} (instead of --data, set "
                "zero_tp.evaluation.task_data)"
            )
            raise UserError(message) from error

    def on_evaluate(self, state: TrainState) -> None:
        micro_batch = state.config.micro_batch
        self._log(state, self.evaluate(state.engine, micro_batch))
        if state.evaluates_average:
            with state.averaged_weights() as prefix:
                results = self.evaluate(state.engine, micro_batch)
            self._log(state, results, prefix)
        gc.collect()  # thousands of lm-eval requests in reference cycles

    def _log(
        self, state: TrainState, results: Mapping[str, Mapping[str, float | None]], prefix: str = ""
    ) -> None:
        for task, metrics in results.items():
            values = ", ".join(
                f"{name} {format_number(value)}"
                for name, value in metrics.items()
                if value is not None
            )
            state.print(f"{prefix}{task} at step {state.step}: {values}")
        flat = {
            f"{prefix}{task}/{name}": value
            for task, metrics in results.items()
            for name, value in metrics.items()
        }
        state.log({"step": state.step, **flat})

    def evaluate(
        self, engine: TrainingEngine, batch_size: int
    ) -> dict[str, dict[str, float | None]]:
        """Return the metrics to log, by task. Collective."""
        model = EvalModel(
            ParallelScorer(engine.deepspeed_engine),
            engine.model,
            self._tokenizer,
            self._model_config,
            self._positions,
            batch_size=batch_size,
            device=engine.device,
            topology=engine.topology,
            lock_step=engine.zero.lock_step,
            quiet=True,
        )
        engine.deepspeed_engine.eval()
        try:
            return {
                task.name: task.metrics_to_log(as_json(task.compute_metrics(model)))
                for task in self._tasks
            }
        finally:
            # Also after an error: a model in evaluation mode would train without dropout.
            engine.deepspeed_engine.train()
