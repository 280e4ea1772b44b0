"""lm-eval's tasks by our adapter against lm-eval's own HFLM, in one process; and what is asked wrongly."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.harness import assert_same, native_model, ours, parallel_model, reference
from tests.support.lm_eval_tasks import CHOSEN, write_tasks
from tests.support.tiny_models import tiny_gpt2
from tests.tiers import THOROUGH
from zero_tp.errors import UserError
from zero_tp.evaluation.eval_model import EvalModel
from zero_tp.evaluation.evaluation_report import write_samples
from zero_tp.evaluation.lm_eval_model import merge_single_tokens
from zero_tp.evaluation.lm_eval_tasks import LM_EVAL_TASKS
from zero_tp.evaluation.rows import Row
from zero_tp.evaluation.task import Task, TaskOptions
from zero_tp.evaluation.zero_shot import make_tasks
from zero_tp.parallel.scores import TokenScores
from zero_tp.topology import Topology

LIMIT = 25


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory, shared_file: Callable[[str], Path]) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"), shared_file)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, shared_file: Callable[[str], Path]) -> Path:
    text = shared_file("data/lambada_openai_first1000.jsonl").read_text()[:20_000]
    return tiny_gpt2(tmp_path_factory.mktemp("models") / "tiny", [text])


@pytest.mark.parametrize("kind", ["native", "parallel"])
def test_equals_lm_evals_own_adapter(model: Path, tasks: Path, kind: str) -> None:
    eval_model = native_model(model) if kind == "native" else parallel_model(model, Topology())
    # Contexts longer than the model's 64 positions are cut on the left, as there.
    names = [*CHOSEN, "generate_local"] if kind == "native" else list(CHOSEN)
    assert assert_same(ours(eval_model, tasks, names, LIMIT), reference(model, tasks, names, LIMIT)) > 200
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


def test_rows_of_one_token_are_merged() -> None:
    def row(*tokens: int, scored: int = 1) -> Row:
        return Row(np.array(tokens), scored)

    rows, places = merge_single_tokens([row(1, 2, 3), row(1, 2, 4), row(1, 2, 3), row(1, 3, 4), row(1, 2, 5, scored=2)])
    assert [(each.tokens.tolist(), each.scored, each.alternatives) for each in rows] == [
        ([1, 2, 3], 1, (4,)),
        ([1, 3, 4], 1, ()),
        ([1, 2, 5], 2, ()),
    ]
    assert places == [(0, 0), (0, 1), (0, 0), (1, 0), (2, 0)]


def test_sampled_text_is_the_same_again(model: Path, tmp_path: Path, shared_file: Callable[[str], Path]) -> None:
    sampled = write_tasks(tmp_path, shared_file, sample=True)
    first, second = (ours(native_model(model), sampled, ["generate_local"], 6) for _ in range(2))
    assert assert_same(first, second) == 6
    greedy = write_tasks(tmp_path, shared_file)
    assert ours(native_model(model), greedy, ["generate_local"], 6)["generate_local"][1] != first["generate_local"][1]


TEMPLATE = "{% for message in messages %}<{{ message.role }}> {{ message.content }}\n{% endfor %}<assistant>"


@THOROUGH
def test_chat_templates_and_samples_are_lm_evals(model: Path, tasks: Path, tmp_path: Path) -> None:
    """Examples before a question are turns of their own; each request stands with its answer."""
    import shutil

    from lm_eval import evaluator
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import AutoModelForCausalLM, AutoTokenizer

    chatting = tmp_path / "chatting"
    shutil.copytree(model, chatting)
    tokenizer = AutoTokenizer.from_pretrained(str(chatting))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(str(chatting))
    options = TaskOptions(include_path=tasks, limit=4, num_fewshot=1, apply_chat_template=True, log_samples=True)
    (task,) = make_tasks(["copa_local"], {}, options)
    found = task.run(native_model(chatting))["samples"]["copa_local"]
    loaded = TaskManager(include_path=str(tasks), include_defaults=False).load(["copa_local"])
    for each in loaded["tasks"].values():
        each.set_config(key="num_fewshot", value=1)
        each.set_fewshot_seed(1234)
    lm = HFLM(pretrained=AutoModelForCausalLM.from_pretrained(str(chatting)), tokenizer=tokenizer, batch_size=4)
    results = evaluator.evaluate(
        lm, loaded, limit=4, bootstrap_iters=0, log_samples=True, apply_chat_template=True, fewshot_as_multiturn=True
    )
    expected = results["samples"]["copa_local"]
    assert len(found) == len(expected) == 4
    for ours_, theirs in zip(found, expected, strict=True):
        assert ours_["arguments"] == json.loads(json.dumps(theirs["arguments"]))
        assert "<assistant>" in json.dumps(ours_["arguments"]) and ours_["acc"] == theirs["acc"]
    with pytest.raises(UserError, match="no chat template"):
        task.run(native_model(model))
    with pytest.raises(UserError, match="--log-samples: lambada"):
        make_tasks(["lambada"], {}, TaskOptions(log_samples=True))


def test_samples_are_files_beside_the_report(tmp_path: Path) -> None:
    """One for each task, whatever its name."""
    samples = {"../mine/a": [{"acc": 1}, {"acc": 0}], "../mine a": [{"acc": 2}], "copa_local": [{"acc": 3}]}
    report: dict[str, Any] = {"tasks": {"mine": {"samples": dict(samples)}, "perplexity": {}}}
    files = write_samples(tmp_path / "results.json", report)
    assert [file.name for file in files] == [
        f"results_samples_{name}.jsonl" for name in ("..%2Fmine%2Fa", "..%2Fmine%20a", "copa_local")
    ]
    for file, told in zip(files, samples.values(), strict=True):
        assert file.parent == tmp_path and [json.loads(line) for line in file.read_text().splitlines()] == told
    assert report == {"tasks": {"mine": {}, "perplexity": {}}}


def test_random_states_are_left_alone(model: Path, tasks: Path) -> None:
    import random

    (task,) = make_tasks(["copa_local"], {}, TaskOptions(include_path=tasks, limit=3, num_fewshot=2))
    eval_model = native_model(model)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[index]
    first = task.run(eval_model)
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[index]
    assert before[:2] == after[:2] and torch.equal(before[2], after[2])
    # The examples before each question are drawn anew, not further, the second time.
    assert task.run(eval_model)["metrics"] == first["metrics"]
    assert first["lm_eval"]["n-shot"] == {"copa_local": 2}


@THOROUGH
def test_a_file_for_a_task_of_lm_evals_own(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "piqa.jsonl"
    line = '{"goal": "To boil an egg", "sol1": "put it in water", "sol2": "put it in sand", "label": 0}\n'
    file.write_text(line * 3)
    (task,) = make_tasks(["piqa"], {"piqa": file}, TaskOptions())
    result = task.run(native_model(model))
    assert result["examples"] == 3 and result["metrics"]["acc,none"] in (0.0, 1.0)
    assert result["data"]["piqa"]["data_files"] == {"validation": str(file)}


def refusal(names: list[str], data: dict[str, Path] | None = None, **options: object) -> str:
    with pytest.raises(UserError) as caught:
        make_tasks(names, data or {}, TaskOptions(**options))  # type: ignore[arg-type]
    return str(caught.value)


def test_a_directory_without_tasks_is_refused(tmp_path: Path) -> None:
    assert re.search("--include-path .*no such directory", refusal(["copa_local"], include_path=tmp_path / "none"))
    assert re.search("no task file", refusal(["copa_local"], include_path=tmp_path))
    (tmp_path / "copa.yaml").write_text("task: copa_local\ndataset_path: json")
    (tmp_path / "broken.yaml").write_text("task: [copa_local")
    expected = r"^.*broken\.yaml can't be read \(.*line 1.*\); correct that file$"
    assert re.search(expected, refusal(["copa_local"], include_path=tmp_path))
    for text, problem in (
        ("include: broken.yaml", "broken.yaml can't be read (Include cycle"),
        ("include: none.yaml", "none.yaml'); correct that file"),
        ("include: 5", "broken.yaml can't be read"),
        ("- copa_local", "broken.yaml can't be read (Expected YAML dict"),
    ):
        (tmp_path / "broken.yaml").write_text(text)
        assert problem in refusal(["copa_local"], include_path=tmp_path)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("task: 2147483647", "the name 2147483647 is not a string; write it in quotes"),
        ("task: yes", "the name true is not a string; write it in quotes"),
        ("task:", "the name null is not a string; write it in quotes"),
        ("task: [copa_local]", 'the name ["copa_local"] is not a string; write it in quotes'),
        ("task: {2024-01-01: 1}", "the name an object is not a string; write it in quotes"),
        ("task: other\ntag: 5", "the name 5 is not a string; write it in quotes"),
        ("task: other\ntag: [a, null]", "the name null is not a string; write it in quotes"),
        ("group: 5\ntask: [copa_local]", "the name 5 is not a string; write it in quotes"),
    ],
)
def test_names_of_task_files_that_are_no_strings_are_refused(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "a.yaml").write_text("task: copa_local\ndataset_path: json\n")
    (tmp_path / "b.yaml").write_text(text)
    assert refusal(["copa_local"], include_path=tmp_path) == (
        f"{tmp_path / 'b.yaml'} can't be read ({problem}); correct that file"
    )


@pytest.fixture
def without_lm_evals_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of a directory know no tasks but the directory's: to index lm-eval's own takes seconds."""
    from lm_eval.tasks import TaskManager

    def without_defaults(include_path: str, include_defaults: bool) -> TaskManager:
        return TaskManager(include_path=include_path, include_defaults=False)

    monkeypatch.setattr("zero_tp.evaluation.lm_eval_tasks.TaskManager", without_defaults)


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ("copa_local", "all: a group without tasks; write their names as a list"),
        ("[7]", r"all: lm-eval can't load it \(Unsupported sub-entry 7 in group 'all'\)"),
    ],
)
@pytest.mark.usefixtures("without_lm_evals_tasks")
def test_a_group_whose_list_has_no_names_is_refused(tmp_path: Path, members: str, words: str) -> None:
    (tmp_path / "b.yaml").write_text(f"group: all\ntask: {members}")
    assert re.match(words, refusal(["all"], include_path=tmp_path))


CODE = "task: mine\ndataset_path: json\noutput_type: loglikelihood\ndoc_to_text: !function code.text\n"


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("mine.yaml", CODE),
        ("mine.yaml", "task: mine\ninclude: other.yml\n"),
        ("mine.yaml", "task: mine\nclass: !function code.text\n"),
        ("mine.yaml", "task: [[{a: !function code.text}]]\ngroup: mine\n"),
        ("mine.yaml", "group: mine\ntask: [inner]\n"),
        ("mine.yaml", "group: mine\ntask: [{task: inner, num_fewshot: 1}]\n"),
        ("mine.yaml", "group: mine\ntask: [{group: nested, task: [inner]}]\n"),
        ("mine.yaml", "group: mine\ntask: [{task: new, process_docs: !function code.text}]\n"),
        ("mine.yaml", "group: mine\ntask: [{task: new, metric_list: [{metric: /some/directory}]}]\n"),
        ("mine.yaml", "group: mine\ntask: [labelled]\n"),
        ("tagged.yaml", CODE.replace("mine", "tagged") + "tag: mine\n"),
    ],
)
@pytest.mark.usefixtures("without_lm_evals_tasks")
def test_no_way_to_a_task_runs_its_python(tmp_path: Path, file: str, text: str) -> None:
    """Named, included, in a group or by a tag."""
    directory = tmp_path / "tasks"
    directory.mkdir()
    (directory / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef text(doc):\n    return 'one'\n")
    (directory / "inner.yaml").write_text(CODE.replace("mine", "inner") + "tag: labelled\n")
    (directory / "other.yml").write_text(CODE)
    (directory / file).write_text(text)
    refusal(["mine"], include_path=directory)
    assert not (tmp_path / "ran").exists()


def test_questions_of_ones_own_need_no_task_file(
    model: Path, tasks: Path, shared_file: Callable[[str], Path], tmp_path: Path
) -> None:
    """Their figures are lm-eval's of a task file for the same questions."""
    file = shared_file("data/copa.jsonl")
    (task,) = make_tasks(["multiple_choice"], {"multiple_choice": file}, TaskOptions(limit=LIMIT))
    found = task.run(native_model(model))
    expected = reference(model, tasks, ["copa_local"], LIMIT)["copa_local"][0]
    assert found["examples"] == LIMIT
    for metric in ("acc,none", "acc_norm,none"):
        assert found["metrics"][metric] == expected[metric]
    assert re.search("multiple_choice needs JSON lines with query, choices, gold", refusal(["multiple_choice"]))
    other = tmp_path / "other.jsonl"
    other.write_text('{"question": "one", "choices": ["a", "b"]}\n')
    assert re.search(
        "no field query: multiple_choice reads query, choices, gold, the file has question, choices; rename",
        refusal(["multiple_choice"], {"multiple_choice": other}),
    )
    assert re.search(
        "no examples for --num-fewshot 1", refusal(["multiple_choice"], {"multiple_choice": file}, num_fewshot=1)
    )


@THOROUGH
def test_a_file_with_other_fields_says_which_are_wanted(shared_file: Callable[[str], Path]) -> None:
    """As the functions of lm-eval's task read them."""
    told = refusal(["copa"], {"copa": shared_file("data/copa.jsonl")})
    assert "copa reads choice1, choice2, label, premise, question, the file has " in told
    assert "--tasks multiple_choice" in told


@THOROUGH
def test_mistakes(tasks: Path, tmp_path: Path) -> None:
    """lm-eval reads all its task files for these, and asks the network."""
    assert re.search("copa_locl: unknown task; did you mean copa_local", refusal(["copa_locl"], include_path=tasks))
    assert re.search("lambda: unknown task; did you mean lambada", refusal(["lambda"]))
    assert re.search(r"arc_easy: lm-eval can't load it .* --data arc_easy=FILE", refusal(["arc_easy"]))
    file = tmp_path / "x.jsonl"
    file.write_text('{"other": 1}\n')
    wanted = "no field answerKey: arc_easy reads answerKey, choices, question, the file has other; rename its fields"
    assert wanted in refusal(["arc_easy"], {"arc_easy": file})
    assert re.search("no examples for --num-fewshot 2", refusal(["arc_easy"], {"arc_easy": file}, num_fewshot=2))
    assert re.search("mmlu: it is a group of tasks", refusal(["mmlu"], {"mmlu": file}))


@pytest.mark.parametrize("name", ["hellaswag", "wikitext103"])
def test_a_missing_lm_eval_is_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero_tp.evaluation.task.find_spec", lambda package: None)
    with pytest.raises(UserError, match=r"^[^\n]* needs lm-eval, which is not installed: pip install [^\n]*$"):
        make_tasks([name], {}, TaskOptions())


def test_task_files_run_no_python(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, directory = tmp_path / "x.jsonl", tmp_path / "tasks"
    file.write_text("".join(f'{{"text": "one", "answer": "two", "number": {number}}}\n' for number in (1, 2)))
    directory.mkdir()
    (directory / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef text(doc):\n    return 'one'\n")
    plain: dict[str, Any] = {
        "task": "mine",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}},
    }
    plain |= {"output_type": "loglikelihood", "test_split": "test", "doc_to_text": "{{text}}"}
    plain |= {"doc_to_target": " {{answer}}", "metric_list": [{"metric": "acc"}]}

    def task(allow: bool = False, **changes: object) -> Task:
        text = json.dumps(plain | changes).replace('"!function code.text"', "!function code.text")
        (directory / "mine.yaml").write_text(text)
        return make_tasks(["mine"], {}, TaskOptions(include_path=directory, allow_task_code=allow))[0]

    def refuses(message: str, **changes: object) -> None:
        with pytest.raises(UserError, match=message):
            task(**changes)  # type: ignore[arg-type]
        assert not (tmp_path / "ran").exists()

    eval_model = native_model(model)
    expected = task().run(eval_model)["metrics"]
    refuses(r"mine: .*mine\.yaml: it runs Python \(!function code\.text\)", doc_to_text="!function code.text")
    included = str(LM_EVAL_TASKS / "super_glue" / "copa" / "default.yaml")
    refuses(r"mine: .*mine\.yaml: it runs Python \(!function utils\.", include=included, doc_to_text=None)
    refuses("mine: .* is unsafe", doc_to_text="{{ text.__class__.__mro__ }}")
    refuses('"/some/directory" is none of lm-eval', metric_list=[{"metric": "/some/directory"}])
    refuses('"acc" is none of lm-eval', metric_list=[{"metric": "acc", "hf_evaluate": True}])
    refuses(r"mine: lm-eval can't load it \('nothing' is undefined\)", doc_to_text="{{ nothing }}")
    refuses("mine: document 2 of its data doesn't fit its task file", doc_to_text="{{ 1 // (number - 2) }}")
    refuses(r"mine: document 1 of its data .*a request is \[.*, true\], not text", doc_to_target=True)
    exact = {"output_type": "generate_until", "doc_to_target": 1, "generation_kwargs": {"max_gen_toks": 2}}
    exact["metric_list"] = [{"metric": "exact_match", "regexes_to_ignore": ["("]}]
    with pytest.raises(UserError, match=r"mine: lm-eval can't evaluate it .*its task file"):
        task(**exact).run(eval_model)  # type: ignore[arg-type]
    with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):  # no fault of the task file
        patched.setattr(EvalModel, "score", lambda *_: 1 // 0)
        task().run(eval_model)
    os.mkfifo(directory / "pipe.yaml")
    refuses("not a regular file")
    (directory / "pipe.yaml").unlink()
    allowed = task(True, doc_to_text="!function code.text")
    assert (tmp_path / "ran").exists() and allowed.run(eval_model)["metrics"] == expected
    file.write_text('{"text": "one", "answer": "two"}\n{"text": "", "answer": "{{"}\n')
    assert task().run(eval_model)["examples"] == 2, "a document is no template"


@pytest.mark.parametrize(("world", "expected"), [(1, UserError), (2, RuntimeError)])
def test_a_lost_peer_is_no_fault_of_the_task(
    model: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch, world: int, expected: type[Exception]
) -> None:
    def lost(*_: object) -> None:
        raise RuntimeError("Connection closed by peer")

    (task,) = make_tasks(["generate_local"], {}, TaskOptions(include_path=tasks, limit=2))
    monkeypatch.setattr(EvalModel, "map_batches", lost)
    with pytest.raises(expected, match="Connection closed by peer") as raised:
        task.run(replace(native_model(model), topology=Topology(world=world)))
    assert raised.type is expected


def test_a_model_that_cannot_generate(model: Path, tasks: Path) -> None:
    (task,) = make_tasks(["generate_local"], {}, TaskOptions(include_path=tasks, limit=2))
    eval_model = native_model(model)
    with pytest.raises(UserError, match="object can't generate text"):
        task.run(replace(eval_model, module=object()))
    with pytest.raises(UserError, match="generates 12 tokens, and the model's 10 positions leave no room"):
        task.run(replace(eval_model, positions=10))
