"""A real model on whole test sets, against lm-eval's own HFLM: SmolLM2-135M, or the directory that
ZERO_TP_EVALUATION_MODEL names. ZERO_TP_EVALUATION_LIMIT takes the first N examples of each set.

    python -m pytest -m heavy tests/evaluation/test_real_evaluation.py
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.harness import Results, assert_same, native_model, ours, parallel_model, reference
from tests.support.lm_eval_tasks import CHOSEN, write_tasks
from tests.support.pools import Pools
from zero_tp.evaluation.model_directory import open_directory
from zero_tp.topology import Topology

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(4 * 3600)]

LIMIT = int(os.environ.get("ZERO_TP_EVALUATION_LIMIT", "0")) or None
BATCH, POSITIONS, HOUR = 8, 512, 3600.0
ARTICLES = 3 if LIMIT is None else 1


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest) -> Path:
    given = os.environ.get("ZERO_TP_EVALUATION_MODEL")
    return Path(given) if given else request.getfixturevalue("smollm2")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory, shared_file: Callable[[str], Path]) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"), shared_file)


@pytest.fixture(scope="module")
def expected(model: Path, tasks: Path) -> Results:
    found = reference(model, tasks, list(CHOSEN), LIMIT, BATCH, POSITIONS)
    return found | reference(model, tasks, ["wikitext_local"], ARTICLES, BATCH, POSITIONS)


def answers(directory: Path, tasks: Path, tensor: int, native: bool) -> Results:
    """On this grid, by transformers' own class or by zero_tp's."""
    topology = Topology(tensor)
    eval_model = native_model(directory, BATCH) if native else parallel_model(directory, topology, BATCH)
    eval_model = replace(eval_model, topology=topology, positions=POSITIONS)
    return ours(eval_model, tasks, list(CHOSEN), LIMIT) | ours(eval_model, tasks, ["wikitext_local"], ARTICLES)


def test_one_process(model: Path, tasks: Path, expected: Results) -> None:
    assert assert_same(answers(model, tasks, 1, native=True), expected) > ARTICLES


def test_data_parallel(ranks: Pools, model: Path, tasks: Path, expected: Results) -> None:
    first, second = ranks(2).run(answers, model, tasks, 1, True, timeout=HOUR)
    assert first == second
    assert assert_same(first, expected) > ARTICLES


@pytest.mark.parametrize("kind", ["alone", "divides the heads"])
def test_tensor_parallel(ranks: Pools, model: Path, tasks: Path, expected: Results, kind: str) -> None:
    heads = open_directory(model).config.num_attention_heads
    tensor = 1 if kind == "alone" else next(size for size in (3, 2) if heads % size == 0)
    if tensor == 1:
        found = [answers(model, tasks, 1, native=False)]
    else:
        found = ranks(tensor).run(answers, model, tasks, tensor, False, timeout=HOUR)
    assert all(each == found[0] for each in found[1:])
    assert assert_same(found[0], expected) > ARTICLES
