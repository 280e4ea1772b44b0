#!/usr/bin/env python3
"""Train one model twice, as zero_tp's parallel run and as transformers' own class under torch's AdamW in one process.

Both begin with the weights that transformers draws, and see the same rows at the same learning rates. The run is the
config file's on 4 CPU ranks, with what --set changes; by default the quickstart's, TP 2 × DP 2 with SP, under ZeRO-3.
Prints the losses and how far apart they are; --output writes a dated result, which picture.py draws.

    python benchmarks/same_model.py --steps 150 --output benchmarks/results/     # after bash launch/quickstart.sh
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from dated import ROOT, write_result  # type: ignore[import-not-found]  # beside this script
from torch import nn
from transformers import AutoModelForCausalLM

from zero_tp.config import RunConfig
from zero_tp.data.samples import PackedSamples

RANKS = 4


def parallel(config: Path, overrides: list[str], model: Path, steps: int, folder: Path) -> tuple[str, list[Any]]:
    """Train the parallel run → its first line, and the line of each step."""
    words = [*overrides, f"zero_tp.training.steps={steps}", f'zero_tp.model={{"from_pretrained": "{model}"}}']
    words += ["zero_tp.evaluation.interval=null", "zero_tp.checkpoint.interval=null"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(RANKS), "--master_port", port]
    run = ["launch/pretrain.py", "--deepspeed_config", str(config), "--output-dir", str(folder / "run")]
    settings = [word for override in words for word in ("--set", override)]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *launcher, *run, *settings]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    told = next(line for line in done.stdout.splitlines() if "parameters" in line)
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return told.split(", in ")[0], [line for line in lines if "loss" in line]


def plain(run: RunConfig, model: Path, rates: list[float]) -> list[float]:
    """Train transformers' own class → the loss of each step."""
    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    settings = run.deepspeed_config()
    arguments = settings["optimizer"]["params"]
    flat = [weight for weight in network.parameters() if weight.ndim < 2]
    groups: list[dict[str, Any]] = [
        {"params": [weight for weight in network.parameters() if weight.ndim >= 2]},
        {"params": flat, "weight_decay": 0.0},
    ]
    decay, betas = arguments["weight_decay"], tuple(arguments["betas"])
    optimizer = torch.optim.AdamW(groups, betas=betas, weight_decay=decay)
    samples = PackedSamples(run.zero_tp.data.train, run.zero_tp.data.sequence_length, run.zero_tp.training.seed)
    losses = []
    for step, rate in enumerate(rates):
        (rows,) = samples.rank_batches(step, run.global_batch, run.global_batch, 1, 0, 1)
        loss = nn.functional.cross_entropy(network(rows.input_ids).logits.flatten(0, 1), rows.labels.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), settings["gradient_clipping"])
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=ROOT / "ds_configs" / "quickstart.json")
    parser.add_argument("--set", action="append", default=["zero_optimization.stage=3"], metavar="KEY=VALUE")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--output", type=Path, help="directory for the dated result")
    options = parser.parse_args()
    os.chdir(ROOT)  # the config names the corpus from here
    run = RunConfig.load(options.config, options.set, RANKS)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        torch.manual_seed(run.zero_tp.training.seed)
        AutoModelForCausalLM.from_config(run.hf_config(), dtype=torch.float32).save_pretrained(model)
        told, lines = parallel(options.config, options.set, model, options.steps, Path(folder))
        ours = [line["loss"] for line in lines]
        theirs = plain(run, model, [line["learning_rate"] for line in lines])
    print(told)
    print("  step   parallel      plain   difference")
    for step in sorted({1, 2, 5, *range(10, options.steps + 1, 10)} & set(range(1, options.steps + 1))):
        ourselves, they = ours[step - 1], theirs[step - 1]
        print(f"{step:6} {ourselves:10.6f} {they:10.6f} {ourselves - they:12.1e}")
    if options.output:
        result = {
            "config": f"{options.config.name}, {' '.join(options.set)}, {RANKS} CPU ranks over gloo",
            "parallel": told,
            "plain": "transformers' class, torch.optim.AdamW, one process",
            "losses": {"parallel": ours, "plain": theirs},
        }
        write_result(options.output, "same-model", result)


if __name__ == "__main__":
    main()
