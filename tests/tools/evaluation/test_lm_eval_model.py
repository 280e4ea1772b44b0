"""lm-eval's tasks by `LMEvalModel` equal its own HFLM, in one process and on TP × DP grids."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval import evaluator
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer, OlmoeConfig, OlmoeForCausalLM

from tests.support.harness import (
    Results,
    assert_same,
    native_model,
    ours,
    parallel_model,
    reference,
)
from tests.support.live_evaluation import BATCH, GRIDS, grid, live_model
from tests.support.lm_eval_tasks import CHOSEN, write_tasks
from tests.support.pools import Pools
from tests.tiers import THOROUGH, in_tiers
from zero_tp.base.errors import UserError
from zero_tp.parallel.token_scores import TokenScores
from zero_tp.parallel.topology import Topology
from zero_tp.tools.evaluation.eval_model import EvalModel, ParallelScorer
from zero_tp.tools.evaluation.settings import TaskOptions
from zero_tp.tools.evaluation.zero_shot import make_tasks

LIMIT = 25
GRID_LIMIT = 13


@pytest.fixture(scope="module")
def experts(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An OLMoE with the tokenizer of `model`."""
    directory = Path(shutil.copytree(model, tmp_path_factory.mktemp("models") / "experts"))
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2}
    sizes |= {
        "num_attention_heads": 4,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 64,
    }
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    config = OlmoeConfig(
        **sizes, vocab_size=vocabulary, initializer_range=0.3, pad_token_id=None, eos_token_id=0
    )
    OlmoeForCausalLM(config).save_pretrained(str(directory))
    return directory


@pytest.fixture(scope="module")
def expected(tasks: Path) -> Callable[[Path], Results]:
    """Results of lm-eval's own adapter for a model."""
    return functools.cache(
        lambda directory: (
            reference(directory, tasks, list(CHOSEN), GRID_LIMIT)
            | reference(directory, tasks, ["wikitext_local"], 1)
        )
    )


def answers_on_grid(directory: Path, tasks: Path, tensor: int) -> Results:
    eval_model = parallel_model(directory, grid(tensor), BATCH)
    return ours(eval_model, tasks, list(CHOSEN), GRID_LIMIT) | ours(
        eval_model, tasks, ["wikitext_local"], 1
    )


CASES = [*(("model", *sizes) for sizes in GRIDS), ("experts", 4, 2)]


@pytest.mark.parametrize(("name", "world", "tensor"), in_tiers(CASES, [("model", 4, 2)]))
def test_lm_evals_tasks_equal_its_own_adapter(
    ranks: Pools,
    request: pytest.FixtureRequest,
    tasks: Path,
    expected: Callable[[Path], Results],
    name: str,
    world: int,
    tensor: int,
) -> None:
    directory = request.getfixturevalue(name)
    found = ranks(world).run(answers_on_grid, directory, tasks, tensor)
    assert assert_same(found[0], expected(directory)) > 100
    assert all(results == found[0] for results in found[1:]), "ranks disagree"


@THOROUGH
def test_transformers_own_class_equals_lm_evals_own_adapter(model: Path, tasks: Path) -> None:
    eval_model = native_model(model)
    # Contexts longer than the model's 64 positions are cut on the left, as there.
    names = [*CHOSEN, "generate_local"]
    assert (
        assert_same(ours(eval_model, tasks, names, LIMIT), reference(model, tasks, names, LIMIT))
        > 200
    )
    texts = ["wikitext_local"]
    assert assert_same(ours(eval_model, tasks, texts, 3), reference(model, tasks, texts, 3)) == 3


def test_one_token_answers_share_a_forward(model: Path, tasks: Path) -> None:
    eval_model = native_model(model)
    rows: list[int] = []

    def counting(input_ids: torch.Tensor, labels: torch.Tensor) -> TokenScores:
        rows.append(len(input_ids))
        return eval_model.scorer(input_ids, labels)

    found = ours(replace(eval_model, scorer=counting), tasks, ["letters_local"], LIMIT)
    assert sum(rows) == LIMIT
    assert assert_same(found, reference(model, tasks, ["letters_local"], LIMIT)) == 2 * LIMIT


def generated(directory: Path, tasks: Path, by: str, tensor: int) -> Results:
    """By transformers' own class on each data-parallel rank, by zero_tp's, or by its live ZeRO-3
    model.
    """
    if by == "transformers":
        eval_model = replace(native_model(directory, BATCH), topology=grid(1))
    else:
        eval_model = parallel_model(directory, grid(tensor), BATCH)
        if by == "zero-3":
            eval_model = live_model(
                directory, tensor, 3, lambda engine: ParallelScorer(engine.deepspeed_engine)
            )
    return ours(eval_model, tasks, ["generate_local"], GRID_LIMIT)


@THOROUGH
@pytest.mark.parametrize("sample", [False, True])
def test_generated_text(
    ranks: Pools, model: Path, tmp_path: Path, shared_file: Callable[[str], Path], sample: bool
) -> None:
    tasks = write_tasks(tmp_path, shared_file, sample=sample)
    alone = ours(native_model(model, BATCH), tasks, ["generate_local"], GRID_LIMIT)
    texts = {text for (text,) in [answer for (answer,) in alone["generate_local"][1]]}
    assert len(texts) > GRID_LIMIT // 2, "each context has an answer of its own"
    cases = [
        ("transformers", 2, 1),
        *(("zero_tp", *grid) for grid in GRIDS),
        ("zero-3", 2, 1),
        ("zero-3", 4, 2),
    ]
    for by, world, tensor in cases:
        for found in ranks(world).run(generated, model, tasks, by, tensor):
            assert assert_same(found, alone) == GRID_LIMIT, (by, world, tensor)
    if not sample:
        assert (
            assert_same(alone, reference(model, tasks, ["generate_local"], GRID_LIMIT, BATCH))
            == GRID_LIMIT
        )


def live_answers(directory: Path, tasks: Path, tensor: int) -> Results:
    """Of a live model whose experts are divided over pairs of data-parallel ranks."""
    eval_model = live_model(
        directory, tensor, 1, lambda engine: ParallelScorer(engine.deepspeed_engine), expert=2
    )
    assert eval_model.lock_step
    return ours(eval_model, tasks, ["generate_local", "letters_local"], GRID_LIMIT)


@THOROUGH
@pytest.mark.parametrize("tensor", in_tiers([1, 2], [1]))
def test_divided_experts_answer_in_lockstep(
    ranks: Pools, experts: Path, tasks: Path, tensor: int
) -> None:
    """13 requests in batches of 3, whose texts end at different tokens."""
    expected = reference(experts, tasks, ["generate_local", "letters_local"], GRID_LIMIT, BATCH)
    texts = [text for (text,) in [answer for (answer,) in expected["generate_local"][1]]]
    assert len(set(map(len, texts))) > 2
    found = ranks(4).run(live_answers, experts, tasks, tensor, timeout=90)
    assert assert_same(found[0], expected) == 3 * GRID_LIMIT
    assert all(results == found[0] for results in found[1:]), "ranks disagree"


TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}> {{ message.content }}\n{% endfor "
    "%}<assistant>"
)


@THOROUGH
def test_chat_templates_and_samples_are_lm_evals(model: Path, tasks: Path, tmp_path: Path) -> None:
    chatting = tmp_path / "chatting"
    shutil.copytree(model, chatting)
    tokenizer = AutoTokenizer.from_pretrained(str(chatting))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(str(chatting))
    options = TaskOptions(
        include_path=tasks, limit=4, num_fewshot=1, apply_chat_template=True, log_samples=True
    )
    (task,) = make_tasks(["copa_local"], {}, options)
    found = task.compute_metrics(native_model(chatting))["samples"]["copa_local"]
    loaded = TaskManager(include_path=str(tasks), include_defaults=False).load(["copa_local"])
    for each in loaded["tasks"].values():
        each.set_config(key="num_fewshot", value=1)
        each.set_fewshot_seed(1234)
    lm = HFLM(
        pretrained=AutoModelForCausalLM.from_pretrained(str(chatting)),
        tokenizer=tokenizer,
        batch_size=4,
    )
    results = evaluator.evaluate(
        lm,
        loaded,
        limit=4,
        bootstrap_iters=0,
        log_samples=True,
        apply_chat_template=True,
        fewshot_as_multiturn=True,
    )
    expected = results["samples"]["copa_local"]
    assert len(found) == len(expected) == 4
    for ours_, theirs in zip(found, expected, strict=True):
        assert ours_["arguments"] == json.loads(json.dumps(theirs["arguments"]))
        assert "<assistant>" in json.dumps(ours_["arguments"]) and ours_["acc"] == theirs["acc"]
    with pytest.raises(UserError, match="no chat template"):
        task.compute_metrics(native_model(model))
    with pytest.raises(UserError, match="--log-samples: lambada"):
        make_tasks(["lambada"], {}, TaskOptions(log_samples=True))


@pytest.mark.parametrize(
    ("world", "error", "expected"),
    [
        (1, RuntimeError("Connection closed by peer"), UserError),
        (2, RuntimeError("Connection closed by peer"), RuntimeError),
        (1, torch.OutOfMemoryError("out of memory"), torch.OutOfMemoryError),
        (1, MemoryError("out of memory"), MemoryError),
    ],
)
def test_a_lost_peer_or_full_memory_is_no_fault_of_the_task(
    model: Path,
    tasks: Path,
    monkeypatch: pytest.MonkeyPatch,
    world: int,
    error: Exception,
    expected: type[Exception],
) -> None:
    def failing(*_: object) -> None:
        raise error

    (task,) = make_tasks(["generate_local"], {}, TaskOptions(include_path=tasks, limit=2))
    monkeypatch.setattr(EvalModel, "map_batches", failing)
    with pytest.raises(expected, match=str(error)) as raised:
        task.compute_metrics(replace(native_model(model), topology=Topology(world=world)))
    assert raised.type is expected


def test_prompts_that_leave_no_room_for_text_are_truncated_and_counted(
    model: Path, tasks: Path
) -> None:
    """By the tokens that lm-eval's adapter gives to `generate`."""
    (task,) = make_tasks(["generate_local"], {}, TaskOptions(include_path=tasks, limit=6))
    eval_model, prompts = native_model(model), list[int]()
    generate = eval_model.module.generate

    def counting(input_ids: torch.Tensor, **options: Any) -> torch.Tensor:
        prompts.extend(options["attention_mask"].sum(1).tolist())
        return torch.as_tensor(generate(input_ids=input_ids, **options))

    eval_model.module.generate = counting
    whole = task.compute_metrics(eval_model)
    lengths, room = list(prompts), sorted(prompts)[2]
    prompts.clear()
    cut = task.compute_metrics(replace(eval_model, window=room + 12))  # 12 of them it generates
    assert whole["truncated"] == 0 and sorted(prompts) == sorted(
        min(length, room) for length in lengths
    )
    assert cut["truncated"] == sum(length > room for length in lengths) > 0
    assert cut["tokens_computed"] - cut["tokens"] == sum(prompts)


def test_a_model_that_cannot_generate(model: Path, tasks: Path) -> None:
    (task,) = make_tasks(["generate_local"], {}, TaskOptions(include_path=tasks, limit=2))
    eval_model = native_model(model)
    with pytest.raises(UserError, match="object can't generate text"):
        task.compute_metrics(replace(eval_model, module=object()))
    with pytest.raises(
        UserError, match="generates 12 tokens, and the model's 10 positions leave no room"
    ):
        task.check(10, eval_model.tokenizer)
    (task,) = make_tasks(["copa_local"], {}, TaskOptions(include_path=tasks, limit=2))
    with pytest.raises(
        UserError,
        match=r"copa_local: a continuation of \d+ tokens is longer than the model's 2 posit",
    ):
        task.check(2, eval_model.tokenizer)
