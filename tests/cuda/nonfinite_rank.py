"""The process of test_nonfinite.py: three steps, the second with gradients that are not finite."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.contenders import connected
from tests.support.parallel_run import drawn_batches, optimizer_tensors
from tests.support.plain_run import MOMENTS
from tests.support.settings import engine_of
from tests.support.skipping_rank import skip_steps
from zero_tp.data.batch import as_batch
from zero_tp.run.config import RunConfig

NONFINITE_STEP = 2


def main(path: Path, output: Path) -> None:
    """Write what each step leaves: whether it was skipped, its norm, weights, masters, moments."""
    skip_steps(lambda step: step == NONFINITE_STEP)
    config = RunConfig.load(path, world_size=1)
    topology, device = connected(config)
    engine = engine_of(config, device=device, compiled=config.zero_tp.compile)
    steps: list[dict[str, Any]] = []
    for step in range(3):
        micro = drawn_batches(engine.model, topology, 1, step, config.accumulation)
        engine.train_step([as_batch(batch).to(device) for batch in micro])
        tensors = {name: value.cpu().clone() for name, value in engine.model.named_parameters()}
        for key in (None, *MOMENTS):
            states = optimizer_tensors(engine, key)
            tensors |= {f"{key or 'master'} {name}": value for name, value in states.items()}
        norm = float(engine.gradient_norm)
        steps.append({"skipped": engine.skipped, "norm": norm, "tensors": tensors})
    torch.save(steps, output)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
