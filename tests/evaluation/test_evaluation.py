"""Evaluation on TP × DP grids against lm-eval's HFLM and against one process, and on a live ZeRO-3 model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import OlmoeConfig, OlmoeForCausalLM

from tests.support.harness import Results, assert_same, native_model, ours, parallel_model, reference
from tests.support.lm_eval_tasks import CHOSEN, write_tasks
from tests.support.pool_rank import cached
from tests.support.pools import Pools
from tests.support.tiny_models import tiny_gpt2
from tests.tiers import THOROUGH, in_tiers
from zero_tp.evaluation.eval_model import EvalModel, ParallelScorer
from zero_tp.evaluation.model_directory import open_directory
from zero_tp.evaluation.task import Task, TaskOptions
from zero_tp.evaluation.zero_shot import OWN_TASKS, make_tasks
from zero_tp.parallel.scores import TokenScores
from zero_tp.topology import Topology

LIMIT, BATCH = 13, 3
GRIDS = [(2, 2), (2, 1), (4, 2), (4, 4)]  # world, TP


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory, shared_file: Callable[[str], Path]) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"), shared_file)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, shared_file: Callable[[str], Path]) -> Path:
    text = shared_file("data/lambada_openai_first1000.jsonl").read_text()[:20_000]
    return tiny_gpt2(tmp_path_factory.mktemp("models") / "tiny", [text])


@pytest.fixture(scope="module")
def expected(model: Path, tasks: Path) -> Results:
    return reference(model, tasks, list(CHOSEN), LIMIT) | reference(model, tasks, ["wikitext_local"], 1)


def grid(tensor: int) -> Topology:
    return cached(("evaluation", tensor), lambda: Topology(tensor, sequence=tensor == 2))


def answers_on_grid(directory: Path, tasks: Path, tensor: int) -> Results:
    eval_model = parallel_model(directory, grid(tensor), BATCH)
    return ours(eval_model, tasks, list(CHOSEN), LIMIT) | ours(eval_model, tasks, ["wikitext_local"], 1)


@pytest.mark.parametrize(("world", "tensor"), in_tiers(GRIDS, [(4, 2)]))
def test_lm_evals_tasks_equal_its_own_adapter(
    ranks: Pools, model: Path, tasks: Path, expected: Results, world: int, tensor: int
) -> None:
    found = ranks(world).run(answers_on_grid, model, tasks, tensor)
    assert assert_same(found[0], expected) > 100
    assert all(each == found[0] for each in found[1:]), "ranks disagree"


@pytest.fixture(scope="module")
def experts(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An OLMoE with the tokenizer of `model`."""
    directory = tmp_path_factory.mktemp("models") / "experts"
    shutil.copytree(model, directory)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    config = OlmoeConfig(
        **sizes,
        num_experts=5,
        num_experts_per_tok=2,
        vocab_size=vocabulary,
        max_position_embeddings=64,
        initializer_range=0.3,
        pad_token_id=None,
        eos_token_id=0,
    )
    OlmoeForCausalLM(config).save_pretrained(str(directory))
    return directory


@THOROUGH
def test_experts_score_as_by_lm_evals_own_adapter(ranks: Pools, experts: Path, tasks: Path) -> None:
    expected = reference(experts, tasks, list(CHOSEN), LIMIT) | reference(experts, tasks, ["wikitext_local"], 1)
    found = ranks(4).run(answers_on_grid, experts, tasks, 2)
    assert assert_same(found[0], expected) > 100
    assert all(each == found[0] for each in found[1:]), "ranks disagree"


def asked_of_other_data(directory: Path, folder: Path, name: str) -> str:
    """What is said where each rank's file of a task is another one."""
    from zero_tp.errors import UserError

    file = folder / f"{torch.distributed.get_rank()}.jsonl"
    file.write_text(json.dumps({"text": f"a text of rank {torch.distributed.get_rank()}, for it alone"}) + "\n")
    task = OWN_TASKS[name](file, TaskOptions())
    try:
        task.run(parallel_model(directory, grid(1), BATCH))
    except UserError as error:
        return str(error)
    return ""


def test_ranks_whose_data_differ_are_refused(ranks: Pools, model: Path, tmp_path: Path) -> None:
    for told in ranks(2).run(asked_of_other_data, model, tmp_path, "perplexity"):
        assert told.startswith("what a task asks of the model: SHA-256 ") and " on rank 0 " in told


def weights_of_seeds(directory: Path, tensor: int, seeds: list[int]) -> str:
    """What is said of ranks that have drawn their weights from these seeds."""
    from zero_tp.errors import UserError
    from zero_tp.evaluation.zero_shot import check_same_weights
    from zero_tp.huggingface import ZeroTPForCausalLM

    topology, config = grid(tensor), open_directory(directory).config
    model = ZeroTPForCausalLM(config, topology, seed=seeds[topology.rank])
    with torch.no_grad():
        model.get_parameter("transformer.final_norm.bias").add_(seeds[topology.rank])
    try:
        check_same_weights(model, topology, directory)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("tensor", "seeds", "told"),
    [(1, [1, 1], ""), (1, [1, 2], "holds other weights"), (2, [1, 1], ""), (2, [1, 2], "holds other weights")],
)
def test_ranks_that_load_other_weights_are_refused(
    ranks: Pools, model: Path, tensor: int, seeds: list[int], told: str
) -> None:
    for found in ranks(2).run(weights_of_seeds, model, tensor, seeds):
        assert told in found and bool(told) == bool(found)


def generated(directory: Path, tasks: Path, by: str, tensor: int) -> Results:
    """By transformers' own class on each data-parallel rank, by zero_tp's, or by its live ZeRO-3 model."""
    if by == "transformers":
        eval_model = replace(native_model(directory, BATCH), topology=grid(1))
    else:
        eval_model = parallel_model(directory, grid(tensor), BATCH)
        if by == "zero-3":
            eval_model = live_model(directory, tensor, 3, lambda engine: ParallelScorer(engine.engine))
    return ours(eval_model, tasks, ["generate_local"], LIMIT)


@THOROUGH
@pytest.mark.parametrize("sample", [False, True])
def test_generated_text(
    ranks: Pools, model: Path, tmp_path: Path, shared_file: Callable[[str], Path], sample: bool
) -> None:
    tasks = write_tasks(tmp_path, shared_file, sample=sample)
    alone = ours(native_model(model, BATCH), tasks, ["generate_local"], LIMIT)
    texts = {text for (text,) in [answer for (answer,) in alone["generate_local"][1]]}
    assert len(texts) > LIMIT // 2, "each context has an answer of its own"
    cases = [("transformers", 2, 1), *(("zero_tp", *grid) for grid in GRIDS), ("zero-3", 2, 1), ("zero-3", 4, 2)]
    for by, world, tensor in cases:
        for found in ranks(world).run(generated, model, tasks, by, tensor):
            assert assert_same(found, alone) == LIMIT, (by, world, tensor)
    if not sample:
        assert assert_same(alone, reference(model, tasks, ["generate_local"], LIMIT, BATCH)) == LIMIT


def own_tasks(directory: Path, files: dict[str, Path]) -> list[Task]:
    options = TaskOptions(overlap=16)
    return make_tasks(list(files), files, options)


def figures(directory: Path, files: dict[str, Path], tensor: int) -> list[dict[str, Any]]:
    eval_model = parallel_model(directory, grid(tensor), BATCH)
    return [task.run(eval_model) for task in own_tasks(directory, files)]


@pytest.fixture
def files(tmp_path: Path, shared_file: Callable[[str], Path]) -> dict[str, Path]:
    """Texts whose batches and lengths divide by nothing."""
    lines = shared_file("data/lambada_openai_first1000.jsonl").read_text().splitlines()[:10]
    passages, texts, wiki = tmp_path / "lambada.jsonl", tmp_path / "texts.jsonl", tmp_path / "wiki.txt"
    passages.write_text("\n".join(lines))
    texts.write_text("\n".join(json.dumps({"text": json.loads(line)["context"]}) for line in lines[:4]))
    wiki.write_text(" \n = A title = \n \n Words , more words . \n" * 12)
    return {"perplexity": texts, "wikitext103": wiki, "lambada": passages}


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As the ranks compute: on another number of threads torch adds in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_own_tasks_are_the_same_on_every_grid(ranks: Pools, model: Path, files: dict[str, Path]) -> None:
    eval_model = native_model(model, BATCH)
    expected = [task.run(eval_model) for task in own_tasks(model, files)]
    alone = parallel_model(model, Topology(), BATCH)
    one_process = [task.run(alone) for task in own_tasks(model, files)]
    for world, tensor in GRIDS:
        found = ranks(world).run(figures, model, files, tensor)
        assert all(each == found[0] for each in found[1:])
        if tensor == 1:
            assert found[0] == one_process, "the same batches have the same sums"
        for mine, theirs in zip(found[0], expected, strict=True):
            assert mine["nll"] == pytest.approx(theirs["nll"], rel=1e-5)
            for key, value in theirs.items():
                if isinstance(value, int):
                    assert mine[key] == value, key
            assert mine.get("accuracy") == theirs.get("accuracy")


def live_model(directory: Path, tensor: int, stage: int, scorer: Callable[[Any], Any]) -> EvalModel:
    """A DeepSpeed engine that has made no step. `scorer` is made of it."""
    from zero_tp.huggingface import ZeroTPForCausalLM
    from zero_tp.training.engine import TrainingEngine
    from zero_tp.weights.load import PretrainedSource

    opened = open_directory(directory)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }
    topology = grid(tensor)
    source = PretrainedSource(directory, opened.config)
    engine = TrainingEngine(opened.config, topology, config, seed=1, source=source, model=ZeroTPForCausalLM)
    engine.engine.eval()
    return EvalModel(
        scorer(engine),
        engine.model,
        opened.tokenizer,
        opened.config,
        64,
        batch_size=BATCH,
        topology=topology,
        lock_step=True,
        quiet=True,
    )


def live(directory: Path, files: dict[str, Path], tensor: int, stage: int) -> tuple[list[dict[str, Any]], int]:
    """(figures, forwards)"""
    forwards = 0

    def counting(engine: Any) -> Any:
        def score(input_ids: Tensor, labels: Tensor) -> TokenScores:
            nonlocal forwards
            forwards += 1
            return ParallelScorer(engine.engine)(input_ids, labels)

        return score

    eval_model = live_model(directory, tensor, stage, counting)
    return [task.run(eval_model) for task in own_tasks(directory, files)], forwards


def test_a_live_zero_3_model(ranks: Pools, model: Path, files: dict[str, Path]) -> None:
    eval_model = native_model(model, BATCH)
    expected = [task.run(eval_model) for task in own_tasks(model, files)]
    found = ranks(4).run(live, model, files, 2, 3)
    assert len({forwards for _, forwards in found}) == 1
    for figures, _ in found:
        for mine, theirs in zip(figures, expected, strict=True):
            assert mine["nll"] == pytest.approx(theirs["nll"], rel=1e-5)
            assert mine.get("accuracy") == theirs.get("accuracy")


def disagreeing(directory: Path, tasks: Path) -> None:
    eval_model = parallel_model(directory, grid(2), BATCH)
    ours(eval_model, tasks, ["copa_local"], 3 + torch.distributed.get_rank())


def test_ranks_with_different_requests(ranks: Pools, model: Path, tasks: Path) -> None:
    with pytest.raises(Exception, match=r"what a task asks of the model: SHA-256 .* on rank 0 "):
        ranks(2).run(disagreeing, model, tasks)
