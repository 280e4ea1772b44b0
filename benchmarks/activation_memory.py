#!/usr/bin/env python3
"""Activation bytes: one layer measured against the papers' formulas, and the peak of a whole training step.

1. What one bf16 layer keeps for backward on each rank, for TP 1, 2 and 4, SP off and on, and each recomputation, beside
   the formula of zero_tp/planning/formulas.py (arXiv 2205.05198, table 2). The ranks are processes of this script.
2. The peak of a training step (forward, backward, AdamW; a GPT-2 on one rank) by category, as torch's MemTracker counts
   real tensors. Beside the layers' activations it has the logits and what operations need for a moment.

    python benchmarks/activation_memory.py --output benchmarks/results/
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from kept import kept_by_layer  # type: ignore[import-not-found]  # beside this script
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import GPT2Config

from zero_tp.activations.memory import ActivationMemory
from zero_tp.activations.policy import RecomputePolicy
from zero_tp.models.wrapper import ZeroTPForCausalLM
from zero_tp.planning.formulas import (
    Layer,
    kept,
    kept_full,
    kept_selective,
    sdpa_fused_core,
    sdpa_maths_core,
)
from zero_tp.topology import Topology

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
TENSOR = (1, 2, 4)
EVERYTHING = ["attention_core", "mlp_activation", "norm"]
SHAPE = Layer(s=512, b=2, h=512, a=8)
STEP = {"layers": 4, "vocabulary": 4096}

# name, zero_tp.attention, dropout on the softmax, zero_tp.recompute, bytes
Row = tuple[str, str, float, dict[str, Any], float]


def rows(layer: Layer) -> Iterator[Row]:
    yield "nothing recomputed", "eager", 0.1, {"mode": "none"}, kept(layer)
    yield "selective", "eager", 0.1, {"mode": "selective"}, kept_selective(layer)
    everything = kept_selective(layer, modules=EVERYTHING)
    yield "selective, all modules", "eager", 0.1, {"mode": "selective", "modules": EVERYTHING}, everything
    yield "full", "eager", 0.1, {"mode": "full"}, kept_full(layer)
    if layer.t > 1 and not layer.sequence:
        yield "full, partition_activations", "eager", 0.1, {"mode": "full"}, kept_full(layer, partitioned=True)
    yield "sdpa, fused", "sdpa", 0.0, {"mode": "none"}, kept(layer, sdpa_fused_core)
    yield "sdpa, maths path", "sdpa", 0.1, {"mode": "none"}, kept(layer, sdpa_maths_core)


def model_of(topology: Topology, attention: str, dropout: float, layers: int = 1, vocabulary: int = 8) -> Any:
    config = GPT2Config(
        n_layer=layers,
        n_embd=SHAPE.h,
        n_head=SHAPE.a,
        n_positions=SHAPE.s,
        vocab_size=vocabulary,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
    )
    config._attn_implementation = attention
    return ZeroTPForCausalLM(config, topology, dtype=torch.bfloat16).train()


def measure_layer(rank: int, tensor: int, folder: str) -> None:
    """On each rank: the rows, of which rank 0 writes the greatest bytes of any rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=tensor)
    found = []
    for sequence in (False, True)[: 1 if tensor == 1 else 2]:
        topology = Topology(tensor, sequence)
        layer = replace(SHAPE, t=tensor, sequence=sequence)
        for name, attention, dropout, policy, formula in rows(layer):
            model = model_of(topology, attention, dropout)
            settings = {"partition_activations": "partition" in name}
            ActivationMemory(model, RecomputePolicy(**policy), settings, CPU)
            own = torch.tensor(sum(storage.bytes for storage in kept_by_layer(model, 0, layer.s, layer.b)))
            dist.all_reduce(own, dist.ReduceOp.MAX)
            row = {"parallel": topology.describe(), "row": name, "measured": own.item(), "formula": formula}
            found.append({**row, "ratio": round(own.item() / formula, 5)})
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def each_layer() -> list[dict[str, Any]]:
    found = []
    for tensor in TENSOR:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(measure_layer, (tensor, folder), nprocs=tensor)
            found += json.loads(Path(folder, "found.json").read_text())
    return found


def training_step(mode: Any) -> dict[str, int]:
    """Bytes at the peak of a step, by category; the optimizer's states exist already."""
    model = model_of(Topology(world=1), "eager", 0.1, STEP["layers"], STEP["vocabulary"])
    ActivationMemory(model, RecomputePolicy(mode=mode), {}, CPU)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(STEP["vocabulary"], (SHAPE.b, SHAPE.s))

    def step() -> None:
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    tracker = MemTracker()
    tracker.track_external(model, optimizer, tokens)
    with tracker:
        step()
    peak = tracker.get_tracker_snapshot("peak")[CPU]
    return {getattr(category, "value", category): size for category, size in peak.items() if size}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="directory for the dated result")
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    layer = each_layer()
    shape = {name: getattr(SHAPE, name) for name in "sbha"}
    print(f"one layer, {shape}: MiB a rank")
    for row in layer:
        print(
            f"{row['parallel']:16} {row['row']:28} measured {row['measured'] / 2**20:8.3f}  "
            f"formula {row['formula'] / 2**20:8.3f}  ratio {row['ratio']:.4f}"
        )
    steps = {mode: training_step(mode) for mode in ("none", "selective", "full")}
    formulas: dict[str, Callable[[Layer], float]] = {"none": kept, "selective": kept_selective, "full": kept_full}
    print(f"peak of a training step, {STEP['layers']} layers: MiB")
    for mode, peak in steps.items():
        print(f"{mode:10}", ", ".join(f"{category} {size / 2**20:.2f}" for category, size in peak.items()))
    result = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip(),
        "versions": {package: version(package) for package in ("torch", "transformers")},
        "config": "CPU ranks over gloo, bf16, dropout 0.1; eager attention where a row does not say sdpa",
        "layer_shape": shape,
        "layer_bytes": layer,
        "greatest_deviation": max(abs(row["ratio"] - 1) for row in layer),
        "step": f"gpt2, {STEP['layers']} layers of the same shape, {STEP['vocabulary']} tokens, TP 1, bf16 AdamW",
        "step_peak_bytes": steps,
        "step_layers_formula_bytes": {mode: STEP["layers"] * formula(SHAPE) for mode, formula in formulas.items()},
    }
    print(f"greatest deviation of a layer from its formula: {result['greatest_deviation']:.2%}")
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        path = options.output / f"{result['date']}-activation-memory.json"
        path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
