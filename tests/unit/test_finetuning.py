"""Fine-tuning files in their published formats, as features of transformers' models, and what answers are worth."""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from tests.tiers import THOROUGH
from tests.tiny_models import tiny_gpt2
from zero_tp.commands import finetune
from zero_tp.data.tokenizer_training import EOS, train_wordpiece
from zero_tp.errors import UserError
from zero_tp.evaluation.finetuning import TASKS, judged_answer, read_task

CONTEXT = "The University of Chicago's library opened in 1892. It holds eleven million volumes, and it is well lit."
MNLI = (
    "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence1\tsentence2\tlabel1\tgold_label\n"
    '0\t63735\t63735n\tslate\t( The ... )\tThe "new rights are nice enough\tEveryone likes them\tneutral\tneutral\n'
    "1\t91383\t91383c\tgovernment\t( This ... )\tThis site includes a list\tIt does not\tcontradiction\tcontradiction\n"
    "2\t91383\t91383e\tgovernment\t( This ... )\tThis site includes a list\tIt has a list\tentailment\tentailment\n"
    "3\t1\t1n\ttravel\t( No ... )\tNo one agreed\tSome did\tneutral\t-\n"
)
QQP = (
    "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
    "133273\t213221\t213222\tHow can I be a good geologist?\tWhat should I do to be a great geologist?\t1\n"
    "364575\t1\t2\tWhat is the step by step guide to invest?\tWhat would happen if the government stole it?\t0\n"
)
SQUAD: dict[str, Any] = {
    "version": "v2.0",
    "data": [
        {
            "title": "University_of_Chicago",
            "paragraphs": [
                {
                    "context": CONTEXT,
                    "qas": [
                        {
                            "id": "1",
                            "question": "When did the library open?",
                            "answers": [{"text": "1892", "answer_start": CONTEXT.index("1892")}],
                            "is_impossible": False,
                        },
                        {
                            "id": "2",
                            "question": "How much does it hold?",
                            "answers": [
                                {"text": "eleven million volumes", "answer_start": CONTEXT.index("eleven")},
                                {"text": "eleven million", "answer_start": CONTEXT.index("eleven")},
                            ],
                        },
                        {"id": "3", "question": "Who burnt it?", "answers": [], "is_impossible": True},
                    ],
                }
            ],
        }
    ],
}
RACE = {
    "article": "Last week I talked with some of my students about what they wanted to do.",
    "questions": ["The writer is a _ .", "Who was asked?"],
    "options": [["teacher", "reporter", "student", "visitor"], ["parents", "doctors", "students", "nobody"]],
    "answers": ["A", "C"],
    "id": "high1.txt",
}


LONG = json.dumps(SQUAD).replace("When did", "When did " * 64)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    texts = [CONTEXT, MNLI, QQP, json.dumps(RACE), "When did the library open? How much does it hold? Who burnt it?"]
    return train_wordpiece(lambda: iter(texts), 300, cased=False)


def read(
    folder: Path, task: str, name: str, content: str, tokenizer: PreTrainedTokenizerFast, longest: int = 64
) -> Any:
    (folder / name).write_text(content, encoding="utf-8")
    return read_task(TASKS[task], folder / name, folder / name, tokenizer, longest)


def test_mnli_and_qqp(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    train, _, labels = read(tmp_path, "mnli", "train.tsv", MNLI, tokenizer)
    assert labels == {"contradiction": 0, "entailment": 1, "neutral": 2}
    assert [feature["labels"] for feature in train.features] == [2, 0, 1], "the row that judges did not agree on is out"
    told = tokenizer.decode(train.features[0]["input_ids"])
    assert told == '[CLS] the " new rights are nice enough [SEP] everyone likes them [SEP]'
    assert set(train.features[0]["token_type_ids"]) == {0, 1}
    lines = "".join(json.dumps(dict(zip(MNLI.split("\n")[0].split("\t"), row.split("\t"), strict=True))) + "\n"
                    for row in MNLI.splitlines()[1:])  # fmt: skip
    assert read(tmp_path, "mnli", "train.jsonl", lines, tokenizer)[0].features == train.features
    train, _, labels = read(tmp_path, "qqp", "train.tsv", QQP, tokenizer)
    assert labels == {"0": 0, "1": 1} and [feature["labels"] for feature in train.features] == [1, 0]


def test_race(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    (tmp_path / "high").mkdir()
    train, _, labels = read(tmp_path, "race", "high/1.txt", json.dumps(RACE), tokenizer)
    assert not labels and [feature["labels"] for feature in train.features] == [0, 2]
    told = [str(tokenizer.decode(ids)) for ids in train.features[0]["input_ids"]]
    assert len(told) == 4 and all(text.endswith("[SEP]") and " do. [SEP] " in text for text in told)
    assert told[1].endswith("the writer is a reporter. [SEP]")
    assert str(tokenizer.decode(train.features[1]["input_ids"][2])).endswith("who was asked? students [SEP]")
    again, _, _ = read_task(TASKS["race"], tmp_path, tmp_path / "high", tokenizer, 64)
    assert again.features == train.features, "a directory of passages"


@pytest.mark.parametrize("longest", [96, 32])
def test_squad(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, longest: int) -> None:
    train, _, _ = read(tmp_path, "squad", "train.json", json.dumps(SQUAD), tokenizer, longest)
    assert (len(train.features) > 3) == (longest == 32), "a context that is too long has several rows"
    assert {*train.of} == {0, 1, 2}
    starts, ends = (np.zeros((len(train.features), longest), np.float32) for _ in range(2))
    found = set()
    for row, (feature, number) in enumerate(zip(train.features, train.of, strict=True)):
        first, last = feature["start_positions"], feature["end_positions"]
        assert len(feature["input_ids"]) <= longest
        if first:
            told = tokenizer.decode(feature["input_ids"][first : last + 1])
            assert told == {0: "1892", 1: "eleven million volumes"}[number]
            found.add(number)
        # A model that is right is sure, and surer where it sees the answer.
        starts[row, first] = ends[row, last] = 10 if first else 5
    assert found == {0, 1}
    kind = TASKS["squad"].kind
    assert kind.judge(train.records, train.features, train.of, (starts, ends)) == {"F1": 1.0, "exact match": 1.0}
    starts[:, 0] = ends[:, 0] = 20
    right = kind.judge(train.records, train.features, train.of, (starts, ends))
    assert right["F1"] == pytest.approx(1 / 3), "only the unanswerable question has no answer"
    # Where every question is answerable, no answer is none of the choices.
    answered = [row for row, number in enumerate(train.of) if number < 2]
    figures = kind.judge(
        train.records[:2], [train.features[row] for row in answered], [train.of[row] for row in answered],
        (starts[answered], ends[answered]),
    )  # fmt: skip
    assert figures == {"F1": 1.0, "exact match": 1.0}
    assert "offset_mapping" not in train.inputs()[0] and "start_positions" in train.inputs()[0]


@pytest.mark.parametrize(
    ("answer", "expected", "exact", "f1"),
    [
        ("The Norman conquest!", ["norman  Conquest"], 1.0, 1.0),
        ("in 1066", ["1066"], 0.0, 2 / 3),
        ("a b c d", ["c d e", "x"], 0.0, 2 * 2 / (3 + 3)),
        ("", [], 1.0, 1.0),
        ("something", [], 0.0, 0.0),
        ("Paris", ["London", "Paris"], 1.0, 1.0),
    ],
)
def test_answers_are_compared_as_squads_script_does(answer: str, expected: list[str], exact: float, f1: float) -> None:
    """Articles, case and punctuation do not count; F1 is over words; the best of the expected answers counts."""
    assert judged_answer(answer, expected) == (exact, pytest.approx(f1))


@pytest.mark.parametrize(
    ("task", "name", "content", "message"),
    [
        ("mnli", "a.tsv", QQP, r"a\.tsv:2: no field 'sentence1'; the fields are id, "),
        ("mnli", "a.txt", MNLI, r"a\.txt: unknown kind of file"),
        ("mnli", "a.jsonl", "{", r"a\.jsonl:1: not valid JSON"),
        ("classification", "a.jsonl", "", "no example in it"),
        ("squad", "a.json", "{}", r"a\.json: no 'data' where"),
        ("squad", "a.json", "[", r"a\.json: not valid JSON"),
        ("squad", "a.json", LONG, r"a\.json: its examples don't fit the task with --length 64 \(Exception: Truncation"),
        ("squad", "a.json", '{"data": 7}', r"a\.json: its examples don't fit the task .*\(TypeError: 'int' object"),
        ("race", "a.txt", json.dumps({**RACE, "answers": ["A", "E"]}), r"the answer 'E' is none of its 4 options"),
        ("race", "a.txt", json.dumps({**RACE, "answers": ["A"]}), r"a\.txt: 2 questions, 2 options and 1 answers"),
    ],
)
def test_a_file_of_another_format_is_one_line(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, task: str, name: str, content: str, message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        read(tmp_path, task, name, content, tokenizer)
    assert "\n" not in str(caught.value)


def test_a_label_that_training_has_not(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    def rows(label: str) -> str:
        return json.dumps({"first": "a", "second": "b", "label": label}) + "\n"

    (tmp_path / "t.jsonl").write_text(rows("x") + rows("y"))
    (tmp_path / "v.jsonl").write_text(rows("z"))
    with pytest.raises(UserError, match=r"v\.jsonl: the label 'z' is not in .*t\.jsonl"):
        read_task(TASKS["classification"], tmp_path / "t.jsonl", tmp_path / "v.jsonl", tokenizer, 16)
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(UserError, match=r"pipe\.jsonl: not a regular file"):
        read_task(TASKS["classification"], tmp_path / "pipe.jsonl", tmp_path / "v.jsonl", tokenizer, 16)
    with pytest.raises(UserError, match="No such file"):
        read_task(TASKS["squad"], tmp_path / "none.json", tmp_path / "none.json", tokenizer, 16)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("ranks", 0),
        ("batch_size", 0),
        ("length", -1),
        ("epochs", math.nan),
        ("lr", 0.0),
        ("lr", math.inf),
        ("seed", -1),
    ],
)
def test_a_number_that_cannot_be_is_one_line(option: str, value: float) -> None:
    parser = argparse.ArgumentParser()
    finetune.add_arguments(parser)
    options = parser.parse_args(["--model", "m", "--task", "mnli", "--train", "t", "--validation", "v"])
    finetune.check(options)
    setattr(options, option, value)
    with pytest.raises(UserError, match=f"^--{option.replace('_', '-')} {value}: "):
        finetune.check(options)


def changed(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@THOROUGH
def test_a_model_that_cannot_be_fine_tuned_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nobody is asked whether code that comes with it may run."""
    monkeypatch.setattr(finetune, "launched", None)
    monkeypatch.setattr("builtins.input", None)
    model = tiny_gpt2(tmp_path / "model", ["the cat sat on the mat and looked at the moon"] * 20)
    (tmp_path / "rows.jsonl").write_text('{"first": "the cat", "label": "a"}\n')
    parser = argparse.ArgumentParser()
    finetune.add_arguments(parser)
    rows = ["--train", str(tmp_path / "rows.jsonl"), "--validation", str(tmp_path / "rows.jsonl"), "--length", "16"]
    options = parser.parse_args(["--model", str(model), "--task", "classification", *rows])

    def refuses(told: str) -> None:
        with pytest.raises(UserError, match=told):
            finetune.main(options)

    refuses(r"its tokenizer has no padding token.* name one of its tokens as \"pad_token\"")
    config, weights = model / "config.json", model / "model.safetensors"
    changed(model / "tokenizer_config.json", pad_token=EOS)
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-4])
    refuses(r"model\.safetensors: not a readable safetensors file")
    weights.write_bytes(whole)
    options.save = tmp_path / "rows.jsonl"
    refuses(r"rows\.jsonl: can't be written \(File exists\)")
    changed(config, model_type="mine", auto_map={"AutoConfig": "code.Config"})
    refuses('model_type "mine": transformers has no class of its own for it, and code .* is never run')
    config.unlink()
    refuses(r"no config\.json in it")
