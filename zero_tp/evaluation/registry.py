"""Tasks are found by name: zero_tp's own, and all of lm-eval's."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from zero_tp.data.documents import check_files
from zero_tp.errors import UserError
from zero_tp.evaluation.lambada import LambadaTask
from zero_tp.evaluation.masked import MaskedTask
from zero_tp.evaluation.perplexity import PerplexityTask
from zero_tp.evaluation.task import Task, TaskOptions, require_lm_eval
from zero_tp.evaluation.wikitext import WikitextTask

if TYPE_CHECKING:
    from zero_tp.evaluation.catalogue import Catalogue

TASKS: dict[str, Callable[[Path | None, TaskOptions], Task]] = {
    task.name: task for task in (PerplexityTask, WikitextTask, LambadaTask, MaskedTask)
}
NEEDS_FILE = (PerplexityTask.name, MaskedTask.name)
NAMES = f"{', '.join(TASKS)} and all of lm-eval's"


def check_kind(tasks: Iterable[Task], *, causal: bool) -> None:
    """Raise a UserError for a task that doesn't score such models."""
    for task in tasks:
        if task.causal and not causal:
            raise UserError(f"{task.name}: scores causal models, and this one is an encoder; {MaskedTask.name} does")
        if causal and not task.causal:
            raise UserError(f"{task.name}: scores encoders, and this model is causal; {PerplexityTask.name} does")


def parse_tasks(text: str) -> list[str]:
    """Read task names from `a,b`. UserError: none."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise UserError(f"--tasks {text!r}: no task named; there are {NAMES}")
    return names


def parse_data(pairs: Iterable[str], tasks: Sequence[str]) -> dict[str, Path]:
    """Read TASK=PATH pairs. UserError: not such a pair, a task that isn't run, or no such file."""
    data: dict[str, Path] = {}
    for pair in pairs:
        task, equals, path = pair.partition("=")
        if not equals or not path:
            raise UserError(f"--data {pair}: TASK=PATH is needed, such as lambada=data/lambada.jsonl")
        if task in data:
            raise UserError(f"--data {pair}: {task} has a file already, {data[task]}")
        data[task] = Path(path)
    check_data(data, tasks)
    return data


def check_data(data: Mapping[str, Path], tasks: Sequence[str]) -> None:
    """Raise a UserError for a file of a task that isn't run, a missing file, or none where a task needs one."""
    for task, path in data.items():
        if task not in tasks:
            raise UserError(f"--data {task}={path}: {task!r} is not among --tasks {','.join(tasks)}")
    for task in NEEDS_FILE:
        if task in tasks and task not in data:
            raise UserError(f"{task} needs a text: --data {task}=FILE (.txt or .jsonl, each also .gz)")
    check_files(data.values())


OF_LM_EVAL = ("num_fewshot", "apply_chat_template", "log_samples")
"""Options that change lm-eval's tasks alone."""


def make_tasks(names: Sequence[str], data: Mapping[str, Path], options: TaskOptions) -> list[Task]:
    """Make the tasks in order and read their data; the model isn't needed yet.

    A task file under `include_path` wins over a task of the same name here, and both over lm-eval's own.

    Raises:
        UserError: an unknown task (names the nearest), options that don't fit it, or data that can't be read.
    """
    options.check()
    catalogue = _catalogue(names, options)
    own = [name for name in names if name in TASKS and (catalogue is None or name not in catalogue.included)]
    asked = [name for name in OF_LM_EVAL if getattr(options, name) not in (None, False)]
    if asked and len(own) == len(names):
        raise UserError(f"--{asked[0].replace('_', '-')}: {', '.join(names)}: for tasks of lm-eval only; leave it out")
    for name in names:
        if name not in own and (catalogue is None or not catalogue.has(name)):
            unreadable = catalogue.unreadable if catalogue else ""
            raise UserError(f"{name}: unknown task; {_near(name, catalogue)}{unreadable}")
    check_data({name: path for name, path in data.items() if name in own}, own)

    def make(name: str) -> Task:
        if name in own:
            return TASKS[name](data.get(name), options)
        assert catalogue is not None
        return catalogue.task(name, data.get(name))

    return [make(name) for name in names]


def _catalogue(names: Sequence[str], options: TaskOptions) -> Catalogue | None:
    """Open lm-eval's tasks; None where none can be meant.

    Raises:
        UserError: lm-eval is not installed.
    """
    if options.include_path is None and all(name in TASKS for name in names):
        return None
    require_lm_eval("a task that is none of zero_tp's own")
    from zero_tp.evaluation.catalogue import Catalogue

    return Catalogue(options)


def _near(name: str, catalogue: Catalogue | None) -> str:
    known = dict.fromkeys([*TASKS, *(catalogue.names if catalogue else ())])
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)
    return f"did you mean {' or '.join(near)}?" if near else f"there are {NAMES}"
