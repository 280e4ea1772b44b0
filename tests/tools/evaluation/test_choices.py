"""Multiple-choice questions whose accuracy lm-eval would report as 0 are refused with their
place.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import GPT2Config

from tests.support.harness import native_model, reference
from tests.support.lm_eval_tasks import task_file
from zero_tp.base.errors import UserError
from zero_tp.base.settings.schema import Evaluation
from zero_tp.tools.evaluation.live_tasks import LiveTasks
from zero_tp.tools.evaluation.settings import TaskOptions
from zero_tp.tools.evaluation.zero_shot import make_tasks

QUESTION = {"query": "Some words of a", "choices": ["text", "word"], "gold": 0}
WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"gold": 2},
        r"gold is 2, and there are 2 choices; write the right choice's index, counted from 0",
    ),
    ({"gold": -1}, r"gold is -1, and there are 2 choices"),
    ({"gold": "1"}, r'gold is "1", which is none of the choices'),
    ({"gold": None}, r"gold is null; write the right choice's index"),
    ({"gold": 0.5}, r"gold is 0\.5; write the right choice's index"),
    ({"gold": []}, r"gold is empty"),
    ({"choices": "text"}, r"choices is a string; write a list of texts"),
    ({"choices": None}, r"choices is null; write a list of texts"),
    ({"choices": ["text", 1]}, r"choices\[1\] is an integer; write a text"),
    ({"choices": ["text", ""]}, r"choices\[1\] is empty; write a text"),
    ({"choices": ["text"]}, r"choices has 1 choices; write at least 2"),
    ({"query": None}, r"query is null; write a text"),
]


def write(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def message(file: Path) -> str:
    with pytest.raises(UserError) as caught:
        make_tasks(["multiple_choice"], {"multiple_choice": file}, TaskOptions(limit=1))
    return str(caught.value)


@pytest.mark.parametrize(("change", "problem"), WRONG)
def test_a_question_without_a_score_is_refused_with_its_line(
    change: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    file = write(tmp_path / "mine.jsonl", QUESTION, QUESTION | change)
    assert re.match(rf"{file}:2: {problem}", message(file)), message(file)


def test_a_missing_field_and_other_formats(tmp_path: Path) -> None:
    file = write(tmp_path / "mine.jsonl", QUESTION, {"query": "one", "choices": ["a", "b"]})
    assert re.match(rf"{file}:2: no field gold", message(file))
    table = tmp_path / "mine.parquet"
    pq.write_table(pa.Table.from_pylist([QUESTION, QUESTION | {"gold": 2}]), table)
    assert re.match(rf"{table}:2: gold is 2", message(table))
    (tmp_path / "mine.csv").write_text("query,choices,gold\none,\"['a', 'b']\",0\n")
    assert re.search(
        r"a \.csv file has no lists of choices; write JSON lines", message(tmp_path / "mine.csv")
    )


def test_a_run_refuses_them_before_training(small_model: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "mine.jsonl", QUESTION | {"gold": 2})
    block = Evaluation(tasks=["multiple_choice"], task_data={"multiple_choice": str(file)})
    with pytest.raises(UserError, match=rf"zero_tp\.evaluation\.tasks: {file}:1: gold is 2"):
        LiveTasks(block, small_model, GPT2Config(vocab_size=1000), 32)


def test_the_right_choice_as_a_text_equals_its_index(small_model: Path, tmp_path: Path) -> None:
    """lm-eval's accuracy of both ways to write it is the same."""
    scores = []
    for name, golds in (("index", (0, 1, 1)), ("text", ("text", "word", "word"))):
        file = write(tmp_path / f"{name}.jsonl", *(QUESTION | {"gold": gold} for gold in golds))
        (task,) = make_tasks(["multiple_choice"], {"multiple_choice": file}, TaskOptions())
        metrics = task.compute_metrics(native_model(small_model))["metrics"]
        directory = tmp_path / name
        directory.mkdir()
        fields = {"doc_to_text": "query", "doc_to_choice": "choices", "doc_to_target": "gold"}
        yaml = task_file(name, file, "multiple_choice", {"acc": "mean"}, **fields)
        (directory / "task.yaml").write_text(yaml)
        assert (
            metrics["acc,none"]
            == reference(small_model, directory, [name], None)[name][0]["acc,none"]
        )
        scores.append(metrics["acc,none"])
    assert scores[0] == scores[1] in (1 / 3, 2 / 3)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"gold": 2}, r"document 2 of its data .*doc_to_target is 2, and there are 2 choices"),
        ({"gold": -1}, r"document 2 of its data .*doc_to_target is -1"),
        ({"choices": ["a", ""]}, r"document 2 of its data .*doc_to_choice\[1\] is empty"),
    ],
)
def test_a_task_file_with_such_documents_is_refused(
    change: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    file = write(tmp_path / "mine.jsonl", QUESTION, QUESTION | change)
    fields = {"doc_to_text": "query", "doc_to_choice": "choices", "doc_to_target": "gold"}
    (tmp_path / "task.yaml").write_text(
        task_file("mine", file, "multiple_choice", {"acc": "mean"}, **fields)
    )
    with pytest.raises(UserError, match=rf"mine: {problem}"):
        make_tasks(["mine"], {}, TaskOptions(include_path=tmp_path))


def test_text_choices_of_a_task_file_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "mine.jsonl", QUESTION | {"choices": "ab"})
    fields = {"doc_to_text": "query", "doc_to_choice": "choices", "doc_to_target": "gold"}
    (tmp_path / "task.yaml").write_text(
        task_file("mine", file, "multiple_choice", {"acc": "mean"}, **fields)
    )
    with pytest.raises(
        UserError, match=r"mine: document 1 .*doc_to_choice is a string; write a list of texts"
    ):
        make_tasks(["mine"], {}, TaskOptions(include_path=tmp_path))
