"""Time one layer under recomputation (table 4 of arXiv 2205.05198) on a launcher's ranks.

    torchrun --nproc-per-node 8 -m benchmarks.recompute --output benchmarks/results/

Each technique's overhead is the median over the rounds, with quartiles, relative to TP alone. The
last column is what it adds to the FLOPs of the layer's products. `python -m benchmarks.papers
recomputation-table-4` is the small version.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.dated import write_result
from benchmarks.papers import layers
from benchmarks.papers.engines import of_layers
from benchmarks.papers.published import TECHNIQUES, technique
from zero_tp.run.config import RunConfig
from zero_tp.tools.planning.plan_settings import Layer

DTYPES = ("fp32", "bf16")


def arguments() -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = " (default: %(default)s)"
    parser.add_argument(
        "--hidden", type=int, default=6144 if cuda else 768, help="hidden size h" + default
    )
    parser.add_argument(
        "--heads", type=int, default=64 if cuda else 12, help="attention heads a" + default
    )
    parser.add_argument(
        "--sequence", type=int, default=2048 if cuda else 512, help="sequence length s" + default
    )
    parser.add_argument(
        "--batch", type=int, default=4 if cuda else 2, help="micro-batch b" + default
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default="bf16" if cuda else "fp32", help="dtype" + default
    )
    parser.add_argument(
        "--dropout", type=float, default=0.1, help="of scores and of both branches" + default
    )
    parser.add_argument(
        "--rounds", type=int, default=20, help="times that each technique runs" + default
    )
    parser.add_argument("--output", type=Path, help="directory for the dated result")
    return parser.parse_args()


def report(options: argparse.Namespace, layer: Layer, times: layers.Times, device: str) -> None:
    rows = {}
    for name, ratios in layers.overheads(times).items():
        forward, backward = layers.medians(times[name])
        low, middle, high = statistics.quantiles(ratios, n=4)
        flops = layers.added_flops(layer, name)
        print(
            f"{name:>18}  forward {1e3 * forward:6.1f} ms, backward {1e3 * backward:6.1f} ms, "
            f"overhead {middle:+.1%} "
            f"({low:+.1%} to {high:+.1%}), FLOPs {flops:+.1%}"
        )
        rows[name] = {
            "median_seconds": {"forward": forward, "backward": backward},
            "quartiles_of_overhead": [low, middle, high],
            "added_flops": flops,
        }
    if options.output:
        shape = {"s": layer.s, "b": layer.b, "h": layer.h, "a": layer.a, "t": dist.get_world_size()}
        result = {
            "device": device,
            "layer": shape,
            "dtype": options.dtype,
            "dropout": options.dropout,
        }
        result |= {"rounds": options.rounds, "rows": rows}
        write_result(options.output, f"recompute-{device.split(',')[0]}", result)


def runs(layer: Layer, options: argparse.Namespace) -> dict[str, RunConfig]:
    """Return a run of each technique, with TP over all ranks; without SP on one rank."""
    world = dist.get_world_size()
    dropout = (
        f"zero_tp.model.{name}={options.dropout}"
        for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop")
    )
    changes = (
        "zero_tp.model.n_layer=1",
        f"bf16.enabled={json.dumps(options.dtype == 'bf16')}",
        *dropout,
    )
    return {
        name: of_layers(layer, world, *changes, *technique(name))
        for name, (sequence, _) in TECHNIQUES.items()
        if world > 1 or sequence == "false"
    }


def main() -> None:
    options = arguments()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        layer = Layer(options.sequence, options.batch, options.hidden, options.heads)
        times = layers.measure(runs(layer, options), options.rounds, device)
        if dist.get_rank() == 0:
            report(
                options,
                layer,
                times,
                f"cuda, {torch.cuda.get_device_name()}" if cuda else "cpu, gloo",
            )
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
