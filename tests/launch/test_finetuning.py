"""launch/finetune.py: the published file formats, tokenized rows, metrics and errors."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from launch import finetune
from launch.finetune import TASKS, load_splits, score_answer
from tests.support.tiny_models import tiny_gpt2
from tests.tiers import THOROUGH
from zero_tp.base.errors import UserError
from zero_tp.tools.corpus.tokenizer_training import EOS, train_wordpiece

CONTEXT = (
    "The University of Chicago's library opened in 1892. It holds eleven million volumes, and it "
    "is well lit."
)
MNLI = (
    "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence1\tsentence2\tlabel1\tgold_label\n"
    '0\t63735\t63735n\tslate\t( The ... )\tThe "new rights are nice enough\tEveryone likes '
    "them\tneutral\tneutral\n"
    "1\t91383\t91383c\tgovernment\t( This ... )\tThis site includes a list\tIt does "
    "not\tcontradiction\tcontradiction\n"
    "2\t91383\t91383e\tgovernment\t( This ... )\tThis site includes a list\tIt has a "
    "list\tentailment\tentailment\n"
    "3\t1\t1n\ttravel\t( No ... )\tNo one agreed\tSome did\tneutral\t-\n"
)
QQP = (
    "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
    "133273\t213221\t213222\tHow can I be a good geologist?\tWhat should I do to be a great "
    "geologist?\t1\n"
    "364575\t1\t2\tWhat is the step by step guide to invest?\tWhat would happen if the government "
    "stole it?\t0\n"
)


def question(text: str, *answers: str, **others: Any) -> dict[str, Any]:
    """A question of SQUAD about CONTEXT."""
    answered = [{"text": answer, "answer_start": CONTEXT.index(answer)} for answer in answers]
    return {"question": text, "answers": answered, **others}


QUESTIONS = [
    question("When did the library open?", "1892", id="1", is_impossible=False),
    question("How much does it hold?", "eleven million volumes", "eleven million"),
    question("Who burnt it?", is_impossible=True),
]
SQUAD: dict[str, Any] = {
    "version": "v2.0",
    "data": [
        {"title": "University_of_Chicago", "paragraphs": [{"context": CONTEXT, "qas": QUESTIONS}]}
    ],
}
RACE = {
    "article": "Last week I talked with some of my students about what they wanted to do.",
    "questions": ["The writer is a _ .", "Who was asked?"],
    "options": [
        ["teacher", "reporter", "student", "visitor"],
        ["parents", "doctors", "students", "nobody"],
    ],
    "answers": ["A", "C"],
    "id": "high1.txt",
}


LONG = json.dumps(SQUAD).replace("When did", "When did " * 64)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    texts = [
        CONTEXT,
        MNLI,
        QQP,
        json.dumps(RACE),
        "When did the library open? How much does it hold? Who burnt it?",
    ]
    return train_wordpiece(lambda: iter(texts), 300, cased=False)


def load(
    task: str, train: Path, validation: Path, tokenizer: PreTrainedTokenizerFast, length: int = 64
) -> Any:
    options = argparse.Namespace(task=task, train=train, validation=validation, length=length)
    return load_splits(options, tokenizer)


def write_and_load(
    folder: Path,
    task: str,
    name: str,
    content: str,
    tokenizer: PreTrainedTokenizerFast,
    length: int = 64,
) -> Any:
    (folder / name).write_text(content, encoding="utf-8")
    return load(task, folder / name, folder / name, tokenizer, length)


def test_mnli_and_qqp(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    (_, rows), _, labels = write_and_load(tmp_path, "mnli", "train.tsv", MNLI, tokenizer)
    assert labels == {"contradiction": 0, "entailment": 1, "neutral": 2}
    assert [row["labels"] for row in rows] == [2, 0, 1], (
        "the row on which the annotators disagreed is skipped"
    )
    text = tokenizer.decode(rows[0]["input_ids"])
    assert text == '[CLS] the " new rights are nice enough [SEP] everyone likes them [SEP]'
    assert set(rows[0]["token_type_ids"]) == {0, 1}
    header, *lines = (line.split("\t") for line in MNLI.splitlines())
    objects = "".join(json.dumps(dict(zip(header, line, strict=True))) + "\n" for line in lines)
    assert write_and_load(tmp_path, "mnli", "train.jsonl", objects, tokenizer)[0][1] == rows
    (_, rows), _, labels = write_and_load(tmp_path, "qqp", "train.tsv", QQP, tokenizer)
    assert labels == {"0": 0, "1": 1} and [row["labels"] for row in rows] == [1, 0]


def test_race(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    (tmp_path / "high").mkdir()
    (_, rows), _, labels = write_and_load(
        tmp_path, "race", "high/1.txt", json.dumps(RACE), tokenizer
    )
    assert not labels and [row["labels"] for row in rows] == [0, 2]
    texts = [str(tokenizer.decode(ids)) for ids in rows[0]["input_ids"]]
    assert len(texts) == 4 and all(
        text.endswith("[SEP]") and " do. [SEP] " in text for text in texts
    )
    assert texts[1].endswith("the writer is a reporter. [SEP]")
    assert str(tokenizer.decode(rows[1]["input_ids"][2])).endswith("who was asked? students [SEP]")
    (_, rows_of_directory), _, _ = load("race", tmp_path, tmp_path / "high", tokenizer)
    assert rows_of_directory == rows


@pytest.mark.parametrize("length", [96, 32])
def test_squad(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, length: int) -> None:
    split, _, _ = write_and_load(
        tmp_path, "squad", "train.json", json.dumps(SQUAD), tokenizer, length
    )
    records, rows = split
    assert (len(rows) > 3) == (length == 32), "a long context has several rows"
    assert {row["record"] for row in rows} == {0, 1, 2}
    starts, ends = (np.zeros((len(rows), length), np.float32) for _ in range(2))
    answered = set()
    for index, row in enumerate(rows):
        first, last = row["start_positions"], row["end_positions"]
        assert len(row["input_ids"]) <= length
        if first:
            text = tokenizer.decode(row["input_ids"][first : last + 1])
            assert text == {0: "1892", 1: "eleven million volumes"}[row["record"]]
            answered.add(row["record"])
        # The logits of a perfect model, higher in rows that hold the answer.
        starts[index, first] = ends[index, last] = 10 if first else 5
    assert answered == {0, 1}
    metrics = TASKS["squad"].metrics
    assert metrics(split, (starts, ends)) == {"F1": 1.0, "exact match": 1.0}
    starts[:, 0] = ends[:, 0] = 20
    assert metrics(split, (starts, ends))["F1"] == pytest.approx(1 / 3), (
        "only one question is unanswerable"
    )
    # If every question is answerable, "no answer" is no candidate.
    kept = [index for index, row in enumerate(rows) if row["record"] < 2]
    figures = metrics((records[:2], [rows[index] for index in kept]), (starts[kept], ends[kept]))
    assert figures == {"F1": 1.0, "exact match": 1.0}


def test_an_answer_has_at_most_30_tokens(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    (records, rows), _, _ = write_and_load(
        tmp_path, "squad", "train.json", json.dumps(SQUAD), tokenizer, 96
    )
    begin = next(token for token, span in enumerate(rows[0]["offset_mapping"]) if span is not None)
    starts, ends = (np.zeros((1, 96), np.float32) for _ in range(2))
    starts[0, begin], ends[0, begin + 30], ends[0, begin + 29] = 10, 20, 15
    spans = rows[0]["offset_mapping"]
    assert spans[begin + 30] is not None
    expected = {**records[0], "answers": [(CONTEXT[: spans[begin + 29][1]], 0)]}
    assert TASKS["squad"].metrics(([expected], rows[:1]), (starts, ends)) == {
        "F1": 1.0,
        "exact match": 1.0,
    }


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
def test_answers_are_compared_as_squads_script_does(
    answer: str, expected: list[str], exact: float, f1: float
) -> None:
    """Articles, case and punctuation do not count; F1 is over words; the best of the expected
    answers counts.
    """
    assert score_answer(answer, expected) == (exact, pytest.approx(f1))


@pytest.mark.parametrize(
    ("task", "name", "content", "message"),
    [
        (
            "mnli",
            "a.tsv",
            QQP,
            r"a\.tsv: row 1 has no sentence1, only id, .*: the task reads sentence1, sentence2 "
            r"\(opt",
        ),
        (
            "qqp",
            "a.csv",
            "question1,is_duplicate\nis it\n",
            r"a\.csv: row 1 has no is_duplicate, only question1, is_dup",
        ),
        (
            "classification",
            "a.csv",
            "text,label\nis it,1,2\n",
            r"a\.csv: row 1 has no first, only text, label: the task",
        ),
        (
            "classification",
            "a.csv",
            "first,label\nis it,1\n",
            r"a\.csv: all examples have the label 1; a classifier",
        ),
        ("mnli", "a.txt", MNLI, r"a\.txt: unknown file format"),
        ("mnli", "a.jsonl", "{", r"a\.jsonl:1: not valid JSON"),
        ("classification", "a.jsonl", "", "no examples in it"),
        ("squad", "a.json", "{}", r'a\.json: not usable for --task squad: "data" is missing'),
        ("squad", "a.json", LONG, r"a\.json: not usable for --task squad: Truncation"),
        (
            "squad",
            "a.json",
            '{"data": 7}',
            r"a\.json: not usable for --task squad: .*'int' object is not iterable",
        ),
        (
            "race",
            "a.txt",
            json.dumps({**RACE, "answers": ["A", "E"]}),
            r"answer 'E' of 4 options; RACE has 4, and A, ",
        ),
        (
            "race",
            "a.txt",
            json.dumps({**RACE, "answers": ["A"]}),
            r"a\.txt: not usable for --task race: zip\(\) argument 3 is shorter",
        ),
    ],
)
def test_a_file_of_another_format_is_one_line(
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,
    task: str,
    name: str,
    content: str,
    message: str,
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        write_and_load(tmp_path, task, name, content, tokenizer)
    assert "\n" not in str(caught.value)


def test_a_label_that_is_not_in_the_training_file(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    def rows(label: str) -> str:
        return json.dumps({"first": "a", "second": "b", "label": label}) + "\n"

    (tmp_path / "t.jsonl").write_text(rows("x") + rows("y"))
    (tmp_path / "v.jsonl").write_text(rows("z"))
    with pytest.raises(
        UserError, match=r"v\.jsonl: .*: no training example has the label 'z', only 'x', 'y'$"
    ):
        load("classification", tmp_path / "t.jsonl", tmp_path / "v.jsonl", tokenizer, 16)
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(UserError, match=r"pipe\.jsonl: not a regular file"):
        load("classification", tmp_path / "pipe.jsonl", tmp_path / "v.jsonl", tokenizer, 16)
    with pytest.raises(FileNotFoundError):
        load("squad", tmp_path / "none.json", tmp_path / "none.json", tokenizer)


OPTIONS = ["--model", "m", "--task", "mnli", "--train", "t", "--validation", "v"]


@pytest.mark.parametrize(
    "option", ("ranks 0", "batch-size 0", "length -1", "epochs nan", "lr 0.0", "lr inf", "seed -1")
)
def test_a_number_out_of_range_is_one_line(option: str) -> None:
    finetune.parse(OPTIONS)
    with pytest.raises(UserError, match=f"^--{option}: "):
        finetune.parse([*OPTIONS, *f"--{option}".split()])


def changed(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@THOROUGH
def test_a_model_that_cannot_be_fine_tuned_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script never asks whether to run code that comes with a model."""
    monkeypatch.setattr("launch.finetune.subprocess.run", None)
    monkeypatch.setattr("builtins.input", None)
    model = tiny_gpt2(tmp_path / "model", ["the cat sat on the mat and looked at the moon"] * 20)
    (tmp_path / "rows.jsonl").write_text(
        "".join(f'{{"first": "the cat", "label": "{label}"}}\n' for label in "ab")
    )
    rows = [
        "--train",
        str(tmp_path / "rows.jsonl"),
        "--validation",
        str(tmp_path / "rows.jsonl"),
        "--length",
        "16",
    ]
    words = ["--model", str(model), "--task", "classification", *rows]

    def refuses(message: str, *more: str) -> None:
        with pytest.raises(UserError, match=message):
            finetune.main([*words, *more])

    changed(
        model / "tokenizer_config.json", pad_token=None, padding_side="left", model_max_length=12
    )
    tokenizer = finetune.open_padding_tokenizer(model)
    assert (tokenizer.pad_token, tokenizer.padding_side) == (EOS, "right")
    refuses("--length: 16 tokens, but the model has 12 positions; shorten it")
    changed(model / "tokenizer_config.json", eos_token=None, pad_token=None, model_max_length=64)
    refuses(
        "its tokenizer has neither a padding token nor an end of text; name one of its tokens as "
        r"\"pad_token\""
    )
    config, weights = model / "config.json", model / "model.safetensors"
    changed(model / "tokenizer_config.json", pad_token=EOS)
    changed(config, model_type="t5")
    refuses("t5 is an encoder-decoder; give an encoder or a decoder")
    changed(config, model_type="roberta", max_position_embeddings=17, pad_token_id=1)
    refuses("--length: 16 tokens, but the model has 15 positions; shorten it")
    changed(config, model_type="gpt2")
    weights.rename(model / "pytorch_model.bin")
    refuses("its weights are pickled")
    (model / "pytorch_model.bin").rename(weights)
    refuses("nowhere", "--model", "nowhere")
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-4])
    refuses(r"model\.safetensors: its weights can.t be read: not a safetensors file")
    weights.write_bytes(whole)
    refuses(
        r"rows\.jsonl: can't be written \(File exists\)", "--save", str(tmp_path / "rows.jsonl")
    )
    changed(config, model_type="mine", auto_map={"AutoConfig": "code.Config"})
    refuses(
        'model_type "mine": transformers has no class of its own for it, and code .* is never run'
    )
    config.unlink()
    refuses(r"no config\.json in it")
    weights.unlink()
    (model / "checkpoints").mkdir()
    refuses(r"a run; first export it: zero-tp convert to-hf")
