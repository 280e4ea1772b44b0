"""The interface of zero-shot tasks, and readers of their data. Needs no torch."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic_core import to_jsonable_python

from zero_tp.base.errors import UserError, first_line
from zero_tp.data.documents import file_format, file_sha256, read_documents, read_objects
from zero_tp.data.formats import import_optional

if TYPE_CHECKING:
    from zero_tp.tools.evaluation.eval_model import EvalModel

Origin = dict[str, Any]
"""The source of a task's data in a report: the path or data set, and a SHA-256."""

MULTIPLE_CHOICE = "multiple_choice"
CHOICE_FIELDS = ("query", "choices", "gold")
"""The task that evaluates a user's file of questions, and the fields of that file."""


def require_lm_eval(what: str) -> None:
    """Check that the optional lm-eval is installed, without importing it, which takes seconds."""
    if find_spec("lm_eval") is None:
        raise UserError(
            f"{what} needs lm-eval, which is not installed: pip install -c constraints.txt -e "
            ".[eval]"
        )


class Task(ABC):
    """One of `--tasks`. The constructor reads and checks its data, and does not need the model.

    Attributes:
        name: as in `--tasks`.
        logged: the metrics that a training run logs.
    """

    name: str
    logged: ClassVar[tuple[str, ...]] = ()

    def check(self, window: int, tokenizer: Any) -> None:  # noqa: B027  # some tasks fit every model
        """Raise a UserError if the options or the data don't fit windows of `window` tokens."""

    @abstractmethod
    def compute_metrics(self, model: EvalModel) -> dict[str, Any]:
        """Compute the metrics and counts of the report.

        Every task has `data` (its origin), `tokens` (scored) and `tokens_computed` (read by the
        model without padding).
        """

    def metrics_to_log(self, result: Mapping[str, Any]) -> dict[str, float | None]:
        """Return the metrics of a result that a training run logs."""
        return {name: result[name] for name in self.logged}


def as_json(value: Any) -> Any:
    """Return a value as JSON values.

    A number that is not finite becomes None, an object that JSON has no type for its `str`.
    """
    return to_jsonable_python(
        value,
        inf_nan_mode="null",
        # A NumPy scalar becomes a number. Other objects in lm-eval's results, such as classes, are
        # only named.
        fallback=lambda other: other.item() if isinstance(other, np.generic) else str(other),
    )


def hash_records(records: Iterable[Any]) -> str:
    """Return the hexadecimal SHA-256 of records, each as a line of JSON with sorted keys."""
    digest = hashlib.sha256()
    for record in records:
        # Sorted keys: the hash is of the content, and not of the order in which a file or a library
        # has the fields.
        digest.update(json.dumps(record, sort_keys=True, default=str).encode() + b"\n")
    return digest.hexdigest()


def file_origin(path: Path) -> Origin:
    """Return a file's path and the SHA-256 of its (compressed) bytes."""
    return {"path": str(path), "sha256": file_sha256(path)}


def read_texts(path: Path, text_key: str, limit: int | None = None) -> tuple[list[str], Origin]:
    """Read the texts of a file that are not blank."""
    texts = list(islice((text for text in read_documents(path, text_key) if text.strip()), limit))
    if not texts:
        raise UserError(f"{path}: it has no text")
    return texts, file_origin(path)


def require_fields(task: str, file: Path, wanted: Sequence[str]) -> None:
    """Check that the first record of a file of JSON lines has the fields that the task reads."""
    if file_format(file) != "jsonl":
        return
    fields = list(next((record for _, record in read_objects(file)), {}))
    if lacking := [field for field in wanted if field not in fields]:
        others = ", ".join(CHOICE_FIELDS)
        hint = (
            ""
            if task == MULTIPLE_CHOICE
            else f", or give a file with {others} as --tasks {MULTIPLE_CHOICE}"
        )
        raise UserError(
            f"--data {task}={file}: no field {lacking[0]}: {task} reads {', '.join(wanted)}, the "
            "file has "
            f"{', '.join(fields) or 'none'}; rename its fields{hint}"
        )


def read_hub_test_split(
    task: str, repository: str, name: str, file: str
) -> tuple[list[dict[str, Any]], Origin]:
    """Read the test split of a data set from the hub or its cache. The error names `task` and
    `file` for --data.
    """
    datasets = import_optional("datasets", f"{task} without --data {task}=FILE ({file})", "eval")
    try:
        records = list(datasets.load_dataset(repository, name, split="test"))
    except Exception as error:  # datasets and huggingface_hub raise a dozen types
        raise UserError(
            f"{task}: {repository} can't be loaded from the Hugging Face hub "
            f"({first_line(error)}); give the file with "
            f"--data {task}=FILE ({file})"
        ) from error
    return records, {
        "dataset": repository,
        "name": name,
        "split": "test",
        "sha256": hash_records(records),
    }
