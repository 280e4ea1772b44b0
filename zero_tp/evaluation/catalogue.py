"""lm-eval's tasks are tasks here, found and run by its own code; those of a directory are data that run no Python."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import random
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import lm_eval.api.task
import lm_eval.utils
import numpy as np
import torch
from jinja2 import StrictUndefined
from jinja2.sandbox import SandboxedEnvironment
from lm_eval import evaluator
from lm_eval.api.registry import metric_registry
from lm_eval.tasks import TaskManager, _yaml_loader

from zero_tp.errors import UserError, first_line, in_json_words, one_line, shown
from zero_tp.evaluation.harness import SEEDS, Harness
from zero_tp.evaluation.subject import Subject
from zero_tp.evaluation.task import Origin, Task, TaskOptions, digest_of
from zero_tp.process.quiet import hushed
from zero_tp.weights.files import is_regular

BOOTSTRAP = 1000
"""Draws of the standard errors that have no formula; lm-eval's 100,000 take minutes in one process."""

OWN = Path(lm_eval.__file__).resolve().parent
_IF_TRUSTED = "--allow-task-code (in Python allow_task_code=True) allows it, if you trust the source"

NOT_METRICS = ("alias", "name", "sample_len", "sample_count")
IN_REPORT = ("results", "groups", "group_subtasks", "versions", "n-shot", "higher_is_better")


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Run lm-eval's code with its seeds, without its output and in this process; training goes on with its own states.

    What it and datasets print goes to stderr where the block fails. Streams that were opened before are not touched:
    our own bars stay.
    """
    logger, multiprocessing = logging.getLogger("lm_eval"), os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"  # its bootstrap would fork this process, connections to other ranks and all
    level, states = logger.level, (random.getstate(), np.random.get_state())
    logger.setLevel(logging.ERROR)
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices), hushed(stderr=True):
            random.seed(SEEDS["random"])
            np.random.seed(SEEDS["numpy"])
            torch.manual_seed(SEEDS["torch"])
            yield
    finally:
        if multiprocessing is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = multiprocessing
        logger.setLevel(level)
        random.setstate(states[0])
        np.random.set_state(states[1])


@contextlib.contextmanager
def only_data(asked: bool = True) -> Iterator[None]:
    """Run lm-eval with a directory's task files as data, if `asked`: what of them would run Python is refused by name.

    That is `!function`, metrics that the package evaluate would load, and templates that reach for Python's own.
    """
    if not asked:
        yield
        return
    import_function, get_metric = _yaml_loader._import_func_in_yml, lm_eval.api.task.get_metric
    sandbox = SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
    sandbox.filters |= lm_eval.utils.env.filters

    def own_function(name: str, directory: Path) -> Any:
        if OWN not in Path(directory).resolve().parents:
            raise UserError(f"{directory}: a task file there runs Python (!function {name}); {_IF_TRUSTED}")
        return import_function(name, directory)

    def own_metric(name: str, elsewhere: bool = False) -> Any:
        if elsewhere or name not in metric_registry:
            raise UserError(f"the metric {shown(name)} is none of lm-eval's own, and would run code; {_IF_TRUSTED}")
        return get_metric(name)

    replaced = [
        (_yaml_loader, "_import_func_in_yml", own_function),
        (lm_eval.api.task, "get_metric", own_metric),
        (lm_eval.utils, "env", sandbox),
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in replaced]
    try:
        for module, name, ours in replaced:
            setattr(module, name, ours)
        yield
    finally:
        for module, name, theirs in before:
            setattr(module, name, theirs)


@functools.cache
def _own_tasks() -> Any:
    """Index lm-eval's own tasks. That takes seconds, so it is done once, and not where a directory has all names."""
    return TaskManager()


def check_task_names(directory: Path) -> dict[Path, str]:
    """Check the names in all task files of a directory: lm-eval sorts them as strings, whatever they are.

    Returns:
        The files that lm-eval can't read, with the reason. Its own index skips them in silence.

    Raises:
        UserError: a `task`, `group` or `tag` is no string, or a file is a pipe or a device.
    """
    unreadable = {}
    for file in sorted(directory.rglob("*.yaml")):
        is_regular(file)  # reading a pipe would wait for its writer
        try:
            config = _yaml_loader.load_yaml(file, resolve_func=False)
        except Exception as error:  # YAML, lm-eval's includes and the file system raise anything
            unreadable[file] = one_line(in_json_words(str(error)) or first_line(error), 160)
            continue
        if problem := _name_problem(config):
            raise UserError(f"{file}: {problem}")
    return unreadable


def _name_problem(config: Mapping[str, Any]) -> str | None:
    """Return the problem with the `task`, `group` or `tag` of a task file or of a group's entry; None without one."""
    is_group = "group" in config and "class" not in config
    tags = config.get("tag") or []
    names = [(key, config[key]) for key in ("group" if is_group else "task",) if key in config]
    names += [("tag", tag) for tag in (tags if isinstance(tags, list) else [tags])]
    for key, name in names:
        if not isinstance(name, str):
            return f"{key} is {shown(name)}, not a string; write the name in quotes"
    members = config.get("task", []) if is_group else []
    if not isinstance(members, list):
        return f"task of the group {shown(config['group'])} is {shown(members)}; write a list of names: [NAME, ...]"
    for member in members:
        problem = None
        if isinstance(member, dict):
            problem = _name_problem(member)
        elif not isinstance(member, str):
            problem = f"{shown(member)} is not a string; write the task's name in quotes"
        if problem:
            return f"in the list of the group {shown(config['group'])}: {problem}"
    return None


class Catalogue:
    """The catalogue has lm-eval's tasks, and those of a directory before them.

    Attributes:
        included: names of the directory's tasks.
        unreadable: the end of a line that names the first of its files that can't be read; "" without one.
    """

    def __init__(self, options: TaskOptions):
        """Read the names of the directory's tasks.

        Raises:
            UserError: no such directory, no task in it, or a name in a task file that is no string.
        """
        self.options = options
        self.included: list[str] = []
        self.unreadable = ""
        if options.include_path is not None:
            if not options.include_path.is_dir():
                raise UserError(f"--include-path {options.include_path}: no such directory")
            unreadable = check_task_names(options.include_path)
            self._included = TaskManager(include_path=str(options.include_path), include_defaults=False)
            self.included = list(self._included.all_tasks)
            for file, reason in list(unreadable.items())[:1]:
                self.unreadable = f"; {file} can't be read ({reason}); correct that file"
            if not self.included:
                raise UserError(
                    f"--include-path {options.include_path}: no task file (.yaml) of lm-eval in it{self.unreadable}"
                )

    def has(self, name: str) -> bool:
        return name in self.included or name in _own_tasks().all_tasks

    @property
    def names(self) -> list[str]:
        return [*self.included, *_own_tasks().all_tasks]

    def task(self, name: str, file: Path | None) -> HarnessTask:
        """Load the task, group or tag of that name, with its documents.

        Args:
            file: its evaluated split, instead of what its task file names.

        Raises:
            UserError: its data can't be had, or its task file runs Python, which isn't allowed.
        """
        only = name in self.included and not self.options.allow_task_code
        manager = self._manager(name)
        asked: Any = name if file is None else self._with_file(manager.task_index[name], file)
        try:
            with isolated(), only_data(only):
                loaded = manager.load([asked])
                for task in loaded["tasks"].values():
                    _fill_in(task, self.options.limit)
        except UserError as error:
            raise UserError(f"{name}: {error}") from error
        except Exception as error:  # datasets, huggingface_hub, jinja and a task's own code raise anything
            if name in self.included:
                raise UserError(
                    f"{name}: lm-eval can't load it ({first_line(error)}); correct its task file or its data; without "
                    "a network its data have to be files on this machine"
                ) from error
            raise UserError(
                f"{name}: its data can't be read ({first_line(error)}); without a network give "
                f"the evaluated split's file with --data {name}=FILE, or a task file that names it with --include-path"
            ) from error
        if file is not None:
            loaded = {"tasks": loaded["tasks"], "groups": {}, "group_map": {}}
        for task in loaded["tasks"].values():
            self._set_fewshot(task)
        return HarnessTask(name, loaded, self.options, only_data=only)

    def _manager(self, name: str) -> Any:
        if name not in self.included:
            return _own_tasks()
        if name in self._included.all_subtasks:
            return self._included
        return TaskManager(include_path=str(self.options.include_path))  # a group may name tasks of lm-eval's own

    def _with_file(self, entry: Any, file: Path) -> dict[str, Any]:
        """Make a group of the task alone, which is lm-eval's way to read it with other keys than its file has."""
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
        changed = {
            **dict.fromkeys(("training_split", "validation_split", "test_split", "fewshot_split")),
            "task": entry.name,
            "dataset_path": {"jsonl": "json"}.get(kind, "text"),
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {split: str(file)}},
            "test_split" if config.get("test_split") else "validation_split": split,
            "num_fewshot": 0,
        }
        return {"group": f"{entry.name} of a file", "task": [changed]}

    def _set_fewshot(self, task: Any) -> None:
        """Do as lm-eval's `simple_evaluate`: a task that says 0 keeps it."""
        said = task.get_config("num_fewshot")
        asked = self.options.num_fewshot
        if asked is not None and said != 0:
            task.set_config(key="num_fewshot", value=asked)
        elif said is None:
            task.set_config(key="num_fewshot", value=0)


def _fill_in(task: Any, limit: int | None) -> None:
    """Fill in every document, so that what is wrong with one is told before the model is read.

    Raises:
        UserError: a document does not fit the task file.
    """
    for number, document in enumerate(islice(task.eval_docs, limit), 1):
        try:
            scored = {"doc_to_text": task.doc_to_text(document), "doc_to_target": task.doc_to_target(document)}
            for key, value in scored.items():
                if task.OUTPUT_TYPE.startswith("loglikelihood") and not isinstance(value, str):
                    raise TypeError(f"{key} is {shown(value)}, not text")
            if task.OUTPUT_TYPE == "multiple_choice":
                task.doc_to_choice(document)
        except Exception as error:  # jinja, lm-eval's own use of the values, and a task's own code raise anything
            raise UserError(
                f"document {number} of its data doesn't fit its task file ({first_line(error)}); correct either"
            ) from error


class HarnessTask(Task):
    """The task is a task, group or tag of lm-eval, as its `TaskManager` loads it.

    Args:
        only_data: nothing of its files may run Python.
    """

    def __init__(self, name: str, loaded: Any, options: TaskOptions, *, only_data: bool = False):
        self.name, self.loaded, self.options, self.only_data = name, loaded, options, only_data
        self.limit = options.limit

    def figures(self, subject: Subject) -> dict[str, Any]:
        """Compute the metrics as lm-eval names them, and its whole result under `lm_eval`, for its table."""
        chat = self.options.apply_chat_template
        if chat and not subject.tokenizer.chat_template:
            raise UserError("--apply-chat-template: the model's tokenizer has no chat template; leave it out")
        for task in self.loaded["tasks"].values():
            task.set_fewshot_seed(SEEDS["fewshot"])  # it is used up: an evaluation before this one drew from it
        with subject.progress(self.name) as report, isolated(), only_data(self.only_data):
            lm = Harness(subject, report)
            try:
                results = evaluator.evaluate(
                    lm,
                    self.loaded,
                    limit=self.limit,
                    bootstrap_iters=0 if subject.quiet or subject.topology.rank else BOOTSTRAP,
                    log_samples=self.options.log_samples,
                    apply_chat_template=chat,
                    fewshot_as_multiturn=chat,
                )
            except UserError:
                raise
            except Exception as error:  # its own use of the values: jinja, metrics, filters, a task's own code
                # A RuntimeError may be a peer that is lost, which is told by the rank that failed.
                if lm.computing or (subject.topology.world > 1 and isinstance(error, RuntimeError)):
                    raise
                raise UserError(
                    f"{self.name}: lm-eval can't evaluate it ({first_line(error)}); correct its task file or its data"
                ) from error
        whole = {key: results[key] for key in IN_REPORT if key in results}
        metrics = whole["results"].get(self.name) or whole.get("groups", {}).get(self.name) or {}
        return {
            "data": {name: self._origin(task) for name, task in self.loaded["tasks"].items()},
            "metrics": {key: value for key, value in metrics.items() if key not in NOT_METRICS},
            "examples": sum(counts["effective"] for counts in results["n-samples"].values()),
            "tokens": lm.tokens,
            "tokens_computed": lm.tokens_computed,
            "truncated": lm.truncated,
            "lm_eval": whole,
            **({"samples": results["samples"]} if self.options.log_samples else {}),
        }

    def figures_to_log(self, result: Mapping[str, Any]) -> dict[str, float | None]:
        """Pick every metric but standard errors. Its `acc,none` is `acc` here; another filter stays in the name."""
        return {
            metric.removesuffix(",none"): value
            for metric, value in result["metrics"].items()
            if "_stderr" not in metric and isinstance(value, int | float)
        }

    def _origin(self, task: Any) -> Origin:
        """Describe where a task's documents are from, with a SHA-256 of those that were used."""
        found = {"dataset": task.DATASET_PATH, "name": task.DATASET_NAME}
        if files := (task.get_config("dataset_kwargs") or {}).get("data_files"):
            found["data_files"] = files
        return found | {"sha256": digest_of(islice(task.eval_docs, self.limit))}
