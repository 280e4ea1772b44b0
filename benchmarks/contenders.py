#!/usr/bin/env python3
"""One rank of a contender of benchmarks/train.py: build the engine, train a few steps, write the
measurements.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

if TYPE_CHECKING:
    import torch

    from zero_tp.engine.engine import TrainingEngine
    from zero_tp.parallel.topology import Topology
    from zero_tp.run.config import RunConfig

BATCH = 4
WARM_UP = 2
STEPS = 6
RATE = 1e-3
CLIP = 1.0
OPTIMIZER = {
    "type": "AdamW",
    "params": {"lr": RATE, "weight_decay": 0.0, "torch_adam": True, "fused": True},
}


class Shape(NamedTuple):
    """The sizes of a Llama, or of a Mixtral if it has experts of `mlp` each, and the length of
    its rows.
    """

    hidden: int
    layers: int
    heads: int
    mlp: int
    vocabulary: int
    length: int = 512
    experts: int = 0
    experts_per_token: int = 0

    @property
    def parameters(self) -> int:
        """Return the number of elements of the matrices."""
        mlps = 3 * self.mlp * max(1, self.experts) + self.experts
        return (
            self.layers * self.hidden * (4 * self.hidden + mlps) + 2 * self.vocabulary * self.hidden
        )


SHAPES = {
    "tiny": Shape(64, 2, 4, 128, 512, 64),
    "small": Shape(512, 6, 8, 1408, 16_384),
    "wide": Shape(768, 4, 12, 2048, 50_304),
    "tiny-experts": Shape(64, 2, 4, 128, 512, 64, experts=4, experts_per_token=2),
    "experts": Shape(512, 6, 8, 704, 16_384, experts=8, experts_per_token=2),
    "many-experts": Shape(512, 6, 8, 256, 16_384, experts=32, experts_per_token=6),
}
CONTENDERS: dict[str, tuple[int, dict[str, Any]]] = {
    "hf-1p": (1, {}),
    "hf-1p-eager": (1, {"experts": "eager"}),
    "ztp-1p": (1, {"stage": 0}),
    "ztp-z1-1p": (1, {"stage": 1}),
    "ds-z2": (2, {"stage": 2}),
    "ds-z2-eager": (2, {"stage": 2, "experts": "eager"}),
    "ztp-z2": (2, {"stage": 2}),
    "ztp-z1": (2, {"stage": 1}),
    "ztp-z3": (2, {"stage": 3}),
    "autotp": (2, {"stage": 1, "tensor": 2}),
    "ztp-tp": (2, {"stage": 1, "tensor": 2}),
    "ztp-sp": (2, {"stage": 1, "tensor": 2, "sequence": True}),
    "ztp-1p-compiled": (1, {"stage": 1, "compile": True}),
    "ztp-z2-compiled": (2, {"stage": 2, "compile": True}),
    "ztp-sp-compiled": (2, {"stage": 1, "tensor": 2, "sequence": True, "compile": True}),
}
"""Name → (ranks, options of DeepSpeed and TP)."""

Step = Callable[[Any], float]
"""Trains on one batch [BATCH, length] → its mean loss."""


def settings_of(options: dict[str, Any], bf16: bool, data: int) -> dict[str, Any]:
    """Return DeepSpeed's config, the same for all contenders that use it."""
    return {
        "train_micro_batch_size_per_gpu": BATCH // data,
        "gradient_clipping": CLIP,
        "optimizer": OPTIMIZER,
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": options["stage"]},
    }


def connected(config: RunConfig) -> tuple[Topology, torch.device]:
    """Connect the ranks as launch/pretrain.py does. Collective."""
    from zero_tp.run.process.connect import connect_deepspeed
    from zero_tp.run.process.environment import RankEnvironment

    environment = RankEnvironment.of_this_process()
    environment.export()
    return connect_deepspeed(config, environment)


def engine_of(
    config: RunConfig, topology: Topology, device: torch.device, weights: Path | None = None
) -> TrainingEngine:
    """Build a run's engine as launch/pretrain.py does, with the weights of a directory or random
    ones.
    """
    from zero_tp.engine.engine import TrainingEngine
    from zero_tp.model.weights.load import PretrainedSource

    model = config.hf_config()
    return TrainingEngine(
        model,
        topology,
        config.engine_settings,
        seed=config.zero_tp.training.seed,
        device=device,
        source=None if weights is None else PretrainedSource(weights, model),
        recompute=config.zero_tp.recompute_policy,
        compiled=config.zero_tp.compile,
    )


def zero_tp(weights: Path, options: dict[str, Any], bf16: bool) -> Step:
    from zero_tp.run.config import RunConfig
    from zero_tp.run.process.environment import RankEnvironment

    tensor = options.get("tensor", 1)
    block = {
        "model": {"from_pretrained": str(weights)},
        "parallel": {"tensor": tensor, "sequence": options.get("sequence", False)},
        "data": {"train": "none", "sequence_length": 8},
        "training": {"steps": 1, "seed": 1},
        "compile": options.get("compile", False),
    }
    world = RankEnvironment.of_this_process().world
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({**settings_of(options, bf16, world // tensor), "zero_tp": block}, file)
        file.flush()
        config = RunConfig.load(file.name, world_size=world)
    topology, device = connected(config)
    engine = engine_of(config, topology, device, weights)
    rows = slice(
        topology.data_rank * config.micro_batch, (topology.data_rank + 1) * config.micro_batch
    )
    return lambda tokens: engine.train_step([(tokens[rows, :-1], tokens[rows, 1:])])


def loss_of(model: Any, tokens: Any) -> Any:
    labels = tokens[:, 1:].contiguous()
    return model(input_ids=tokens[:, :-1], shift_labels=labels, labels=labels).loss


def transformers_model(weights: Path, options: dict[str, Any], bf16: bool) -> Any:
    """Return transformers' own model, with the experts' implementation of the contender."""
    import torch
    from transformers import AutoModelForCausalLM

    implementation = {"experts_implementation": options["experts"]} if "experts" in options else {}
    dtype = torch.bfloat16 if bf16 else torch.float32
    return AutoModelForCausalLM.from_pretrained(weights, dtype=dtype, **implementation).train()


def hugging_face(weights: Path, options: dict[str, Any], bf16: bool) -> Step:
    import torch

    model = transformers_model(weights, options, bf16)
    parameters = list(model.parameters())
    masters = (
        [each.detach().float().requires_grad_() for each in parameters] if bf16 else parameters
    )
    optimizer = torch.optim.AdamW(masters, lr=RATE, weight_decay=0.0, fused=True)

    def step(tokens: Any) -> float:
        loss = loss_of(model, tokens)
        loss.backward()
        if bf16:
            for master, parameter in zip(masters, parameters, strict=True):
                master.grad = parameter.grad.float()
                parameter.grad = None
        torch.nn.utils.clip_grad_norm_(masters, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        if bf16:
            with torch.no_grad():
                for master, parameter in zip(masters, parameters, strict=True):
                    parameter.copy_(master)
        return float(loss)

    return step


def with_deepspeed(weights: Path, options: dict[str, Any], bf16: bool) -> Step:
    import deepspeed
    import torch.distributed as dist

    from zero_tp.engine.zero.ops import disable_shared_memory_collectives

    disable_shared_memory_collectives()  # which its inference alone uses
    deepspeed.init_distributed("gloo", verbose=False)
    tensor = options.get("tensor", 1)
    data = dist.get_world_size() // tensor
    settings = settings_of(options, bf16, data)
    if tensor > 1:
        settings["tensor_parallel"] = {"autotp_size": tensor}
    model = transformers_model(weights, options, bf16)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=settings
    )
    rank = dist.get_rank() // tensor
    micro = BATCH // data
    rows = slice(rank * micro, (rank + 1) * micro)

    def step(tokens: Any) -> float:
        loss = loss_of(engine, tokens[rows])
        engine.backward(loss)
        engine.step()
        total = loss.detach().float().clone()
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()

    return step


@contextmanager
def recorded() -> Iterator[list[Callable[[], Any]]]:
    """Yield the collectives that the block calls, each as a function that repeats the call."""
    from torch.distributed import ProcessGroup

    from benchmarks.papers.collectives import COLLECTIVES

    asked: list[Callable[[], Any]] = []

    def recording(method: Any) -> Any:
        def called(*args: Any, **options: Any) -> Any:
            asked.append(partial(method, *args, **options))
            return method(*args, **options)

        return called

    with ExitStack() as stack:
        for name in COLLECTIVES:
            stack.enter_context(
                mock.patch.object(ProcessGroup, name, recording(getattr(ProcessGroup, name)))
            )
        yield asked


def seconds_of(ranks: int, run: Callable[[], Any]) -> float:
    """Return the seconds of `run` between two barriers."""
    import torch.distributed as dist

    if ranks > 1:
        dist.barrier()
    start_time = time.perf_counter()
    run()
    if ranks > 1:
        dist.barrier()
    return time.perf_counter() - start_time


def floors(ranks: int, parameters: int, step: Callable[[], Any]) -> dict[str, float]:
    """Return the seconds of a step's collectives alone, and of the update of a rank's share."""
    import torch

    with recorded() as asked:
        step()
    values = [torch.zeros(parameters // ranks, requires_grad=True)]
    values[0].grad = torch.zeros_like(values[0])
    update = torch.optim.AdamW(values, fused=True).step
    update()  # makes its moments
    again = [lambda: [collective().wait() for collective in asked], update]
    with torch.no_grad():
        return {
            name: min(seconds_of(ranks, run) for _ in range(3))
            for name, run in zip(("collectives", "update"), again, strict=True)
        }


def work(name: str, weights: Path, shape: Shape, bf16: bool, output: Path) -> None:
    """Run one rank of a contender; the first rank writes the measurements."""
    import torch
    import torch.distributed as dist

    from zero_tp.parallel.cpu.heap import keep_freed_memory

    if not name.startswith("ztp"):  # its runs set their heap as their config says
        keep_freed_memory()
    ranks, options = CONTENDERS[name]
    torch.set_num_threads(2 // ranks)
    make = (
        zero_tp
        if name.startswith("ztp")
        else hugging_face
        if name.startswith("hf")
        else with_deepspeed
    )
    step = make(weights, options, bf16)
    torch.set_num_threads(2 // ranks)
    generator = torch.Generator().manual_seed(2)
    seconds = []
    losses = []
    for number in range(WARM_UP + STEPS):
        tokens = torch.randint(shape.vocabulary, (BATCH, shape.length + 1), generator=generator)
        if number == WARM_UP:
            Path("/proc/self/clear_refs").write_text("5")  # reset the peak of resident memory
        seconds.append(seconds_of(ranks, lambda tokens=tokens: losses.append(step(tokens))))  # type: ignore[misc]
    status = Path("/proc/self/status").read_text()
    peak = (
        int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])
        / 1024
    )
    result = {"seconds": seconds[WARM_UP:], "losses": losses, "peak_mib": peak}
    result["floor"] = floors(ranks, shape.parameters, lambda: step(tokens))
    if int(os.environ.get("RANK", 0)) == 0:
        output.write_text(json.dumps(result))
    if dist.is_initialized():
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), required=True)
    parser.add_argument(
        "--output", type=Path, required=True, help="file for the first rank's measurements"
    )
    options = parser.parse_args()
    work(
        options.contender,
        options.weights,
        SHAPES[options.shape],
        options.dtype == "bf16",
        options.output,
    )


if __name__ == "__main__":
    main()
