"""Measure one layer under each technique, on running ranks: the bytes that it keeps, and its
times.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.papers.engines import CPU, built, topology_of
from benchmarks.papers.kept import kept_by_layer
from benchmarks.papers.published import TECHNIQUES
from zero_tp.model.context import ForwardInputs
from zero_tp.run.config import RunConfig
from zero_tp.tools.planning.plan_settings import Layer

Times = dict[str, list[tuple[float, float]]]
"""Seconds of forward and of backward in each round, by technique."""
WARM_UP = 2
PASSES = ("forward", "backward")


# ---- bytes ---------------------------------------------------------------------------------------


def kept_bytes(configs: Mapping[str, RunConfig]) -> dict[str, int]:
    """Return the bytes that one layer of each run keeps on this rank. Collective."""
    return {name: kept_by_micro_batch(config)[0] for name, config in configs.items()}


def kept_by_micro_batch(config: RunConfig) -> list[int]:
    """Return the bytes that one layer keeps of each micro-batch of a step. Collective."""
    model, activations = built(config, topology_of(config))
    byte_counts = []
    for index in range(config.accumulation):
        activations.begin_micro_batch(index)
        storages = kept_by_layer(model, 0, config.zero_tp.data.sequence_length, config.micro_batch)
        byte_counts.append(sum(storage.bytes for storage in storages))
    return byte_counts


# ---- times ---------------------------------------------------------------------------------------


def measure(configs: Mapping[str, RunConfig], rounds: int, device: torch.device = CPU) -> Times:
    """Time the first layer of each run in turns. Collective."""
    runs = {name: _run(config, device) for name, config in configs.items()}
    found: Times = {name: [] for name in runs}
    for turn in range(WARM_UP + rounds):
        for name, once in runs.items():
            times = once()
            if turn >= WARM_UP:
                found[name].append(times)
    return found


def _run(config: RunConfig, device: torch.device) -> Callable[[], tuple[float, float]]:
    """Return a function that runs the layer forward and backward once, and returns the seconds
    of each.
    """
    model, _ = built(config, topology_of(config), device)
    topology = model.topology
    length = config.zero_tp.data.sequence_length
    dtype = model.dtype
    shape = (
        length // (topology.tensor if topology.sequence else 1),
        config.micro_batch,
        model.spec.hidden,
    )
    stream = torch.randn(shape, dtype=dtype, device=device).requires_grad_()
    gradient = torch.randn(shape, dtype=dtype, device=device)
    context = model.transformer.context(length, stream, ForwardInputs(), sequence=topology.sequence)

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
    """Return each technique's overhead in each round: the time of both passes relative to TP
    alone, minus 1.
    """
    return {
        name: [sum(mine) / sum(base) - 1 for mine, base in zip(each, times["TP"], strict=True)]
        for name, each in times.items()
    }


def added_flops(layer: Layer, technique: str) -> float:
    """Return the share that a technique adds to a layer's matrix FLOPs, a third of which are
    forward's.
    """
    core = layer.s / (6 * layer.h)  # 4bs²h of 24bsh²
    return {"none": 0.0, "full": 1.0, "selective": core / (1 + core)}[TECHNIQUES[technique][1]] / 3
