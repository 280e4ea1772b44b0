"""TP 2 × DP 2 as four ranks of one CUDA device train the plain model: `pytest -m cuda tests/cuda`.

NCCL takes one rank a device, so the ranks communicate over gloo, with CUDA tensors. The product
refuses that (`Topology.check_backend`); these runs go past the refusal.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.support.device_runs import (
    launch_once,
    require_device,
    shared_directory,
    trace_of,
    train_on_one_device,
    write_run,
)
from tests.support.matrix import WORLD, Cell, config_of
from tests.support.matrix_distances import distances
from tests.support.plain_run import Trace

pytestmark = pytest.mark.cuda

# Streams, events, hooks and stores: SP's overlap, partitioned checkpoints on the host, gathers.
CELLS: list[Cell] = [
    ("TP 2", "SP", "ZeRO-1", "selective", "no offload", "× 3", "fp32"),
    ("TP 2", "no SP", "ZeRO-2", "full, P_a, cpu", "optimizer offloaded", "× 3", "bf16"),
    ("TP 2", "SP", "ZeRO-3", "full, cpu", "no offload", "× 1", "fp32"),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, run_seed: int) -> Path:
    """The folder of the traces, launched by one of pytest's workers."""
    require_device()

    def launch(folder: Path) -> None:
        for cell in CELLS:
            config = config_of(cell, run_seed)
            config["zero_tp"]["compile"] = False
            write_run(folder, " ".join(cell), config)
        train_on_one_device(folder, WORLD)

    return launch_once(shared_directory(tmp_path_factory, "one device"), launch)


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("cell", CELLS, ids=" ".join)
def test_ranks_of_one_device_train_the_plain_model(
    results: Path, run_seed: int, cell: Cell
) -> None:
    traces = [Trace(**trace_of(results, " ".join(cell), rank)) for rank in range(WORLD)]
    far = distances(cell, traces, run_seed, "gpt2")
    farthest = max(far, key=lambda name: far[name])
    print(f"\n{' '.join(cell)}: {farthest} {far[farthest]:.2f} × what is allowed", end="")
    assert all(math.isfinite(distance) for distance in far.values())
    assert not {name: distance for name, distance in far.items() if not distance <= 1}
