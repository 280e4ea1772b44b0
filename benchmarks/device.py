"""Train models of 1.3, 3 and 8 B on this machine's accelerator: tokens/s, MFU, and memory compared
with the plan.

    python -m benchmarks.device --output benchmarks/results/
    python -m benchmarks.device --tiny          # the same code on CPU, with tiny sizes
    python -m benchmarks.device --full          # a session's figures: benchmarks/device_full.py

The runs go the way of launch/pretrain.py: a checked config, `connect_deepspeed`, `TrainingEngine`;
weights and tokens are random, and each run is a process of its own. The first model is also run
with one thing changed at a time. What does not fit or fails says so in its row; the others go on,
and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.dated import ROOT, write_result

LIMIT_SECONDS = 1800
LENGTH = 2048
TINY_LENGTH = 64


def llama(
    hidden: int, layers: int, heads: int, groups: int, mlp: int, vocabulary: int
) -> dict[str, Any]:
    names = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
    )
    sizes = dict(zip(names, (hidden, layers, heads, groups, mlp), strict=True))
    return {
        "model_type": "llama",
        **sizes,
        "vocab_size": vocabulary,
        "max_position_embeddings": LENGTH,
    }


def olmoe(sizes: dict[str, Any], experts: int, experts_per_token: int) -> dict[str, Any]:
    counts = {"num_experts": experts, "num_experts_per_tok": experts_per_token}
    return {**sizes, "model_type": "olmoe", **counts}


TINY = llama(64, 2, 4, 2, 128, 512)


class Row(NamedTuple):
    """A model, the samples of its micro-batch, and its `KEY=VALUE` overrides of `settings`.

    Attributes:
        tiny: the model that stands for it on CPU.
    """

    model: dict[str, Any]
    micro: int
    changes: tuple[str, ...] = ()
    tiny: dict[str, Any] = TINY  # never changed


FULL = "zero_tp.recompute=full"
OFFLOADED = 'zero_optimization.offload_optimizer={"device": "cpu", "pin_memory": true}'
ROWS = {
    "1.3b": Row(llama(2048, 24, 16, 16, 5504, 32_000), 8),
    "3b-recomputed": Row(llama(3072, 28, 24, 8, 8192, 32_000), 8, (FULL,)),
    "8b-recomputed-offloaded": Row(llama(4096, 32, 32, 8, 14_336, 128_256), 8, (FULL, OFFLOADED)),
    "olmoe-6-layers": Row(
        olmoe(llama(2048, 6, 16, 16, 1024, 50_304), 64, 8),
        4,
        tiny=olmoe(llama(64, 2, 4, 4, 32, 512), 4, 2),
    ),
}


class Item(NamedTuple):
    """A difference from the first row: `KEY=VALUE` overrides, environment variables.

    Attributes:
        constants: `MODULE.NAME=VALUE` of the library, for that run alone.
        several: it changes something only where there are several devices.
        transformers: transformers' own class in DeepSpeed's engine, not zero_tp's.
    """

    changes: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()
    environment: dict[str, str] = {}  # noqa: RUF012 - never changed
    several: bool = False
    transformers: bool = False


COPIED = "zero_optimization.contiguous_gradients=true"
UNCOMPILED = "zero_tp.compile=false"
REPLICAS = "zero_tp.parallel.tensor=1"
ITEMS = {
    "transformers": Item(transformers=True),
    "transformers-not-compiled": Item((UNCOMPILED,), transformers=True),
    "not-compiled": Item((UNCOMPILED,)),
    # Of 128 MiB in fp32: an eighth of the launches. Compiled kernels have no slices.
    "not-compiled-large-slices": Item(
        (UNCOMPILED,), constants=("zero_tp.parallel.loss.SLICE_ELEMENTS=33554432",)
    ),
    "expandable-segments": Item(
        environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    ),
    "optimizer-not-fused": Item(
        ("optimizer.params.torch_adam=true", "optimizer.params.fused=false")
    ),
    "gradients-copied": Item((COPIED,)),
    "gradients-copied-small-buckets": Item((COPIED, "zero_optimization.reduce_bucket_size=auto")),
    "cuda-order-of-launches": Item(environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, several=True),
    "one-product-after-the-gather": Item(
        constants=("zero_tp.parallel.linear.OWN_ROWS_FIRST=false",), several=True
    ),
    "replicas": Item((REPLICAS,), several=True),
    "replicas-reduced-to-owners": Item(
        (REPLICAS, "zero_optimization.use_multi_rank_bucket_allreduce=false"), several=True
    ),
}


def settings(row: Row, options: argparse.Namespace) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2 if options.tiny else row.micro,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1},
        },
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "zero_tp": {
            "model": row.tiny if options.tiny else row.model,
            "parallel": {"tensor": options.ranks},
            "data": {"train": "none", "sequence_length": TINY_LENGTH if options.tiny else LENGTH},
            "training": {"steps": options.steps, "seed": 1},
            "compile": True,
        },
    }


def launch(row: Row, item: Item, options: argparse.Namespace) -> dict[str, Any]:
    """Run a row in new processes; return its measurements, or the reason why it failed."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        output = Path(folder) / "result.json"
        config.write_text(json.dumps(settings(row, options)))
        words = [
            "-m",
            "benchmarks.device_rank",
            str(config),
            "--steps",
            str(options.steps),
            "--output",
            str(output),
        ]
        words += [f"--set={change}" for change in (*row.changes, *item.changes)]
        words += [f"--constant={constant}" for constant in item.constants]
        words += ["--transformers"] * item.transformers
        if options.ranks > 1:
            words = [
                "-m",
                "torch.distributed.run",
                "--nproc-per-node",
                str(options.ranks),
                "--standalone",
                *words,
            ]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
            **item.environment,
        }
        environment |= {"DS_ACCELERATOR": "cpu"} if options.tiny else {}
        try:
            done = subprocess.run(
                [sys.executable, *words],
                env=environment,
                capture_output=True,
                text=True,
                timeout=LIMIT_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"took longer than {LIMIT_SECONDS} s"}
        if done.returncode:
            print(done.stdout, done.stderr, sep="", file=sys.stderr)
            told = re.findall(
                r"^(?:\[rank\d+\]: ?)?((?!torch\.distributed\.)[\w.]*Error\b.*)",
                done.stderr,
                re.MULTILINE,
            )
            return {"failed": told[-1] if told else f"ended with status {done.returncode}"}
        record: dict[str, Any] = json.loads(output.read_text())
        return record


def line_of(name: str, record: dict[str, Any], first: dict[str, Any]) -> str:
    """Return a line of the table; for an item also the ratio of the first row's tokens/s to its
    own.
    """
    if "failed" in record:
        return f"{name:<34}{record['failed']}"
    rates = record["tokens_per_second"]
    middle = statistics.median(rates)
    mfu = "unknown" if record["mfu"] is None else f"{statistics.median(record['mfu']):.1%}"
    planned = f"{record['planned_gib']:.2f}" if "planned_gib" in record else "unknown"
    times = ""
    if record["item"] and "failed" not in first:
        times = f"{statistics.median(first['tokens_per_second']) / middle:.2f}"
    spread = f"{min(rates):,.0f} to {max(rates):,.0f}"
    memory = f"{record['peak_gib']:>8.2f}{planned:>9}"
    return f"{name:<34}{middle:>9,.0f}{spread:>20}{mfu:>9}{memory}{times:>8}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, on CPU")
    parser.add_argument(
        "--rows", nargs="+", choices=ROWS, default=[*ROWS], help="models (default: all)"
    )
    parser.add_argument(
        "--items", nargs="*", choices=ITEMS, default=[*ITEMS], help="of the first (default: all)"
    )
    parser.add_argument(
        "--ranks", type=int, default=1, help="devices; TP with SP splits each model over them"
    )
    parser.add_argument("--steps", type=int, default=10, help="timed steps (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="directory for the dated result")
    parser.add_argument("--full", action="store_true", help="see benchmarks/device_full.py")
    parser.add_argument("--before", type=Path, metavar="DIR", help="an older tree, with --full")
    parser.add_argument("--part", choices=("A", "B"), help="of --full (default: both)")
    parser.add_argument(
        "--seconds", type=float, default=270, help="limit of a part (default: %(default)s)"
    )
    options = parser.parse_args()
    if not options.tiny and (
        os.environ.get("DS_ACCELERATOR") == "cpu" or not torch.cuda.is_available()
    ):
        parser.error("there is no accelerator here; --tiny runs the same code on CPU")
    if options.full:
        from benchmarks.device_full import run_full

        if options.output is None:
            parser.error("--full needs --output DIR, where it writes each result and looks first")
        run_full(options)
    first, *others = options.rows
    elsewhere = [
        ITEMS[name].transformers if options.ranks > 1 else ITEMS[name].several
        for name in options.items
    ]
    items = [name for name, other in zip(options.items, elsewhere, strict=True) if not other]
    runs = [(first, ""), *((first, item) for item in items), *((row, "") for row in others)]
    print(f"{'':<34}{'tokens/s':>9}{'from':>20}{'MFU':>9}{'GiB':>8}{'planned':>9}{'first ×':>8}")
    records: list[dict[str, Any]] = []
    for name, item in runs:
        row = ROWS[name]
        change = ITEMS.get(item, Item())
        changes = row.changes + change.changes + change.constants
        run = {"row": name, "item": item, "settings": settings(row, options), "changes": changes}
        records.append({**run, **launch(row, change, options)})
        print(line_of(f"  {item}" if item else name, records[-1], records[0]), flush=True)
        if options.output:  # after each run: a time limit may end the next one
            result = {"ranks": options.ranks, "timed_steps": options.steps, "runs": records}
            last = len(records) == len(runs)
            write_result(
                options.output, "device-tiny" if options.tiny else "device", result, tell=last
            )
    if failed := [
        " ".join((run["row"], run["item"])).strip() for run in records if "failed" in run
    ]:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
