"""The tasks' texts come from a file that a person names, or from the Hugging Face hub."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from zero_tp.data.documents import file_sha256, read_documents
from zero_tp.errors import UserError, first_line

Origin = dict[str, Any]
"""What a report says of where data are from: the path or data set, and a SHA-256."""


def digest_of(records: Iterable[Any]) -> str:
    """Return the SHA-256 of records, each a line of JSON with sorted keys, in hexadecimal."""
    digest = hashlib.sha256()
    for record in records:
        digest.update(json.dumps(record, sort_keys=True, default=str).encode() + b"\n")
    return digest.hexdigest()


def origin_of(path: Path) -> Origin:
    """Describe a file by its path and the SHA-256 of its bytes as stored."""
    return {"path": str(path), "sha256": file_sha256(path)}


def read_texts(path: Path, text_key: str, limit: int | None = None) -> tuple[list[str], Origin]:
    """Read the texts of a file, but for empty ones. UserError: it can't be read, or there is none."""
    texts = list(islice((text for text in read_documents(path, text_key) if text.strip()), limit))
    if not texts:
        raise UserError(f"{path}: no text in it")
    return texts, origin_of(path)


def read_hub(task: str, repository: str, name: str, file: str) -> tuple[list[dict[str, Any]], Origin]:
    """Read the test split of a data set, from the hub or its cache on this machine.

    Args:
        task, file: what a `UserError` names where it can't be had: `--data TASK=FILE`.
    """
    wanted = f"give the file with --data {task}=FILE ({file})"
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"{task}: reading from the Hugging Face hub needs datasets (pip install -c constraints.txt -e .[eval]); "
            f"or {wanted}"
        ) from error
    try:
        records = list(datasets.load_dataset(repository, name, split="test"))
    except Exception as error:  # datasets and huggingface_hub raise a dozen kinds, with and without a network
        raise UserError(
            f"{task}: {repository} can't be had from the Hugging Face hub ({first_line(error)}): {wanted}"
        ) from error
    return records, {"dataset": repository, "name": name, "split": "test", "sha256": digest_of(records)}
