"""How far the run of a cell of the matrix is from the plain run."""

from __future__ import annotations

import math

import torch

from tests.support.closeness import of_bf16, of_fp32
from tests.support.matrix import FACTORS, WORLD, Cell
from tests.support.plain_run import CLIP, Trace


def micro_batches_of(cell: Cell) -> int:
    """The micro-batches of a step, on all ranks."""
    named = dict(zip(FACTORS, cell, strict=True))
    return WORLD // int(named["tensor"][3:]) * int(named["accumulation"][2:])


def distances(cell: Cell, traces: list[Trace], seed: int, family: str) -> dict[str, float]:
    """What is compared: how far off it is, in units of what is allowed."""
    named = dict(zip(FACTORS, cell, strict=True))
    first = traces[0]
    wrong = [
        f"the module's {name} on rank {rank}"
        for rank, trace in enumerate(traces)
        for name in trace.stale
    ]
    wrong += [
        f"losses of rank {rank}"
        for rank, trace in enumerate(traces)
        if trace.losses != first.losses
    ]
    wrong += [
        f"norms of rank {rank}" for rank, trace in enumerate(traces) if trace.norms != first.norms
    ]
    wrong += [
        f"balances of rank {rank}"
        for rank, trace in enumerate(traces)
        if trace.balances != first.balances
    ]
    wrong += ["nothing was clipped"] * (min(first.norms) <= CLIP)
    far = dict.fromkeys(wrong, math.inf)
    micro_batches = micro_batches_of(cell)
    if named["dtype"] == "fp32":
        return far | of_fp32(first, seed, family, micro_batches=micro_batches)
    shards = int(named["tensor"][3:]) if named["sequence"] == "SP" else 1
    summed_in = torch.bfloat16 if named["dtype"] == "bf16" else torch.float32
    return far | of_bf16(
        first, seed, family, int(named["stage"][5:]), micro_batches, shards, summed_in
    )
