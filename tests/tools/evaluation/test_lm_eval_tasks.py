"""lm-eval's tasks: task files are data, questions of one's own need none, and mistakes are
refused by name.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from lm_eval.tasks import TaskManager

from tests.support.harness import native_model, reference
from tests.support.lm_eval_tasks import task_file
from tests.tiers import THOROUGH
from zero_tp.base.errors import UserError
from zero_tp.tools.evaluation.eval_model import EvalModel
from zero_tp.tools.evaluation.lm_eval_tasks import LM_EVAL_TASKS
from zero_tp.tools.evaluation.settings import TaskOptions
from zero_tp.tools.evaluation.task import CHOICE_FIELDS, Task
from zero_tp.tools.evaluation.zero_shot import make_tasks

LIMIT = 25


def test_random_states_are_left_alone(model: Path, tasks: Path) -> None:
    (task,) = make_tasks(
        ["copa_local"], {}, TaskOptions(include_path=tasks, limit=3, num_fewshot=2)
    )
    eval_model = native_model(model)

    def states() -> list[Any]:
        numpy_state: Any = np.random.get_state()
        return [random.getstate(), numpy_state[1].tolist(), torch.get_rng_state().tolist()]

    before = states()
    first = task.compute_metrics(eval_model)
    assert states() == before
    # The examples before each question are drawn anew, not further, the second time.
    assert task.compute_metrics(eval_model)["metrics"] == first["metrics"]
    assert first["lm_eval"]["n-shot"] == {"copa_local": 2}


@THOROUGH
def test_a_file_for_a_task_of_lm_evals_own(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "piqa.jsonl"
    line = (
        '{"goal": "To boil an egg", "sol1": "put it in water", "sol2": "put it in sand", "label": '
        "0}\n"
    )
    file.write_text(line * 3)
    (task,) = make_tasks(["piqa"], {"piqa": file}, TaskOptions())
    result = task.compute_metrics(native_model(model))
    assert result["examples"] == 3 and result["metrics"]["acc,none"] in (0.0, 1.0)
    assert result["data"]["piqa"]["data_files"] == {"validation": str(file)}


def refusal(names: list[str], data: dict[str, Path] | None = None, **options: object) -> str:
    with pytest.raises(UserError) as caught:
        make_tasks(names, data or {}, TaskOptions(**options))  # type: ignore[arg-type]
    return str(caught.value)


def test_a_directory_without_tasks_is_refused(tmp_path: Path) -> None:
    assert re.search(
        "--include-path .*no such directory",
        refusal(["copa_local"], include_path=tmp_path / "none"),
    )
    assert re.search("no task file", refusal(["copa_local"], include_path=tmp_path))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("task: [copa_local", r".*line 1.*"),
        ("include: b.yaml", "Include cycle.*"),
        ("include: none.yaml", r".*none\.yaml'"),
        ("- copa_local", "Expected YAML dict.*"),
        ("task: [copa_local]", ".*unhashable.*"),
        *(
            (text, "a name in it is not a string; write it in quotes")
            for text in (
                "task: yes",
                "task:",
                "task: other\ntag: [a, null]",
                "group: 5\ntask: [copa_local]",
            )
        ),
        ("task: copa_local", 'another file has the task "copa_local" already'),
    ],
)
def test_a_task_file_that_lm_eval_would_skip_is_refused(
    tmp_path: Path, text: str, problem: str
) -> None:
    (tmp_path / "a.yaml").write_text("task: copa_local\ndataset_path: json\n")
    (tmp_path / "b.yaml").write_text(text)
    message = refusal(["copa_local"], include_path=tmp_path)
    assert re.fullmatch(
        rf"{tmp_path}/b\.yaml can't be read \({problem}\); correct that file", message
    ), message


@pytest.fixture
def without_lm_evals_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of a directory know no tasks but the directory's: to index lm-eval's own takes
    seconds.
    """

    def without_defaults(include_path: str | None = None, *, include_defaults: bool) -> TaskManager:
        return TaskManager(include_path=include_path, include_defaults=False)

    monkeypatch.setattr("zero_tp.tools.evaluation.task_index.TaskManager", without_defaults)


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ("copa_local", "all: a group without tasks; write its tasks as a list"),
        ("[7]", r"all: lm-eval can't load it \(Unsupported sub-entry 7 in group 'all'\)"),
    ],
)
@pytest.mark.usefixtures("without_lm_evals_tasks")
def test_a_group_whose_list_has_no_names_is_refused(
    tmp_path: Path, members: str, words: str
) -> None:
    (tmp_path / "b.yaml").write_text(f"group: all\ntask: {members}")
    assert re.match(words, refusal(["all"], include_path=tmp_path))


@pytest.mark.usefixtures("without_lm_evals_tasks")
def test_tasks_of_a_tag_or_of_a_group_without_a_mean_are_logged(
    model: Path, shared_file: Callable[[str], Path], tmp_path: Path
) -> None:
    fields = dict(
        zip(("doc_to_text", "doc_to_choice", "doc_to_target"), CHOICE_FIELDS, strict=True)
    )
    for name in ("one", "two"):
        file = task_file(
            name,
            shared_file("data/copa.jsonl"),
            "multiple_choice",
            {"acc": "mean"},
            tag="both",
            **fields,
        )
        (tmp_path / f"{name}.yaml").write_text(file)
    (tmp_path / "all.yaml").write_text("group: all\ntask: [one, two]")
    for task in make_tasks(["both", "all"], {}, TaskOptions(include_path=tmp_path, limit=2)):
        assert task.metrics_to_log(task.compute_metrics(native_model(model))).keys() == {
            "one/acc",
            "two/acc",
        }, task.name


CODE = (
    "task: mine\ndataset_path: json\noutput_type: loglikelihood\ndoc_to_text: !function code.text\n"
)


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
        (
            "mine.yaml",
            "group: mine\ntask: [{task: new, metric_list: [{metric: /some/directory}]}]\n",
        ),
        ("mine.yaml", "group: mine\ntask: [labelled]\n"),
        ("tagged.yaml", CODE.replace("mine", "tagged") + "tag: mine\n"),
    ],
)
@pytest.mark.usefixtures("without_lm_evals_tasks")
def test_no_way_to_a_task_runs_its_python(tmp_path: Path, file: str, text: str) -> None:
    """Named, included, in a group or by a tag."""
    directory = tmp_path / "tasks"
    directory.mkdir()
    (directory / "code.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\ndef text(doc):\n    return 'one'\n"
    )
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
    records = [json.loads(line) for line in file.read_text().splitlines()]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "copa.parquet")
    expected = reference(model, tasks, ["copa_local"], LIMIT)["copa_local"][0]
    for path in (file, tmp_path / "copa.parquet"):
        (task,) = make_tasks(
            ["multiple_choice"], {"multiple_choice": path}, TaskOptions(limit=LIMIT)
        )
        found = task.compute_metrics(native_model(model))
        assert found["examples"] == LIMIT
        for metric in ("acc,none", "acc_norm,none"):
            assert found["metrics"][metric] == expected[metric]
    assert re.search(
        "multiple_choice needs JSON lines with query, choices, gold", refusal(["multiple_choice"])
    )
    other = tmp_path / "other.jsonl"
    other.write_text('{"question": "one", "choices": ["a", "b"]}\n')
    assert re.search(
        "no field query: multiple_choice reads query, choices, gold, the file has question, "
        "choices; rename",
        refusal(["multiple_choice"], {"multiple_choice": other}),
    )
    assert re.search(
        "no examples for --num-fewshot 1",
        refusal(["multiple_choice"], {"multiple_choice": file}, num_fewshot=1),
    )


@THOROUGH
def test_mistakes_with_lm_evals_own_tasks(
    tasks: Path, tmp_path: Path, shared_file: Callable[[str], Path]
) -> None:
    """lm-eval reads all its task files and tries the network."""
    message = refusal(["copa"], {"copa": shared_file("data/copa.jsonl")})
    assert "copa reads choice1, choice2, label, premise, question, the file has " in message
    assert "or give a file with query, choices, gold as --tasks multiple_choice" in message
    assert re.search(
        "copa_locl: unknown task; did you mean copa_local",
        refusal(["copa_locl"], include_path=tasks),
    )
    assert re.search("lambda: unknown task; did you mean lambada or llama or ", refusal(["lambda"]))
    assert re.search(
        r"arc_easy: lm-eval can't load it .* --data arc_easy=FILE", refusal(["arc_easy"])
    )
    file = tmp_path / "x.jsonl"
    file.write_text('{"other": 1}\n')
    wanted = (
        "no field answerKey: arc_easy reads answerKey, choices, question, the file has other; "
        "rename its fields"
    )
    assert wanted in refusal(["arc_easy"], {"arc_easy": file})
    assert re.search(
        "no examples for --num-fewshot 2", refusal(["arc_easy"], {"arc_easy": file}, num_fewshot=2)
    )
    assert re.search("mmlu: a group of tasks takes no file", refusal(["mmlu"], {"mmlu": file}))


@pytest.mark.parametrize("name", ["hellaswag", "wikitext103"])
def test_a_missing_lm_eval_is_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero_tp.tools.evaluation.task.find_spec", lambda package: None)
    with pytest.raises(
        UserError, match=r"^[^\n]* needs lm-eval, which is not installed: pip install [^\n]*$"
    ):
        make_tasks([name], {}, TaskOptions())


def test_task_files_run_no_python(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, directory = tmp_path / "x.jsonl", tmp_path / "tasks"
    file.write_text(
        "".join(f'{{"text": "one", "answer": "two", "number": {number}}}\n' for number in (1, 2))
    )
    directory.mkdir()
    (directory / "code.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\ndef text(doc):\n    return 'one'\n"
    )
    plain = {
        "doc_to_text": "{{text}}",
        "doc_to_target": " {{answer}}",
        "metric_list": [{"metric": "acc"}],
    }

    def task(allow: bool = False, **changes: object) -> Task:
        fields: dict[str, Any] = {"output_type": "loglikelihood", **plain, **changes}
        (directory / "mine.yaml").write_text(task_file("mine", file, metrics={}, **fields))
        return make_tasks(["mine"], {}, TaskOptions(include_path=directory, allow_task_code=allow))[
            0
        ]

    def refuses(message: str, **changes: object) -> None:
        with pytest.raises(UserError, match=message):
            task(**changes)  # type: ignore[arg-type]
        assert not (tmp_path / "ran").exists()

    eval_model = native_model(model)
    expected = task().compute_metrics(eval_model)["metrics"]
    refuses(
        r"mine: .*mine\.yaml: it runs Python \(!function code\.text\)",
        doc_to_text="!function code.text",
    )
    included = str(LM_EVAL_TASKS / "super_glue" / "copa" / "default.yaml")
    refuses(
        r"mine: .*mine\.yaml: it runs Python \(!function utils\.",
        include=included,
        doc_to_text=None,
    )
    refuses("mine: .* is unsafe", doc_to_text="{{ text.__class__.__mro__ }}")
    refuses('"/some/directory" is not one of lm-eval', metric_list=[{"metric": "/some/directory"}])
    refuses('"acc" is not one of lm-eval', metric_list=[{"metric": "acc", "hf_evaluate": True}])
    refuses(r"mine: lm-eval can't load it \('nothing' is undefined\)", doc_to_text="{{ nothing }}")
    refuses(
        "mine: document 2 of its data doesn't fit its task file",
        doc_to_text="{{ 1 // (number - 2) }}",
    )
    refuses(
        r"mine: document 1 of its data .*a request is \[.*, true\], not text", doc_to_target=True
    )
    exact = {
        "output_type": "generate_until",
        "doc_to_target": 1,
        "generation_kwargs": {"max_gen_toks": 2},
    }
    exact["metric_list"] = [{"metric": "exact_match", "regexes_to_ignore": ["("]}]
    with pytest.raises(UserError, match=r"mine: lm-eval can't evaluate it .*its task file"):
        task(**exact).compute_metrics(eval_model)  # type: ignore[arg-type]
    # No fault of the task file.
    with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):
        patched.setattr(EvalModel, "score", lambda *_: 1 // 0)
        task().compute_metrics(eval_model)
    os.mkfifo(directory / "pipe.yaml")
    refuses("not a regular file")
    (directory / "pipe.yaml").unlink()
    allowed = task(True, doc_to_text="!function code.text")
    assert (tmp_path / "ran").exists() and allowed.compute_metrics(eval_model)[
        "metrics"
    ] == expected
    file.write_text('{"text": "one", "answer": "two"}\n{"text": "", "answer": "{{"}\n')
    assert task().compute_metrics(eval_model)["examples"] == 2, "a document is no template"
