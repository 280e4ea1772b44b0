#!/usr/bin/env python3
"""Throughput of the 4-rank quickstart run (TP 2 × DP 2, SP, ZeRO-2) against Hugging Face's model in
ZeRO-2 (DP 4).

Both train on the same tokens with the same global batch through the deepspeed launcher, in turns,
several times. The first steps of a run are left out. Prints the ratio of the medians and its
spread; --output writes a dated result.

    python benchmarks/quickstart.py --rounds 5 --output benchmarks/results/
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from dated import ROOT, write_result  # type: ignore[import-not-found]  # beside this script

from zero_tp.run.config import RunConfig

RANKS = 4
WARM_UP = 5


def launch(arguments: list[str]) -> None:
    runner = [
        sys.executable,
        "-m",
        "deepspeed.launcher.runner",
        "-q",
        "--num_accelerators",
        str(RANKS),
    ]
    environment = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [*runner, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")


def ours(config: Path, directory: Path, steps: int) -> list[float]:
    """Return the seconds of each step of the quickstart run."""
    overrides = {
        "zero_tp.training.steps": steps,
        "zero_tp.evaluation.interval": 10**6,
        "scheduler.params.warmup_num_steps": 2,
    }
    words = [word for key, value in overrides.items() for word in ("--set", f"{key}={value}")]
    launch(
        [
            "launch/pretrain.py",
            "--deepspeed_config",
            str(config),
            "--output-dir",
            str(directory),
            *words,
        ]
    )
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [line["seconds"] for line in lines if "loss" in line]


def plain(config: Path, directory: Path, steps: int) -> list[float]:
    """Return the seconds of each step of the contender."""
    output = directory / "plain.json"
    launch(
        [
            "benchmarks/plain.py",
            "--config",
            str(config),
            "--steps",
            str(steps),
            "--output",
            str(output),
        ]
    )
    seconds: list[float] = json.loads(output.read_text())["seconds"]
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=ROOT / "ds_configs" / "quickstart.json")
    parser.add_argument(
        "--rounds", type=int, default=5, help="times that each contender runs (default: 5)"
    )
    parser.add_argument(
        "--steps", type=int, default=30, help="steps of one run, warm-up included (default: 30)"
    )
    parser.add_argument("--output", type=Path, help="directory for the dated result")
    options = parser.parse_args()
    config = RunConfig.load(options.config, world_size=RANKS)
    tokens = config.global_batch * config.zero_tp.data.sequence_length
    rates: dict[str, list[float]] = {"zero_tp": [], "plain": []}
    for turn in range(options.rounds):
        for name, contender in (("zero_tp", ours), ("plain", plain)):
            with tempfile.TemporaryDirectory() as directory:
                seconds = contender(options.config.resolve(), Path(directory), options.steps)[
                    WARM_UP:
                ]
            rates[name].append(tokens / statistics.median(seconds))
        print(
            f"round {turn + 1}: "
            + ", ".join(f"{name} {rate[-1]:.0f} tokens/s" for name, rate in rates.items())
        )
    ratios = [a / b for a, b in zip(rates["zero_tp"], rates["plain"], strict=True)]
    median = statistics.median(ratios)
    print(f"zero_tp / plain: median {median:.3f}, from {min(ratios):.3f} to {max(ratios):.3f}")
    if options.output:
        result = {
            "config": f"{options.config.name}, 4 CPU ranks over gloo, glibc tunables "
            + ("set" if "GLIBC_TUNABLES" in os.environ else "not set"),
            "model": config.zero_tp.model,
            "global_batch": f"{config.global_batch} × {config.zero_tp.data.sequence_length} tokens",
            "zero_tp": "TP 2 × DP 2, SP, ZeRO-2",
            "plain": "transformers' own model, DeepSpeed ZeRO-2, DP 4",
            "tokens_per_second": rates,
            "ratio_of_each_round": ratios,
            "ratio_median": median,
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
        }
        write_result(options.output, "quickstart", result)


if __name__ == "__main__":
    main()
