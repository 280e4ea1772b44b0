"""A model directory or a run is evaluated zero-shot: the settings, the order of the steps, and the report."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero_tp.constants import DTYPES
from zero_tp.errors import UserError, first_line
from zero_tp.evaluation.pretrained import open_directory
from zero_tp.evaluation.registry import check_kind, make_tasks
from zero_tp.evaluation.subject import Subject
from zero_tp.evaluation.task import Task, TaskOptions, as_json
from zero_tp.parallel.agreement import all_gather_object, tensor_bytes
from zero_tp.process.connect import connect
from zero_tp.process.environment import RankEnvironment
from zero_tp.topology import Topology
from zero_tp.training.guards import check_replicas

PACKAGES = ("torch", "transformers", "tokenizers", "lm-eval", "datasets")
COMPARED = 1024
"""Elements of each parameter by which ranks compare what they have loaded."""


@dataclass(frozen=True)
class EvaluationSettings(TaskOptions):
    """The settings say how a model is evaluated, by the names of the command's options.

    Attributes:
        batch_size: rows at once, on each data-parallel rank.
        sequence_length: tokens of a window and of the longest context; None: all positions the model has.
        dtype: of the weights: float32, bfloat16 or float16.
        device: as torch names it; None: `cuda` if there is one, else `cpu`.
        tensor_parallel: ranks that share one copy of the model.
        tokenizer: a directory to take the tokenizer from, instead of the model's own.
        allow_pickle: read pickled weights where there are no safetensors.
    """

    batch_size: int = 8
    sequence_length: int | None = None
    dtype: str = "float32"
    device: str | None = None
    tensor_parallel: int = 1
    tokenizer: Path | None = None
    allow_pickle: bool = False


def evaluate(
    model: Path,
    names: Sequence[str],
    data: Mapping[str, Path],
    settings: EvaluationSettings,
    environment: RankEnvironment | None = None,
) -> dict[str, Any]:
    """Run the tasks; return what `zero-tp evaluate` writes as JSON. Collective, where there are several ranks.

    All checks, and the reading of the tasks' data, come before ranks connect and before the weights are read.

    Args:
        model: a Hugging Face directory, a run, or one of its checkpoints.
        data: files by the task's name.
        environment: of this rank; None: the process is alone.

    Raises:
        UserError: see `open_directory`, `make_tasks`; settings that don't fit the model; ranks that have other weights.
    """
    world = environment.world if environment else 1
    settings.check()
    if settings.dtype not in DTYPES.values():
        raise UserError(f"--dtype {settings.dtype}: one of {', '.join(DTYPES.values())}")
    if settings.tensor_parallel < 1 or world % settings.tensor_parallel:
        raise UserError(
            f"--tensor-parallel {settings.tensor_parallel}: it must divide the {world} rank{'s' if world > 1 else ''}; "
            f"deepspeed --num_accelerators N starts N"
        )
    device = settings.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if world == 1:  # several take their own
        _check_device(device)
    directory = open_directory(model, allow_pickle=settings.allow_pickle, tokenizer=settings.tokenizer)
    length = directory.sequence_length(settings.sequence_length)
    tasks = make_tasks(names, data, settings)
    check_kind(tasks, causal=directory.causal)
    for task in tasks:
        task.check(length)
    topology = Topology()
    if environment is not None and world > 1:
        if device not in ("cuda", "cpu"):
            raise UserError(f"--device {device}: with several ranks cuda or cpu, each rank takes its own")
        # Without sequence parallelism: without gradients it saves no memory that counts.
        environment.export()
        topology, own_device = connect(environment, device, settings.tensor_parallel)
        device = str(own_device)
    subject = directory.load(
        settings.dtype, device, topology, batch_size=settings.batch_size, sequence_length=settings.sequence_length
    )
    if world > 1:
        check_same_weights(subject.module, topology, directory.path)
    return {
        "model": {
            "path": str(directory.path),
            "step": directory.step,
            **({"note": directory.note} if directory.note else {}),
            "model_type": directory.config.model_type,
            "class": type(subject.module).__name__,
            "parameters": subject.module.num_parameters(),
            "vocabulary_size": len(directory.tokenizer),
        },
        "settings": as_json(
            asdict(settings) | {"sequence_length": length, "device": device, "data_parallel": topology.data}
        ),
        "versions": _versions(),
        "tasks": {task.name: _timed(task, subject) for task in tasks},
    }


def check_same_weights(model: nn.Module, topology: Topology, path: Path) -> None:
    """Check that all ranks have loaded one model: machines may each have a directory of that name. Collective.

    They compare the beginning of each parameter over DP, and those that are whole on each rank over TP.

    Raises:
        UserError: on every rank; they have not.
    """
    hashed = hashlib.sha256()
    for parameter in model.parameters():
        hashed.update(tensor_bytes(parameter.flatten()[:COMPARED]))
    other = f"--model {path}: holds other weights on other machines; put it on storage that all share"
    if len(set(all_gather_object((topology.tensor_rank, hashed.digest())))) > topology.tensor:
        raise UserError(other)
    try:
        check_replicas(model, topology)
    except UserError as error:  # which tells of training
        raise UserError(other) from error


def _check_device(device: str) -> None:
    """Raise a UserError if nothing can be computed there."""
    try:
        torch.ones(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(f"--device {device}: {first_line(error)}") from error


def _timed(task: Task, subject: Subject) -> dict[str, Any]:
    """Run the task; return its figures with `seconds`, and tokens scored and computed a second."""
    started = time.perf_counter()
    result = task.run(subject)
    seconds = time.perf_counter() - started
    return result | {
        "seconds": round(seconds, 3),
        "tokens_per_second": round(result["tokens"] / seconds, 1),
        "tokens_computed_per_second": round(result["tokens_computed"] / seconds, 1),
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # lm-eval and datasets are an extra
            continue
    return found
