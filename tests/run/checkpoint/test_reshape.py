"""A checkpoint of any topology resumes on any other: masters and moments bit for bit, losses within
rounding.

The step of the save and both runs' accumulation are drawn.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.support.checkpoint_runs import build, steps_of
from tests.support.places import (
    DP2,
    DP4,
    MORE,
    REPLICATED,
    SPLIT,
    WHOLE,
    Place,
    contents,
    first_part,
)
from tests.support.pools import Pools
from tests.tiers import THOROUGH
from zero_tp.run.checkpoint.find import find_checkpoint

TP2, TP4 = Place(2, 2, True, 0), Place(4, 4, True, 2)
MIXED, PLAIN_MIXED = Place(4, 2, True, 3), Place(4, 2, False, 1)
THREE = Place(3, 1, False, 3)
BF16, BF16_ZERO3 = Place(4, 2, True, 1, "bf16"), Place(4, 2, True, 3, "bf16", "parameters")
OFFLOADED, UNPARTITIONED = Place(4, 1, False, 2, "fp32", "optimizer"), Place(4, 2, True, 0)
BF16_UNPARTITIONED = Place(2, 2, True, 0, "bf16")
WHOLE_3, UNEVEN_2, UNEVEN_4 = (
    Place(world, tensor, tensor > 1, stage, model="3 KV heads")
    for world, tensor, stage in ((4, 1, 3), (4, 2, 1), (4, 4, 3))
)
MUON, MUON_WHOLE, MUON_BF16 = (
    Place(4, tensor, tensor > 1, stage, dtype, model=model, optimizer="Muon")
    for tensor, stage, dtype, model in (
        (2, 1, "fp32", "2 KV heads"),
        (1, 3, "fp32", "2 KV heads"),
        (4, 0, "bf16", "2 KV heads"),
    )
)
LINEAR, LINEAR_WHOLE, LINEAR_4, LATENTS, LATENTS_WHOLE = (
    Place(world, tensor, tensor > 1, stage, model=model)
    for world, tensor, stage, model in (
        (2, 2, 3, "linear attention"),
        (2, 1, 1, "linear attention"),
        (4, 4, 2, "linear attention"),
        (2, 2, 1, "latents"),
        (2, 1, 3, "latents"),
    )
)

PAIRS: dict[Place, list[Place]] = {
    DP2: [DP4, TP2, TP4, MIXED, BF16],
    DP4: [DP2, UNPARTITIONED, BF16_ZERO3, THREE],
    TP2: [DP2, TP4, MIXED, OFFLOADED],
    TP4: [TP2, DP4, PLAIN_MIXED, BF16_UNPARTITIONED],
    MIXED: [TP4, DP2, UNPARTITIONED, PLAIN_MIXED],
    BF16: [MIXED, TP2, BF16_ZERO3],
    BF16_ZERO3: [BF16, DP4, BF16_UNPARTITIONED],
    BF16_UNPARTITIONED: [TP4, BF16],
    OFFLOADED: [MIXED, DP2],
    THREE: [TP4, UNPARTITIONED],
    WHOLE: [SPLIT, REPLICATED],
    SPLIT: [REPLICATED],
    REPLICATED: [SPLIT, WHOLE],
    WHOLE_3: [UNEVEN_2],
    UNEVEN_2: [UNEVEN_4],
    UNEVEN_4: [WHOLE_3],
    MUON: [MUON_WHOLE],
    MUON_WHOLE: [MUON, MUON_BF16],
    MUON_BF16: [MUON],
    LINEAR: [LINEAR_WHOLE, LINEAR_4],
    LINEAR_WHOLE: [LINEAR],
    LATENTS: [LATENTS_WHOLE],
}


def moved(path: str, run: str, again: str, saved: int) -> list[tuple[float, float]]:
    """Resume on this grid, save again at once, and train on."""
    from zero_tp.run.checkpoint.save import run_saver
    from zero_tp.run.checkpoint.start_point import Resume

    engine, config = build(path)
    start = Resume(find_checkpoint(Path(run)))
    start.restore(engine.zero, config.zero_tp.training.seed)
    assert start.step == saved
    saver = run_saver(engine.zero, config, Path(again))
    saver.save(saved)
    assert saver.outcome() == (saved, "")
    return steps_of(engine, saved + 1, saved + MORE)


def inherited(path: str, run: str, again: str, saved: int) -> list[tuple[float, float]]:
    """Begin on this grid with the weights alone, save at once, and train a step."""
    from zero_tp.run.checkpoint.save import run_saver
    from zero_tp.run.checkpoint.start_point import Branch

    engine, config = build(path)
    Branch(find_checkpoint(Path(run)), (), False).restore(engine.zero, 0)
    saver = run_saver(engine.zero, config, Path(again))
    saver.save(saved)
    assert saver.outcome() == (saved, "")
    return steps_of(engine, saved + 1, saved + 1)


HEAVY = (BF16_ZERO3, BF16_UNPARTITIONED, OFFLOADED, THREE)
SOURCES = [
    pytest.param(
        source,
        id=source.name,
        marks=() if source == MUON else pytest.mark.heavy if source in HEAVY else THOROUGH,
    )
    for source in PAIRS
]


@pytest.mark.parametrize("source", SOURCES)
def test_a_run_moves(ranks: Pools, tmp_path: Path, source: Place, seed: int) -> None:
    draw, run = random.Random(seed), tmp_path / "run"
    step = draw.randint(1, 5)
    path = source.write(tmp_path / "source.json", draw)
    unmoved = ranks(source.world).run(first_part, str(path), str(run), step)[0]
    saved = contents(run, step)
    states = {"exp_avg", "exp_avg_sq"} | (
        {"momentum_buffer"} if source.optimizer == "Muon" else set()
    )
    assert {kind for _, kind in saved} == {"master", *states}
    for target in PAIRS[source]:
        path, again = target.write(tmp_path / "target.json", draw), tmp_path / target.name
        done = ranks(target.world).run(moved, str(path), str(run), str(again), step)[0]
        restored = contents(again, step)
        assert restored.keys() == saved.keys()
        for key, tensor in saved.items():
            assert torch.equal(restored[key], tensor), f"{key} at {target.name}"
        # A bf16 module computes with rounded weights: the masters fix its loss only up to that
        # rounding.
        exact = source.dtype == target.dtype == "fp32"
        for (loss, norm), (loss_before, norm_before) in zip(done, unmoved, strict=True):
            assert loss == pytest.approx(loss_before, rel=1e-5 if exact else 1e-2), target.name
            assert not exact or norm == pytest.approx(norm_before, rel=1e-4), target.name


@THOROUGH
@pytest.mark.parametrize("target", [MUON, MUON_WHOLE], ids=lambda place: place.name)
def test_muon_starts_from_the_weights_that_adamw_has_trained(
    ranks: Pools, tmp_path: Path, target: Place
) -> None:
    draw = random.Random(1)
    path = SPLIT.write(tmp_path / "source.json", draw)
    unmoved = ranks(SPLIT.world).run(first_part, str(path), str(tmp_path / "run"), 2)[0]
    saved = contents(tmp_path / "run", 2)
    path, again = target.write(tmp_path / "target.json", draw), tmp_path / "again"
    options = (str(path), str(tmp_path / "run"), str(again), 2)
    (loss, norm), *_ = ranks(target.world).run(inherited, *options)[0]
    restored = contents(again, 2)
    assert {kind for _, kind in restored} == {"master"}, "no step was taken, so no state is there"
    for key, tensor in restored.items():
        assert torch.equal(tensor, saved[key]), key
    loss_before, norm_before = unmoved[0]
    assert loss == pytest.approx(loss_before, rel=1e-5)
    assert norm == pytest.approx(norm_before, rel=1e-4)
