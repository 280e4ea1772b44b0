#!/usr/bin/env python3
"""Compare the speed of zero-shot evaluation in one process with lm-eval's own adapter and with
plain forwards.

Tasks of a directory of lm-eval task files, at the same batch size: seconds of lm-eval's `HFLM` over
ours, by transformers' class and by zero_tp's. wikitext103 at overlap 32: tokens that the model
reads a second, over those of a plain batched forward of the same shapes and class that makes logits
for the same 32 positions. Each ratio is taken within a round; above 1 ours is faster.

    python benchmarks/evaluation.py --model DIR --include-path TASKS --tasks copa_local --wikitext
    wiki.valid.txt
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dated import write_result  # type: ignore[import-not-found]  # beside this script
from lm_eval import evaluator as lm_evaluator
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from zero_tp.base import cli
from zero_tp.model.huggingface import ZeroTPForCausalLM
from zero_tp.tools.evaluation.eval_model import EvalModel, ParallelScorer
from zero_tp.tools.evaluation.lm_eval_model import LMEvalModel
from zero_tp.tools.evaluation.lm_eval_tasks import lm_eval_settings
from zero_tp.tools.evaluation.model_directory import open_directory
from zero_tp.tools.evaluation.perplexity import (
    WIKITEXT_OVERLAP,
    detokenize,
    sliding_windows,
    wikitext_split,
)
from zero_tp.tools.evaluation.rows import prefix_token

Contenders = dict[str, Callable[[], object]]


def seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def in_turns(contenders: Contenders, rounds: int) -> dict[str, dict[str, Any]]:
    """Return each function's median seconds and the ratios to the first one's, after one warm-up
    round.
    """
    names = list(contenders)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        turn = names[number % len(names) :] + names[: number % len(names)]
        for name in turn:
            elapsed = seconds(contenders[name])
            if number:
                times[name].append(elapsed)
    ratios = {
        name: [a / b for a, b in zip(times[names[0]], times[name], strict=True)] for name in names
    }
    return {
        name: {
            "seconds": round(statistics.median(times[name]), 3),
            "ratio": round(statistics.median(ratios[name]), 3),
            "least_and_greatest_ratio": [round(min(ratios[name]), 3), round(max(ratios[name]), 3)],
        }
        for name in names
    }


def eval_models(directory: Path, batch_size: int, positions: int) -> dict[str, EvalModel]:
    """Return the two scoring functions for one process."""
    native = open_directory(directory).load(
        "float32", "cpu", batch_size=batch_size, window=positions
    )
    own = ZeroTPForCausalLM.from_pretrained(directory).eval()
    return {
        "transformers' class": native,
        "zero_tp's": replace(native, scorer=ParallelScorer(own), module=own),
    }


def of_tasks(asked: argparse.Namespace, ours: dict[str, EvalModel]) -> dict[str, Any]:
    model = ours["transformers' class"]
    theirs = HFLM(
        pretrained=model.module,
        tokenizer=model.tokenizer,
        batch_size=asked.batch_size,
        max_length=asked.positions,
    )
    adapters: dict[str, Any] = {"lm-eval's HFLM": theirs}
    adapters |= {f"ours, {name}": LMEvalModel(each) for name, each in ours.items()}
    manager = TaskManager(include_path=str(asked.include_path), include_defaults=False)
    timings = {}
    for task in asked.tasks.split(","):
        loaded = manager.load([task])

        def run(lm: Any, loaded: Any = loaded) -> None:
            with lm_eval_settings():
                lm_evaluator.evaluate(
                    lm, loaded, limit=asked.limit, bootstrap_iters=0, log_samples=False
                )

        runs: dict[str, Callable[[], object]] = {
            name: partial(run, lm) for name, lm in adapters.items()
        }
        timings[task] = in_turns(runs, asked.rounds)
        show(task, timings[task])
    return timings


def of_wikitext(asked: argparse.Namespace, ours: dict[str, EvalModel]) -> dict[str, Any]:
    """Score the first windows of the text, all of the same length."""
    native = ours["transformers' class"]
    ids = native.encode(detokenize(wikitext_split(asked.wikitext, "text")[0][:400_000]))
    tokens = np.concatenate(([prefix_token(native.tokenizer)], ids))
    rows = list(sliding_windows(tokens, asked.positions, WIKITEXT_OVERLAP))
    rows = rows[1 : 1 + asked.windows]  # the first scores all its targets
    batches = [
        torch.from_numpy(
            np.stack([row.tokens[:-1] for row in rows[start : start + asked.batch_size]])
        )
        for start in range(0, len(rows), asked.batch_size)
    ]

    @torch.no_grad()
    def plain(module: Any) -> None:
        for batch in batches:
            module(input_ids=batch, use_cache=False, logits_to_keep=WIKITEXT_OVERLAP)

    computed = sum(map(len, rows))
    results = {}
    for name, each in ours.items():
        contenders: Contenders = {
            "plain forwards": partial(plain, each.module),
            "wikitext103": partial(each.score, rows),
        }
        timings = results[name] = in_turns(contenders, asked.rounds)
        for of_one in timings.values():
            of_one["tokens_computed_per_second"] = round(computed / of_one["seconds"])
        show(f"{len(rows)} windows of {asked.positions} tokens, {name}", timings)
    return results


def show(title: str, timings: dict[str, dict[str, Any]]) -> None:
    print(title)
    for name, figures in timings.items():
        least, greatest = figures["least_and_greatest_ratio"]
        print(
            f"  {name:34} {figures['seconds']:8.2f} s  {figures['ratio']:.3f} × ({least:.3f} to "
            f"{greatest:.3f})"
        )


def main() -> None:
    parser = cli.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, required=True, metavar="DIR", help="a Hugging Face directory"
    )
    parser.add_argument(
        "--include-path", type=Path, required=True, metavar="DIR", help="lm-eval task files"
    )
    parser.add_argument("--tasks", required=True, metavar="TASK[,TASK]", help="of that directory")
    parser.add_argument(
        "--wikitext", type=Path, required=True, metavar="FILE", help="a WikiText split"
    )
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="default: 8")
    parser.add_argument(
        "--positions", type=int, default=512, metavar="N", help="tokens of a window (default: 512)"
    )
    parser.add_argument(
        "--windows", type=int, default=32, metavar="N", help="of wikitext103 (default: 32)"
    )
    parser.add_argument(
        "--limit", type=int, default=40, metavar="N", help="examples of a task (default: 40)"
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="default: 5")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="write a dated JSON result there"
    )
    asked = parser.parse_args()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    ours = eval_models(asked.model, asked.batch_size, asked.positions)
    result = {
        "settings": {
            name: value.name if isinstance(value, Path) else value
            for name, value in vars(asked).items()
            if name != "output"
        },
        "threads": torch.get_num_threads(),
        "tasks": of_tasks(asked, ours),
        "wikitext103": of_wikitext(asked, ours),
    }
    if asked.output:
        write_result(asked.output, "evaluation", result)


if __name__ == "__main__":
    cli.run(main)
