"""Where the tasks' texts come from: a file that a person names, or the Hugging Face hub."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

from zero_tp.data.documents import document_kind, file_sha256, read_documents, read_objects, text_of
from zero_tp.errors import UserError, first_line
from zero_tp.evaluation.cloze import Passage
from zero_tp.evaluation.wikitext import TEST_TOKENS, original_tokens

T = TypeVar("T")


@dataclass(frozen=True)
class Sourced(Generic[T]):
    """Something read, and what a report says of its origin: the path or data set, and a SHA-256."""

    value: T
    origin: dict[str, Any]


def digest_of(records: Iterable[Any]) -> str:
    """SHA-256 of records, each a line of JSON with sorted keys, in hexadecimal."""
    digest = hashlib.sha256()
    for record in records:
        digest.update(json.dumps(record, sort_keys=True, default=str).encode() + b"\n")
    return digest.hexdigest()


def _of_file(path: Path) -> dict[str, Any]:
    return {"path": str(path), "sha256": file_sha256(path)}


def documents(path: Path, text_key: str, limit: int | None) -> Sourced[list[str]]:
    """The texts of a file, but for empty ones. UserError: it can't be read, or there is none."""
    texts = list(islice((text for text in read_documents(path, text_key) if text.strip()), limit))
    if not texts:
        raise UserError(f"{path}: no text in it")
    return Sourced(texts, _of_file(path))


def wikitext_split(path: Path | None, text_key: str) -> Sourced[str]:
    """The tokenised text of one split: the file's, which is one text, or the test split from the hub.

    UserError: no text, or several, or the hub's can't be had.
    """
    if path is not None:
        found = documents(path, text_key, None)
        if len(found.value) > 1:
            raise UserError(
                f"{path}: {len(found.value):,} texts, where wikitext103 is one: give the split's own file, "
                "such as wiki.test.tokens with .txt for its ending"
            )
        return Sourced(found.value[0], found.origin)
    records, origin = _from_hub("wikitext103", "Salesforce/wikitext", "wikitext-103-v1", "wiki.test.tokens")
    # The hub's lines are the file's, but for blank ones, whose space it takes away.
    text = "".join(record["text"] or " \n" for record in records)
    if original_tokens(text) != TEST_TOKENS:
        raise UserError(
            f"wikitext103: the hub's test split has {original_tokens(text):,} tokens, not the {TEST_TOKENS:,} of the "
            "original file: give that with --data wikitext103=FILE"
        )
    return Sourced(text, origin)


def lambada_passages(path: Path | None, text_key: str, limit: int | None) -> Sourced[list[Passage]]:
    """The passages of a file, or OpenAI's variant of the test split from the hub.

    A file has JSON lines, with `context` and `continuation` or with the whole passage as text, or a passage a line.
    UserError: another kind of file, or no passage.
    """
    if path is None:
        records, origin = _from_hub("lambada", "EleutherAI/lambada_openai", "default", "lambada_test.jsonl")
        passages = [Passage.of_text(record["text"]) for record in records[:limit]]
    elif document_kind(path) == "jsonl":
        origin = _of_file(path)
        passages = [_passage(record, where, text_key) for where, record in islice(read_objects(path), limit)]
    else:
        origin = _of_file(path)
        lines = [line for text in read_documents(path) for line in text.splitlines() if line.strip()]
        passages = [_of_text(line, str(path)) for line in lines[:limit]]
    if not passages:
        raise UserError(f"{path}: no passage in it")
    return Sourced(passages, origin)


def _passage(record: dict[str, Any], where: str, text_key: str) -> Passage:
    both = [key in record for key in ("context", "continuation")]
    if not any(both):
        return _of_text(text_of(record, where, text_key), where)
    if not all(both):
        raise UserError(f"{where}: 'context' and 'continuation' go together; the keys found are {', '.join(record)}")
    # A word is the same with its space as without.
    return Passage(text_of(record, where, "context").rstrip(), text_of(record, where, "continuation").strip())


def _of_text(text: str, where: str) -> Passage:
    try:
        return Passage.of_text(text)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from error


def _from_hub(task: str, repository: str, name: str, file: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The test split of a data set, from the hub or its cache on this machine, and its origin."""
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
