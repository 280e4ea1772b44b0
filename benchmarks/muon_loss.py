"""Muon beside AdamW on the quickstart's corpus, model and schedule: loss at equal tokens, and
seconds a step.

    python -m benchmarks.muon_loss --output benchmarks/results/

Both have the quickstart's rate and decay: Muon's factor `match_rms_adamw` is made for that. One run
each of two ranks (TP 2, SP, ZeRO-2), one after the other.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.dated import write_result
from benchmarks.launched import launched

RANKS = 2
WARM_UP = 5
SHARED = {"lr": 3e-3, "weight_decay": 0.1}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"type": "AdamW", "params": {**SHARED, "betas": [0.9, 0.95]}},
    "Muon": {
        "type": "Muon",
        "params": {**SHARED, "adjust_lr_fn": "match_rms_adamw", "adamw": {"betas": [0.9, 0.95]}},
    },
}


def train(name: str, data: Path, directory: Path, steps: int) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl of one run."""
    settings = {
        "optimizer": json.dumps(OPTIMIZERS[name]),
        "zero_tp.data.train": data / "train",
        "zero_tp.data.validation": data / "validation",
        "zero_tp.training.steps": steps,
        "zero_tp.evaluation.interval": steps,
        "zero_tp.checkpoint.interval": steps,
        # The quickstart's 8 rows a step are on two replicas.
        "train_micro_batch_size_per_gpu": 8,
    }
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    runner = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(RANKS))
    config = ("--deepspeed_config", "ds_configs/quickstart.json", "--output-dir", str(directory))
    launched([*runner, "launch/pretrain.py", *config, *words])
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--output", type=Path, help="folder of the dated result")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"ranks": RANKS, "steps": arguments.steps}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "data")
        corpus = ("--input", "launch/corpus/sotu.jsonl.gz", "--tokenizer", "bpe:4096")
        launched(["launch/prepare_data.py", *corpus, "--output", str(data)])
        for name in OPTIMIZERS:
            lines = train(name, data, Path(folder, name), arguments.steps)
            steps = [line for line in lines if "loss" in line]
            seconds = [line["seconds"] for line in steps[WARM_UP:]]
            tokens = steps[0]["consumed_samples"] * 256
            result |= {"tokens": tokens * arguments.steps}
            result[name] = {
                "validation loss": lines[-1]["validation_loss"],
                "training loss, last tenth": statistics.fmean(
                    line["loss"] for line in steps[-arguments.steps // 10 :]
                ),
                "seconds": statistics.median(seconds),
                "range": [min(seconds), max(seconds)],
            }
            print(f"{name}: {result[name]}", flush=True)
    result["Muon to AdamW"] = result["Muon"]["seconds"] / result["AdamW"]["seconds"]
    if arguments.output:
        write_result(arguments.output, "muon-loss", result)


if __name__ == "__main__":
    main()
