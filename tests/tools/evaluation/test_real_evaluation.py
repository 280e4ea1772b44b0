"""A real model on whole test sets, against lm-eval's own HFLM: SmolLM2-135M, or the directory that
ZERO_TP_EVALUATION_MODEL names. ZERO_TP_EVALUATION_LIMIT takes the first N examples of each set.

    python -m pytest -m heavy tests/tools/evaluation/test_real_evaluation.py
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.harness import (
    Results,
    assert_same,
    native_model,
    ours,
    parallel_model,
    reference,
)
from tests.support.lm_eval_tasks import CHOSEN
from tests.support.pools import Pools
from zero_tp.parallel.topology import Topology
from zero_tp.tools.evaluation.model_directory import open_directory

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(4 * 3600)]

LIMIT = int(os.environ.get("ZERO_TP_EVALUATION_LIMIT", "0")) or None
BATCH, POSITIONS, HOUR = 8, 512, 3600.0
ARTICLES = 3 if LIMIT is None else 1


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest) -> Path:
    named = os.environ.get("ZERO_TP_EVALUATION_MODEL")
    return Path(named) if named else request.getfixturevalue("smollm2")


@pytest.fixture(scope="module")
def expected(model: Path, tasks: Path) -> Results:
    found = reference(model, tasks, list(CHOSEN), LIMIT, BATCH, POSITIONS)
    return found | reference(model, tasks, ["wikitext_local"], ARTICLES, BATCH, POSITIONS)


def answers(directory: Path, tasks: Path, tensor: int, native: bool) -> Results:
    """On this grid, by transformers' own class or by zero_tp's."""
    topology = Topology(tensor)
    eval_model = (
        native_model(directory, BATCH) if native else parallel_model(directory, topology, BATCH)
    )
    eval_model = replace(eval_model, topology=topology, window=POSITIONS)
    return ours(eval_model, tasks, list(CHOSEN), LIMIT) | ours(
        eval_model, tasks, ["wikitext_local"], ARTICLES
    )


@pytest.mark.parametrize("kind", ["transformers", "transformers, DP 2", "zero_tp", "zero_tp, TP"])
def test_equals_lm_evals_own_adapter(
    ranks: Pools, model: Path, tasks: Path, expected: Results, kind: str
) -> None:
    heads = open_directory(model).config.num_attention_heads
    tensor = next(size for size in (3, 2) if heads % size == 0) if kind.endswith("TP") else 1
    world, native = 2 if kind.endswith("DP 2") else tensor, kind.startswith("transformers")
    if world == 1:
        found = [answers(model, tasks, tensor, native)]
    else:
        found = ranks(world).run(answers, model, tasks, tensor, native, timeout=HOUR)
    assert all(results == found[0] for results in found[1:])
    assert assert_same(found[0], expected) > ARTICLES
