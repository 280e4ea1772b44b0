"""Zero-shot evaluation of a model directory or a run: what is asked, checked, and reported; tasks.py computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from zero_tp.errors import UserError
from zero_tp.evaluation.pretrained import DTYPES, open_directory
from zero_tp.evaluation.tasks import TaskOptions, make_tasks, timed
from zero_tp.topology import Topology

PACKAGES = ("torch", "transformers", "tokenizers", "lm-eval", "datasets")


@dataclass(frozen=True)
class EvaluationSettings:
    """How a model is evaluated.

    Attributes:
        batch_size: rows at once, on each data-parallel rank.
        sequence_length: tokens of a window and of the longest context; None: all positions the model has.
        dtype: of the weights: float32, bfloat16 or float16.
        device: as torch names it; None: `cuda` if there is one, else `cpu`.
        tensor_parallel: ranks that share one copy of the model.
        tokenizer: a directory to take the tokenizer from, instead of the model's own.
        allow_pickle: read pickled weights where there are no safetensors.
        tasks: what the tasks are asked with.
    """

    batch_size: int = 8
    sequence_length: int | None = None
    dtype: str = "float32"
    device: str | None = None
    tensor_parallel: int = 1
    tokenizer: Path | None = None
    allow_pickle: bool = False
    tasks: TaskOptions = field(default_factory=TaskOptions)

    def check(self, world: int) -> None:
        """UserError: a value that can't be."""
        if self.batch_size < 1:
            raise UserError(f"--batch-size {self.batch_size}: at least 1")
        if self.dtype not in DTYPES:
            raise UserError(f"--dtype {self.dtype}: one of {', '.join(DTYPES)}")
        if self.tensor_parallel < 1 or world % self.tensor_parallel:
            raise UserError(
                f"--tensor-parallel {self.tensor_parallel}: it must divide the {world} rank{'s' if world > 1 else ''}; "
                f"deepspeed --num_accelerators N starts N"
            )


def evaluate(
    model: Path,
    names: Sequence[str],
    data: Mapping[str, Path],
    settings: EvaluationSettings,
    *,
    world: int = 1,
    connect: Callable[[], tuple[str, Topology]] | None = None,
) -> dict[str, Any]:
    """Run the tasks; returns what `eval/zero_shot.py` writes as JSON. Collective, where there are several ranks.

    All checks, and the reading of the tasks' data, come before ranks connect and before the weights are read.

    Args:
        model: a Hugging Face directory, a run, or one of its checkpoints.
        data: files by the task's name.
        world: number of ranks.
        connect: joins the ranks, when the checks are done, and returns this one's device and place.

    Raises:
        UserError: see `open_directory`, `make_tasks`; settings that don't fit the model.
    """
    settings.check(world)
    directory = open_directory(model, allow_pickle=settings.allow_pickle, tokenizer=settings.tokenizer)
    length = directory.sequence_length(settings.sequence_length)
    tasks = make_tasks(names, data, settings.tasks)
    for task in tasks:
        task.check(length)

    import torch

    from zero_tp.evaluation.scoring import Evaluator
    from zero_tp.evaluation.tasks import Subject

    if connect is None:
        device, topology = settings.device or ("cuda" if torch.cuda.is_available() else "cpu"), Topology()
    else:
        device, topology = connect()
    loaded = directory.load(settings.dtype, device, topology)
    evaluator = Evaluator(loaded.scorer, batch_size=settings.batch_size, device=device, topology=topology)
    subject = Subject(evaluator, directory.tokenizer, directory.config, loaded.module, length)
    results = {task.name: timed(task, subject) for task in tasks}
    return {
        "model": {
            "path": str(directory.path),
            "step": directory.step,
            "model_type": directory.config.model_type,
            "class": type(loaded.module).__name__,
            "parameters": loaded.parameters,
            "vocabulary_size": len(directory.tokenizer),
        },
        "settings": _settings(settings, length, device, topology),
        "versions": _versions(),
        "tasks": results,
    }


def _settings(settings: EvaluationSettings, length: int, device: str, topology: Topology) -> dict[str, Any]:
    shown = asdict(settings) | {"sequence_length": length, "device": device, "data_parallel": topology.data}
    options = shown.pop("tasks")
    return {key: str(value) if isinstance(value, Path) else value for key, value in {**shown, **options}.items()}


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # lm-eval and datasets are an extra
            continue
    return found
