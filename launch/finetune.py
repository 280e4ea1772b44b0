#!/usr/bin/env python3
"""Fine-tune a Hugging Face model, and its architecture from random weights, and print the metrics
of both in one table.

python launch/finetune.py --model exports/bert --task mnli --train train.tsv --validation
dev_matched.tsv
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import re
import string
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from zero_tp.base import cli
from zero_tp.base.errors import UserError, first_line
from zero_tp.base.files import read_regular
from zero_tp.base.strict_json import read_object
from zero_tp.data.documents import read_objects
from zero_tp.data.tokenizer_files import open_tokenizer
from zero_tp.engine.zero.ops import disable_shared_memory_collectives
from zero_tp.run.process.node import die_with
from zero_tp.run.process.quiet import quiet_libraries
from zero_tp.tools.evaluation.model_directory import usable_positions

Record = dict[str, Any]  # one example of a file, or one tokenized row
# Examples, rows; Trainer drops the fields that `forward` does not take.
Split = tuple[list[Record], list[Record]]
MAX_ANSWER_TOKENS = 30  # as in BERT's run_squad.py


def read_table(path: Path, first: str, second: str, label: str) -> Iterator[Record]:
    """Yield the sentence pairs of a table, without those labelled "-" (MNLI's annotators
    disagreed).
    """
    if path.suffix == ".jsonl":
        rows: Iterator[Record] = (row for _, row in read_objects(path))
    elif path.suffix in (
        ".tsv",
        ".csv",
    ):  # GLUE's tables are .tsv, with stray quotation marks and no quoted fields
        style: Any = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if path.suffix == ".tsv" else {}
        rows = csv.DictReader(io.StringIO(read_regular(path).decode(), newline=""), **style)
    else:
        raise UserError(f"{path}: unknown file format; the name must end with .jsonl, .tsv or .csv")
    for number, row in enumerate(rows, start=1):
        missing = next((name for name in (first, label) if row.get(name) is None), None)
        if missing is not None:
            columns = (
                f"the task reads {first}, {second} (optional) and {label}; rename the file's "
                "columns"
            )
            raise UserError(
                f"{path}: row {number} has no {missing}, only {', '.join(filter(None, row))}: "
                f"{columns}"
            )
        if str(row[label]) != "-":
            yield {"first": str(row[first]), "second": row.get(second), "label": str(row[label])}


def read_squad(path: Path) -> Iterator[Record]:
    """Yield the questions of a SQuAD file. An unanswerable question has no answers."""
    for paragraph in (
        paragraph for article in read_object(path)["data"] for paragraph in article["paragraphs"]
    ):
        for entry in paragraph["qas"]:
            answers = [(answer["text"], answer["answer_start"]) for answer in entry["answers"]]
            yield {
                "context": paragraph["context"],
                "question": entry["question"],
                "answers": answers,
            }


def read_race(path: Path) -> Iterator[Record]:
    """Yield the questions of one RACE passage."""
    passage = read_object(path)
    for question, options, answer in zip(
        passage["questions"], passage["options"], passage["answers"], strict=True
    ):
        if len(options) != 4 or answer not in list("ABCD"):
            raise ValueError(
                f"answer {answer!r} of {len(options)} options; RACE has 4, and A, B, C or D is "
                "right"
            )
        yield {
            "context": passage["article"],
            "question": question,
            "options": options,
            "label": "ABCD".index(answer),
        }


def encode_pairs(
    records: Sequence[Record], labels: Mapping[str, int], tokenizer: Any, length: int
) -> list[Record]:
    """Tokenize each record as a pair of texts."""
    for unknown in {record["label"] for record in records} - labels.keys():
        raise ValueError(
            f"no training example has the label {unknown!r}, only {', '.join(map(repr, labels))}"
        )
    pairs = [
        tokenizer(r["first"], r["second"], truncation=True, max_length=length) for r in records
    ]
    return [
        {**pair, "labels": labels[record["label"]]}
        for pair, record in zip(pairs, records, strict=True)
    ]


def encode_choices(
    records: Sequence[Record], labels: Mapping[str, int], tokenizer: Any, length: int
) -> list[Record]:
    """Tokenize each record as one pair (context, question with option) per option. An option
    fills the blank "_".
    """
    features = []
    for record in records:
        question = record["question"] if "_" in record["question"] else f"{record['question']} _"
        texts = [question.replace("_", option) for option in record["options"]]
        encoded = tokenizer(
            [record["context"]] * len(texts), texts, truncation="longest_first", max_length=length
        )
        features.append({**encoded, "labels": record["label"]})
    return features


def encode_spans(
    records: Sequence[Record], labels: Mapping[str, int], tokenizer: Any, length: int
) -> list[Record]:
    """Tokenize each record as rows (question, context). A row without the answer has the span of
    token 0, [CLS].
    """
    features = []
    for number, record in enumerate(records):
        encoded = tokenizer(
            record["question"].strip(),
            record["context"],
            truncation="only_second",
            max_length=length,
            stride=length // 4,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        chars = [
            char for text, start in record["answers"][:1] for char in (start, start + len(text) - 1)
        ]
        for row, offsets in enumerate(encoded["offset_mapping"]):
            tokens = [encoded.char_to_token(row, char, 1) for char in chars]
            first, last = tokens if tokens and None not in tokens else (0, 0)
            spans = [
                s if part == 1 else None
                for s, part in zip(offsets, encoded.sequence_ids(row), strict=True)
            ]
            feature = {
                "start_positions": first,
                "end_positions": last,
                "offset_mapping": spans,
                "record": number,
            }
            features.append(
                feature | {n: encoded[n][row] for n in tokenizer.model_input_names if n in encoded}
            )
    return features


def accuracy(split: Split, logits: Any) -> dict[str, float]:
    return {
        "accuracy": float(
            np.mean(np.argmax(logits, axis=-1) == [row["labels"] for row in split[1]])
        )
    }


def span_metrics(split: Split, logits: Any) -> dict[str, float]:
    """Return F1 and exact match of each record's best span. [CLS], no answer, counts if any
    record is unanswerable.
    """
    records, features = split
    unanswerable = any(not record["answers"] for record in records)
    best = [(-np.inf, "")] * len(records)
    for feature, starts, ends in zip(features, *logits, strict=True):
        spans = feature["offset_mapping"]
        index = feature["record"]
        in_context = np.array([span is not None for span in spans])
        allowed = np.triu(np.tril(np.outer(in_context, in_context), MAX_ANSWER_TOKENS - 1))
        if allowed.any():
            scores = np.where(allowed, starts[: len(spans), None] + ends[: len(spans)], -np.inf)
            first, last = np.unravel_index(np.argmax(scores), scores.shape)
            answer = records[index]["context"][spans[first][0] : spans[last][1]]
            best[index] = max(best[index], (float(scores[first, last]), answer))
        if unanswerable:
            best[index] = max(best[index], (float(starts[0] + ends[0]), ""))
    pairs = zip(best, records, strict=True)
    exact, f1 = np.mean(
        [score_answer(text, [t for t, _ in r["answers"]]) for (_, text), r in pairs], axis=0
    ).tolist()
    return {"F1": f1, "exact match": exact}


def score_answer(answer: str, expected: Sequence[str]) -> tuple[float, float]:
    """Return the best (exact match, F1) over the expected answers ("" if there are none), as
    SQuAD's script does.
    """

    def normalized_words(text: str) -> list[str]:
        without_punctuation = text.lower().translate(str.maketrans("", "", string.punctuation))
        return re.sub(r"\b(a|an|the)\b", " ", without_punctuation).split()

    scores = []
    words = normalized_words(answer)
    for reference in map(normalized_words, expected or [""]):
        exact = float(words == reference)
        common = sum(min(words.count(word), reference.count(word)) for word in set(words))
        scores.append(
            (exact, 2 * common / (len(words) + len(reference)) if words and reference else exact)
        )
    return max(scores)


class Task(NamedTuple):
    """The file format, head, tokenization and metrics of a task."""

    read: Callable[[Path], Iterator[Record]]
    auto_class: str = "AutoModelForSequenceClassification"
    encode: Callable[[Sequence[Record], Mapping[str, int], Any, int], list[Record]] = encode_pairs
    metrics: Callable[[Split, Any], dict[str, float]] = accuracy


TASKS = {
    "classification": Task(lambda path: read_table(path, "first", "second", "label")),
    "mnli": Task(lambda path: read_table(path, "sentence1", "sentence2", "gold_label")),
    "qqp": Task(lambda path: read_table(path, "question1", "question2", "is_duplicate")),
    "squad": Task(read_squad, "AutoModelForQuestionAnswering", encode_spans, span_metrics),
    "race": Task(read_race, "AutoModelForMultipleChoice", encode_choices),
}


def load_splits(options: argparse.Namespace, tokenizer: Any) -> tuple[Split, Split, dict[str, int]]:
    """Return both splits and the ids of a classification's labels. UserError: a file does not
    fit the task.
    """
    task = TASKS[options.task]
    labels = dict[str, int]()
    splits = list[Split]()
    for path in (options.train, options.validation):
        file = path
        records = list[Record]()
        try:
            for file in sorted(path.rglob("*.txt")) if path.is_dir() else [path]:
                records += task.read(file)
            file = path
            if not records:
                raise UserError(f"{path}: no examples in it")
            if not splits and task.encode is encode_pairs:
                labels = {
                    label: i
                    for i, label in enumerate(sorted({record["label"] for record in records}))
                }
                if len(labels) < 2:
                    raise UserError(
                        f"{path}: all examples have the label {', '.join(labels)}; a classifier "
                        "needs two"
                    )
            splits.append((records, task.encode(records, labels, tokenizer, options.length)))
        except Exception as error:  # csv, JSON and tokenizers raise many types
            if isinstance(error, UserError | OSError):
                raise
            raise UserError(
                f"{file}: not usable for --task {options.task}: {first_line(error)}"
            ) from error
    return splits[0], splits[1], labels


def open_padding_tokenizer(model: Path) -> Any:
    """Return the model's tokenizer; it pads on the right, with its eos token if it has no
    padding token.
    """
    tokenizer = open_tokenizer(model)
    tokenizer.padding_side = "right"  # `encode_spans` counts tokens from the first
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is None:
        remedy = 'name one of its tokens as "pad_token" in tokenizer_config.json'
        raise UserError(
            f"--model {model}: its tokenizer has neither a padding token nor an end of text; "
            f"{remedy}"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def train_variant(options: argparse.Namespace) -> None:
    """Train one variant as one rank, which ends with torchrun. Rank 0 writes the metrics."""
    import transformers

    die_with(psutil.Process(os.getppid()))
    task, tokenizer, (variant, result) = (
        TASKS[options.task],
        open_padding_tokenizer(options.model),
        options.variant,
    )
    train, validation, labels = load_splits(options, tokenizer)
    transformers.set_seed(options.seed)
    disable_shared_memory_collectives()
    names = {"label2id": labels, "id2label": dict(enumerate(labels))} if labels else {}
    config = transformers.AutoConfig.from_pretrained(options.model, **names)
    # A decoder's head reads the last token before the padding.
    config.pad_token_id = tokenizer.pad_token_id
    auto_class = getattr(transformers, task.auto_class)
    pretrained = variant == "pretrained"
    model = (
        auto_class.from_pretrained(options.model, config=config)
        if pretrained
        else auto_class.from_config(config)
    )
    deepspeed = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": options.lr, "torch_adam": True}},
        "zero_optimization": {
            "stage": options.zero_stage,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }
    arguments = transformers.TrainingArguments(
        output_dir=f"{result}.trainer",
        use_cpu=os.environ.get("DS_ACCELERATOR") == "cpu",
        deepspeed=deepspeed,
        num_train_epochs=options.epochs,
        learning_rate=options.lr,
        warmup_steps=0.1,  # a fraction of all steps
        per_device_train_batch_size=options.batch_size,
        per_device_eval_batch_size=options.batch_size,
        average_tokens_across_devices=False,  # the loss is a mean over examples
        seed=options.seed,
        report_to=[],
        save_strategy="no",
        logging_steps=50,
        disable_tqdm=True,
    )
    # None: pads.
    collator = (
        transformers.DataCollatorForMultipleChoice(tokenizer) if options.task == "race" else None
    )
    trainer: Any = transformers.Trainer(
        model, arguments, collator, train[1], processing_class=tokenizer
    )
    trainer.train()
    logits = trainer.predict(validation[1]).predictions
    if options.save is not None and pretrained:
        trainer.save_model(str(options.save))  # with its tokenizer
    if arguments.process_index == 0:
        Path(result).write_text(
            json.dumps({"examples": len(train[0]), "metrics": task.metrics(validation, logits)})
        )


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = cli.Parser(description=__doc__)
    add = parser.add_argument
    add(
        "--model",
        type=Path,
        required=True,
        metavar="DIR",
        help="Hugging Face directory, or a name on its hub",
    )
    add("--task", choices=TASKS, required=True)
    add("--train", type=Path, required=True, metavar="FILE")
    add("--validation", type=Path, required=True, metavar="FILE")
    add("--epochs", type=float, default=3.0, metavar="N", help="(default: 3)")
    add(
        "--lr",
        type=float,
        default=5e-5,
        help="peak rate, after 10 %% warm-up; decays linearly (default: 5e-5)",
    )
    add(
        "--batch-size",
        type=int,
        default=16,
        metavar="N",
        help="examples per rank and step (default: 16)",
    )
    add(
        "--length",
        type=int,
        metavar="N",
        help="maximum tokens of a row (default: 128, or all of a shorter model's)",
    )
    add(
        "--zero-stage",
        type=int,
        choices=(0, 1, 2, 3),
        default=2,
        help="DeepSpeed ZeRO stage (default: 2)",
    )
    add("--ranks", type=int, default=2, metavar="N", help="data-parallel ranks (default: 2)")
    add(
        "--seed",
        type=int,
        default=1234,
        help="seed of the order, new heads and random weights (default: 1234)",
    )
    add("--save", type=Path, metavar="DIR", help="save the fine-tuned model here")
    add("--variant", nargs=2, help=argparse.SUPPRESS)  # name and result file, for the ranks
    options = parser.parse_args(words)
    for name in ("ranks", "batch_size", "length", "epochs", "lr"):
        if getattr(options, name) is not None and not 0 < getattr(options, name) < np.inf:
            raise UserError(
                f"--{name.replace('_', '-')} {getattr(options, name)}: must be positive and finite"
            )
    if not 0 <= options.seed < 2**32:
        raise UserError(f"--seed {options.seed}: must be from 0 to {2**32 - 1}")
    return options


def main(words: Sequence[str]) -> None:
    """Check all inputs, train both variants, each by ranks of its own, and print the table."""
    options = parse(words)
    results = dict[str, Any]()
    if options.variant is not None:
        return train_variant(options)
    import transformers

    from zero_tp.base.weight_files import open_weights, resolve
    from zero_tp.model.weights.native import open_any_config
    from zero_tp.run.checkpoint.directory import is_run

    model = resolve(options.model, "--model")
    name = options.task
    if is_run(model) and not any(model.glob("model*.safetensors")):
        raise UserError(
            f"--model {model}: a run; first export it: zero-tp convert to-hf {model} --output DIR"
        )
    config = open_any_config(model)
    tokenizer = open_padding_tokenizer(model)
    open_weights(model)  # refuses pickles and damaged files
    if type(config) not in getattr(transformers, TASKS[name].auto_class)._model_mapping:
        raise UserError(
            f"--task {name}: transformers has no {config.model_type} for it; use another model"
        )
    if config.is_encoder_decoder:
        raise UserError(
            f"--model {model}: {config.model_type} is an encoder-decoder; give an encoder or a "
            "decoder"
        )
    positions = min(usable_positions(config) or np.inf, tokenizer.model_max_length)
    options.length = options.length or min(128, positions)
    if options.length > positions:
        raise UserError(
            f"--length: {options.length} tokens, but the model has {positions} positions; shorten "
            "it"
        )
    load_splits(options, tokenizer)  # so that bad input is reported once and not by every rank
    if options.save is not None:
        cli.check_writable(options.save)
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        str(options.ranks),
    ]
    with tempfile.TemporaryDirectory() as folder:
        for variant in ("pretrained", "random"):
            result = Path(folder, f"{variant}.json")
            checked = ["--model", str(model), "--length", str(options.length)]
            command = [*torchrun, __file__, *words, *checked, "--variant", variant, str(result)]
            print(f"{variant}:", flush=True)
            done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
            if done.returncode:
                sys.exit(done.stderr)
            results[variant] = json.loads(result.read_text())
    print(f"{name}, {results['pretrained']['examples']:,} training examples")
    print(
        f"{'weights':<12}" + "".join(f"{metric:>14}" for metric in results["pretrained"]["metrics"])
    )
    for variant, result in results.items():
        print(f"{variant:<12}" + "".join(f"{value:>14.1%}" for value in result["metrics"].values()))


if __name__ == "__main__":
    quiet_libraries(verbose=False)
    cli.run(lambda: main(sys.argv[1:]))
