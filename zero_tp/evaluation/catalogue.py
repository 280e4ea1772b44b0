"""lm-eval's tasks: which there are, what their data are, and what they give."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from zero_tp.errors import UserError, first_line
from zero_tp.evaluation.harness import Harness
from zero_tp.evaluation.lm_eval_parts import SEEDS, TaskManager, evaluator
from zero_tp.evaluation.sources import digest_of
from zero_tp.evaluation.surroundings import hushed, in_one_process, seeded
from zero_tp.evaluation.tasks import Subject, TaskOptions

BOOTSTRAP = 1000
"""Draws of the standard errors that have no formula; lm-eval's 100,000 take minutes in one process."""

TEXT_METRICS = ("alias", "name", "sample_len", "sample_count")


@functools.cache
def _own_tasks() -> Any:
    """lm-eval's own tasks. Their index takes seconds, so it is made once, and not where a directory has all names."""
    return TaskManager()


class Catalogue:
    """lm-eval's tasks, with those of a directory before them."""

    def __init__(self, options: TaskOptions):
        """UserError: no such directory, or no task in it."""
        self.options = options
        self._included: Any = None
        if options.include_path is not None:
            if not options.include_path.is_dir():
                raise UserError(f"--include-path {options.include_path}: no such directory")
            self._included = TaskManager(include_path=str(options.include_path), include_defaults=False)
            if not self._included.all_tasks:
                raise UserError(f"--include-path {options.include_path}: no task file (.yaml) of lm-eval in it")

    @property
    def included(self) -> list[str]:
        """The tasks of the directory."""
        return list(self._included.all_tasks) if self._included else []

    def has(self, name: str) -> bool:
        return name in self.included or name in _own_tasks().all_tasks

    def names(self) -> list[str]:
        """All of them."""
        return [*self.included, *_own_tasks().all_tasks]

    def _manager(self, name: str) -> Any:
        if name not in self.included:
            return _own_tasks()
        if name in self._included.all_subtasks:
            return self._included
        return TaskManager(include_path=str(self.options.include_path))  # a group may name tasks of lm-eval's own

    def task(self, name: str, file: Path | None) -> HarnessTask:
        """The task, group or tag of that name, with its documents.

        Args:
            file: its evaluated split, instead of what its task file names.

        Raises:
            UserError: its data can't be had.
        """
        manager = self._manager(name)
        asked: Any = name if file is None else self._with_file(manager.task_index[name], file)
        try:
            with seeded(), hushed():
                loaded = manager.load([asked])
        except Exception as error:  # datasets, huggingface_hub, jinja and a task's own code raise anything
            raise UserError(
                f"{name}: its data can't be read ({type(error).__name__}: {first_line(error)}); without a network give "
                f"the evaluated split's file with --data {name}=FILE, or a task file that names it with --include-path"
            ) from error
        if file is not None:
            loaded = {"tasks": loaded["tasks"], "groups": {}, "group_map": {}}
        for task in loaded["tasks"].values():
            self._set_fewshot(task)
        return HarnessTask(name, loaded, self.options.limit)

    def _with_file(self, entry: Any, file: Path) -> dict[str, Any]:
        """The task as a group of one, which is lm-eval's way to read it with other keys than its file has."""
        config = entry.cfg or {}
        split = config.get("test_split") or config.get("validation_split")
        if not isinstance(config.get("task"), str) or split is None:
            raise UserError(f"--data {entry.name}={file}: {entry.name} is a group of tasks; give files to its tasks")
        if self.options.num_fewshot:
            raise UserError(
                f"--data {entry.name}={file}: it has no examples for --num-fewshot {self.options.num_fewshot}; use a "
                "task file with all splits and --include-path"
            )
        kind = file.name.removesuffix(".gz").rpartition(".")[2]
        other = {"training_split": None, "validation_split": None, "test_split": None, "fewshot_split": None}
        changed = other | {
            "task": entry.name,
            "dataset_path": {"jsonl": "json"}.get(kind, "text"),
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {split: str(file)}},
            "test_split" if config.get("test_split") else "validation_split": split,
            "num_fewshot": 0,
        }
        return {"group": f"{entry.name} of a file", "task": [changed]}

    def _set_fewshot(self, task: Any) -> None:
        """As lm-eval's `simple_evaluate`: a task that says 0 keeps it."""
        said = task.get_config("num_fewshot")
        asked = self.options.num_fewshot
        if asked is not None and said != 0:
            task.set_config(key="num_fewshot", value=asked)
        elif said is None:
            task.set_config(key="num_fewshot", value=0)


@dataclass(frozen=True)
class HarnessTask:
    """A task, group or tag of lm-eval, as its `TaskManager` loads it."""

    name: str
    loaded: Any
    limit: int | None

    def check(self, positions: int) -> None:
        """Nothing that depends on the model can be wrong yet."""

    def run(self, subject: Subject) -> dict[str, Any]:
        """The metrics as lm-eval names them, and its whole result under `lm_eval`, for its table."""
        for task in self.loaded["tasks"].values():
            task.set_fewshot_seed(SEEDS["fewshot"])  # it is used up: an evaluation before this one drew from it
        with subject.progress(self.name) as report, seeded(), hushed(), in_one_process():
            lm = Harness(subject, report)
            results = evaluator.evaluate(
                lm,
                self.loaded,
                limit=self.limit,
                bootstrap_iters=0 if subject.quiet or subject.evaluator.topology.rank else BOOTSTRAP,
                log_samples=False,
            )
        kept = ("results", "groups", "group_subtasks", "versions", "n-shot", "higher_is_better")
        whole = {key: _plain(results[key]) for key in kept if key in results}
        metrics = whole["results"].get(self.name) or whole.get("groups", {}).get(self.name) or {}
        samples = {task: counts["effective"] for task, counts in results["n-samples"].items()}
        return {
            "data": {name: self._origin(task) for name, task in self.loaded["tasks"].items()},
            "metrics": {key: value for key, value in metrics.items() if key not in TEXT_METRICS},
            "examples": sum(samples.values()),
            "tokens": lm.tokens,
            "tokens_computed": lm.tokens_computed,
            "truncated": lm.truncated,
            "lm_eval": whole,
        }

    def _origin(self, task: Any) -> dict[str, Any]:
        """Where a task's documents are from, and a SHA-256 of those that were used."""
        found = {"dataset": task.DATASET_PATH, "name": task.DATASET_NAME}
        files = (task.get_config("dataset_kwargs") or {}).get("data_files")
        if files:
            found["data_files"] = _plain(files)
        return found | {"sha256": digest_of(islice(task.eval_docs, self.limit))}


def _plain(value: Any) -> Any:
    """The value as JSON has it; a number that isn't finite is None, and what JSON has no form for its text."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(each) for each in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)
