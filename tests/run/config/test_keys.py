"""A run for each key that acts, beyond the parity matrix: more keys in its cells, and other
optimizers.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support import matrix
from tests.support.compare import check_close, grid
from tests.support.gpt2_reference import reference_model
from tests.support.keys import CELLS, OPTIMIZED
from tests.support.matrix_distances import distances
from tests.support.mistakes import with_changes
from tests.support.parallel_run import train
from tests.support.pools import Pools
from tests.support.small_engine import ACCUMULATION, build, tokens_of_step
from zero_tp.model.causal_lm import next_tokens

CLIP, STEPS = 0.3, 4


@pytest.mark.thorough
@pytest.mark.parametrize("name", CELLS)
def test_a_cell_with_more_keys_trains_the_plain_model(
    ranks: Pools, run_seed: int, tmp_path: Path, name: str
) -> None:
    cell, changes = CELLS[name]
    config = with_changes(matrix.config_of(cell, run_seed), changes)
    (tmp_path / "run.json").write_text(json.dumps(config))
    far = distances(cell, ranks(matrix.WORLD).run(train, tmp_path / "run.json"), run_seed, "gpt2")
    assert not {what: distance for what, distance in far.items() if not distance <= 1}


def plain(kind: str, params: dict[str, Any]) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """(losses, norms, weights) of transformers' model with torch's optimizer in one process."""
    model = reference_model()
    l2 = kind == "Adam" and not params["adam_w_mode"]
    name = {"Adam": "Adam" if l2 else "AdamW"}.get(kind, kind)
    options = {
        key: value for key, value in params.items() if key not in ("adam_w_mode", "weight_decay")
    }
    decay = params.get("weight_decay", 0.0)
    groups = [
        {"params": [each for each in model.parameters() if each.ndim >= 2], "weight_decay": decay},
        {"params": [each for each in model.parameters() if each.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = getattr(torch.optim, name)(groups, **options)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        tokens = tokens_of_step(step)
        loss = F.cross_entropy(model(tokens).logits.flatten(0, 1), next_tokens(tokens).flatten())
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, {name: weight.detach() for name, weight in model.named_parameters()}


def parallel(
    stage: int, kind: str, params: dict[str, Any], offloaded: bool
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    from tests.support.parallel_run import optimizer_tensors

    topology = grid(2, True)
    torch_adam = {"torch_adam": True} if kind.startswith("Adam") else {}
    engine = build(
        topology,
        stage,
        zero_optimization={
            "stage": stage,
            **({"offload_optimizer": {"device": "cpu"}} if offloaded else {}),
        },
        optimizer={"type": kind, "params": {**params, **torch_adam}},
        gradient_clipping=CLIP,
        zero_allow_untested_optimizer=True,
    )
    losses, norms = [], []
    for step in range(STEPS):
        own = tokens_of_step(step).chunk(topology.data)[topology.data_rank]
        losses.append(
            engine.train_step([(part, next_tokens(part)) for part in own.chunk(ACCUMULATION)])
        )
        norms.append(engine.gradient_norm)
    return losses, norms, optimizer_tensors(engine)


@pytest.mark.thorough
@pytest.mark.parametrize("name", OPTIMIZED)
def test_an_optimizer_on_shards_is_the_plain_one(ranks: Pools, name: str) -> None:
    stage, kind, params = OPTIMIZED[name]
    losses, norms, weights = plain(kind, params)
    assert min(norms) > CLIP and not math.isclose(losses[0], losses[-1], rel_tol=1e-3), (
        "nothing is clipped or trained"
    )
    for found in ranks(4).run(parallel, stage, kind, params, "offloaded" in name):
        assert found[0] == pytest.approx(losses, rel=1e-5)
        assert found[1] == pytest.approx(norms, rel=1e-4)
        check_close(found[2], weights)
