"""lm-eval's answers by its own Hugging Face adapter, and by ours on any grid, for comparing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lm_eval import evaluator as lm_evaluator
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.lm_eval_tasks import answers
from zero_tp.model.huggingface import ZeroTPForCausalLM
from zero_tp.parallel.topology import Topology
from zero_tp.tools.evaluation.eval_model import EvalModel, ParallelScorer
from zero_tp.tools.evaluation.lm_eval_model import LMEvalModel
from zero_tp.tools.evaluation.model_directory import open_directory

Results = dict[str, tuple[dict[str, Any], list[Any]]]
"""By task: lm-eval's metrics, and the answer to every request."""


def reference(
    directory: Path,
    tasks: Path,
    names: list[str],
    limit: int | None,
    batch_size: int = 4,
    positions: int | None = None,
) -> Results:
    """By lm-eval's own `HFLM`, in one process. `positions`: tokens that it reads at most."""
    lm = HFLM(
        pretrained=AutoModelForCausalLM.from_pretrained(str(directory)),
        tokenizer=AutoTokenizer.from_pretrained(str(directory)),
        batch_size=batch_size,
        max_length=positions,
    )
    return _evaluated(lm, tasks, names, limit)


def ours(eval_model: EvalModel, tasks: Path, names: list[str], limit: int | None) -> Results:
    """By `LMEvalModel`. Collective."""
    return _evaluated(LMEvalModel(eval_model), tasks, names, limit)


def _evaluated(lm: Any, tasks: Path, names: list[str], limit: int | None) -> Results:
    loaded = TaskManager(include_path=str(tasks), include_defaults=False).load(names)
    results = lm_evaluator.evaluate(lm, loaded, limit=limit, bootstrap_iters=0, log_samples=True)
    assert results is not None
    return {name: (dict(results["results"][name]), answers(results, name)) for name in names}


def native_model(directory: Path, batch_size: int = 4) -> EvalModel:
    """transformers' own class, as the command has it in one process."""
    return open_directory(directory).load("float32", "cpu", batch_size=batch_size)


def parallel_model(directory: Path, topology: Topology, batch_size: int = 4) -> EvalModel:
    """zero_tp's own class on a grid, one process included."""
    opened = open_directory(directory)
    model = ZeroTPForCausalLM.from_pretrained(directory, topology).eval()
    return EvalModel(
        ParallelScorer(model),
        model,
        opened.tokenizer,
        opened.config,
        opened.sequence_length(None),
        batch_size=batch_size,
        topology=topology,
    )


def assert_same(found: Results, expected: Results) -> int:
    """Accuracies equal, log-likelihoods to 1e-3, perplexities to 1e-4, generated text equal. How
    many answers.
    """
    compared = 0
    assert found.keys() == expected.keys()
    for name, (metrics, responses) in expected.items():
        for key, value in metrics.items():
            kind = key.split(",")[0]
            if not isinstance(value, float) or kind.endswith("_stderr"):
                continue
            tolerance = (
                1e-4 if kind in ("word_perplexity", "byte_perplexity", "bits_per_byte") else 0.0
            )
            # LAMBADA's is e to a sum over a word: 1e-3 on the log-likelihood.
            tolerance = 1e-3 if kind == "perplexity" else tolerance
            assert found[name][0][key] == pytest.approx(value, rel=tolerance, abs=0), (name, key)
        assert len(found[name][1]) == len(responses)
        for mine, theirs in zip(_flat(found[name][1]), _flat(responses), strict=True):
            compared += 1
            if isinstance(theirs, str):
                assert mine == theirs, name
            elif isinstance(theirs, tuple):
                assert mine[1] == theirs[1] and mine[0] == pytest.approx(theirs[0], abs=1e-3), name
            else:
                # A whole text's. torch's fp32 log_softmax on CPU, which HFLM uses, is off by 1e-5
                # nats a token of a large vocabulary (256 tokens, v 49,152: 688.92468 of ours,
                # 688.92469 in fp64, 688.92261 of HFLM).
                assert mine == pytest.approx(theirs, rel=1e-5), name
    return compared


def _flat(responses: list[Any]) -> list[Any]:
    """The answers of all documents; each request has a list of one."""
    return [answer for document in responses for (answer,) in document]
