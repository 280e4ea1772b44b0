"""Train cells of the matrix on ranks, and say how far each is from the plain run."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

from tests.support.closeness import first_decided
from tests.support.matrix import FACTORS, WORLD, Cell, Changes, describe, write_config
from tests.support.matrix_distances import distances, micro_batches_of
from tests.support.parallel_run import train
from tests.support.pools import Pools, RankError


def failures_of(
    ranks: Pools, seed: int, folder: Path, cell: Cell, family: str, changes: Changes | None = None
) -> list[str]:
    """Train a cell; a line if it fails or is further from the plain run than is allowed.

    Args:
        changes: of the cell's config, by dotted key.
    """
    try:
        far = middle_distances(ranks, seed, folder, cell, family, changes)
    except RankError as error:
        return [f"{describe(cell, family)}: {error}"]
    # Written so that nan is too far.
    off = [f"{name} {distance:.2f}" for name, distance in far.items() if not distance <= 1]
    return [f"{describe(cell, family)}: × what is allowed: {', '.join(off)}"] if off else []


def middle_distances(
    ranks: Pools, seed: int, folder: Path, cell: Cell, family: str, changes: Changes | None = None
) -> dict[str, float]:
    """The distances of a cell; if a bf16 run is too far, the medians over its model and two more.

    In 16 bit a few tokens of a model can be a large part of all rounding: measured, the biases of
    one layer were at 1.8 times the plain runs' distance with one batch, at 0.8 to 1.3 with four
    others. A mistake stays with the model.
    """
    runs: list[dict[str, float]] = []
    if exact := cell[list(FACTORS).index("dtype")] == "fp32":
        seed = first_decided(seed, family, micro_batches_of(cell))
    for other in range(3):
        traces = ranks(WORLD).run(train, write_config(cell, folder, seed + other, family, changes))
        runs.append(distances(cell, traces, seed + other, family))
        far = runs[-1]
        farthest = max(far, key=lambda name: far[name])
        print(
            f"\n{describe(cell, family)}: {farthest} {far[farthest]:.2f} × what is allowed", end=""
        )
        if exact or (other == 0 and all(d <= 1 for d in far.values())):
            break
    names = dict.fromkeys(name for run in runs for name in run)
    of_each = {name: [run.get(name, 0.0) for run in runs] for name in names}
    return {
        name: statistics.median(values) if all(map(math.isfinite, values)) else math.inf
        for name, values in of_each.items()
    }
