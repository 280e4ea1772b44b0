"""Measure one layer under each technique, on ranks that are started: the bytes that it keeps, and its times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import GPT2Config

from zero_tp.activations.memory import ActivationMemory
from zero_tp.activations.policy import RecomputePolicy
from zero_tp.models.wrapper import ZeroTPForCausalLM
from zero_tp.papers.kept import kept_by_layer
from zero_tp.papers.published import TECHNIQUES
from zero_tp.planning.formulas import Layer
from zero_tp.planning.workload import Workload
from zero_tp.topology import Topology

Times = dict[str, list[tuple[float, float]]]
"""Seconds of forward and of backward in each round, by technique."""
WARM_UP = 2
ALONE = "no parallelism"
SMALL, LAYERS = Layer(s=512, b=2, h=512, a=8), 4
"""Of what is measured in small: a layer, and how many a dry run has."""
MICRO_BATCHES = 4


def gpt2(layer: Layer, layers: int = 1, dropout: float = 0.1) -> GPT2Config:
    """Return a GPT-2 of such layers, as the paper's: dropout everywhere, attention not fused."""
    config = GPT2Config(
        n_layer=layers,
        n_embd=layer.h,
        n_head=layer.a,
        n_positions=layer.s,
        vocab_size=128,
        bos_token_id=0,
        eos_token_id=0,
        attn_pdrop=dropout,
        embd_pdrop=dropout,
        resid_pdrop=dropout,
    )
    config._attn_implementation = "eager"
    return config


def small_workloads(tensor: int) -> dict[str, Workload]:
    """Return the rows of table 2, in small."""
    rows = {ALONE: (1, "false", "none")} | {name: (tensor, *each) for name, each in TECHNIQUES.items()}
    return {
        name: Workload(SMALL.s, SMALL.b, size, sequence == "true", cpu=True, policy=policy_of(mode))
        for name, (size, sequence, mode) in rows.items()
    }


def policy_of(mode: str, kept: int = 0) -> RecomputePolicy:
    return RecomputePolicy.model_validate({"mode": mode, "keep_micro_batches": kept})


# ---- bytes -----------------------------------------------------------------------------------------------------------


def small_model(workload: Workload) -> tuple[ZeroTPForCausalLM, ActivationMemory]:
    topology = Topology(workload.tensor, workload.sequence)
    model = ZeroTPForCausalLM(gpt2(SMALL), topology, dtype=torch.bfloat16).train()
    return model, ActivationMemory(model, workload.policy, {}, torch.device("cpu"))


def kept_bytes() -> dict[str, int]:
    """Return the bytes of all that one layer keeps on this rank, by row of table 2. Collective."""
    found = {}
    for name, workload in small_workloads(dist.get_world_size()).items():
        model, _ = small_model(workload)
        found[name] = sum(storage.bytes for storage in kept_by_layer(model, 0, workload.length, workload.batch))
    return found


def kept_by_micro_batch(kept: int) -> list[int]:
    """Return the bytes that one layer keeps of each micro-batch, the first ones whole. Collective."""
    at = small_workloads(dist.get_world_size())["TP, SP, selective"]
    model, activations = small_model(replace(at, policy=policy_of("selective", kept)))
    found = []
    for index in range(MICRO_BATCHES):
        activations.begin_micro_batch(index)
        found.append(sum(storage.bytes for storage in kept_by_layer(model, 0, at.length, at.batch)))
    return found


# ---- times -----------------------------------------------------------------------------------------------------------


def measure(layer: Layer, dtype: torch.dtype, device: torch.device, rounds: int, dropout: float = 0.1) -> Times:
    """Time the layer under every technique in turns, with TP over all ranks. Collective."""
    world = dist.get_world_size()
    topologies = {name: Topology(world, name == "true") for name in ("false", "true")}
    runs = {
        name: _run(layer, topologies[sequence], mode, dtype, device, dropout)
        for name, (sequence, mode) in TECHNIQUES.items()
        if world > 1 or sequence == "false"
    }
    found: Times = {name: [] for name in runs}
    for turn in range(WARM_UP + rounds):
        for name, once in runs.items():
            times = once()
            if turn >= WARM_UP:
                found[name].append(times)
    return found


def _run(
    layer: Layer, topology: Topology, mode: str, dtype: torch.dtype, device: torch.device, dropout: float
) -> Callable[[], tuple[float, float]]:
    """Return a function that runs the layer forward and backward once, and returns the seconds of each."""
    model = ZeroTPForCausalLM(gpt2(layer, dropout=dropout), topology, dtype=dtype, device=device).train()
    ActivationMemory(model, policy_of(mode), {}, device)
    shape = (layer.s // (topology.tensor if topology.sequence else 1), layer.b, layer.h)
    stream = torch.randn(shape, dtype=dtype, device=device).requires_grad_()
    gradient = torch.randn(shape, dtype=dtype, device=device)
    context = model.transformer.context(layer.s, stream, sequence=topology.sequence)

    def now() -> float:
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)
        dist.barrier()
        return time.perf_counter()

    def once() -> tuple[float, float]:
        model.zero_grad()
        stream.grad = None
        begin = now()
        output: Tensor = model.transformer.layers[0](stream, context=context)
        middle = now()
        output.backward(gradient)
        return middle - begin, now() - middle

    return once


def medians(times: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the median seconds of forward and of backward."""
    forward, backward = zip(*times, strict=True)
    return statistics.median(forward), statistics.median(backward)


def overheads(times: Times) -> dict[str, list[float]]:
    """Return, of each technique, how much longer both passes together take than under TP alone, in each round."""
    return {
        name: [sum(mine) / sum(base) - 1 for mine, base in zip(each, times["TP"], strict=True)]
        for name, each in times.items()
    }


def added_flops(layer: Layer, technique: str) -> float:
    """Return what a technique adds to the FLOPs of a layer's products, of which backward has twice those of forward."""
    core = layer.s / (6 * layer.h)  # 4bs²h of 24bsh²
    return {"none": 0.0, "full": 1.0, "selective": core / (1 + core)}[TECHNIQUES[technique][1]] / 3
