"""Fine-tuning tasks: the published formats of MNLI, QQP, SQuAD and RACE, and one of ours, as transformers' models take
them, with the figure that each is judged by.

Training itself is transformers.Trainer's (commands/finetune.py).
"""

from __future__ import annotations

import collections
import contextlib
import csv
import io
import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from zero_tp.data.documents import read_objects
from zero_tp.errors import UserError, first_line
from zero_tp.files import open_regular
from zero_tp.strict_json import InvalidJson, parse_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Record = dict[str, Any]
Features = dict[str, Any]
LONGEST_ANSWER = 30
"""Tokens, as BERT's own script has it."""
BEST = 20  # starts and ends that are tried with each other
_ARTICLES = re.compile(r"\b(a|an|the)\b")


# --- formats: each yields records -------------------------------------------------------------------------------------


def rows_of(path: Path) -> Iterator[tuple[str, Record]]:
    """Yield (file and line, record) of .jsonl, or of .tsv or .csv with a header. UserError: neither, or damaged."""
    if path.suffix == ".jsonl":
        yield from read_objects(path)
        return
    if path.suffix not in (".tsv", ".csv"):
        raise UserError(f"{path}: unknown kind of file: the name must end with .jsonl, .tsv or .csv")
    # GLUE's tables have lone quotation marks in them and no quoted fields.
    options: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if path.suffix == ".tsv" else {}
    for number, row in enumerate(csv.DictReader(io.StringIO(_text(path), newline=""), **options), start=2):
        yield f"{path}:{number}", dict(row)


def pairs(path: Path, first: str, second: str, label: str) -> Iterator[Record]:
    """Yield {"first", "second", "label"} of a table, but for rows labelled "-": MNLI's judges did not agree on them."""
    for where, row in rows_of(path):
        for key in (first, label):
            if row.get(key) is None:
                raise UserError(f"{where}: no field {key!r}; the fields are {', '.join(map(str, row))}")
        if str(row[label]) != "-":
            yield {"first": str(row[first]), "second": row.get(second), "label": str(row[label])}


def squad(path: Path) -> Iterator[Record]:
    """Yield {"context", "question", "answers", "starts"} of SQuAD's JSON; unanswerable questions have none."""
    for article in _field(_json(path), "data", path):
        for paragraph in _field(article, "paragraphs", path):
            for asked in _field(paragraph, "qas", path):
                answers = _field(asked, "answers", path)
                yield {
                    "context": _field(paragraph, "context", path),
                    "question": _field(asked, "question", path),
                    "answers": [_field(answer, "text", path) for answer in answers],
                    "starts": [_field(answer, "answer_start", path) for answer in answers],
                }


def race(path: Path) -> Iterator[Record]:
    """Yield {"context", "question", "options", "label"} of RACE: a file of one passage, or a directory of them."""
    files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
    for file in files:
        passage = _json(file)
        parts = [_field(passage, key, file) for key in ("questions", "options", "answers")]
        counts = [len(part) for part in parts]
        if len(set(counts)) > 1:
            raise UserError(f"{file}: {counts[0]} questions, {counts[1]} options and {counts[2]} answers")
        for question, options, answer in zip(*parts, strict=True):
            label = "ABCD".find(str(answer))
            if not 0 <= label < len(options):
                raise UserError(f"{file}: the answer {answer!r} is none of its {len(options)} options")
            context = _field(passage, "article", file)
            yield {"context": context, "question": question, "options": list(options), "label": label}


def _text(path: Path) -> str:
    try:
        with open_regular(path) as file:
            return file.read().decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start}: convert it to UTF-8 first") from error
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from error


def _json(path: Path) -> Any:
    try:
        return parse_json(_text(path).encode())
    except InvalidJson as error:
        raise UserError(f"{path}: {error}") from error


def _field(record: Any, key: str, path: Path) -> Any:
    if not isinstance(record, dict) or key not in record:
        raise UserError(f"{path}: no {key!r} where this format has one")
    return record[key]


# --- what a model is given, and how its answers are judged ------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A kind of task has a class of transformers' models, features for it, and a figure.

    Attributes:
        auto_class, collator: names in transformers.
        features: (records, labels by name, tokenizer, longest row) → features, and for each the number of its record.
        judge: (records, features, their records, the model's outputs) → figures, the first the one that counts.
    """

    auto_class: str
    collator: str
    features: Callable[..., tuple[list[Features], list[int]]]
    judge: Callable[[Sequence[Record], Sequence[Features], Sequence[int], Any], dict[str, float]]


def _classified(
    records: Sequence[Record], labels: Mapping[str, int], tokenizer: PreTrainedTokenizerBase, longest: int
) -> tuple[list[Features], list[int]]:
    made = []
    for record in records:
        encoded = tokenizer(record["first"], record["second"], truncation=True, max_length=longest)
        made.append({**encoded, "labels": labels[record["label"]]})
    return made, list(range(len(made)))


def _chosen(
    records: Sequence[Record], labels: Mapping[str, int], tokenizer: PreTrainedTokenizerBase, longest: int
) -> tuple[list[Features], list[int]]:
    made = []
    for record in records:
        question = record["question"]
        asked = [
            question.replace("_", option) if "_" in question else f"{question} {option}" for option in record["options"]
        ]
        contexts = [record["context"]] * len(asked)
        encoded = tokenizer(contexts, asked, truncation="longest_first", max_length=longest)
        made.append({**encoded, "labels": record["label"]})
    return made, list(range(len(made)))


def _spans(
    records: Sequence[Record], labels: Mapping[str, int], tokenizer: PreTrainedTokenizerBase, longest: int
) -> tuple[list[Features], list[int]]:
    """A context longer than a row has several, which overlap; an answer outside of one is at its [CLS]."""
    made, of = [], []
    for number, record in enumerate(records):
        encoded = tokenizer(
            record["question"].strip(), record["context"], truncation="only_second", max_length=longest,
            stride=longest // 4, return_overflowing_tokens=True, return_offsets_mapping=True,
        )  # fmt: skip
        for row in range(len(encoded["input_ids"])):
            inside = [part == 1 for part in encoded.sequence_ids(row)]
            offsets = [
                tuple(span) if here else None for span, here in zip(encoded["offset_mapping"][row], inside, strict=True)
            ]
            feature = {name: encoded[name][row] for name in encoded if name not in ("overflow_to_sample_mapping",)}
            first, last = _place(record, offsets)
            made.append({**feature, "offset_mapping": offsets, "start_positions": first, "end_positions": last})
            of.append(number)
    return made, of


def _place(record: Record, offsets: Sequence[tuple[int, int] | None]) -> tuple[int, int]:
    if not record["answers"]:
        return 0, 0
    begin, end = record["starts"][0], record["starts"][0] + len(record["answers"][0])
    tokens = [token for token, span in enumerate(offsets) if span is not None and span[0] < end and span[1] > begin]
    shown = [span for span in offsets if span is not None]
    if not tokens or shown[0][0] > begin or shown[-1][1] < end:
        return 0, 0
    return tokens[0], tokens[-1]


def _accuracy(
    records: Sequence[Record], features: Sequence[Features], of: Sequence[int], outputs: Any
) -> dict[str, float]:
    right = np.argmax(outputs, axis=-1) == np.array([feature["labels"] for feature in features])
    return {"accuracy": float(right.mean())}


def _f1(records: Sequence[Record], features: Sequence[Features], of: Sequence[int], outputs: Any) -> dict[str, float]:
    starts, ends = outputs
    best: dict[int, tuple[float, str]] = {}
    all_answered = all(record["answers"] for record in records)
    for row, (feature, number) in enumerate(zip(features, of, strict=True)):
        offsets, text = feature["offset_mapping"], records[number]["context"]
        found = (-np.inf if all_answered else float(starts[row][0] + ends[row][0]), "")
        firsts, lasts = (np.argsort(scores[row][: len(offsets)])[-BEST:].tolist() for scores in (starts, ends))
        for first in firsts:
            for last in lasts:
                if first <= last < first + LONGEST_ANSWER and offsets[first] is not None and offsets[last] is not None:
                    answer = text[offsets[first][0] : offsets[last][1]]
                    found = max(found, (float(starts[row][first] + ends[row][last]), answer))
        best[number] = max(best.get(number, found), found)
    judged = [judged_answer(best[number][1], record["answers"]) for number, record in enumerate(records)]
    exact, f1 = (sum(each) / len(judged) for each in zip(*judged, strict=True))
    return {"F1": f1, "exact match": exact}


def judged_answer(answer: str, expected: Sequence[str]) -> tuple[float, float]:
    """Return (exact match, F1) of an answer, as SQuAD's own script does: the best over the expected ones, of which an
    unanswerable question has none, without case, punctuation and articles."""
    return max(map(_compared, [answer] * max(1, len(expected)), expected or [""]))


def _compared(answer: str, expected: str) -> tuple[float, float]:
    ours, theirs = _words(answer), _words(expected)
    if not ours or not theirs:
        return float(ours == theirs), float(ours == theirs)
    shared = sum((collections.Counter(ours) & collections.Counter(theirs)).values())
    return float(ours == theirs), 2 * shared / (len(ours) + len(theirs))


def _words(text: str) -> list[str]:
    bare = "".join(character for character in text.lower() if character not in string.punctuation)
    return _ARTICLES.sub(" ", bare).split()


CLASSIFICATION = Kind("AutoModelForSequenceClassification", "DataCollatorWithPadding", _classified, _accuracy)
SPAN = Kind("AutoModelForQuestionAnswering", "DataCollatorWithPadding", _spans, _f1)
CHOICE = Kind("AutoModelForMultipleChoice", "DataCollatorForMultipleChoice", _chosen, _accuracy)


@dataclass(frozen=True)
class FineTuning:
    """A fine-tuning task is a kind, and what reads the format of its files."""

    kind: Kind
    read: Callable[[Path], Iterable[Record]]


TASKS = {
    "classification": FineTuning(CLASSIFICATION, lambda path: pairs(path, "first", "second", "label")),
    "mnli": FineTuning(CLASSIFICATION, lambda path: pairs(path, "sentence1", "sentence2", "gold_label")),
    "qqp": FineTuning(CLASSIFICATION, lambda path: pairs(path, "question1", "question2", "is_duplicate")),
    "squad": FineTuning(SPAN, squad),
    "race": FineTuning(CHOICE, race),
}


@dataclass(frozen=True)
class Split:
    """The records of a file, as features."""

    records: list[Record]
    features: list[Features]
    of: list[int]

    def inputs(self) -> list[Features]:
        """Return what a model and its collator take of each."""
        return [{name: value for name, value in each.items() if name != "offset_mapping"} for each in self.features]


def read_task(
    task: FineTuning, train: Path, validation: Path, tokenizer: PreTrainedTokenizerBase, longest: int
) -> tuple[Split, Split, dict[str, int]]:
    """Return the training and validation records of a task, and its labels (of a classification) by name.

    Raises:
        UserError: a file is missing, damaged, of another format or empty, or has a label that the other lacks.
    """
    records = []
    for path in (train, validation):
        with _fitting(path, longest):
            records.append(list(task.read(path)))
        if not records[-1]:
            raise UserError(f"{path}: no example in it")
    labels: dict[str, int] = {}
    if task.kind is CLASSIFICATION:
        labels = {label: i for i, label in enumerate(sorted({record["label"] for record in records[0]}))}
        for record in records[1]:
            if record["label"] not in labels:
                raise UserError(f"{validation}: the label {record['label']!r} is not in {train}")
    splits = []
    for path, found in zip((train, validation), records, strict=True):
        with _fitting(path, longest):
            splits.append(Split(found, *task.kind.features(found, labels, tokenizer, longest)))
    return splits[0], splits[1], labels


@contextlib.contextmanager
def _fitting(path: Path, longest: int) -> Iterator[None]:
    """Raise a UserError where a file's values are none of its format, or too long for a row."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # what any value makes of this file's code, of csv and of tokenizers
        why = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"{path}: its examples don't fit the task with --length {longest} ({why}); mend one") from error
