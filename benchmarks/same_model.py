#!/usr/bin/env python3
"""Train one model twice, as zero_tp's parallel run and as transformers' own class under torch's
AdamW in one process.

Both begin with the weights that transformers draws, and see the same rows at the same learning
rates. The run is the config file's on 4 CPU ranks, with what --set changes; by default the
quickstart's, TP 2 × DP 2 with SP, under ZeRO-3. Prints the losses and how far apart they are;
--output writes a dated result, which picture.py draws.

    python -m benchmarks.same_model --steps 150 --output benchmarks/results/     # after bash
    launch/quickstart.sh
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks.dated import ROOT, write_result
from benchmarks.papers.runs import plainly_trained, trained
from zero_tp.run.config import RunConfig

RANKS = 4
WITHOUT = ("zero_tp.evaluation.interval=null", "zero_tp.checkpoint.interval=null")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=ROOT / "ds_configs" / "quickstart.json")
    parser.add_argument(
        "--set", action="append", default=["zero_optimization.stage=3"], metavar="KEY=VALUE"
    )
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--output", type=Path, help="directory for the dated result")
    options = parser.parse_args()
    os.chdir(ROOT)  # the config names the corpus from here
    run = RunConfig.load(options.config, options.set, RANKS)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        torch.manual_seed(run.zero_tp.training.seed)
        AutoModelForCausalLM.from_config(run.hf_config(), dtype=torch.float32).save_pretrained(
            model
        )
        changes = [*options.set, f"zero_tp.training.steps={options.steps}", *WITHOUT]
        changes.append(f'zero_tp.model={{"from_pretrained": "{model}"}}')
        topology, lines = trained(options.config, changes, RANKS, Path(folder) / "run")
        ours = [line["loss"] for line in lines]
        theirs = plainly_trained(run, model, [line["learning_rate"] for line in lines])
    print(topology)
    print("  step   parallel      plain   difference")
    for step in sorted(
        {1, 2, 5, *range(10, options.steps + 1, 10)} & set(range(1, options.steps + 1))
    ):
        ourselves = ours[step - 1]
        they = theirs[step - 1]
        print(f"{step:6} {ourselves:10.6f} {they:10.6f} {ourselves - they:12.1e}")
    if options.output:
        result = {
            "config": f"{options.config.name}, {' '.join(options.set)}, {RANKS} CPU ranks over "
            "gloo",
            "parallel": topology,
            "plain": "transformers' class, torch.optim.AdamW, one process",
            "losses": {"parallel": ours, "plain": theirs},
        }
        write_result(options.output, "same-model", result)


if __name__ == "__main__":
    main()
