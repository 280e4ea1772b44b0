"""Zero-shot tasks during training: as commands, and that training doesn't notice them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config

from tests.support.launched import launch, metrics_of, run, script
from tests.support.live_evaluation import deepspeed_settings
from tests.support.lm_eval_tasks import task_file
from tests.support.pool_rank import cached
from tests.support.pools import Pools
from tests.support.tiny_models import tiny_gpt2
from tests.tiers import THOROUGH
from zero_tp.base.errors import UserError
from zero_tp.base.settings.schema import Evaluation
from zero_tp.parallel.topology import Topology
from zero_tp.tools.evaluation.live_tasks import LiveTasks

TEXT = "Some words of a text, and more of them for the model to read. "


def write_files(directory: Path) -> dict[str, Any]:
    """Files for a task of zero_tp's own and one of lm-eval's; gives the keys of
    `zero_tp.evaluation`.
    """
    texts, questions, tasks = (
        directory / "held_out.jsonl",
        directory / "letters.jsonl",
        directory / "letters",
    )
    texts.write_text("".join(json.dumps({"text": TEXT * count}) + "\n" for count in (1, 5, 3)))
    questions.write_text(
        "".join(json.dumps({"text": "A" * n, "choices": ["B", "C"]}) + "\n" for n in (1, 2, 4))
    )
    tasks.mkdir()
    fields = {"doc_to_text": "{{text}}", "doc_to_choice": "{{choices}}", "doc_to_target": 0}
    letters = task_file("letters", questions, "multiple_choice", {"acc": "mean"}, **fields)
    (tasks / "letters.yaml").write_text(letters)
    return {
        "tasks": ["perplexity", "letters"],
        "task_data": {"perplexity": str(texts)},
        "task_include_path": str(tasks),
    }


def test_a_continuation_that_no_row_holds_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "lambada.jsonl").write_text('{"context": "A", "continuation": "word"}\n')
    model = tiny_gpt2(tmp_path / "model", [TEXT])
    block = Evaluation(tasks=["lambada"], task_data={"lambada": str(tmp_path / "lambada.jsonl")})
    tokens = LiveTasks(block, model, GPT2Config(vocab_size=1000), 9)._tokenizer(" word").input_ids
    with pytest.raises(
        UserError, match=rf"tasks: lambada: a continuation of {len(tokens)} tokens is longer than "
    ):
        LiveTasks(block, model, GPT2Config(vocab_size=1000), len(tokens) - 1)


def losses(
    directory: Path, settings: dict[str, Any], stage: int, live: bool
) -> tuple[list[float], list[Any]]:
    """Of three steps with dropout, and what the tasks gave between them."""
    from zero_tp.engine.engine import TrainingEngine
    from zero_tp.model.causal_lm import CausalLM
    from zero_tp.model.huggingface import ZeroTPForCausalLM

    topology = cached(("live tasks", 2), lambda: Topology(2, sequence=True))
    config = GPT2Config.from_pretrained(str(directory), attn_implementation="sdpa")
    tasks = LiveTasks(Evaluation(**settings), directory, config, 32)
    model = ZeroTPForCausalLM if live else CausalLM
    engine = TrainingEngine.from_dict(
        config, topology, deepspeed_settings(stage), seed=3, model=model
    )
    found, figures = [], []
    for step in range(3):
        generator = torch.Generator().manual_seed(100 * step + topology.data_rank)
        tokens = torch.randint(config.vocab_size, (2, 33), generator=generator)
        found.append(engine.train_step([(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())]))
        if live:
            figures.append(tasks.evaluate(engine, 2))
    return found, figures


@pytest.mark.thorough
@pytest.mark.parametrize("stage", [2, 3])
def test_live_tasks_do_not_change_training(ranks: Pools, tmp_path: Path, stage: int) -> None:
    settings = write_files(tmp_path)
    model = tiny_gpt2(tmp_path / "model", [TEXT])
    without = ranks(4).run(losses, model, settings, stage, False)
    with_tasks = ranks(4).run(losses, model, settings, stage, True)
    assert [each for each, _ in with_tasks] == [each for each, _ in without], "bit for bit"
    figures = [each for _, each in with_tasks]
    assert all(each == figures[0] for each in figures[1:]), "ranks disagree"
    assert set(figures[0][0]) == {"perplexity", "letters"} and set(figures[0][0]["letters"]) == {
        "acc"
    }
    perplexities = [each["perplexity"]["perplexity"] for each in figures[0]]
    assert len(set(perplexities)) == 3, "each is of the weights of its step"


@THOROUGH
def test_a_run_and_its_evaluation_as_commands(workplace: Path, tmp_path: Path) -> None:
    config = json.loads((workplace / "small.json").read_text())
    config["zero_tp"]["evaluation"] |= write_files(tmp_path) | {"interval": 2}
    config["zero_tp"]["training"]["steps"] = 3
    config["zero_tp"]["parallel"]["tensor"] = 1
    config["zero_tp"]["data"]["sequence_length"] = 32  # half of the model's positions
    (tmp_path / "tasks.json").write_text(json.dumps(config))
    directory = str(tmp_path / "run")
    done = script(
        "launch/pretrain.py",
        workplace,
        "--deepspeed_config",
        str(tmp_path / "tasks.json"),
        "--output-dir",
        directory,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    logged = [
        record for record in metrics_of(tmp_path / "run") if "perplexity/perplexity" in record
    ]
    assert [record["step"] for record in logged] == [2, 3]
    names = ("perplexity", "word_perplexity", "bits_per_byte")
    assert set(logged[0]) == {"step", "letters/acc", *(f"perplexity/{name}" for name in names)}
    assert "letters at step 2: acc " in done.stdout

    # The run as it is, without an export, over two ranks.
    settings = config["zero_tp"]["evaluation"]
    sizes = "--batch-size 2 --tensor-parallel 2 --sequence-length 32"
    words = f"--model {directory} --tasks perplexity {sizes}".split()
    words += [
        "--data",
        f"perplexity={settings['task_data']['perplexity']}",
        "--output",
        str(tmp_path / "two.json"),
    ]
    on_two = run([*launch(2, script="eval/zero_shot.py"), *words], workplace)
    assert on_two.returncode == 0, on_two.stdout + on_two.stderr
    report = json.loads((tmp_path / "two.json").read_text())
    assert report["model"]["step"] == 3 and report["settings"]["tensor_parallel"] == 2
    found = report["tasks"]["perplexity"]["perplexity"]
    assert found == pytest.approx(logged[-1]["perplexity/perplexity"], rel=1e-5)
    assert on_two.stdout.count("task ") == 1, "one rank shows the table"
