"""Zero-shot tasks run on the model that is training: no copy of it, and training goes on as if they hadn't been."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_tp.config import RunConfig
from zero_tp.data.tokenizer import load_tokenizer
from zero_tp.errors import UserError
from zero_tp.evaluation.pretrained import check_tokenizer
from zero_tp.evaluation.registry import check_kind, make_tasks
from zero_tp.evaluation.subject import ParallelScorer, Subject
from zero_tp.evaluation.task import Task, TaskOptions

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def live_tasks(
    config: RunConfig, tokenizer: Path | None, model_config: PretrainedConfig
) -> Callable[[Any, int], dict[str, dict[str, float | None]]]:
    """Read the tasks of a run's config and their data; return what runs them on an engine (`run_tasks`).

    Args:
        tokenizer: the run's tokenizer's directory.
        model_config: the model's Hugging Face config.

    Raises:
        UserError: see `make_tasks`; the run has no tokenizer, or one that doesn't fit the model.
    """
    asked = config.zero_tp.evaluation
    if tokenizer is None:
        raise UserError("zero_tp.evaluation.tasks: they need a tokenizer; set zero_tp.tokenizer to its directory")
    include = Path(asked.task_include_path) if asked.task_include_path else None
    data = {task: Path(file) for task, file in asked.task_data.items()}
    try:
        opened = load_tokenizer(tokenizer)
        check_tokenizer(opened, model_config, tokenizer)
        tasks = make_tasks(asked.tasks, data, TaskOptions(limit=asked.task_limit, include_path=include))
        check_kind(tasks, causal=True)  # with the masked objective none is accepted
        for task in tasks:
            task.check(model_config.max_position_embeddings)
    except UserError as error:
        # Where the command has options, the file has keys.
        raise UserError(f"zero_tp.evaluation.tasks: {error} (--data is zero_tp.evaluation.task_data here)") from error
    return partial(run_tasks, tasks, opened, model_config)


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
