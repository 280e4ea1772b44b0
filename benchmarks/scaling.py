"""Plan weak scaling: models of 8, 70 and 530 B on 8 to 4,096 H100, each at the fastest settings
that fit.

    python -m benchmarks.scaling [--devices 8 64 512 4096]

prints the tables of benchmarks/results/scaling.md. Nothing runs but the planner.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import NamedTuple

from zero_tp.base.errors import UserError
from zero_tp.model.flops import model_flops, utilisation
from zero_tp.parallel.devices import named_device
from zero_tp.run.config import RunConfig
from zero_tp.tools.planning.plan import Estimate
from zero_tp.tools.planning.search import Search

CONFIGS = Path(__file__).resolve().parent.parent / "ds_configs"
DEVICES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
TOKENS = 8192
"""Of each device in a step, whatever the number of devices."""
OVERLAPPED = ("zero_optimization.stage=1", "zero_optimization.overlap_comm=true")
LLAMA_70B = {
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
}
MODELS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "8 B": ("llama3_8b.json", 8192, ()),
    "70 B": (
        "llama3_8b.json",
        8192,
        tuple(f"zero_tp.model.{key}={json.dumps(size)}" for key, size in LLAMA_70B.items()),
    ),
    "530 B": ("papers/gpt_530b.json", 2048, ("zero_tp.attention=sdpa",)),
}


class Point(NamedTuple):
    """The fastest plan of a model on a number of devices; `best` is None if nothing fits."""

    devices: int
    best: Estimate | None
    tokens: float = 0.0
    mfu: float = 0.0


def point(name: str, devices: int) -> Point:
    """Return the fastest plan that fits."""
    file, length, changes = MODELS[name]
    device = named_device("h100")
    sequences = devices * TOKENS // length
    overrides = [
        *changes,
        *OVERLAPPED,
        f"train_batch_size={sequences}",
        "train_micro_batch_size_per_gpu=1",
    ]
    try:
        (best,), _ = Search(RunConfig.load(CONFIGS / file, overrides, devices), device).fastest(
            overrides, 1
        )
    except UserError:
        return Point(devices, None)
    assert device.bf16_tflops is not None
    flops = model_flops(best.model.spec, sequences, length)
    mfu = utilisation(flops, best.time.total, devices, device.bf16_tflops * 1e12)
    assert mfu is not None
    return Point(devices, best, TOKENS / best.time.total, mfu)


def row(one: Point, fastest: float) -> str:
    """Return a line of the table.

    Args:
        fastest: the most tokens/s of a device over all numbers of devices.
    """
    if one.best is None:
        return f"| {one.devices:,} | does not fit | | | | | | |"
    time = one.best.time
    exposed = f"{time.tp_communication / time.total:.1%} | {time.dp_communication / time.total:.1%}"
    return (
        f"| {one.devices:,} | {one.best.describe()} | {time.total:.3f} | {one.tokens:,.0f} | "
        f"{one.mfu:.1%} | "
        f"{one.tokens / fastest:.1%} | {exposed} |"
    )


def table(name: str, devices: tuple[int, ...]) -> str:
    """Return a model's table in Markdown."""
    points = [point(name, number) for number in devices]
    fastest = max(one.tokens for one in points)
    head = (
        "| devices | fastest settings | s a step | tokens/s a device | MFU | efficiency | TP costs "
        "| DP costs |"
    )
    return "\n".join(
        [
            head,
            "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
            *(row(one, fastest) for one in points),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, nargs="+", default=DEVICES)
    options = parser.parse_args()
    for name in MODELS:
        print(f"### {name}\n\n{table(name, tuple(options.devices))}\n", flush=True)


if __name__ == "__main__":
    main()
