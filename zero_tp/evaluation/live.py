"""Zero-shot tasks run on the model that is training: no copy of it, and training goes on as if they hadn't been."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_tp.config import RunConfig
from zero_tp.data.tokenizer import load_tokenizer
from zero_tp.errors import UserError
from zero_tp.evaluation.pretrained import check_tokenizer
from zero_tp.evaluation.registry import check_kind, make_tasks
from zero_tp.evaluation.subject import ParallelScorer, Subject
from zero_tp.evaluation.task import TaskOptions

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class LiveTasks:
    """Live tasks are those of a run's config, their data read once.

    Args:
        tokenizer: the run's tokenizer's directory.
        config: the model's.

    Raises:
        UserError: see `make_tasks`; a tokenizer that doesn't fit the model.
    """

    def __init__(
        self,
        names: Sequence[str],
        data: Mapping[str, Path],
        options: TaskOptions,
        tokenizer: Path,
        config: PretrainedConfig,
    ):
        self.tokenizer, self.config = load_tokenizer(tokenizer), config
        check_tokenizer(self.tokenizer, config, tokenizer)
        self.tasks = make_tasks(names, data, options)
        check_kind(self.tasks, causal=True)  # with the masked objective none is accepted
        for task in self.tasks:
            task.check(config.max_position_embeddings)

    def run(self, engine: Any, batch_size: int) -> dict[str, dict[str, float | None]]:
        """Return what is logged of each task. Collective over all ranks.

        Args:
            engine: a `TrainingEngine`.
            batch_size: rows of a forward.
        """
        subject = Subject(
            ParallelScorer(engine.engine),
            engine.model,
            self.tokenizer,
            self.config,
            self.config.max_position_embeddings,
            batch_size=batch_size,
            device=engine.device,
            topology=engine.topology,
            lock_step=engine.zero.lock_step,
            quiet=True,
        )
        engine.engine.eval()
        try:
            return {task.name: task.figures_to_log(task.run(subject)) for task in self.tasks}
        finally:
            engine.engine.train()


def live_tasks(
    config: RunConfig, tokenizer: Path | None, model_config: PretrainedConfig
) -> Callable[[Any, int], dict[str, dict[str, float | None]]]:
    """Read the tasks of a run's config and their data; return what runs them (`LiveTasks.run`).

    Args:
        tokenizer: the run's tokenizer's directory.
        model_config: the model's Hugging Face config.

    Raises:
        UserError: see `LiveTasks`; the run has no tokenizer.
    """
    asked = config.zero_tp.evaluation
    if tokenizer is None:
        raise UserError("zero_tp.evaluation.tasks: they need a tokenizer; set zero_tp.tokenizer to its directory")
    include = Path(asked.task_include_path) if asked.task_include_path else None
    options = TaskOptions(limit=asked.task_limit, include_path=include)
    data = {task: Path(file) for task, file in asked.task_data.items()}
    try:
        return LiveTasks(asked.tasks, data, options, tokenizer, model_config).run
    except UserError as error:
        # Where the command has options, the file has keys.
        raise UserError(f"zero_tp.evaluation.tasks: {error} (--data is zero_tp.evaluation.task_data here)") from error
