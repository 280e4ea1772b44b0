"""The norms of updates by group against the whole masters before and after."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.compare import grid, norm
from tests.support.parallel_run import optimizer_tensors
from tests.support.pools import Pools
from tests.support.settings import deepspeed_settings, gpt2_config, rows
from tests.tiers import in_tiers
from zero_tp.base.settings.optimizer import check_optimizer
from zero_tp.base.settings.param_groups import parse_param_groups
from zero_tp.base.settings.schema import Logging
from zero_tp.engine.engine import TrainingEngine
from zero_tp.run.update_norms import UpdateNorms

ENTRIES = [{"kind": "embedding", "weight_decay": 0, "lr_scale": 2.0}]


def group_of(name: str) -> int:
    """Muon's matrices, AdamW's biases and norms, the entry's embeddings."""
    if "wte" in name or "wpe" in name:
        return 2
    return 0 if name.endswith(("attn.weight", "proj.weight", "fc.weight")) else 1


def norms_of_steps(stage: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What three steps log, of which the first is not due and the last is skipped; and the norms
    of the whole masters' changes.
    """
    settings = deepspeed_settings(stage, micro_batch=2) | {
        "optimizer": {"type": "Muon", "params": {"lr": 1e-2}}
    }
    topology = grid(2, True)
    engine = TrainingEngine.from_dict(
        gpt2_config(vocab_size=50), topology, settings, seed=1, param_groups=ENTRIES
    )
    logged: list[dict[str, Any]] = []
    phases: list[str] = []
    engine.on_phase = phases.append
    state: Any = SimpleNamespace(
        engine=engine, topology=topology, step=0, is_last_step=False, log=logged.append
    )
    block = SimpleNamespace(logging=Logging(interval=2), param_groups=parse_param_groups(ENTRIES))
    optimizer = SimpleNamespace(optimizer=check_optimizer(settings))
    state.config = SimpleNamespace(zero_tp=block, settings=optimizer)
    state.is_due = lambda interval: state.step % interval == 0
    callback = UpdateNorms()
    callback.on_start(state)
    expected = []
    for state.step in (1, 2, 4):
        before = optimizer_tensors(engine)
        callback.on_step_begin(state)
        hook = engine.model.get_parameter("transformer.embedding.word.weight").register_hook(
            lambda gradient: gradient * (torch.nan if state.step == 4 else 1.0)
        )
        engine.run_step(rows(engine))
        hook.remove()
        callback.on_step_end(state)
        after = optimizer_tensors(engine)
        line = {"step": state.step}
        for group in range(3):
            changes = [after[name] - before[name] for name in after if group_of(name) == group]
            line[f"update_norm/group_{group}"] = pytest.approx(norm(*changes), rel=1e-6)
        expected.append(line)
    assert phases[:3] == ["forward", "backward", "update"]
    return logged, expected[1:]


@pytest.mark.parametrize("stage", in_tiers(range(4), [1]))
def test_the_norm_of_each_groups_update_is_logged(ranks: Pools, stage: int) -> None:
    for logged, expected in ranks(4).run(norms_of_steps, stage):
        assert logged == expected
        assert all(value > 0 for value in logged[0].values())
        assert set(logged[1].values()) == {4, 0.0}
