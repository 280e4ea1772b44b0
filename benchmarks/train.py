#!/usr/bin/env python3
"""Compare training throughput and memory with the alternatives, on the same weights, tokens, dtype
and cores.

Each contender is launched by itself, in turns, over several rounds: one process with two threads,
or two ranks with one each. All start from the same Hugging Face directory, train on the same random
tokens, keep freed memory and update fp32 values with torch's fused AdamW. Their losses are compared
to check that they do the same work. Prints a table and the ratios; --output writes a dated result
and its picture. "of GEMM" is the share of the rate of matrix products alone. "floor" is the share
of a step that products at that rate, its collectives alone and one update would take.

    python benchmarks/train.py --shape wide --dtype bf16 --rounds 3 --output benchmarks/results/

`ztp-…` is this project, built as launch/pretrain.py does: a checked config, `connect_deepspeed`,
`TrainingEngine`. `hf-1p` is Hugging Face's model in one process, `ds-z2` that model in DeepSpeed's
ZeRO-2, `autotp` in its AutoTP. A shape with experts is a Mixtral; transformers multiplies its
experts by torch's grouped_mm, and one by one in `…-eager`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from contenders import (  # type: ignore[import-not-found]  # beside this script
    BATCH,
    CONTENDERS,
    SHAPES,
    STEPS,
    Shape,
)
from dated import ROOT, write_result  # type: ignore[import-not-found]  # beside this script

RATIOS = (
    *(
        ("ztp-1p", "hf-1p"),
        ("ztp-z2", "ds-z2"),
        ("ztp-sp", "autotp"),
        ("ztp-sp", "ztp-tp"),
        ("ztp-z3", "ztp-z1"),
    ),
    *(("ztp-1p-compiled", "hf-1p"), ("ztp-z2-compiled", "ds-z2"), ("ztp-sp-compiled", "autotp")),
    *(("ztp-1p-compiled", "hf-1p-eager"), ("ztp-z2-compiled", "ds-z2-eager")),
    *(("ztp-sp-compiled", other) for other in ("ds-z2", "ds-z2-eager", "hf-1p", "hf-1p-eager")),
)


def products(shape: Shape, bf16: bool) -> float:
    """Return the FLOP/s of two threads on products of the model's shapes, the best of several."""
    import torch

    torch.set_num_threads(2)
    dtype = torch.bfloat16 if bf16 else torch.float32
    tokens = torch.randn(BATCH * shape.length, shape.hidden).to(dtype)
    best = 0.0
    for size in (shape.mlp, shape.vocabulary // 4):
        weight = torch.randn(size, shape.hidden).to(dtype)
        for _ in range(6):
            start_time = time.perf_counter()
            tokens @ weight.t()
            best = max(
                best, 2.0 * len(tokens) * weight.numel() / (time.perf_counter() - start_time)
            )
    return best


def write_model(directory: Path, shape: Shape) -> float:
    """Write a Llama or Mixtral with random weights; return the FLOPs of one of its steps."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    from zero_tp.model.architectures import architecture_of
    from zero_tp.model.flops import model_flops

    torch.manual_seed(1)
    logging.disable_progress_bar()
    experts = {
        "num_local_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "output_router_logits": True,
    }
    config = AutoConfig.for_model(
        "mixtral" if shape.experts else "llama",
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        vocab_size=shape.vocabulary,
        max_position_embeddings=shape.length,
        **(experts if shape.experts else {}),
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    return model_flops(architecture_of(config).spec(config), BATCH, shape.length)


def launch(name: str, weights: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run a contender; return its steps' seconds and losses, rank 0's peak in MiB, and the
    floor's seconds.
    """
    ranks = CONTENDERS[name][0]
    with tempfile.NamedTemporaryFile(suffix=".json") as output:
        words = [str(ROOT / "benchmarks" / "contenders.py"), name, "--weights", str(weights)]
        words += ["--shape", options.shape, "--dtype", options.dtype, "--output", output.name]
        if ranks > 1:
            words = [
                "-m",
                "torch.distributed.run",
                "--nproc-per-node",
                str(ranks),
                "--standalone",
                *words,
            ]
        environment = {
            **os.environ,
            "DS_ACCELERATOR": "cpu",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": str(2 // ranks),
        }
        done = subprocess.run(
            [sys.executable, *words], env=environment, capture_output=True, text=True, timeout=900
        )
        if done.returncode:
            sys.exit(f"{name} failed:\n{done.stdout}{done.stderr}")
        result: dict[str, Any] = json.loads(Path(output.name).read_text())
        return result


def draw(path: Path, rates: dict[str, list[float]], title: str) -> None:
    """Draw each contender's tokens/s: the median and the range over the rounds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 0.5 + 0.42 * len(rates)), layout="constrained")
    axes = figure.add_subplot()
    for place, (name, each) in enumerate(reversed(rates.items())):
        middle = statistics.median(each)
        spread = [[middle - min(each)], [max(each) - middle]]
        axes.barh(
            place,
            middle,
            xerr=spread,
            capsize=3,
            color="#4477AA" if name.startswith("ztp") else "#BBBBBB",
        )
        axes.text(max(each) * 1.01, place, f"{middle:,.0f}", va="center", fontsize=9)
    axes.set_yticks(range(len(rates)), [*reversed(rates)])
    axes.set_xlabel("tokens/s")
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="wide")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each contender (default: 3)")
    parser.add_argument(
        "--contenders", default=",".join(CONTENDERS), help="by default all: %(default)s"
    )
    parser.add_argument(
        "--output", type=Path, help="directory for the dated result and its picture"
    )
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    bf16 = options.dtype == "bf16"
    names = options.contenders.split(",")
    if unknown := sorted(set(names) - CONTENDERS.keys()):
        parser.error(f"no contender {unknown[0]}")
    compare(names, shape, bf16, options)


def compare(names: list[str], shape: Shape, bf16: bool, options: argparse.Namespace) -> None:
    """Run all rounds; exit with 1 if a contender's losses differ from the others'."""
    tokens = BATCH * shape.length
    rates: dict[str, list[float]] = {name: [] for name in names}
    peaks: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, list[float]] = {}
    floor: dict[str, list[float]] = {name: [] for name in names}
    gemm: list[float] = []
    with tempfile.TemporaryDirectory() as directory:
        flops = write_model(Path(directory), shape)
        for turn in range(options.rounds):
            gemm.append(products(shape, bf16))
            for name in names:
                found = launch(name, Path(directory), options)
                rates[name].append(tokens / statistics.median(found["seconds"]))
                peaks[name].append(found["peak_mib"])
                losses[name] = found["losses"]
                floor[name].append(flops / gemm[-1] + sum(found["floor"].values()))
            print(
                f"round {turn + 1}: "
                + ", ".join(f"{name} {rates[name][-1]:.0f}" for name in names),
                flush=True,
            )
    print(f"\n{'contender':<16}{'tokens/s':>10}{'from':>8}{'to':>8}", end="")
    print(f"{'of GEMM':>9}{'floor':>7}{'peak MiB':>10}{'last loss':>11}")
    for name in names:
        middle = statistics.median(rates[name])
        share = flops * middle / tokens / statistics.median(gemm)
        least = statistics.median(floor[name]) * middle / tokens
        print(
            f"{name:<16}{middle:>10.0f}{min(rates[name]):>8.0f}{max(rates[name]):>8.0f}{share:>9.0%}{least:>7.0%}"
            f"{statistics.median(peaks[name]):>10.0f}{losses[name][-1]:>11.4f}"
        )
    ratios = {
        f"{one} / {other}": ratio(rates[one], rates[other])
        for one, other in RATIOS
        if {one, other} <= {*names}
    }
    for pair, (middle, least, most) in ratios.items():
        print(f"{pair}: {middle:.2f} (from {least:.2f} to {most:.2f})")
    if options.output:
        result = {
            "model": {"model_type": "mixtral" if shape.experts else "llama", **shape._asdict()},
            "batch": f"{BATCH} × {shape.length} tokens, {options.dtype}, {STEPS} timed steps",
            "contenders": {
                name: {"ranks": CONTENDERS[name][0], **CONTENDERS[name][1]} for name in names
            },
            "tokens_per_second": rates,
            "peak_mib": peaks,
            "losses": losses,
            "gemm_flops_per_second": gemm,
            "flops_per_step": flops,
            "floor_seconds": floor,
            "ratios": ratios,
        }
        path = write_result(options.output, f"train-{options.shape}-{options.dtype}", result)
        draw(
            path.with_suffix(".png"),
            rates,
            f"{options.shape} {options.dtype}, two cores, {options.rounds} rounds",
        )
    first = losses[names[0]]
    limit = 0.05 if bf16 else 1e-3
    if shape.experts:
        limit = max(limit, 5e-3)  # the balance of experts is that of each replica's own rows
    for name in names[1:]:
        apart = max(abs(a - b) for a, b in zip(first, losses[name], strict=True))
        if not apart < limit:
            sys.exit(
                f"{name}'s losses differ from those of {names[0]} by {apart:.4f}: it does not do "
                "the same work"
            )


def ratio(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """Return the median, the least and the greatest ratio over the rounds."""
    each = [a / b for a, b in zip(ours, theirs, strict=True)]
    return statistics.median(each), min(each), max(each)


if __name__ == "__main__":
    main()
