#!/usr/bin/env python3
"""Train BERT with both orders of layer norm at growing depth and draw the losses: arXiv 1909.08053's figure 7 in small.

"original" is `bert`, whose norms follow the residual sums; "rearranged" is `megatron-bert`, whose norms stand before
attention and MLP. All else is alike: the corpus (the shipped one), samples, seed, sizes, optimizer and learning rate.
Prints a table; --output takes a dated result and the picture.

    python benchmarks/norm_order.py --layers 2 6 12 24 --steps 800 --output benchmarks/results/
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from dated import ROOT, write_result  # type: ignore[import-not-found]  # beside this script

ORDERS = {"original": "bert", "rearranged": "megatron-bert"}
COLOURS = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377")  # Paul Tol's "bright" scheme
VOCABULARY = 2048
LENGTH, BATCH = 16, 48
SMOOTHED = 20  # steps of the moving mean that is drawn


def launched(arguments: list[str]) -> None:
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")


def initializer_range(hidden: int) -> float:
    """The gain of BERT-large, 0.02 at its width of 1,024: at 0.02 a layer of 64 adds almost nothing in either order."""
    return 0.02 * math.sqrt(1024 / hidden)


def config(model_type: str, layers: int, options: argparse.Namespace, corpus: Path) -> dict[str, Any]:
    """The run's file; no dropout, so that the training loss is that of the model that is validated."""
    return {
        "train_batch_size": BATCH,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": options.lr, "betas": [0.9, 0.999], "weight_decay": 0.01}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_max_lr": "auto",
                "warmup_num_steps": options.warmup,
                "warmup_type": "linear",
                "total_num_steps": "auto",
            },
        },
        "zero_optimization": {"stage": 1},
        "zero_tp": {
            "model": {
                "model_type": model_type,
                "num_hidden_layers": layers,
                "hidden_size": options.hidden,
                "num_attention_heads": max(1, options.hidden // 16),
                "intermediate_size": 4 * options.hidden,
                "max_position_embeddings": LENGTH,
                "vocab_size": VOCABULARY,
                "initializer_range": initializer_range(options.hidden),
                "hidden_dropout_prob": 0.0,
                "attention_probs_dropout_prob": 0.0,
            },
            "objective": {"type": "masked", "max_ngram": 1, "sentence_order": False},
            "data": {
                "train": str(corpus / "train"),
                "validation": str(corpus / "validation"),
                "sequence_length": LENGTH,
            },
            "training": {"steps": options.steps},
            "evaluation": {"batches": 20},
        },
    }


def run(name: str, layers: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train once → the masked tokens' loss of each step, and what validation found at the end."""
    directory = folder / f"{name}-{layers}"
    file = folder / f"{name}-{layers}.json"
    file.write_text(json.dumps(config(ORDERS[name], layers, options, folder / "corpus")))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(options.ranks), "--master_port", port]
    launched([*launcher, "launch/pretrain.py", "--deepspeed_config", str(file), "--output-dir", str(directory)])
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    (validation,) = (line for line in lines if "validation_loss" in line)
    losses = [line["loss"] if line["loss"] is not None else math.inf for line in steps]
    figures = {key: value for key, value in validation.items() if key.startswith("validation")}
    return {"order": name, "layers": layers, "masked_loss": losses, **figures}


def picture(results: list[dict[str, Any]], unigram: float, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 3.8), layout="constrained")
    both = figure.subplots(1, len(ORDERS), sharey=True)
    depths = sorted({result["layers"] for result in results})
    for axes, name in zip(both, ORDERS, strict=True):
        for colour, layers in zip(COLOURS, depths, strict=False):
            for result in (each for each in results if (each["order"], each["layers"]) == (name, layers)):
                losses = result["masked_loss"]
                means = [sum(losses[max(0, i - SMOOTHED) : i + 1]) / len(losses[max(0, i - SMOOTHED) : i + 1])
                         for i in range(len(losses))]  # fmt: skip
                axes.plot(range(1, len(means) + 1), means, color=colour, linewidth=1.4, label=f"{layers} layers")
        axes.axhline(unigram, color="#222222", linewidth=0.8, linestyle=":")
        axes.annotate("unigram", (0, unigram), fontsize=8, va="bottom")
        axes.set_title(f"{name} ({ORDERS[name]})", loc="left", fontsize=11, fontweight="bold")
        axes.set_xlabel("step", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=9)
    both[0].set_ylabel("loss of masked tokens [nats]", fontsize=9)
    both[-1].legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)
    print(f"wrote {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 6, 12, 24], help="depths (default: 2 6 12 24)")
    parser.add_argument("--hidden", type=int, default=64, help="hidden size, heads of 16 (default: 64)")
    parser.add_argument("--steps", type=int, default=800, help="of each run (default: 800)")
    parser.add_argument("--warmup", type=int, default=50, help="steps of linear warm-up (default: 50)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate (default: 1e-3)")
    parser.add_argument("--ranks", type=int, default=2, help="data-parallel CPU ranks (default: 2)")
    parser.add_argument("--output", type=Path, help="directory for the dated result and the picture")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        how = ["--tokenizer", f"wordpiece:{VOCABULARY}", "--split-sentences", "en"]
        text = ["--input", "launch/corpus/sotu.jsonl.gz", "--output", str(folder / "corpus")]
        launched(["launch/prepare_data.py", *text, *how])
        unigram = json.loads((folder / "corpus" / "report.json").read_text())["unigram"]["validation_cross_entropy"]
        print(f"unigram: {unigram:.3f} nats a token")
        print(f"{'order':<12} {'layers':>6} {'first loss':>10} {'last loss':>10} {'validation':>10} {'right':>6}")
        results = []
        for layers in options.layers:
            for name in ORDERS:
                result = run(name, layers, options, folder)
                last = result["masked_loss"][-SMOOTHED:]
                loss, right = result["validation_loss"], result["validation_masked_accuracy"]
                print(
                    f"{name:<12} {layers:>6} {result['masked_loss'][0]:>10.3f} {sum(last) / len(last):>10.3f} "
                    f"{loss:>10.3f} {right:>6.1%}",
                    flush=True,
                )
                results.append(result)
    if options.output:
        described = {
            "config": f"hidden {options.hidden}, init {initializer_range(options.hidden):g}, s {LENGTH}, "
            f"batch {BATCH}, {options.steps} steps, lr {options.lr:g} after {options.warmup} of warm-up, linear decay, "
            f"no dropout, {options.ranks} CPU ranks, ZeRO-1",
            "unigram_validation": unigram,
            "runs": [{**each, "masked_loss": [round(loss, 4) for loss in each["masked_loss"]]} for each in results],
        }
        path = write_result(options.output, "norm-order", described)
        picture(results, unigram, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
