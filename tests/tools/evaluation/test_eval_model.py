"""zero_tp's own tasks are the same on every TP × DP grid and on a live ZeRO-3 model; ranks that
differ are refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.harness import native_model, parallel_model
from tests.support.live_evaluation import BATCH, GRIDS, grid, live_model
from tests.support.pools import Pools
from tests.tiers import THOROUGH
from zero_tp.base.errors import UserError
from zero_tp.model.huggingface import ZeroTPForCausalLM
from zero_tp.parallel.token_scores import TokenScores
from zero_tp.parallel.topology import Topology
from zero_tp.tools.evaluation.eval_model import EvalModel, ParallelScorer
from zero_tp.tools.evaluation.model_directory import open_directory
from zero_tp.tools.evaluation.settings import TaskOptions
from zero_tp.tools.evaluation.zero_shot import check_same_step, check_same_weights, make_tasks


@pytest.fixture
def files(tmp_path: Path, shared_file: Callable[[str], Path]) -> dict[str, Path]:
    """Texts whose batches and lengths divide by nothing."""
    lines = shared_file("data/lambada_openai_first1000.jsonl").read_text().splitlines()[:10]
    passages, texts, wiki = (
        tmp_path / "lambada.jsonl",
        tmp_path / "texts.jsonl",
        tmp_path / "wiki.txt",
    )
    passages.write_text("\n".join(lines))
    texts.write_text(
        "\n".join(json.dumps({"text": json.loads(line)["context"]}) for line in lines[:4])
    )
    wiki.write_text(" \n = A title = \n \n Words , more words . \n" * 12)
    return {"perplexity": texts, "wikitext103": wiki, "lambada": passages}


def run_tasks(eval_model: EvalModel, files: dict[str, Path]) -> list[dict[str, Any]]:
    return [
        task.compute_metrics(eval_model)
        for task in make_tasks(list(files), files, TaskOptions(overlap=16))
    ]


def figures(directory: Path, files: dict[str, Path], tensor: int) -> list[dict[str, Any]]:
    return run_tasks(parallel_model(directory, grid(tensor), BATCH), files)


def assert_close(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["nll"] == pytest.approx(theirs["nll"], rel=1e-5)
        assert mine.get("accuracy") == theirs.get("accuracy")
        for key, value in theirs.items():
            if isinstance(value, int):
                assert mine[key] == value, key


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute as the ranks do: on another number of threads torch adds in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@THOROUGH
@pytest.mark.usefixtures("one_thread")
def test_own_tasks_are_the_same_on_every_grid(
    ranks: Pools, model: Path, files: dict[str, Path]
) -> None:
    expected = run_tasks(native_model(model, BATCH), files)
    one_process = run_tasks(parallel_model(model, Topology(), BATCH), files)
    for world, tensor in GRIDS:
        found = ranks(world).run(figures, model, files, tensor)
        assert all(results == found[0] for results in found[1:])
        if tensor == 1:
            assert found[0] == one_process, "the same batches have the same sums"
        assert_close(found[0], expected)


def live(
    directory: Path, files: dict[str, Path], tensor: int, stage: int
) -> tuple[list[dict[str, Any]], int]:
    """Return the figures and the number of forwards."""
    forwards = 0

    def counting(engine: Any) -> Any:
        def score(input_ids: Tensor, labels: Tensor) -> TokenScores:
            nonlocal forwards
            forwards += 1
            return ParallelScorer(engine.deepspeed_engine)(input_ids, labels)

        return score

    return run_tasks(live_model(directory, tensor, stage, counting), files), forwards


@THOROUGH
def test_a_live_zero_3_model(ranks: Pools, model: Path, files: dict[str, Path]) -> None:
    expected = run_tasks(native_model(model, BATCH), files)
    found = ranks(4).run(live, model, files, 2, 3)
    assert len({forwards for _, forwards in found}) == 1
    for results, _ in found:
        assert_close(results, expected)


def other_texts(directory: Path, folder: Path) -> None:
    """Evaluate a file that differs on each rank."""
    file = folder / f"{torch.distributed.get_rank()}.jsonl"
    file.write_text(json.dumps({"text": f"a text of rank {torch.distributed.get_rank()}"}) + "\n")
    run_tasks(parallel_model(directory, grid(1), BATCH), {"perplexity": file})


def test_ranks_with_different_requests_are_refused(
    ranks: Pools, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(Exception, match=r"the requests of a task: SHA-256 .* on rank 0 "):
        ranks(2).run(other_texts, model, tmp_path)


def found_steps(steps: list[int | None]) -> str:
    directory: Any = SimpleNamespace(step=steps[torch.distributed.get_rank()])
    try:
        check_same_step(directory)
    except UserError as error:
        return str(error)
    return ""


def test_ranks_with_different_checkpoints_are_refused(ranks: Pools) -> None:
    assert ranks(2).run(found_steps, [None, None]) == ranks(2).run(found_steps, [20, 20])
    for error in ranks(2).run(found_steps, [20, 40]):
        assert "give RUN/checkpoints/step_N: step 20 on rank 0" in error


def weights_of_seeds(directory: Path, tensor: int, seeds: list[int]) -> str:
    """Return the error of ranks that draw their weights from these seeds."""
    topology, config = grid(tensor), open_directory(directory).config
    model = ZeroTPForCausalLM(config, topology, seed=seeds[topology.rank])
    with torch.no_grad():
        model.get_parameter("transformer.final_norm.bias").add_(seeds[topology.rank])
    try:
        check_same_weights(model, topology, directory)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("tensor", [1, 2])
def test_ranks_with_different_weights_are_refused(ranks: Pools, model: Path, tensor: int) -> None:
    assert ranks(2).run(weights_of_seeds, model, tensor, [1, 1]) == ["", ""]
    for error in ranks(2).run(weights_of_seeds, model, tensor, [1, 2]):
        assert "its weights differ between machines" in error
