"""Zero-shot tasks on a Hugging Face model directory: what is asked, checked, computed and reported."""

from __future__ import annotations

import difflib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from zero_tp.data.documents import check_files, file_sha256, read_documents
from zero_tp.errors import UserError
from zero_tp.evaluation.pretrained import DTYPES, ModelDirectory, open_directory

TASKS = ("perplexity",)
NOT_BUILT = ("wikitext103", "lambada")


@dataclass(frozen=True)
class EvaluationSettings:
    """How a model is evaluated.

    Attributes:
        batch_size: windows at once.
        sequence_length: tokens of a window; None: all positions the model has.
        overlap: tokens a window advances by; None: the window's length, so that windows don't overlap.
        dtype: of the weights: float32, bfloat16 or float16.
        device: as torch names it; None: `cuda` if there is one, else `cpu`.
        text_key: key of the text in JSON lines.
        allow_pickle: read pickled weights where there are no safetensors.
    """

    batch_size: int = 8
    sequence_length: int | None = None
    overlap: int | None = None
    dtype: str = "float32"
    device: str | None = None
    text_key: str = "text"
    allow_pickle: bool = False


def parse_tasks(text: str) -> list[str]:
    """Task names from `a,b`. UserError: none, unknown (names the nearest), or not built yet."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise UserError(f"--tasks {text!r}: no task named; there is: {', '.join(TASKS)}")
    for name in names:
        if name in NOT_BUILT:
            raise UserError(f"--tasks {name}: not built yet; there is: {', '.join(TASKS)}")
        if name not in TASKS:
            near = difflib.get_close_matches(name, TASKS + NOT_BUILT, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"there is: {', '.join(TASKS)}"
            raise UserError(f"--tasks {name}: unknown task; {hint}")
    return names


def parse_data(pairs: Iterable[str], tasks: Sequence[str]) -> dict[str, Path]:
    """TASK=PATH pairs as a mapping. UserError: not such a pair, a task that isn't run, a missing pair or file."""
    data: dict[str, Path] = {}
    for pair in pairs:
        task, equals, path = pair.partition("=")
        if not equals or not path:
            raise UserError(f"--data {pair}: TASK=PATH is needed, such as perplexity=data/sotu/validation.jsonl")
        if task not in tasks:
            raise UserError(f"--data {pair}: {task!r} is not among --tasks {','.join(tasks)}")
        if task in data:
            raise UserError(f"--data {pair}: {task} has a file already, {data[task]}")
        data[task] = Path(path)
    for task in tasks:
        if task not in data:
            raise UserError(f"{task} needs a text: --data {task}=FILE (.txt or .jsonl, each also .gz)")
    check_files(data.values())
    return data


def evaluate(
    model: Path, tasks: Sequence[str], data: Mapping[str, Path], settings: EvaluationSettings
) -> dict[str, Any]:
    """Run the tasks; returns what `eval/zero_shot.py` writes as JSON. All checks come before the weights are read.

    Raises:
        UserError: see `open_directory`, `read_documents`; settings that don't fit the model.
    """
    directory = open_directory(model, allow_pickle=settings.allow_pickle)
    length = directory.sequence_length(settings.sequence_length)
    overlap = length if settings.overlap is None else settings.overlap
    if not 1 <= overlap <= length:
        raise UserError(f"--overlap {overlap}: from 1 to the window's {length:,} tokens")
    if settings.batch_size < 1:
        raise UserError(f"--batch-size {settings.batch_size}: at least 1")
    if settings.dtype not in DTYPES:
        raise UserError(f"--dtype {settings.dtype}: one of {', '.join(DTYPES)}")
    documents = {task: _documents(path, settings.text_key) for task, path in data.items()}

    import torch

    device = settings.device or ("cuda" if torch.cuda.is_available() else "cpu")
    loaded = directory.load(settings.dtype, device)
    results = {
        task: {
            "data": {"path": str(data[task]), "sha256": file_sha256(data[task])},
            **_perplexity(directory, loaded, documents[task], length, overlap, settings.batch_size, device),
        }
        for task in tasks
    }
    return {
        "model": {
            "path": str(model),
            "model_type": directory.config.model_type,
            "parameters": loaded.num_parameters(),
            "vocabulary_size": len(directory.tokenizer),
        },
        "settings": asdict(settings) | {"sequence_length": length, "overlap": overlap, "device": device},
        "versions": {name: version(name) for name in ("torch", "transformers", "tokenizers")},
        "tasks": results,
    }


def _documents(path: Path, text_key: str) -> Iterator[str]:
    """The file's documents; UserError here and now when its first one can't be read or there is none."""
    documents = (text for text in read_documents(path, text_key) if text.strip())
    first = next(documents, None)
    if first is None:
        raise UserError(f"{path}: no text in it")

    def chained() -> Iterator[str]:
        yield first
        yield from documents

    return chained()


def _perplexity(
    directory: ModelDirectory,
    model: Any,
    documents: Iterator[str],
    sequence_length: int,
    overlap: int,
    batch_size: int,
    device: str,
) -> dict[str, Any]:
    from tqdm import tqdm

    from zero_tp.evaluation.perplexity import HuggingFaceScorer, perplexity

    def encode(text: str) -> list[int]:
        # As in preparing a corpus: a text that spells a special token is ordinary text. verbose: no warning on length.
        return directory.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True, verbose=False)

    def advance(tokens: int) -> None:
        bar.update(tokens)

    started = time.perf_counter()
    with tqdm(desc="perplexity", unit=" tokens", disable=None, leave=False) as bar:
        result = perplexity(
            documents,
            encode,
            HuggingFaceScorer(model),
            prefix_token=directory.prefix_token,
            sequence_length=sequence_length,
            overlap=overlap,
            batch_size=batch_size,
            device=device,
            report=advance,
        )
    seconds = time.perf_counter() - started
    return result.as_dict() | {
        "seconds": round(seconds, 3),
        "tokens_per_second": round(result.tokens / seconds, 1),
    }


def write_report(path: Path, report: Mapping[str, Any]) -> None:
    """Write JSON, whole or not at all. UserError when it can't be written."""
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UserError(f"{path}: can't be written: {error.strerror or error}") from error


def table(report: Mapping[str, Any]) -> str:
    """The results for a person: a line a task under a heading."""

    def show(value: float | None) -> str:
        return "overflow" if value is None else f"{value:,.4g}" if value >= 1e6 else f"{value:,.3f}"

    heading = ("task", "perplexity", "nats/token", "bits/byte", "tokens", "documents", "tokens/s")
    rows = [
        (
            task,
            show(result["perplexity"]),
            show(result["loss"]),
            show(result["bits_per_byte"]),
            f"{result['tokens']:,}",
            f"{result['documents']:,}",
            f"{result['tokens_per_second']:,.0f}",
        )
        for task, result in report["tasks"].items()
    ]
    widths = [max(map(len, column)) for column in zip(heading, *rows, strict=True)]
    lines = (
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in (heading, *rows)
    )
    return "\n".join(lines)
