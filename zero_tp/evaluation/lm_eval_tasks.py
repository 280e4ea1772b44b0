"""lm-eval's tasks: loaded by its `TaskManager`, evaluated by its `evaluate`.

The task files of a directory (`--include-path`) are data unless `--allow-task-code` is given. This module reads them,
so lm-eval never imports the Python that they name, and their templates run in jinja2's sandbox.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import random
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import lm_eval.tasks
import lm_eval.utils
import numpy as np
import torch
import yaml
from jinja2 import StrictUndefined
from jinja2.sandbox import SandboxedEnvironment
from lm_eval import evaluator
from lm_eval.api.registry import metric_registry
from lm_eval.tasks import TaskManager

from zero_tp.errors import UserError, first_line, in_json_words, one_line, shown
from zero_tp.evaluation.eval_model import EvalModel
from zero_tp.evaluation.lm_eval_model import SEEDS, LMEvalModel
from zero_tp.evaluation.task import Origin, Task, TaskOptions, hash_records
from zero_tp.process.quiet import suppress_output
from zero_tp.weights.files import is_regular

BOOTSTRAP = 1000
"""Samples of the standard errors that have no formula; lm-eval's 100,000 take minutes in one process."""

LM_EVAL_TASKS = Path(lm_eval.tasks.__file__).parent
NOT_METRICS = ("alias", "name", "sample_len", "sample_count")
IN_REPORT = ("results", "groups", "group_subtasks", "versions", "n-shot", "higher_is_better")


@contextlib.contextmanager
def lm_eval_settings(*, sandbox: bool = False) -> Iterator[None]:
    """Run lm-eval's code with its seeds, without its output, and in this process; restore the caller's random states.

    Output of lm-eval and datasets goes to stderr if the block fails.

    Args:
        sandbox: render templates in jinja2's sandbox. In lm-eval's own environment a template can run any Python.
    """
    os.environ["DISABLE_MULTIPROC"] = "1"  # lm-eval's bootstrap would fork this process with its connections
    logger, environment = logging.getLogger("lm_eval"), lm_eval.utils.env
    level, states = logger.level, (random.getstate(), np.random.get_state())
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        logger.setLevel(logging.ERROR)
        if sandbox:
            lm_eval.utils.env = SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
            lm_eval.utils.env.filters |= environment.filters
        with torch.random.fork_rng(devices), suppress_output(stderr=True):
            random.seed(SEEDS["random"])
            np.random.seed(SEEDS["numpy"])
            torch.manual_seed(SEEDS["torch"])
            yield
    finally:
        lm_eval.utils.env = environment
        logger.setLevel(level)
        random.setstate(states[0])
        np.random.set_state(states[1])


class RefusedCode:
    """Stands in a task file's content for code. lm-eval copies the content of a task that it builds: that is refused.

    Raises:
        UserError: on the copy.
    """

    def __init__(self, problem: str):
        self.problem = problem

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise UserError(self.problem)


class TaskFileLoader(yaml.SafeLoader):
    """Loads a task file as data: `!function` becomes `RefusedCode`."""

    def refuse_function(self, node: yaml.Node) -> RefusedCode:
        return RefusedCode(f"{self.name}: it runs Python (!function {node.value}); {_if_trusted()}")


TaskFileLoader.add_constructor("!function", TaskFileLoader.refuse_function)


def _if_trusted() -> str:
    return "--allow-task-code (in Python allow_task_code=True) allows it, if you trust the source"


def read_task_file(file: Path, including: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a task file with the files that it includes, whose keys it overrides, as lm-eval does.

    Raises:
        UserError: it can't be read, is no mapping, or includes itself.
    """
    is_regular(file)  # reading a pipe would wait for its writer
    try:
        with file.open("rb") as stream:
            own = yaml.load(stream, TaskFileLoader)
    except Exception as error:  # YAML and the file system raise anything
        reason = one_line(in_json_words(str(error)) or first_line(error), 160)
        raise UserError(f"{file} can't be read ({reason}); correct that file") from error
    if not isinstance(own, dict):
        raise UserError(f"{file} is not an object; correct that file")
    if file in including:
        raise UserError(f"{file} includes itself; correct that file")
    includes = own.pop("include", [])
    config: dict[str, Any] = {}
    for name in includes if isinstance(includes, list) else [includes]:
        if not isinstance(name, str):
            raise UserError(f"{file}: include is {shown(name)}, not a string; write the name of a file")
        config |= read_task_file((file.parent / name).resolve(), (*including, file))
    return config | own


def check_names(config: Mapping[str, Any], file: Path) -> None:
    """Check `task`, `group` and `tag` of a task file: lm-eval sorts them as strings.

    Raises:
        UserError: one is not a string.
    """
    key = "group" if "group" in config and "class" not in config else "task"
    tags = config.get("tag") or []
    names = [(key, config.get(key, "")), *(("tag", tag) for tag in (tags if isinstance(tags, list) else [tags]))]
    for field, name in names:
        if not isinstance(name, str | RefusedCode):
            raise UserError(f"{file}: {field} is {shown(name)}, not a string; write the name in quotes")
    if key == "group":
        _check_members(config.get("task"), file)


def _check_members(members: Any, file: Path) -> None:
    """Check the names in a group's `task` list. UserError: one is not a string."""
    for member in members if isinstance(members, list) else []:
        name = member.get("task", member.get("group")) if isinstance(member, dict) else member
        if isinstance(name, list):
            _check_members(name, file)
        elif not isinstance(name, str | RefusedCode):
            raise UserError(f"{file}: a task of the group is {shown(name)}, not a string; write the name in quotes")


def refuse_metrics(config: Any) -> None:
    """Put `RefusedCode` in place of a `metric_list` with a metric that the package evaluate would load, as code.

    Entries of a group's `task` list may have one, too.
    """
    if not isinstance(config, dict):
        return
    metrics, members = config.get("metric_list"), config.get("task")
    for metric in metrics if isinstance(metrics, list) else []:
        name = metric.get("metric") if isinstance(metric, dict) else None
        if isinstance(name, str) and (metric.get("hf_evaluate") or name not in metric_registry):
            problem = f"the metric {shown(name)} is none of lm-eval's own, and would run code; {_if_trusted()}"
            config["metric_list"] = RefusedCode(problem)
    for member in members if isinstance(members, list) else []:
        refuse_metrics(member)


@functools.cache
def lm_eval_task_manager() -> Any:
    """Index lm-eval's own tasks. It takes seconds, and is not needed if a directory has all names."""
    return TaskManager()


class TaskDirectory:
    """The task files of `--include-path`.

    Attributes:
        names: of its tasks, groups and tags.

    Raises:
        UserError: no such directory, no task in it, a file that can't be read, or a name that is not a string.
    """

    def __init__(self, path: Path, *, allow_code: bool):
        if not path.is_dir():
            raise UserError(f"--include-path {path}: no such directory")
        self.path, self.allow_code = path, allow_code
        self._configs = {file: read_task_file(file) for file in sorted(path.rglob("*.yaml"))}
        for file, config in self._configs.items():
            check_names(config, file)
            refuse_metrics(config)
        self._without_defaults = self._task_manager(include_defaults=False)
        self.names: list[str] = list(self._without_defaults.all_tasks)
        if not self.names:
            raise UserError(f"--include-path {path}: no task file (.yaml) of lm-eval in it")

    def task_manager(self, name: str) -> Any:
        """Return a `TaskManager` for a task; for a group or tag one with lm-eval's tasks (seconds) that it may name."""
        own = self._without_defaults
        return own if name in own.all_subtasks else self._task_manager(include_defaults=True)

    def _task_manager(self, *, include_defaults: bool) -> Any:
        """Have lm-eval index the directory, and build its tasks from what was read here instead of from the files."""
        manager = TaskManager(include_path=str(self.path), include_defaults=include_defaults)
        for entry in manager.task_index.values():
            if entry.yaml_path and not entry.yaml_path.is_relative_to(LM_EVAL_TASKS) and not self.allow_code:
                entry.cfg, entry.yaml_path = self._configs[entry.yaml_path], None
        return manager


class LMEvalTask(Task):
    """A task, group or tag of lm-eval, with its documents.

    Args:
        directory: has the task; None: lm-eval itself has it.
        file: the evaluated split; None: what the task file names.

    Raises:
        UserError: its data can't be loaded, or its task file runs Python, which isn't allowed.
    """

    def __init__(self, name: str, directory: TaskDirectory | None, options: TaskOptions, file: Path | None):
        self.name, self.options, self.limit = name, options, options.limit
        self.sandbox = directory is not None and not options.allow_task_code
        manager = lm_eval_task_manager() if directory is None else directory.task_manager(name)
        spec: Any = name if file is None else self._with_file(manager.task_index[name], file)
        try:
            with lm_eval_settings(sandbox=self.sandbox):
                self.loaded = manager.load([spec])
                if not self.loaded["tasks"]:
                    raise UserError("a group without tasks; write their names as a list: task: [NAME, ...]")
                for task in self.loaded["tasks"].values():
                    _check_documents(task, self.limit)
        except UserError as error:
            raise UserError(f"{name}: {error}") from error
        except Exception as error:  # datasets, huggingface_hub, jinja and a task's own code raise anything
            if directory is not None:
                problem = f"lm-eval can't load it ({first_line(error)})"
                remedy = "correct its task file or its data; without a network its data must be files on this machine"
            else:
                problem = f"its data can't be read ({first_line(error)})"
                remedy = (
                    f"without a network give the evaluated split's file with --data {name}=FILE, or a task file that "
                    "names it with --include-path"
                )
            raise UserError(f"{name}: {problem}; {remedy}") from error
        if file is not None:
            self.loaded = {"tasks": self.loaded["tasks"], "groups": {}, "group_map": {}}
        for task in self.loaded["tasks"].values():
            self._set_fewshot(task)

    def _with_file(self, entry: Any, file: Path) -> dict[str, Any]:
        """Return a group of this task alone: lm-eval's way to override keys of a task file."""
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
        """Set the number of examples as lm-eval's `simple_evaluate` does: 0 in a task file is not overridden."""
        in_task_file, option = task.get_config("num_fewshot"), self.options.num_fewshot
        if option is not None and in_task_file != 0:
            task.set_config(key="num_fewshot", value=option)
        elif in_task_file is None:
            task.set_config(key="num_fewshot", value=0)

    def figures(self, model: EvalModel) -> dict[str, Any]:
        """Return the metrics as lm-eval names them, and its whole result under `lm_eval`, for its table."""
        chat = self.options.apply_chat_template
        if chat and not model.tokenizer.chat_template:
            raise UserError("--apply-chat-template: the model's tokenizer has no chat template; leave it out")
        for task in self.loaded["tasks"].values():
            task.set_fewshot_seed(SEEDS["fewshot"])  # an earlier evaluation has drawn from it
        with lm_eval_settings(sandbox=self.sandbox):
            lm = LMEvalModel(model, self.name)
            try:
                results = evaluator.evaluate(
                    lm,
                    self.loaded,
                    limit=self.limit,
                    bootstrap_iters=0 if model.quiet or model.topology.rank else BOOTSTRAP,
                    log_samples=self.options.log_samples,
                    apply_chat_template=chat,
                    fewshot_as_multiturn=chat,
                )
            except UserError:
                raise
            except Exception as error:  # jinja, metrics, filters and a task's own code raise anything
                # A RuntimeError may be a lost peer, which the failing rank reports.
                if lm.computing or (model.topology.world > 1 and isinstance(error, RuntimeError)):
                    raise
                raise UserError(
                    f"{self.name}: lm-eval can't evaluate it ({first_line(error)}); correct its task file or its data"
                ) from error
        report = {key: results[key] for key in IN_REPORT if key in results}
        metrics = report["results"].get(self.name) or report.get("groups", {}).get(self.name) or {}
        return {
            "data": {name: self._origin(task) for name, task in self.loaded["tasks"].items()},
            "metrics": {key: value for key, value in metrics.items() if key not in NOT_METRICS},
            "examples": sum(counts["effective"] for counts in results["n-samples"].values()),
            "tokens": lm.tokens,
            "tokens_computed": lm.tokens_computed,
            "truncated": lm.truncated,
            "lm_eval": report,
            **({"samples": results["samples"]} if self.options.log_samples else {}),
        }

    def figures_to_log(self, result: Mapping[str, Any]) -> dict[str, float | None]:
        """Return every metric but standard errors. `acc,none` is logged as `acc`; other filters stay in the name."""
        return {
            metric.removesuffix(",none"): value
            for metric, value in result["metrics"].items()
            if "_stderr" not in metric and isinstance(value, int | float)
        }

    def _origin(self, task: Any) -> Origin:
        """Return a task's data set, with a SHA-256 of the documents that were used."""
        origin = {"dataset": task.DATASET_PATH, "name": task.DATASET_NAME}
        if files := (task.get_config("dataset_kwargs") or {}).get("data_files"):
            origin["data_files"] = files
        return origin | {"sha256": hash_records(islice(task.eval_docs, self.limit))}


def _check_documents(task: Any, limit: int | None) -> None:
    """Fill the task's templates with every document, so a wrong one is reported before the model is loaded.

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
