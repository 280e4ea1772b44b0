"""Runs on a CUDA device train the plain model of a CPU: `pytest -m cuda tests/cuda`.

The comparisons of run/test_matrix.py, with TP 1 on one rank of NCCL, in processes of their own:
DeepSpeed's accelerator is the CPU in pytest's.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.support.closeness import first_decided, of_bf16, of_fp32
from tests.support.device_cells import CELLS, name_of
from tests.support.device_runs import (
    launch_once,
    require_device,
    shared_directory,
    trace_of,
    train_runs,
    write_run,
)
from tests.support.matrix import Cell, config_of
from tests.support.plain_run import CLIP, Trace

pytestmark = pytest.mark.cuda

CASE = ("cell", "family", "compiled")


def _micro_batches(cell: Cell) -> int:
    return int(cell[5].removeprefix("× "))


def _seed(seed: int, cell: Cell, family: str) -> int:
    return first_decided(seed, family, _micro_batches(cell)) if cell[-1] == "fp32" else seed


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, run_seed: int
) -> Path:
    """The folder of the selected runs' traces, launched by one of pytest's workers."""
    require_device()

    def launch(folder: Path) -> None:
        for item in request.session.items:
            if getattr(item, "originalname", "") != test_a_run_trains_the_plain_model.__name__:
                continue
            cell, family, compiled = (item.callspec.params[name] for name in CASE)  # type: ignore[attr-defined]
            config = config_of(cell, _seed(run_seed, cell, family), family)
            config["zero_tp"]["compile"] = compiled
            write_run(folder, name_of(cell, family, compiled), config)
        train_runs(folder)

    return launch_once(shared_directory(tmp_path_factory, "training"), launch)


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(CASE, [pytest.param(*case, id=name_of(*case)) for case in CELLS])
def test_a_run_trains_the_plain_model(
    results: Path, run_seed: int, cell: Cell, family: str, compiled: bool
) -> None:
    values = trace_of(results, name_of(cell, family, compiled))
    trace, seed, stage = (
        Trace(**values),
        _seed(run_seed, cell, family),
        int(cell[2].removeprefix("ZeRO-")),
    )
    assert not trace.stale and min(trace.norms) > CLIP
    if cell[-1] == "fp32":
        far = of_fp32(trace, seed, family, micro_batches=_micro_batches(cell))
    else:
        summed_in = torch.bfloat16 if cell[-1] == "bf16" else torch.float32
        far = of_bf16(trace, seed, family, stage, _micro_batches(cell), summed_in=summed_in)
    farthest = max(far, key=lambda name: far[name])
    print(
        f"\n{name_of(cell, family, compiled)}: {farthest} {far[farthest]:.2f} × what is allowed",
        end="",
    )
    assert all(math.isfinite(distance) for distance in far.values())
    assert not {name: distance for name, distance in far.items() if not distance <= 1}
