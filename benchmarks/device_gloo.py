"""Try each collective of gloo on tensors of this machine's device, with all ranks on device 0.

    torchrun --nproc_per_node 4 -m benchmarks.device_gloo

Rank 0 prints JSON: of each collective "works", or what is wrong. A CPU takes all of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.device_torch import add_new_names

LIMIT = timedelta(seconds=20)


def collectives(rank: int, world: int, device: torch.device) -> dict[str, Callable[[], Tensor]]:
    """Return a call of each collective, of what rank r sends: r + 1. They return its result."""

    def full(value: float, size: int = 2) -> Tensor:
        return torch.full((size,), float(value), device=device)

    own = full(rank + 1)
    blocks = torch.arange(world, device=device, dtype=torch.float32) + world * rank

    def all_reduce() -> Tensor:
        dist.all_reduce(total := own.clone())
        return total

    def broadcast() -> Tensor:
        dist.broadcast(value := own.clone(), 1)
        return value

    def all_gather() -> Tensor:
        dist.all_gather(parts := [full(0) for _ in range(world)], own)
        return torch.cat(parts)

    def all_gather_single() -> Tensor:
        dist.all_gather_single(gathered := full(0, 2 * world), own)
        return gathered

    def reduce_scatter_single() -> Tensor:
        dist.reduce_scatter_single(piece := full(0, 1), blocks.clone())
        return piece

    def all_to_all_single() -> Tensor:
        dist.all_to_all_single(received := torch.zeros_like(blocks), blocks.clone())
        return received

    def reduce() -> Tensor:
        dist.reduce(total := own.clone(), 0)
        return total if rank == 0 else full(0)

    def asynchronous_all_reduce() -> Tensor:
        work = dist.all_reduce(total := own.clone(), async_op=True)
        assert work is not None
        work.wait()
        return total

    calls = (
        *(all_reduce, asynchronous_all_reduce, broadcast, all_gather, all_gather_single),
        *(reduce_scatter_single, all_to_all_single, reduce),
    )
    return {call.__name__: call for call in calls}


def expected(name: str, rank: int, world: int) -> list[float]:
    """Return the result of a collective, computed without one."""
    total = world * (world + 1) / 2
    column = [float(world * sender + rank) for sender in range(world)]
    gathered = [float(sender + 1) for sender in range(world) for _ in range(2)]
    results = {
        "broadcast": [2.0, 2.0],
        "all_gather": gathered,
        "all_gather_single": gathered,
        "reduce_scatter_single": [sum(column)],
        "all_to_all_single": column,
        "reduce": [total, total] if rank == 0 else [0.0, 0.0],
    }
    return results.get(name, [total, total])


def main() -> None:
    add_new_names()
    dist.init_process_group("gloo", timeout=LIMIT)
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    outcomes: dict[str, str] = {}
    for name, call in collectives(rank, world, device).items():
        try:
            result = call().tolist()
            right = result == expected(name, rank, world)
            outcomes[name] = "works" if right else f"wrong: {result}"
        except (RuntimeError, NotImplementedError, ValueError) as error:  # is what is asked
            outcomes[name] = str(error).splitlines()[0]
    if rank == 0:
        print(json.dumps({"device": device.type, **outcomes}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
