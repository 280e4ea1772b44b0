"""The elements that an engine sends over DP in a step equal those of the planner's timing."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from benchmarks.papers.collectives import counted
from benchmarks.papers.engines import drawn, engine_of, run_model_size, small_config
from tests.support.pools import Pools
from tests.tiers import in_tiers
from zero_tp.tools.planning.plan_settings import ZeroSettings

RANKS = 2
CASES = [(stage, owners, micro) for stage in (1, 2) for owners in (False, True) for micro in (1, 2)]
SMALL = (
    "zero_tp.model.n_layer=2",
    "zero_tp.model.n_embd=64",
    "bf16.enabled=false",
    "gradient_clipping=1.0",
)


def config_of(stage: int, owners: bool, micro: int) -> Any:
    zero = (f"zero_optimization.stage={stage}", "zero_optimization.reduce_bucket_size=20000")
    reductions = (
        f"zero_optimization.use_multi_rank_bucket_allreduce={'false' if owners else 'true'}"
    )
    return small_config(RANKS, *SMALL, *zero, reductions, f"gradient_accumulation_steps={micro}")


def steps(config: Any) -> tuple[list[float], dict[str, float]]:
    """The losses and gradient norms of two steps, and the elements that all ranks together send
    in the second.
    """
    engine, batches = engine_of(config), drawn(config)
    found = [engine.train_step(batches), engine.gradient_norm]
    with counted() as sent:
        found += [engine.train_step(batches), engine.gradient_norm]
    every: list[dict[str, float]] = [{}] * RANKS
    dist.all_gather_object(every, sent)
    return [float(each) for each in found], {
        name: sum(one.get(name, 0.0) for one in every) for name in sent
    }


@pytest.mark.parametrize(
    ("stage", "owners", "micro"), in_tiers(CASES, [(1, False, 1), (1, True, 1), (2, True, 2)])
)
def test_an_engine_sends_what_the_planner_counts(
    ranks: Pools, stage: int, owners: bool, micro: int
) -> None:
    config = config_of(stage, owners, micro)
    settings = ZeroSettings.of(config, cpu=True)
    gathers, reductions = settings.volumes
    assert (gathers, reductions) == (1, (1 if owners else 2) * (micro if stage == 2 else 1))
    (losses, sent), _ = ranks(RANKS).run(steps, config)
    unit = run_model_size(config).num_parameters * (RANKS - 1)  # of all ranks
    found = {name: elements / unit for name, elements in sent.items() if elements > 0.01 * unit}
    assert set(found) == {"all_gather_single", "reduce" if owners else "allreduce"}
    assert found.pop("all_gather_single") == pytest.approx(gathers, rel=0.001)
    assert sum(found.values()) == pytest.approx(reductions, rel=0.001)
    (others, _), _ = ranks(RANKS).run(steps, config_of(stage, not owners, micro))
    assert losses == pytest.approx(others, rel=1e-5), "the same model is trained"
