"""Time Muon's update on several ranks beside AdamW's and beside gathering every matrix, in turns.

    torchrun --nproc_per_node 2 -m benchmarks.muon --output benchmarks/results/

A Llama in fp32 at ZeRO-1: most CPUs have no fast products in bf16. Only the end of a step is timed:
norm, clip, update, all-gather of the weights. "gathered" is what other trainers do: every rank
gathers all matrices and orthogonalises each of them. The rate of products is that of
Newton-Schulz's own, on its shapes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig

from benchmarks.dated import write_result
from zero_tp.engine.engine import TrainingEngine
from zero_tp.engine.zero.matrix_exchange import MatrixExchange
from zero_tp.engine.zero.orthogonalize import NewtonSchulz, iteration_flops
from zero_tp.parallel.topology import Topology
from zero_tp.run.process.connect import connect

MODEL = LlamaConfig(
    num_hidden_layers=4,
    hidden_size=512,
    intermediate_size=1408,
    num_attention_heads=8,
    vocab_size=8192,
)
ITERATION = NewtonSchulz(5, (3.4445, -4.775, 2.0315), 1e-7, torch.float32)
PARAMS: dict[str, dict[str, Any]] = {
    "Muon": {"lr": 1e-3},
    "AdamW": {"lr": 1e-3, "torch_adam": True, "fused": True},
}


def engine_of(optimizer: str, topology: Topology) -> TrainingEngine:
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": optimizer, "params": PARAMS[optimizer]},
        "zero_optimization": {"stage": 1},
    }
    return TrainingEngine.from_dict(MODEL, topology, settings, seed=1)


def seconds_of_update(engine: TrainingEngine) -> float:
    """Return the seconds of the end of one step, after its backward."""
    tokens = torch.randint(MODEL.vocab_size, (1, 33))
    taken: list[float] = []
    update = engine._update

    def timed() -> None:
        dist.barrier()
        start = time.perf_counter()
        update()
        dist.barrier()
        taken.append(time.perf_counter() - start)

    engine._update = timed  # type: ignore[method-assign]
    engine.run_step([(tokens[:, :-1], tokens[:, 1:])])
    engine._update = update  # type: ignore[method-assign]
    return taken[0]


def gathered(
    exchange: MatrixExchange,
    fragments: dict[str, Tensor],
    compute: Callable[[Any, Tensor], Tensor],
    use: Callable[..., None],
    sample: Tensor,
) -> None:
    """Gather all directions on every rank and compute every matrix there; no result travels."""
    own = torch.cat(list(fragments.values())).to(sample.dtype)
    size = torch.tensor(own.numel())
    dist.all_reduce(size, dist.ReduceOp.MAX)
    own = torch.nn.functional.pad(own, (0, int(size) - own.numel()))
    everything = own.new_empty(dist.get_world_size() * own.numel())
    dist.all_gather_into_tensor(everything, own)
    offset = 0
    for matrix in exchange.matrices:
        compute(matrix, everything[offset : offset + matrix.numel].view(matrix.shape))
        offset += matrix.numel


def seconds_of_products(exchange: MatrixExchange) -> float:
    """Return the seconds of all matrices' iterations, divided over the ranks, at the rate at which
    products of their shapes run here.
    """
    seconds = 0.0
    for shape in {matrix.shape for matrix in exchange.matrices}:
        matrix = torch.randn(shape)
        short = matrix if shape[0] <= shape[1] else matrix.T
        gram = short @ short.T
        start = time.perf_counter()
        for product in (short, gram, short):
            _ = gram @ product if product is not gram else gram @ gram
        rate = iteration_flops(*shape) / (time.perf_counter() - start)
        count = sum(other.shape == shape for other in exchange.matrices)
        seconds += count * ITERATION.flops(*shape) / rate
    return seconds / dist.get_world_size()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, help="folder of the dated result")
    arguments = parser.parse_args()
    topology, _ = connect()
    engines = {name: engine_of(name, topology) for name in PARAMS}
    (unit,) = set(engines["Muon"].zero.states().optimizer._units.values())
    ours = MatrixExchange.exchange
    rounds: dict[str, list[float]] = {"Muon": [], "AdamW": [], "gathered": [], "products": []}
    for _ in range(arguments.rounds + 1):
        for name in ("Muon", "AdamW"):
            rounds[name].append(seconds_of_update(engines[name]))
        MatrixExchange.exchange = gathered  # type: ignore[method-assign, assignment]
        rounds["gathered"].append(seconds_of_update(engines["Muon"]))
        MatrixExchange.exchange = ours  # type: ignore[method-assign]
        dist.barrier()
        rounds["products"].append(seconds_of_products(unit.exchange))
    if topology.rank:
        return
    # The first round makes states.
    medians = {name: statistics.median(taken[1:]) for name, taken in rounds.items()}
    ranges = {name: [min(taken[1:]), max(taken[1:])] for name, taken in rounds.items()}
    result = {
        "ranks": topology.world,
        "matrices": len(unit.exchange.matrices),
        "elements": sum(matrix.numel for matrix in unit.exchange.matrices),
        "seconds": medians,
        "ranges": ranges,
        "to AdamW and products": medians["Muon"] / (medians["AdamW"] + medians["products"]),
        "to gathered": medians["Muon"] / medians["gathered"],
    }
    for key, value in result.items():
        print(f"{key}: {value}")
    if arguments.output:
        write_result(arguments.output, "muon", result)


if __name__ == "__main__":
    main()
