"""A checkpoint of any topology resumes on any other: masters and moments bit for bit, losses within rounding.

The step of the save and both runs' accumulation are drawn.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.run.checkpoint.test_checkpoint import BATCH, MODEL, VOCABULARY, build, steps_of, write_config
from tests.support.pools import Pools
from tests.tiers import THOROUGH
from zero_tp.run.checkpoint.directory import read_manifest, step_directory
from zero_tp.run.checkpoint.find import find_checkpoint
from zero_tp.run.checkpoint.reader import CheckpointReader

MORE = 10


MODELS = {
    "gpt2": MODEL | dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), 0.0),
    # 2 KV heads: whole at TP 1, split at TP 2, replicated at TP 4; 3: replicated at TP 2 and 4, unevenly used.
    **{
        f"{count} KV heads": {
            "model_type": "qwen3",
            "num_hidden_layers": 2,
            "hidden_size": 24,
            "num_attention_heads": 12,
            "num_key_value_heads": count,
            "head_dim": 4,
            "intermediate_size": 40,
            "attention_bias": True,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 16,
            "bos_token_id": 0,
            "eos_token_id": 0,
        }
        for count in (2, 3)
    },
}


@dataclass(frozen=True)
class Place:
    """Where a run computes; `vocabulary` rows are padded to a multiple of `tensor`."""

    world: int
    tensor: int
    sequence: bool
    stage: int
    dtype: str = "fp32"
    offload: str = "none"
    model: str = "gpt2"

    @property
    def name(self) -> str:
        sp, offload = "SP " if self.sequence else "", "" if self.offload == "none" else f" {self.offload}"
        place = f"TP {self.tensor} × DP {self.world // self.tensor} {sp}ZeRO-{self.stage} {self.dtype}{offload}"
        return place if self.model == "gpt2" else f"{self.model} {place}"

    def write(self, path: Path, draw: random.Random) -> Path:
        """Write the config of a run here, with an accumulation that is drawn."""
        rows = BATCH * self.tensor // self.world
        write_config(path, self.stage, self.dtype, self.tensor, self.offload, seed=5)
        config: dict[str, Any] = json.loads(path.read_text())
        config["gradient_accumulation_steps"] = draw.choice([count for count in (1, 2, 3, 4) if rows % count == 0])
        config["gradient_clipping"] = 0.5
        config["optimizer"]["params"]["eps"] = 1e-3
        config["scheduler"]["params"]["warmup_num_steps"] = 6
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 100
        config["zero_tp"] |= {"model": MODELS[self.model], "training": {"steps": 12, "seed": 5}}
        config["zero_tp"]["parallel"]["sequence"] = self.sequence
        path.write_text(json.dumps(config))
        return path


DP2, DP4 = Place(2, 1, False, 2), Place(4, 1, False, 1)
TP2, TP4 = Place(2, 2, True, 0), Place(4, 4, True, 2)
MIXED, PLAIN_MIXED = Place(4, 2, True, 3), Place(4, 2, False, 1)
THREE = Place(3, 1, False, 3)
BF16, BF16_ZERO3 = Place(4, 2, True, 1, "bf16"), Place(4, 2, True, 3, "bf16", "parameters")
OFFLOADED, UNPARTITIONED = Place(4, 1, False, 2, "fp32", "optimizer"), Place(4, 2, True, 0)
BF16_UNPARTITIONED = Place(2, 2, True, 0, "bf16")
WHOLE, SPLIT, REPLICATED = (
    Place(world, tensor, tensor > 1, stage, model="2 KV heads")
    for world, tensor, stage in ((2, 1, 2), (2, 2, 3), (4, 4, 1))
)
WHOLE_3, UNEVEN_2, UNEVEN_4 = (
    Place(world, tensor, tensor > 1, stage, model="3 KV heads")
    for world, tensor, stage in ((4, 1, 3), (4, 2, 1), (4, 4, 3))
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
}


def first_part(path: str, run: str, saved: int) -> list[tuple[float, float]]:
    """Save on the way; (loss, gradient norm) of the steps after it."""
    from zero_tp.run.checkpoint.save import run_saver

    engine, config = build(path)
    saver = run_saver(engine.zero, config, Path(run))
    steps_of(engine, 1, saved)
    saver.save(saved)
    assert saver.outcome() == (saved, "")
    return steps_of(engine, saved + 1, saved + MORE)


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


def contents(run: Path, step: int) -> dict[tuple[str, str], Tensor]:
    checkpoint = step_directory(run, step)
    manifest = read_manifest(checkpoint)
    reader = CheckpointReader(checkpoint, manifest)
    return {(name, kind): reader.whole(name, kind) for name in reader.parameters for kind in manifest.kinds}


HEAVY = (BF16_ZERO3, BF16_UNPARTITIONED, OFFLOADED, THREE)
FIRST = (UNEVEN_2,)
SOURCES = [
    pytest.param(
        source, id=source.name, marks=pytest.mark.heavy if source in HEAVY else () if source in FIRST else THOROUGH
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
    assert {kind for _, kind in saved} == {"master", "exp_avg", "exp_avg_sq"}
    for target in PAIRS[source]:
        path, again = target.write(tmp_path / "target.json", draw), tmp_path / target.name
        done = ranks(target.world).run(moved, str(path), str(run), str(again), step)[0]
        restored = contents(again, step)
        assert restored.keys() == saved.keys()
        for key, tensor in saved.items():
            assert torch.equal(restored[key], tensor), f"{key} at {target.name}"
        # A bf16 module computes with rounded weights: the masters fix its loss only up to that rounding.
        exact = source.dtype == target.dtype == "fp32"
        for (loss, norm), (loss_before, norm_before) in zip(done, unmoved, strict=True):
            assert loss == pytest.approx(loss_before, rel=1e-5 if exact else 1e-2), target.name
            assert not exact or norm == pytest.approx(norm_before, rel=1e-4), target.name
