#!/usr/bin/env python3
"""Pretrain ds_configs/bert_small.json on the shipped corpus on 4 CPU ranks, and fine-tune it on two
tasks.

Says the share of held-out masked tokens that the model has right beside that of the most frequent
token, and both figures of each task, which are made of the corpus: those of the pretrained model,
and of one from random weights.

- years (`--task classification`): is a sentence of an address from before 1900 or after 1960?
- sums (`--task squad`): a sentence that names one sum of dollars and one year, and a question for
  either of the two.

Addresses of every fifth year are what a task is judged by; their sentences are not fine-tuned on,
but most of them were pretrained on. Prints tables; --output takes a dated result.

    python benchmarks/bert_small.py --output benchmarks/results/
    python benchmarks/bert_small.py --run runs/bert_small --lr 5e-4     # of a run that is there
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from dated import ROOT, write_result  # type: ignore[import-not-found]  # beside this script
from launched import launched  # type: ignore[import-not-found]
from sentencex import segment

from zero_tp.base.constants import IGNORE_INDEX
from zero_tp.run.checkpoint.convert import to_huggingface

YEAR = re.compile(r"\b1[789]\d\d\b")
SUM = re.compile(r"\$ ?\d[\d,]*\d")
LONGEST = 200  # characters of a sentence
QUESTIONS = {"which year is named?": YEAR, "what sum of money is named?": SUM}

CONFIG = ROOT / "ds_configs" / "bert_small.json"
RANKS = 4
VOCABULARY = 2048
COUNTED = 4000  # training samples whose masked tokens say which is the most frequent

Example = dict[str, Any]


def pretrained(run: Path | None, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Train a run, or use an existing one; return it and its last validation metrics."""
    if run is None:
        corpus = folder / "corpus"
        text = ["--input", "launch/corpus/sotu.jsonl.gz", "--output", str(corpus)]
        launched(
            [
                "launch/prepare_data.py",
                *text,
                "--tokenizer",
                f"wordpiece:{VOCABULARY}",
                "--split-sentences",
                "en",
            ]
        )
        settings = json.loads(CONFIG.read_text())
        data = settings["zero_tp"]["data"]
        data["train"], data["validation"] = str(corpus / "train"), str(corpus / "validation")
        file = folder / "bert_small.json"
        run = folder / "bert_small"
        file.write_text(json.dumps(settings))
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        launcher = [
            "-m",
            "torch.distributed.run",
            "--nproc_per_node",
            str(RANKS),
            "--master_port",
            port,
        ]
        launched(
            [
                *launcher,
                "launch/pretrain.py",
                "--deepspeed_config",
                str(file),
                "--output-dir",
                str(run),
            ]
        )
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if "validation_loss" in line][-1]
    right = last["validation_masked_accuracy"]
    guessed = guess(run)
    print(
        f"masked tokens right at step {last['step']}: {right:.1%}; the most frequent token: "
        f"{guessed:.1%}",
        flush=True,
    )
    seconds = round(sum(line["seconds"] for line in lines if "loss" in line))
    return run, {
        "step": last["step"],
        "seconds_of_steps": seconds,
        "loss": last["validation_loss"],
        "right": right,
        "guess": guessed,
    }


def guess(run: Path) -> float:
    """Return the share of held-out masked tokens that equal the most frequent masked token of
    training.
    """
    from zero_tp.run.config import RunConfig
    from zero_tp.run.run_inputs import RunInputs

    prepared = RunInputs(RunConfig.load(run / "config.json", (), RANKS), run)
    assert prepared.validation is not None
    samples: Any = prepared.samples
    assert prepared.validation is not None
    labels = np.concatenate([samples[k]["labels"] for k in range(COUNTED)])
    token = np.bincount(labels[labels != IGNORE_INDEX]).argmax()
    limit = prepared.config.zero_tp.evaluation.batches * prepared.config.global_batch
    batches = prepared.validation.batches(limit, 64, 0, 1)
    held_out = np.concatenate([batch.labels.flatten().numpy() for batch in batches])
    return float((held_out[held_out != IGNORE_INDEX] == token).mean())


def sentences() -> Iterator[tuple[int, str]]:
    """Yield (year of the address, sentence)."""
    with gzip.open(ROOT / "launch" / "corpus" / "sotu.jsonl.gz", "rt", encoding="utf-8") as lines:
        for line in lines:
            address = json.loads(line)
            for sentence in segment("en", address["text"]):
                if 40 < len(sentence.strip()) <= LONGEST:
                    yield address["year"], sentence.strip()


def of_years(year: int, sentence: str) -> Iterator[Example]:
    if year < 1900 or year > 1960:
        yield {"first": sentence, "label": "before 1900" if year < 1900 else "after 1960"}


def of_sums(year: int, sentence: str) -> Iterator[Example]:
    if len(YEAR.findall(sentence)) != 1 or len(SUM.findall(sentence)) != 1:
        return
    for question, pattern in QUESTIONS.items():
        match = pattern.search(sentence)
        assert match is not None
        answer = {"text": match.group(), "answer_start": match.start()}
        yield {"context": sentence, "qas": [{"question": question, "answers": [answer]}]}


def written(path: Path, examples: list[Example]) -> Path:
    if "label" in examples[0]:
        path.write_text("".join(json.dumps(each) + "\n" for each in examples))
    else:
        path.write_text(
            json.dumps({"version": "1.1", "data": [{"title": "", "paragraphs": examples}]})
        )
    return path


TASKS = {"years": ("classification", of_years, "jsonl"), "sums": ("squad", of_sums, "json")}


def tried(name: str, model: Path, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Fine-tune on one task; return the numbers of examples and each variant's figures."""
    task, examples_of, ending = TASKS[name]
    parts: dict[str, list[Example]] = {"train": [], "validation": []}
    for year, sentence in sentences():
        parts["validation" if year % 5 == 0 else "train"].extend(examples_of(year, sentence))
    words = [
        "--model",
        str(model),
        "--task",
        task,
        "--epochs",
        str(options.epochs),
        "--lr",
        str(options.lr),
    ]
    counts = {}
    for part, most in (("train", options.train), ("validation", options.validation)):
        random.Random(options.seed).shuffle(parts[part])
        counts[part] = len(chosen := parts[part][:most])
        words += [f"--{part}", str(written(folder / f"{name}-{part}.{ending}", chosen))]
    words += ["--length", str(options.length), "--seed", str(options.seed)]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "launch" / "finetune.py"), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    header, *lines = (line.split() for line in done.stdout.splitlines()[-3:])
    print(f"{name}: {counts['train']} training and {counts['validation']} validation examples")
    print("\n".join(done.stdout.splitlines()[-3:]), flush=True)
    names = " ".join(header[1:]).replace("exact match", "exact_match").split()
    return {
        **counts,
        **{variant: dict(zip(names, figures, strict=True)) for variant, *figures in lines},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--run", type=Path, help="an existing run of bert_small.json (default: train one)"
    )
    parser.add_argument(
        "--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="(default: all)"
    )
    parser.add_argument(
        "--train", type=int, default=1000, help="most training examples (default: 1000)"
    )
    parser.add_argument(
        "--validation", type=int, default=1000, help="most validation examples (default: 1000)"
    )
    parser.add_argument("--epochs", type=float, default=4.0, help="(default: 4)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate (default: 1e-3)")
    parser.add_argument(
        "--length", type=int, default=32, help="tokens of the longest row (default: 32)"
    )
    parser.add_argument(
        "--seed", type=int, default=1234, help="of the examples and the fine-tuning (default: 1234)"
    )
    parser.add_argument("--output", type=Path, help="directory for the dated result")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        run, pretraining = pretrained(options.run, folder)
        to_huggingface(run, folder / "export")
        scores = {name: tried(name, folder / "export", options, folder) for name in options.tasks}
    if options.output:
        fine_tuning = {
            **{name: getattr(options, name) for name in ("epochs", "lr", "length", "seed")},
            "tasks": scores,
        }
        write_result(
            options.output, "bert-small", {"pretraining": pretraining, "fine_tuning": fine_tuning}
        )


if __name__ == "__main__":
    main()
