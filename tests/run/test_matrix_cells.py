"""Every cell of the full product of settings is refused with a reason, or all pairs of its
settings are proved.
"""

from __future__ import annotations

import itertools
from pathlib import Path

from tests.support.families import FAMILIES
from tests.support.matrix import (
    FACTORS,
    LEAST_CELLS,
    WORLD,
    Cell,
    Setting,
    chosen_cells,
    covering_array,
    families,
    idle,
    judged,
    write_config,
)
from tests.tiers import THOROUGH
from zero_tp.run.config import RunConfig

# The only pairs that the config refuses: the message's start, and the settings that it is about.
REFUSED: dict[str, set[tuple[Setting, Setting]]] = {
    "zero_optimization.offload_optimizer: refused below stage 1": {
        (("stage", "ZeRO-0"), ("offload", offload))
        for offload in ("optimizer offloaded", "all offloaded")
    },
    "zero_optimization.offload_param: refused below stage 3": {
        (("stage", stage), ("offload", "all offloaded")) for stage in ("ZeRO-0", "ZeRO-1", "ZeRO-2")
    },
    "data_types.grad_accum_dtype: refused at stage 0": {
        (("stage", "ZeRO-0"), ("dtype", "bf16, fp32 accumulation"))
    },
    "zero_tp.recompute.keep_micro_batches: refused from a step's micro-batches on": {
        (("recompute", "full, 1 micro-batch kept"), ("accumulation", "× 1"))
    },
}


def settings_of(cell: Cell) -> tuple[Setting, ...]:
    return tuple(zip(FACTORS, cell, strict=True))


def pairs_of(cell: Cell) -> set[tuple[Setting, Setting]]:
    return set(itertools.combinations(settings_of(cell), 2))


def acting_pairs_of(cell: Cell) -> set[tuple[Setting, Setting]]:
    return {pair for pair in pairs_of(cell) if not idle(cell) & set(pair)}


@THOROUGH
def test_no_cell_is_neither_refused_nor_proved() -> None:
    accepted, refused = judged()
    covered = set().union(*map(pairs_of, covering_array()))
    covered_acting = set().union(*map(acting_pairs_of, covering_array()))
    product = list(itertools.product(*FACTORS.values()))
    assert len(product) == len(accepted) + len(refused)
    for cell in product:
        if cell in refused:
            error = refused[cell]
            assert error.key and error.problem and error.remedy, cell
        else:
            assert pairs_of(cell) <= covered, cell
            assert acting_pairs_of(cell) <= covered_acting, cell


@THOROUGH
def test_the_refusals_are_these_and_no_cell_else_is_refused() -> None:
    accepted, refused = judged()
    seen = set()
    for cell, error in refused.items():
        starts = [start for start in REFUSED if str(error).startswith(start)]
        assert len(starts) == 1, f"{cell}: {error}"
        assert REFUSED[starts[0]] & pairs_of(cell), f"{cell}: {error}"
        seen.add(starts[0])
    assert seen == REFUSED.keys()
    every_refused_pair = set().union(*REFUSED.values())
    for cell in accepted:
        assert not every_refused_pair & pairs_of(cell), cell


@THOROUGH
def test_the_covering_array_has_enough_accepted_cells() -> None:
    cells = covering_array()
    assert len(cells) == len(set(cells)) >= LEAST_CELLS
    assert set(cells) <= set(judged()[0])
    assert {setting for cell in cells for setting in settings_of(cell)} == {
        (factor, name) for factor, settings in FACTORS.items() for name in settings
    }


def test_what_does_nothing_is_known() -> None:
    """SP without TP, and partitioned checkpoints where TP ranks do not hold the same, are
    accepted and do nothing.
    """
    rest = ("no offload", "× 1", "fp32")
    assert idle(("TP 1", "SP", "ZeRO-1", "none", *rest)) == {("sequence", "SP")}
    assert idle(("TP 2", "SP", "ZeRO-1", "none", *rest)) == set()
    assert idle(("TP 2", "SP", "ZeRO-1", "full, P_a", *rest)) == {("recompute", "full, P_a")}
    assert idle(("TP 2", "no SP", "ZeRO-1", "full, P_a", *rest)) == set()
    composed = "full, P_a, contiguous, cpu"
    assert idle(("TP 1", "no SP", "ZeRO-1", composed, *rest)) == {("recompute", composed)}
    assert idle(("TP 2", "SP", "ZeRO-1", "full, contiguous", *rest)) == set()


@THOROUGH
def test_every_family_meets_every_setting(tmp_path: Path) -> None:
    """And the config accepts every family in cells with all pairs of settings."""
    met = {
        (setting, family)
        for cell, family in families().items()
        for setting in set(settings_of(cell)) - idle(cell)
    }
    acting = {
        setting for cell in covering_array() for setting in set(settings_of(cell)) - idle(cell)
    }
    assert families().keys() == set(covering_array())
    assert met == set(itertools.product(acting, FAMILIES))
    cells, with_all_pairs = chosen_cells()
    for cell in cells[:with_all_pairs]:
        for family in FAMILIES:
            config = RunConfig.load(write_config(cell, tmp_path, family=family), world_size=WORLD)
            assert config.hf_config().model_type == config.zero_tp.model["model_type"]
