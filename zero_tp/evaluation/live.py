"""Zero-shot tasks on the model that is training, without a copy of it and without an effect on training."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_tp.config import RunConfig
from zero_tp.data.tokenizer import load_tokenizer
from zero_tp.errors import UserError
from zero_tp.evaluation.eval_model import EvalModel, ParallelScorer
from zero_tp.evaluation.model_directory import check_tokenizer
from zero_tp.evaluation.task import Task, TaskOptions
from zero_tp.evaluation.zero_shot import make_tasks
from zero_tp.training.callback import Callback, TrainState
from zero_tp.training.lines import format_number

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class LiveTasks(Callback):
    """Evaluate the zero-shot tasks of a run's config at every evaluation.

    Args:
        tokenizer: directory of the run's tokenizer.
        model_config: the model's Hugging Face config.

    Raises:
        UserError: see `make_tasks`; the run has no tokenizer, or one that does not fit the model.
    """

    def __init__(self, config: RunConfig, tokenizer: Path | None, model_config: PretrainedConfig) -> None:
        block = config.zero_tp.evaluation
        if tokenizer is None:
            raise UserError("zero_tp.evaluation.tasks: they need a tokenizer; set zero_tp.tokenizer to its directory")
        include = Path(block.task_include_path) if block.task_include_path else None
        data = {task: Path(file) for task, file in block.task_data.items()}
        try:
            self._tokenizer, self._model_config = load_tokenizer(tokenizer), model_config
            check_tokenizer(self._tokenizer, model_config, tokenizer)
            self._tasks = make_tasks(block.tasks, data, TaskOptions(limit=block.task_limit, include_path=include))
            for task in self._tasks:
                task.check(model_config.max_position_embeddings)
        except UserError as error:
            # The command has options where the file has keys.
            message = f"zero_tp.evaluation.tasks: {error} (--data is zero_tp.evaluation.task_data here)"
            raise UserError(message) from error

    def on_evaluate(self, state: TrainState) -> None:
        batch_size = state.config.micro_batch
        results = run_tasks(self._tasks, self._tokenizer, self._model_config, state.engine, batch_size)
        for task, figures in results.items():
            values = ", ".join(
                f"{name} {format_number(value, 0)}" for name, value in figures.items() if value is not None
            )
            state.print(f"{task} at step {state.step}: {values}")
        flat = {f"{task}/{name}": value for task, figures in results.items() for name, value in figures.items()}
        state.log({"step": state.step, **flat})
        gc.collect()  # thousands of requests, which refer to each other


def run_tasks(
    tasks: Sequence[Task], tokenizer: Any, config: PretrainedConfig, engine: Any, batch_size: int
) -> dict[str, dict[str, float | None]]:
    """Return the figures to log of each task. Collective over all ranks.

    Args:
        config: the model's.
        engine: a `TrainingEngine`.
        batch_size: rows of a forward.
    """
    model = EvalModel(
        ParallelScorer(engine.engine),
        engine.model,
        tokenizer,
        config,
        config.max_position_embeddings,
        batch_size=batch_size,
        device=engine.device,
        topology=engine.topology,
        lock_step=engine.zero.lock_step,
        quiet=True,
    )
    engine.engine.eval()
    try:
        return {task.name: task.figures_to_log(task.run(model)) for task in tasks}
    finally:
        engine.engine.train()
