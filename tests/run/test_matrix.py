"""The promise: whatever settings the config accepts, the parallel run trains the Hugging Face
model.

Every cell of the covering array (matrix.py) is trained on 4 ranks, with a model of one of the
families (families.py), and compared with transformers' own class and torch's AdamW in one process
(closeness.py): losses and norms of 4 steps, every gradient of the first, the norm after clipping,
all fp32 weights and both of Adam's moments after the last. `-s` shows the cells and how far off
each was.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.families import EXPERTS
from tests.support.matrix import (
    FACTORS,
    Cell,
    chosen_cells,
    families,
    first_cells,
)
from tests.support.matrix_runs import failures_of
from tests.support.pools import Pools
from tests.tiers import THOROUGH

GRIDS = [(tensor, sequence) for tensor in FACTORS["tensor"] for sequence in FACTORS["sequence"]]
TIERS = [
    ("every setting", False, lambda _: THOROUGH),
    ("all pairs", False, lambda _: THOROUGH),
    ("the rest", False, lambda _: pytest.mark.heavy),
    ("every setting", True, lambda _: THOROUGH),
    ("all pairs", True, lambda _: pytest.mark.heavy),
]
CASES = [
    pytest.param(*grid, part, experts, marks=marks(grid))
    for part, experts, marks in TIERS
    for grid in GRIDS
]
FIRST_CELL: Cell = ("TP 4", "no SP", "ZeRO-3", "full, P_a, cpu", "all offloaded", "× 1", "fp32")
"""One of those that have every setting. It stands here because choosing them loads thousands of
configs.
"""


@THOROUGH
def test_a_cell_trains_the_plain_model(ranks: Pools, run_seed: int, tmp_path: Path) -> None:
    family_of = {FIRST_CELL: "fewer KV heads than TP"}
    train_and_compare(ranks, run_seed, tmp_path, [FIRST_CELL], family_of)


MIXER_CELLS: list[Cell] = [
    ("TP 2", "SP", "ZeRO-3", "selective, every module", "all offloaded", "× 1", "fp32"),
    ("TP 4", "no SP", "ZeRO-2", "full, P_a, cpu", "optimizer offloaded", "× 3", "fp32"),
    ("TP 1", "no SP", "ZeRO-0", "none", "no offload", "× 1", "fp32"),
    ("TP 2", "SP", "ZeRO-1", "full", "no offload", "× 3", "bf16"),
]
"""Each stage and offload, with all that the layers of these families recompute."""


@THOROUGH
@pytest.mark.parametrize("cell", MIXER_CELLS, ids=[cell[2] for cell in MIXER_CELLS])
@pytest.mark.parametrize("family", ["latents", "linear attention"])
def test_other_mixers_train_the_plain_model(
    ranks: Pools, run_seed: int, tmp_path: Path, family: str, cell: Cell
) -> None:
    train_and_compare(ranks, run_seed, tmp_path, [cell], {cell: family})


@pytest.mark.parametrize(("tensor", "sequence", "part", "experts"), CASES)
def test_all_settings_train_the_plain_model(
    ranks: Pools,
    run_seed: int,
    tmp_path: Path,
    tensor: str,
    sequence: str,
    part: str,
    experts: bool,
) -> None:
    """The cells that have every setting first, then those that have all pairs, then the rest;
    with experts, too.
    """
    (cells, pairs), first = chosen_cells(), first_cells()
    parts = {
        "every setting": first,
        "all pairs": [cell for cell in cells[:pairs] if cell not in first],
        "the rest": cells[pairs:],
    }
    chosen = [cell for cell in parts[part] if cell[:2] == (tensor, sequence)]
    in_turn = {cell: list(EXPERTS)[number % len(EXPERTS)] for number, cell in enumerate(cells)}
    train_and_compare(ranks, run_seed, tmp_path, chosen, in_turn if experts else families())


def train_and_compare(
    ranks: Pools, run_seed: int, tmp_path: Path, cells: list[Cell], family_of: dict[Cell, str]
) -> None:
    """Train the cells and compare each with the plain model of its family."""
    assert cells
    failures: list[str] = []
    for cell in cells:
        failures += failures_of(ranks, run_seed, tmp_path, cell, family_of[cell])
    assert not failures, f"{len(failures)} of {len(cells)} cells:\n" + "\n".join(failures)
