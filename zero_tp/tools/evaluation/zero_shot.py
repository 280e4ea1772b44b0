"""Zero-shot evaluation: the table of zero_tp's own tasks, and `evaluate`, which runs tasks.

Options, files and the data of zero_tp's own tasks are checked before torch, transformers or lm-eval
are imported, which takes up to half a minute.
"""

from __future__ import annotations

import difflib
import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_tp.base.errors import UserError, first_line
from zero_tp.base.versions import versions
from zero_tp.data.documents import check_files
from zero_tp.parallel.topology import Topology
from zero_tp.tools.evaluation.choices import check_choice_file
from zero_tp.tools.evaluation.lambada import LambadaTask
from zero_tp.tools.evaluation.model_directory import ModelDirectory, open_directory
from zero_tp.tools.evaluation.perplexity import PerplexityTask, WikitextTask
from zero_tp.tools.evaluation.settings import EvaluationSettings, TaskOptions
from zero_tp.tools.evaluation.task import (
    CHOICE_FIELDS,
    MULTIPLE_CHOICE,
    Task,
    as_json,
    require_lm_eval,
)

if TYPE_CHECKING:
    from torch import nn

    from zero_tp.run.process.environment import RankEnvironment
    from zero_tp.tools.evaluation.eval_model import EvalModel
    from zero_tp.tools.evaluation.lm_eval_tasks import TaskManager


def multiple_choice(file: Path | None, options: TaskOptions) -> Task:
    """Make a multiple-choice task of lm-eval from a file alone."""
    needed = ", ".join(CHOICE_FIELDS)
    if file is None:
        raise UserError(
            f"{MULTIPLE_CHOICE} needs JSON lines with {needed}: --data {MULTIPLE_CHOICE}=FILE"
        )
    require_lm_eval(MULTIPLE_CHOICE)
    check_choice_file(file)
    from zero_tp.tools.evaluation.lm_eval_tasks import LMEvalTask, TaskManager

    return LMEvalTask(MULTIPLE_CHOICE, TaskManager(include_defaults=False), options, file)


OWN_TASKS: dict[str, Callable[[Path | None, TaskOptions], Task]] = {
    PerplexityTask.name: PerplexityTask,
    LambadaTask.name: LambadaTask,
    WikitextTask.name: WikitextTask,
    MULTIPLE_CHOICE: multiple_choice,
}
"""zero_tp's own tasks, made in this order: the last ones import lm-eval."""
TASK_NAMES = f"{', '.join(OWN_TASKS)} and all of lm-eval's"
ANY_LM_EVAL_TASK = "tasks of lm-eval"
OPTION_TASKS = {
    **dict.fromkeys(("num_fewshot", "apply_chat_template", "log_samples"), (ANY_LM_EVAL_TASK,)),
    "overlap": (PerplexityTask.name, WikitextTask.name),
    "text_key": (PerplexityTask.name, WikitextTask.name, LambadaTask.name),
}
"""Options that apply to some tasks only, and these tasks."""
PACKAGES = ("torch", "transformers", "tokenizers", "lm-eval", "datasets")
"""Packages whose versions the report has."""
COMPARED = 1024
"""Elements of each parameter that DP ranks compare after loading."""


def parse_tasks(text: str) -> list[str]:
    """Parse task names from `a,b`."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise UserError(f"--tasks {text!r}: no task; there are {TASK_NAMES}")
    return names


def parse_data(pairs: Iterable[str]) -> dict[str, Path]:
    """Parse TASK=PATH pairs."""
    data: dict[str, Path] = {}
    for pair in pairs:
        task, equals, path = pair.partition("=")
        if not equals or not path:
            raise UserError(f"--data {pair}: not TASK=PATH, such as lambada=data/lambada.jsonl")
        if task in data:
            raise UserError(f"--data {pair}: {task} has a file already, {data[task]}")
        data[task] = Path(path)
    return data


def make_tasks(names: Sequence[str], data: Mapping[str, Path], options: TaskOptions) -> list[Task]:
    """Make the tasks in order and read their data. The model isn't needed.

    A name means a task of `include_path`, else one of zero_tp's, else one of lm-eval's.
    """
    options.check()
    check_files(data[name] for name in names if name in data)
    if options.limit is not None and set(names) == {WikitextTask.name}:
        raise UserError(
            f"--limit {options.limit}: {WikitextTask.name} is one text; leave the limit out"
        )
    included: TaskManager | None = None
    if options.include_path is not None:
        require_lm_eval("--include-path")
        from zero_tp.tools.evaluation.task_index import open_task_directory

        included = open_task_directory(options.include_path)
    # In the order of OWN_TASKS and not of the user: those that import lm-eval come last, so
    # mistakes in the others are reported sooner.
    own = [
        name
        for name in OWN_TASKS
        if name in names and not (included and name in included.task_index)
    ]
    kinds = {
        name if name in own and name != MULTIPLE_CHOICE else ANY_LM_EVAL_TASK for name in names
    }
    for option, allowed in OPTION_TASKS.items():
        if kinds.isdisjoint(allowed) and getattr(options, option) not in (
            0,
            getattr(TaskOptions, option),
        ):
            flag = f"--{option.replace('_', '-')}"
            raise UserError(
                f"{flag}: {', '.join(names)}: for {' and '.join(allowed)} only; leave it out"
            )
    tasks = {name: OWN_TASKS[name](data.get(name), options) for name in own}
    if others := [name for name in names if name not in own]:
        require_lm_eval("a task other than zero_tp's own")
        from zero_tp.tools.evaluation.lm_eval_tasks import LMEvalTask
        from zero_tp.tools.evaluation.task_index import find_task_manager

        manager = find_task_manager(others, included)
        for name in others:
            if name not in manager.task_index:
                near = difflib.get_close_matches(name, sorted({*OWN_TASKS, *manager.all_tasks}))
                hint = f"did you mean {' or '.join(near)}?" if near else f"there are {TASK_NAMES}"
                raise UserError(f"{name}: unknown task; {hint}")
        tasks |= {name: LMEvalTask(name, manager, options, data.get(name)) for name in others}
    return [tasks[name] for name in names]


def evaluate(
    model: Path,
    names: Sequence[str],
    data: Mapping[str, Path],
    settings: EvaluationSettings,
    environment: RankEnvironment | None = None,
) -> dict[str, Any]:
    """Run the tasks; return the report that `zero-tp evaluate` writes as JSON. Collective.

    Settings, paths and the tasks' data are checked before ranks connect and weights are read.

    Args:
        model: a Hugging Face directory, a run, or one of its checkpoints.
        data: files by task name.
        environment: this rank's; None: a single process.

    Raises:
        UserError: a wrong setting, path or data; ranks with different weights or requests.
    """
    world = environment.world if environment else 1
    settings.check_ranks(world)
    for name, file in data.items():
        if name not in names:
            raise UserError(
                f"--data {name}={file}: {name!r} is not among --tasks {','.join(names)}"
            )
    directory = open_directory(
        model, allow_pickle=settings.allow_pickle, tokenizer=settings.tokenizer
    )
    tasks = make_tasks(names, data, settings)
    window = directory.sequence_length(settings.sequence_length)
    for task in tasks:
        task.check(window, directory.tokenizer)
    topology = Topology()
    device = _choose_device(settings.device, world)
    if environment is not None and world > 1:
        from zero_tp.run.process.connect import connect

        environment.export()
        # It joins the store, where every rank says that it is ready or why it is not. No sequence
        # parallelism: without gradients it saves little memory.
        topology, own_device = connect(environment, device, settings.tensor_parallel)
        device = str(own_device)
        check_same_step(directory)
    # Weights are read last, after everything that can be refused without them.
    loaded = directory.load(
        settings.dtype, device, topology, batch_size=settings.batch_size, window=window
    )
    if world > 1:
        check_same_weights(loaded.module, topology, directory.path)
    results = {task.name: _run_timed(task, loaded) for task in tasks}
    return {
        "model": {
            "path": str(directory.path),
            "step": directory.step,
            **({"note": directory.note} if directory.note else {}),
            "model_type": directory.config.model_type,
            "class": type(loaded.module).__name__,
            "parameters": loaded.module.num_parameters(),
            "vocabulary_size": len(directory.tokenizer),
        },
        "settings": as_json(
            asdict(settings)
            | {"sequence_length": window, "device": device, "data_parallel": topology.data}
        ),
        "versions": versions(PACKAGES),
        "tasks": results,
    }


def check_same_step(directory: ModelDirectory) -> None:
    """Check that all ranks have found the same checkpoint of a run, which may still save.

    Collective.

    Raises:
        UserError: on every rank.
    """
    from zero_tp.parallel.agreement import require_same_on_all_ranks

    problem = "--model: the ranks found different checkpoints; give RUN/checkpoints/step_N"
    require_same_on_all_ranks({problem: f"step {directory.step}"})


def check_same_weights(model: nn.Module, topology: Topology, path: Path) -> None:
    """Check that all ranks have loaded the same model. Collective.

    Directories may differ between machines.

    It compares the first elements of each parameter over DP, and replicated parameters over TP.

    Raises:
        UserError: on every rank.
    """
    from zero_tp.engine.guards import check_replicas
    from zero_tp.parallel.agreement import all_gather_object, tensor_bytes

    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(tensor_bytes(parameter.flatten()[:COMPARED]))
    problem = f"--model {path}: its weights differ between machines; put it on shared storage"
    # TP 2 × DP 2 with equal weights on all machines:
    #
    #     rank            0        1        2        3
    #     (TP rank, hash) (0, x)   (1, y)   (0, x)   (1, y)      2 different pairs
    #
    # A machine with other weights adds a third.
    if len(set(all_gather_object((topology.tensor_rank, digest.digest())))) > topology.tensor:
        raise UserError(problem)
    try:
        check_replicas(model, topology)
    except UserError as error:  # its message is about training
        raise UserError(problem) from error


def _choose_device(requested: str | None, world: int) -> str:
    """Return the device to compute on; a single process tries it first."""
    import torch

    device = requested or ("cuda" if torch.cuda.is_available() else "cpu")
    if world == 1:  # else each rank tries its own device
        try:
            torch.ones(1, device=device).item()
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            raise UserError(f"--device {device}: {first_line(error)}") from error
    return device


def _run_timed(task: Task, model: EvalModel) -> dict[str, Any]:
    """Run the task and return its metrics with its speed.

    The added keys are `seconds`, and the tokens scored and computed per second.
    """
    started = time.perf_counter()
    result: dict[str, Any] = as_json(task.compute_metrics(model))
    seconds = time.perf_counter() - started
    return result | {
        "seconds": round(seconds, 3),
        "tokens_per_second": round(result["tokens"] / seconds, 1),
        "tokens_computed_per_second": round(result["tokens_computed"] / seconds, 1),
    }
