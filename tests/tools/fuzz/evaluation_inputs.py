"""What evaluation reads beside a model is damaged at random: task files, texts, tokenizers and options.

    python -m tests.tools.fuzz evaluation_inputs --count 1000

A command ends as every command does; what leaves the figures as they were leaves them bit for bit; nothing runs code
of a task file.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tests.tools.fuzz import models
from tests.tools.fuzz.commands import Ended, broken_promise, run
from tests.tools.fuzz.fuzzing import scratch

DOCUMENTS = [f"{models.TEXT[:60]} {number}" for number in range(5)]
ODD: tuple[Any, ...] = (
    *models.ODD,
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
CHOICES: dict[str, Any] = {"output_type": "multiple_choice", "doc_to_choice": ["a", "b"], "doc_to_target": 0}
GENERATES: dict[str, Any] = {
    "output_type": "generate_until",
    "generation_kwargs": {"until": ["."], "max_gen_toks": 4, "do_sample": False, "temperature": 0.0},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "ignore_case": True}],
    "filter_list": [
        {"name": "first", "filter": [{"function": "regex", "regex_pattern": "(a)"}, {"function": "take_first"}]}
    ],
}
ROLLING: dict[str, Any] = {
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{text}}",
    "metric_list": [{"metric": "word_perplexity"}],
}
CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"num_fewshot": 1},
    {"include": "other.yaml"},
    {"class": "x"},
    CHOICES,
    GENERATES,
    ROLLING,
)


def evaluate(workplace: Path, *words: str) -> Ended:
    return run("eval/zero_shot.py", words, workplace, limit=60)


def of_lines(*words: str) -> tuple[str, ...]:
    return (
        *("--model", "model", "--tasks", "perplexity", "--data", "perplexity=lines.jsonl", "--device", "cpu"),
        *("--batch-size", "1", "--output", "report.json", *words),
    )


def furnish(workplace: Path) -> Path:
    models.furnish(workplace, "gpt2")
    (workplace / "lines.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    return workplace


@cache
def whole() -> dict[str, Any]:
    """The report of what is not damaged."""
    workplace = furnish(scratch())
    ended = evaluate(workplace, *of_lines())
    assert ended.status == 0, ended.err
    found: dict[str, Any] = json.loads((workplace / "report.json").read_text())
    return found


def kept(ended: Ended, what: str) -> bool:
    """Whether the command accepted it; the promises of every command are held to."""
    broken = broken_promise(ended)
    assert broken is None, f"{what}: {broken}"
    return ended.status == 0


def edited(value: Any, chance: random.Random) -> str:
    """Change one value somewhere in it."""
    block, key = value, chance.choice(sorted(value))
    while isinstance(block[key], (dict, list)) and block[key] and chance.random() < 0.8:
        block = block[key]
        key = chance.choice(sorted(block)) if isinstance(block, dict) else chance.randrange(len(block))
    before = block[key]
    how = chance.choice(("change", "change", "rename", "drop"))
    if how == "rename" and isinstance(block, dict):
        block[f"{key}\x1b[31m"] = block.pop(key)
    elif how == "drop":
        del block[key]
    else:
        block[key] = chance.choice(ODD)
        return f"{key!r}: {str(before)[:40]!r} → {str(block[key])[:40]!r}"
    return f"{how} {key!r}"


def damaged(content: bytes, chance: random.Random) -> tuple[bytes, str]:
    place = chance.randrange(len(content) + 1)
    how = chance.choice(("flip", "cut", "insert"))
    if how == "flip" and place < len(content):
        return content[:place] + bytes([content[place] ^ 1 << chance.randrange(8)]) + content[
            place + 1 :
        ], f"{how} {place}"
    if how == "cut":
        return content[:place], f"cut after {place}"
    more = chance.choice((b"\0", b"\xff", b"\x1b[31m", b'"', b"\n\n", b"{" * 300, b"9" * 5000))
    return content[:place] + more + content[place:], f"{more[:8]!r} at {place}"


# --- kinds of cases ---------------------------------------------------------------------------------------------------


def texts(chance: random.Random, workplace: Path) -> str:
    """Lines that change nothing, or damage."""
    file = workplace / "lines.jsonl"
    lines = file.read_bytes()
    harmless = chance.random() < 0.3
    if harmless:
        blank = json.dumps({"text": chance.choice(("", " ", "\n\t")), "x": 1}).encode() + b"\n"
        parts = lines.splitlines(keepends=True)
        parts.insert(chance.randrange(len(parts) + 1), chance.choice((blank, b"\n", b"  \n")))
        file.write_bytes(b"".join(parts))
        what = "a blank document"
    else:
        content, what = damaged(lines, chance)
        file.write_bytes(content)
    words = list(of_lines())
    if chance.random() < 0.3:
        zipped = gzip.compress(file.read_bytes())
        if chance.random() < 0.5:
            zipped, more = damaged(zipped, chance)
            harmless, what = False, f"{what}, zipped and {more}"
        (workplace / "lines.jsonl.gz").write_bytes(zipped)
        words[words.index("perplexity=lines.jsonl")] += ".gz"
    if not kept(evaluate(workplace, *words), what):
        assert not harmless, f"{what} is refused"
        return "refused"
    found = json.loads((workplace / "report.json").read_text())["tasks"]["perplexity"]
    expected = whole()["tasks"]["perplexity"]
    assert not harmless or found["nll"] == expected["nll"], f"{what}: {found['nll']}, without it {expected['nll']}"
    return "the same" if harmless else "other text"


def options(chance: random.Random, workplace: Path) -> str:
    """A number of an option."""
    numbers = (-1, 0, 1, 2, 7, 64, 10**6, 2**31 - 1, 2**31, 2**63, 10**30, 10**80)
    words = ("nan", "", "x", "1e3", "\x1b[31m", "1" * 5000)
    name = chance.choice(
        (
            "batch-size",
            "sequence-length",
            "overlap",
            "limit",
            "num-fewshot",
            "tensor-parallel",
            "dtype",
            "device",
            "text-key",
        )
    )
    value = str(chance.choice((*numbers, *numbers, *words)))
    ended = evaluate(workplace, *of_lines(f"--{name}={value}"))
    if not kept(ended, f"--{name}={value[:40]}"):
        return "refused"
    found = json.loads((workplace / "report.json").read_text())["tasks"]["perplexity"]
    if name == "limit":
        assert found["documents"] == min(int(value), len(DOCUMENTS)), f"--limit {value}: {found['documents']} documents"
    elif name not in ("sequence-length", "overlap"):
        close = abs(found["nll"] / whole()["tasks"]["perplexity"]["nll"] - 1)
        assert close < 1e-5, f"--{name}={value}: another perplexity"
    return "accepted"


def tokenizers(chance: random.Random, workplace: Path) -> str:
    """Another directory's tokenizer, damaged."""
    shutil.copytree(workplace / "model", workplace / "other")
    for name in ("model.safetensors", "config.json"):
        (workplace / "other" / name).unlink()
    if chance.random() < 0.2:
        file = (
            workplace / "other" / chance.choice(("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"))
        )
        file.unlink(missing_ok=True)
        os.mkfifo(file)
        what = f"{file.name} is a pipe"
    else:
        what = models.edit_other(workplace / "other", chance) if chance.random() < 0.9 else "untouched"
    ended = evaluate(workplace, *of_lines("--tokenizer", "other"))
    return "accepted" if kept(ended, f"--tokenizer: {what}") else "refused"


def tasks(chance: random.Random, workplace: Path) -> str:
    """A task file of lm-eval's, with Python beside it."""
    directory = workplace / "tasks"
    directory.mkdir()
    (directory / "code.py").write_text("open('ran', 'w')\ndef text(doc):\n    return 'x'\n")
    task = json.loads(json.dumps(TASK))
    task["dataset_kwargs"]["data_files"]["test"] = str(workplace / "lines.jsonl")
    what = "untouched"
    text = json.dumps(task)
    if chance.random() < 0.6:
        task |= chance.choice(CHANGES)
        what = edited(task, chance)
        text = json.dumps(task).replace('"!function code.text"', "!function code.text")
    elif chance.random() < 0.7:
        content, what = damaged(text.encode(), chance)
        text = content.decode("utf-8", "replace")
    (directory / "mine.yaml").write_text(text)
    words = ["--model", "model", "--tasks", "mine", "--include-path", "tasks", "--device", "cpu", "--limit", "2"]
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(workplace / "cache"), "HF_DATASETS_OFFLINE": "1"}
    ended = run("eval/zero_shot.py", words, workplace, environment=environment, limit=90)
    accepted = kept(ended, f"--include-path: {what}")
    assert not (workplace / "ran").exists(), f"--include-path: {what}: its code was run"
    return "accepted" if accepted else "refused"


KINDS: dict[Callable[[random.Random, Path], str], int] = {texts: 6, options: 6, tokenizers: 4, tasks: 2}


def case(chance: random.Random, directory: Path) -> str:
    furnish(directory)
    (kind,) = chance.choices(tuple(KINDS), tuple(KINDS.values()))
    return f"{kind.__name__} {kind(chance, directory)}"
