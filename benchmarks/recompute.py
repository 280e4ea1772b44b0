#!/usr/bin/env python3
"""Forward, backward and overhead of one transformer layer under recomputation: table 4 of arXiv 2205.05198.

Five rows: everything kept, SP, full recomputation, selective, selective + SP. They run in turns on the same ranks; each
time is the median over the rounds, each ratio is taken within a round, against the row that keeps everything. Beside it
stands what the row adds to the FLOPs of the layer's products (the paper's appendix A).

    python benchmarks/recompute.py --output benchmarks/results/      2 CPU ranks, or the GPUs of this machine
    torchrun --nproc-per-node 8 benchmarks/recompute.py --tensor 8   ranks that a launcher started
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from dated import write_result  # type: ignore[import-not-found]  # beside this script
from torch import Tensor
from transformers import GPT2Config

from zero_tp.activations.memory import ActivationMemory
from zero_tp.activations.policy import RecomputePolicy
from zero_tp.models.wrapper import ZeroTPForCausalLM
from zero_tp.topology import Topology

ROWS = {
    "none": (False, "none"),
    "SP": (True, "none"),
    "full": (False, "full"),
    "selective": (False, "selective"),
    "selective + SP": (True, "selective"),
}
PAPER_OVERHEAD = {"none": 0, "SP": -3, "full": 39, "selective": 7, "selective + SP": 4}
PHASES = ("forward", "backward", "both")


def arguments() -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = " (default: %(default)s)"
    parser.add_argument(
        "--tensor", type=int, default=torch.cuda.device_count() if cuda else 2, help="TP degree" + default
    )
    parser.add_argument("--hidden", type=int, default=6144 if cuda else 768, help="hidden size h" + default)
    parser.add_argument("--heads", type=int, default=64 if cuda else 12, help="attention heads a" + default)
    parser.add_argument("--sequence", type=int, default=2048 if cuda else 512, help="sequence length s" + default)
    parser.add_argument("--batch", type=int, default=4 if cuda else 2, help="micro-batch b" + default)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16" if cuda else "fp32", help="dtype" + default)
    parser.add_argument("--attention", choices=("eager", "sdpa"), default="eager", help="attention" + default)
    parser.add_argument("--dropout", type=float, default=0.1, help="everywhere in the layer" + default)
    parser.add_argument("--rounds", type=int, default=20, help="times that each row runs" + default)
    parser.add_argument("--output", type=Path, help="directory for the dated result")
    return parser.parse_args()


def layer_of(options: argparse.Namespace, topology: Topology, mode: str, device: torch.device) -> Callable[[], Any]:
    """A function that runs one layer forward and backward and returns the seconds of each."""
    config = GPT2Config(
        n_layer=1,
        n_embd=options.hidden,
        n_head=options.heads,
        n_positions=options.sequence,
        vocab_size=128,
        **dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), options.dropout),
        bos_token_id=0,
        eos_token_id=0,
    )
    config._attn_implementation = options.attention
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.dtype]
    model = ZeroTPForCausalLM(config, topology, dtype=dtype, device=device).train()
    ActivationMemory(model, RecomputePolicy(mode=mode), {}, device)
    layer = model.transformer.layers[0]
    length = options.sequence // (topology.tensor if topology.sequence else 1)
    shape = (length, options.batch, options.hidden)
    stream = torch.randn(shape, dtype=dtype, device=device).requires_grad_()
    gradient = torch.randn(shape, dtype=dtype, device=device)
    context = model.transformer.context(options.sequence, stream, sequence=topology.sequence)

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        dist.barrier()
        return time.perf_counter()

    def once() -> tuple[float, float]:
        model.zero_grad()
        stream.grad = None
        begin = now()
        output: Tensor = layer(stream, context=context)
        middle = now()
        output.backward(gradient)
        return middle - begin, now() - middle

    return once


def measure(options: argparse.Namespace, device: torch.device) -> dict[str, list[tuple[float, float, float]]]:
    """Seconds (forward, backward, both) of each row in each round."""
    topologies = {sequence: Topology(options.tensor, sequence) for sequence in (False, True)}
    layers = {
        name: layer_of(options, topologies[sequence], mode, device)
        for name, (sequence, mode) in ROWS.items()
        if options.tensor > 1 or not sequence
    }
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in layers}
    for turn in range(options.rounds + 2):
        for name, once in layers.items():
            forward, backward = once()
            if turn >= 2:
                found[name].append((forward, backward, forward + backward))
    return found


def added_flops(options: argparse.Namespace, mode: str) -> float:
    """What a mode adds to the FLOPs of a layer's products, of which backward has twice those of forward."""
    attention = options.sequence / (6 * options.hidden)  # 4bs²h of 24bsh²
    return {"none": 0.0, "full": 1.0, "selective": attention / (1 + attention)}[mode] / 3


def report(options: argparse.Namespace, found: dict[str, list[tuple[float, float, float]]], device: str) -> None:
    rows: dict[str, Any] = {}
    print(
        f"{'':>16} {'forward':>9} {'backward':>9} {'both':>9}  overhead (quartiles)      FLOPs    paper, 22 B on 8 A100"
    )
    for name, times in found.items():
        seconds = [statistics.median(time[phase] for time in times) for phase in range(3)]
        ratios = [mine[2] / base[2] for mine, base in zip(times, found["none"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(
            f"{name:>16} "
            + " ".join(f"{1e3 * value:>6.1f} ms" for value in seconds)
            + f"  {100 * (middle - 1):+5.1f} % ({100 * (low - 1):+.1f} to {100 * (high - 1):+.1f})"
            + f"  {100 * added_flops(options, ROWS[name][1]):+5.1f} %  {PAPER_OVERHEAD[name]:+d} %"
        )
        against = [
            statistics.median(mine[phase] / base[phase] for mine, base in zip(times, found["none"], strict=True))
            for phase in range(3)
        ]
        rows[name] = {
            "median_seconds": dict(zip(PHASES, seconds, strict=True)),
            "median_ratio_to_none": dict(zip(PHASES, against, strict=True)),
            "quartiles_of_ratio_both": [low, middle, high],
            "added_flops_percent": 100 * added_flops(options, ROWS[name][1]),
            "paper_overhead_percent": PAPER_OVERHEAD[name],
        }
    if options.output:
        layer = {
            key: getattr(options, key)
            for key in ("hidden", "heads", "sequence", "batch", "dtype", "attention", "dropout")
        }
        result = {"device": device, "tensor": options.tensor, "layer": layer, "rounds": options.rounds, "rows": rows}
        write_result(options.output, f"recompute-{'cuda' if 'cuda' in device else 'cpu'}", result)


def rank_main(local_rank: int, options: argparse.Namespace) -> None:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        found = measure(options, device)
        if dist.get_rank() == 0:
            name = f"cuda, {torch.cuda.get_device_name()}" if cuda else "cpu, gloo"
            report(options, found, name)
    finally:
        dist.destroy_process_group()


def spawned(local_rank: int, options: argparse.Namespace, port: int) -> None:
    place = {"RANK": local_rank, "WORLD_SIZE": options.tensor, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in place.items()})
    rank_main(local_rank, options)


def main() -> None:
    options = arguments()
    if "RANK" in os.environ:
        rank_main(int(os.environ.get("LOCAL_RANK", 0)), options)
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the ranks use this store
    multiprocessing.spawn(spawned, (options, store.port), nprocs=options.tensor)


if __name__ == "__main__":
    main()
