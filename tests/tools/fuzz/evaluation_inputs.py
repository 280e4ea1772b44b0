"""What evaluation reads beside a model is damaged at random: task files, texts, tokenizers and
options.

    python -m tests.tools.fuzz evaluation_inputs --count 1000

A command ends as every command does; what leaves the figures as they were leaves them bit for bit;
nothing runs code of a task file.
"""

from __future__ import annotations

import copy
import gzip
import json
import random
import shutil
from functools import cache
from pathlib import Path
from typing import Any

from tests.tools.fuzz import models
from tests.tools.fuzz.commands import PERPLEXITY, attempt, scratch
from tests.tools.fuzz.damage import ODD, damage_bytes, edit_json, replace_file

DOCUMENTS = [f"{models.TEXT[:60]} {number}" for number in range(5)]
TASK_ODD = (
    *ODD,
    "{{text}}",
    "{{ nothing }}",
    "{{ ''.__class__.__mro__ }}",
    "{% for %}",
    "!function code.text",
)
TASK: dict[str, Any] = {
    "task": "mine",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "lines.jsonl"}},
    "output_type": "loglikelihood",
    "test_split": "test",
    "doc_to_text": "{{text}}",
    "doc_to_target": " more",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}
GENERATES: dict[str, Any] = {
    "output_type": "generate_until",
    "generation_kwargs": {
        "until": ["."],
        "max_gen_toks": 4,
        "do_sample": False,
        "temperature": 0.0,
    },
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "ignore_case": True}],
    "filter_list": [
        {
            "name": "first",
            "filter": [{"function": "regex", "regex_pattern": "(a)"}, {"function": "take_first"}],
        }
    ],
}
ROLLING: dict[str, Any] = {
    **{"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"},
    "metric_list": [{"metric": "word_perplexity"}],
}
CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"num_fewshot": 1},
    {"include": "other.yaml"},
    {"class": "x"},
    {"output_type": "multiple_choice", "doc_to_choice": ["a", "b"], "doc_to_target": 0},
    GENERATES,
    ROLLING,
)
LINES = ("--model", "model", *(word.replace("text.txt", "lines.jsonl") for word in PERPLEXITY))


def make_workplace(workplace: Path) -> Path:
    models.make_workplace(workplace, "gpt2")
    (workplace / "lines.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS)
    )
    return workplace


def evaluate(description: str, workplace: Path, *words: str) -> dict[str, Any] | None:
    """Return the figures of the perplexity task, or None where the command refuses."""
    if attempt(description, "eval/zero_shot.py", words, workplace, limit=60) is None:
        return None
    figures: dict[str, Any] = json.loads((workplace / "report.json").read_text())["tasks"][
        "perplexity"
    ]
    return figures


@cache
def undamaged_loss() -> float:
    figures = evaluate("nothing is damaged", make_workplace(scratch()), *LINES)
    assert figures is not None
    return float(figures["nll"])


# --- kinds of cases -------------------------------------------------------------------------------


def texts(draw: random.Random, workplace: Path) -> str:
    """Lines that change nothing, or damage."""
    file = workplace / "lines.jsonl"
    lines = file.read_bytes()
    harmless = draw.random() < 0.3
    if harmless:
        blank = json.dumps({"text": draw.choice(("", " ", "\n\t")), "x": 1}).encode() + b"\n"
        parts = lines.splitlines(keepends=True)
        parts.insert(draw.randrange(len(parts) + 1), draw.choice((blank, b"\n", b"  \n")))
        content, description = b"".join(parts), "a blank document"
    else:
        content, description = damage_bytes(lines, draw)
    file.write_bytes(content)
    words = list(LINES)
    if draw.random() < 0.3:
        zipped = gzip.compress(content)
        if draw.random() < 0.5:
            zipped, more = damage_bytes(zipped, draw)
            harmless, description = False, f"{description}, zipped and {more}"
        (workplace / "lines.jsonl.gz").write_bytes(zipped)
        words[words.index("perplexity=lines.jsonl")] += ".gz"
    figures = evaluate(description, workplace, *words)
    if harmless:
        assert figures is not None and figures["nll"] == undamaged_loss(), (
            f"{description}: {figures}, without it {undamaged_loss()}"
        )
        return "the same"
    return "refused" if figures is None else "other text"


NUMBERS = (-1, 0, 1, 2, 7, 64, 10**6, 2**31 - 1, 2**31, 2**63, 10**30, 10**80)
NAMES = (
    "batch-size",
    "sequence-length",
    "overlap",
    "limit",
    "num-fewshot",
    "tensor-parallel",
    "dtype",
    "device",
)


def options(draw: random.Random, workplace: Path) -> str:
    """A number of an option."""
    name = draw.choice((*NAMES, "text-key"))
    value = str(draw.choice((*NUMBERS, *NUMBERS, "nan", "", "x", "1e3", "\x1b[31m", "1" * 5000)))
    description = f"--{name}={value[:40]}"
    figures = evaluate(description, workplace, *LINES, f"--{name}={value}")
    if figures is None:
        return "refused"
    if name == "limit":
        assert figures["documents"] == min(int(value), len(DOCUMENTS)), (
            f"{description}: {figures['documents']} documents"
        )
    elif name not in ("sequence-length", "overlap"):
        assert abs(figures["nll"] / undamaged_loss() - 1) < 1e-5, (
            f"{description}: another perplexity"
        )
    return "accepted"


def tokenizers(draw: random.Random, workplace: Path) -> str:
    """Another directory's tokenizer, damaged."""
    other = workplace / "other"
    shutil.copytree(workplace / "model", other)
    for name in ("model.safetensors", "config.json"):
        (other / name).unlink()
    description = "untouched"
    if (drawn := draw.random()) < 0.2:
        file = other / draw.choice(
            ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt")
        )
        description = f"{file.name} {replace_file(file, draw)}"
    elif drawn < 0.9:
        description = models.edit_other(other, draw)
    figures = evaluate(f"--tokenizer: {description}", workplace, *LINES, "--tokenizer", "other")
    return "refused" if figures is None else "accepted"


def tasks(draw: random.Random, workplace: Path) -> str:
    """A task file of lm-eval's, with Python beside it."""
    directory = workplace / "tasks"
    directory.mkdir()
    (directory / "code.py").write_text("open('ran', 'w')\ndef text(doc):\n    return 'x'\n")
    task = copy.deepcopy(TASK)
    task["dataset_kwargs"]["data_files"]["test"] = str(workplace / "lines.jsonl")
    content, description = json.dumps(task).encode(), "untouched"
    if draw.random() < 0.6:
        task |= copy.deepcopy(draw.choice(CHANGES))
        description = edit_json(task, draw, TASK_ODD)
        content = json.dumps(task).replace('"!function code.text"', "!function code.text").encode()
    elif draw.random() < 0.7:
        content, description = damage_bytes(content, draw)
    (directory / "mine.yaml").write_bytes(content)
    words = [
        "--model",
        "model",
        "--tasks",
        "mine",
        "--include-path",
        "tasks",
        "--device",
        "cpu",
        "--limit",
        "2",
    ]
    environment = {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(workplace / "cache"),
        "HF_DATASETS_OFFLINE": "1",
    }
    description = f"--include-path: {description}"
    ended = attempt(
        description, "eval/zero_shot.py", words, workplace, environment=environment, limit=90
    )
    assert not (workplace / "ran").exists(), f"{description}: its code was run"
    return "refused" if ended is None else "accepted"


def case(draw: random.Random, directory: Path) -> str:
    make_workplace(directory)
    (kind,) = draw.choices((texts, options, tokenizers, tasks), (6, 6, 4, 2))
    return f"{kind.__name__} {kind(draw, directory)}"
