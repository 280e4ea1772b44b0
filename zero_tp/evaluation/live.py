"""Zero-shot tasks run on the model that is training: no copy of it, and training goes on as if they hadn't been."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_tp.config import RunConfig
from zero_tp.data.tokenizer import load_tokenizer
from zero_tp.errors import UserError
from zero_tp.evaluation.pretrained import check_tokenizer
from zero_tp.evaluation.registry import check_kind, make_tasks
from zero_tp.evaluation.subject import ParallelScorer, Subject
from zero_tp.evaluation.task import Task, TaskOptions
from zero_tp.training.callback import Callback, TrainState
from zero_tp.training.lines import format_number

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class LiveTasks(Callback):
    """Evaluate the zero-shot tasks of a run's config on the model that is training, at every evaluation.

    Args:
        tokenizer: directory of the run's tokenizer.
        model_config: the model's Hugging Face config.

    Raises:
        UserError: see `make_tasks`; the run has no tokenizer, or one that does not fit the model.
    """

    def __init__(self, config: RunConfig, tokenizer: Path | None, model_config: PretrainedConfig) -> None:
        asked = config.zero_tp.evaluation
        if tokenizer is None:
            raise UserError("zero_tp.evaluation.tasks: they need a tokenizer; set zero_tp.tokenizer to its directory")
        include = Path(asked.task_include_path) if asked.task_include_path else None
        data = {task: Path(file) for task, file in asked.task_data.items()}
        try:
            self._tokenizer = load_tokenizer(tokenizer)
            check_tokenizer(self._tokenizer, model_config, tokenizer)
            options = TaskOptions(limit=asked.task_limit, include_path=include)
            self._tasks, self._model_config = make_tasks(asked.tasks, data, options), model_config
            check_kind(self._tasks, causal=True)  # with the masked objective none is accepted
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
            known = ((name, value) for name, value in figures.items() if value is not None)
            shown = ", ".join(f"{name} {format_number(value, 0)}" for name, value in known)
            state.print(f"{task} at step {state.step}: {shown}")
        flat = {f"{task}/{name}": value for task, figures in results.items() for name, value in figures.items()}
        state.log({"step": state.step, **flat})
        gc.collect()  # thousands of requests, which refer to each other


def run_tasks(
    tasks: Sequence[Task], tokenizer: Any, config: PretrainedConfig, engine: Any, batch_size: int
) -> dict[str, dict[str, float | None]]:
    """Return what is logged of each task. Collective over all ranks.

    Args:
        config: the model's.
        engine: a `TrainingEngine`.
        batch_size: rows of a forward.
    """
    subject = Subject(
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
        return {task.name: task.figures_to_log(task.run(subject)) for task in tasks}
    finally:
        engine.engine.train()
