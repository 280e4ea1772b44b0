"""One rank of a run of benchmarks/device.py: build the engine, train a few steps, write the
measurements.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from benchmarks.contenders import connected, engine_of
from zero_tp.base.constants import DTYPES, GIB
from zero_tp.base.errors import UserError
from zero_tp.model.architectures import architecture_of
from zero_tp.model.flops import model_flops, utilisation
from zero_tp.parallel.cpu.heap import keep_freed_memory
from zero_tp.parallel.devices import find_device_spec, named_device, peak_flops
from zero_tp.run.config import RunConfig
from zero_tp.run.metrics import memory_gib
from zero_tp.run.process.environment import RankEnvironment
from zero_tp.tools.planning.plan import plan

WARM_UP = 3


def measure_cpu_flops(dtype: torch.dtype, barrier: Callable[[], object], size: int = 1024) -> float:
    """Measure the FLOP/s of a square matrix product in `dtype`, on all ranks at once: they share
    cores and memory.

    One product of 2·size³ FLOPs warms up, then the median of up to 5 counts; no new one starts
    after half a second.

    Args:
        barrier: waits for the other ranks; called once, by every rank.
    """
    left = torch.ones(size, size, dtype=dtype)
    right = torch.ones(size, size, dtype=dtype)
    torch.mm(left, right)
    barrier()
    seconds: list[float] = []
    end = time.perf_counter() + 0.5
    while not seconds or (len(seconds) < 5 and time.perf_counter() < end):
        start = time.perf_counter()
        torch.mm(left, right)
        seconds.append(time.perf_counter() - start)
    return 2.0 * size**3 / statistics.median(seconds)


def _peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the peak of this rank's device [FLOP/s]: measured on the CPU, else from the table.
    Collective.
    """
    if device.type == "cpu":
        return measure_cpu_flops(dtype, dist.barrier)
    return peak_flops(torch.cuda.get_device_name(), dtype, torch.backends.cuda.matmul.allow_tf32)


def planned(config: RunConfig, name: str, world: int) -> dict[str, float]:
    """Return the planned GiB of the device and of the host; nothing if the planner doesn't know the
    device.

    Raises:
        UserError: the run would not fit.
    """
    known = find_device_spec(name)
    if name != "cpu" and (known is None or not known.memory_gib):
        return {}
    device = named_device("cpu" if known is None else next(iter(known.memory_gib)), world)
    host = psutil.virtual_memory().total / GIB
    run_plan = plan(config, device.model_copy(update={"host_memory_gib": host}))
    if not run_plan.fits:
        raise UserError(
            f"would not fit: {run_plan.needed / GIB:.1f} of {device.memory_gib:.1f} GiB, and "
            f"{world * run_plan.memory.host / GIB:.1f} of {host:.1f} GiB of host memory"
        )
    return {
        "planned_gib": run_plan.peak.total / GIB,
        "planned_host_gib": run_plan.memory.host / GIB,
    }


def replace(constant: str, value: str) -> None:
    """Give a module's constant another value in this process:
    `zero_tp.parallel.loss.SLICE_ELEMENTS`, in JSON.
    """
    module, _, name = constant.rpartition(".")
    known = importlib.import_module(module)
    assert hasattr(known, name), f"{module} has no {name}"
    setattr(known, name, json.loads(value))


def transformers_step(config: RunConfig, device: torch.device) -> Callable[[Tensor], float]:
    """Return a step of transformers' own class in DeepSpeed's engine, with the run's settings.

    `zero_tp.compile` compiles the whole model.
    """
    import deepspeed
    from transformers import AutoModelForCausalLM

    with device:
        model = AutoModelForCausalLM.from_config(
            config.hf_config(), dtype=getattr(torch, DTYPES[config.dtype])
        ).train()
    if config.zero_tp.compile:
        model.compile()
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config=config.engine_settings.written(),
    )

    def step(tokens: Tensor) -> float:
        labels = tokens[:, 1:].contiguous()
        loss = engine(input_ids=tokens[:, :-1], shift_labels=labels, labels=labels).loss
        engine.backward(loss)
        engine.step()
        return float(loss)

    return step


def measured(config: RunConfig, steps: int, *, transformers: bool = False) -> dict[str, Any]:
    """Train on random tokens, the same in every run. Collective.

    Args:
        transformers: train transformers' own class instead.
    """
    topology, device = connected(config)
    if device.type == "cpu" and transformers:  # a run sets its heap as its config says
        keep_freed_memory()
    name = torch.cuda.get_device_name() if device.type == "cuda" else device.type
    record: dict[str, Any] = {
        "device": name,
        **({} if transformers else planned(config, name, topology.world)),
    }
    hf_config = config.hf_config()
    spec = architecture_of(hf_config).spec(hf_config)
    rows = config.micro_batch
    length = config.zero_tp.data.sequence_length
    assert config.accumulation == 1, "one micro-batch"
    if transformers:
        step = transformers_step(config, device)
    else:
        engine = engine_of(config, topology, device)

        def step(tokens: Tensor) -> float:
            return float(engine.train_step([(tokens[:, :-1], tokens[:, 1:])]))

    peak = _peak_flops(device, getattr(torch, DTYPES[config.dtype]))
    batch = config.global_batch
    flops = model_flops(spec, batch, length)
    generator = torch.Generator().manual_seed(2 + topology.data_rank)
    losses = []
    seconds = list[float]()
    for number in range(WARM_UP + steps):
        if number == WARM_UP and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        tokens = torch.randint(spec.vocabulary, (rows, length + 1), generator=generator).to(device)
        begin = time.perf_counter()
        losses.append(step(tokens))
        get_accelerator().synchronize()
        seconds.append(time.perf_counter() - begin)
    return record | {
        "attention": spec.attention,
        "tokens_per_second": [batch * length / each for each in seconds[WARM_UP:]],
        "mfu": None
        if peak is None
        else [utilisation(flops, each, topology.world, peak) for each in seconds[WARM_UP:]],
        "peak_flops": peak,
        "flops_per_step": flops,
        "peak_gib": memory_gib(device.type),
        "losses": losses,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--constant", action="append", default=[], metavar="MODULE.NAME=VALUE")
    parser.add_argument(
        "--transformers", action="store_true", help="train transformers' own class instead"
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="file for the first rank's measurements"
    )
    options = parser.parse_args()
    for constant in options.constant:
        replace(*constant.split("="))
    config = RunConfig.load(options.config, options.set, RankEnvironment.of_this_process().world)
    record = measured(config, options.steps, transformers=options.transformers)
    if dist.get_rank() == 0:
        options.output.write_text(json.dumps(record))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
