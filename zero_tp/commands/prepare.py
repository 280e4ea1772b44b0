"""Turn texts into a training and a validation corpus with their tokenizer."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from zero_tp.base.errors import UserError, visible

if TYPE_CHECKING:
    from zero_tp.tools.corpus.settings import Prepared

EPILOG = """\
example:
  %(prog)s --input $(zero-tp path corpus) --tokenizer bpe:8192 --output data/sotu

writes
  OUTPUT/train.bin, train.idx            training tokens: "data": {"train": "OUTPUT/train"} in a config
  OUTPUT/validation.bin, validation.idx  held-out tokens: "data": {"validation": "OUTPUT/validation"}
  OUTPUT/validation.jsonl                the held-out documents' text, for an evaluation
  OUTPUT/tokenizer/                      opens with AutoTokenizer.from_pretrained
  OUTPUT/report.json                     counts, entropies in nats a token, checksums, settings

inputs: .jsonl and .json (an object is a document), .csv, .parquet, .arrow (a row is a document), .txt (the file is a
document, see --documents); all but .parquet and .arrow also with .gz, .zst, .bz2 or .xz after it. Directories, globs, -
for standard input, hf:NAME[:CONFIGURATION[:SPLIT]] for a data set of the Hugging Face hub. Details: docs/data.md.
Records that can't be read are counted by reason and skipped. The split depends only on the documents and the seed, not
on their order. The same command again reuses OUTPUT, or resumes if it was interrupted.
"""
OPTIONS = {"validation": "validation_fraction", "stdin": "stdin_kind"}
OPTIONS |= {"repair": "repair_unicode", "sentences": "split_sentences"}
"""Fields of PrepareSettings whose options have other names."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument(
        "--input", nargs="+", action="extend", metavar="FILE|DIR|GLOB|-|hf:NAME", help="inputs, see below"
    )
    parser.add_argument(
        "--tokenizer",
        metavar="DIR|bpe:SIZE|wordpiece:SIZE|wordpiece-cased:SIZE",
        help="a Hugging Face tokenizer directory or a name on its hub, or a tokenizer to train: a byte-level BPE of "
        "SIZE tokens, or a WordPiece vocabulary for the masked objective, uncased or cased",
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="directory to make")
    parser.add_argument(
        "--eos",
        metavar="TOKEN",
        help="the token that ends a document, if the tokenizer is given (default: its eos token, or its only one with "
        "a well-known name)",
    )
    parser.add_argument(
        "--tokenizer-documents", type=int, metavar="N", help="train the tokenizer on N documents (default: all)"
    )
    show = parser.add_argument_group("instead of preparing")
    show.add_argument("--show", type=Path, metavar="DIR", help="print documents and packed samples of a corpus as text")
    show.add_argument("--sample", type=int, default=3, metavar="N", help="how many documents and samples (default: 3)")
    show.add_argument("--sequence-length", type=int, default=256, metavar="S", help="tokens of a sample (default: 256)")
    _add_document_arguments(parser)
    _add_step_arguments(
        parser.add_argument_group("steps", "in this order, each off by default and counted in report.json")
    )
    parser.add_argument("--strict", action="store_true", help="stop at the first record that is no document")
    parser.add_argument(
        "--processes", type=int, metavar="N", help="processes that read and tokenise (default: one per core)"
    )
    parser.add_argument(
        "--merge", type=Path, metavar="PARTS", help="join the parts that a cluster wrote (launch/prepare_cluster.py)"
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace an OUTPUT or an interrupted preparation of other inputs or settings",
    )


def _add_document_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--validation-fraction",
        type=float,
        default=0.02,
        metavar="F|COUNT",
        help="documents to hold out: a fraction below 1, or a whole number of documents (default: 0.02)",
    )
    parser.add_argument("--seed", type=int, default=1234, help="seed of the split (default: 1234)")
    parser.add_argument("--text-key", metavar="KEY", help="field of the text (default: text, see docs/data.md)")
    parser.add_argument(
        "--documents",
        choices=("file", "line", "blank-line"),
        default="file",
        help="what is one document in a .txt file: the file, a line, or a paragraph (default: file)",
    )
    parser.add_argument(
        "--stdin-kind",
        choices=("jsonl", "json", "txt", "csv"),
        default="jsonl",
        help="the format of standard input (default: jsonl)",
    )


def _add_step_arguments(steps: argparse._ArgumentGroup) -> None:
    steps.add_argument("--repair-unicode", action="store_true", help="mend Unicode (ftfy)")
    steps.add_argument(
        "--min-tokens",
        type=int,
        nargs="?",
        const=128,
        default=0,
        metavar="N",
        help="drop documents of fewer than N tokens (128 if N is omitted)",
    )
    steps.add_argument(
        "--deduplicate",
        choices=("exact", "near"),
        help="drop copies; near: also documents that share 0.7 of their 5-word shingles with an earlier one (MinHash)",
    )
    steps.add_argument(
        "--decontaminate",
        nargs="+",
        action="extend",
        type=Path,
        default=[],
        metavar="FILE",
        help="drop documents with 13 consecutive words of these evaluation sets, and WikiText's articles by title",
    )
    steps.add_argument(
        "--split-sentences",
        metavar="LANGUAGE",
        help="store where sentences begin, by the rules of a language (its ISO 639 code, such as en); the masked "
        "objective's second segments begin there",
    )


def main(options: argparse.Namespace) -> None:
    if options.show is not None:
        from zero_tp.tools.corpus.show import show_corpus

        for text in show_corpus(options.show, options.sample, options.sequence_length):
            print(text)
        return
    required = ("input", "tokenizer", "output") if options.merge is None else ("output",)
    if missing := [f"--{name}" for name in required if getattr(options, name) is None]:
        raise UserError(f"the following arguments are required: {', '.join(missing)}")
    prepared = _prepare(options) if options.merge is None else _merge(options)
    print(visible("\n".join(_summary(prepared))))  # names of inputs may hold control characters


def _prepare(options: argparse.Namespace) -> Prepared:
    from zero_tp.data import PrepareSettings, prepare

    settings = {field.name: getattr(options, OPTIONS.get(field.name, field.name)) for field in fields(PrepareSettings)}
    return prepare(
        options.input,
        options.output,
        PrepareSettings(**settings | {"decontaminate": tuple(options.decontaminate)}),
        overwrite=options.overwrite,
        strict=options.strict,
        processes=options.processes,
    )


def _merge(options: argparse.Namespace) -> Prepared:
    from zero_tp.data import PrepareSettings
    from zero_tp.tools.corpus.parts import merge

    defaults = {OPTIONS.get(field.name, field.name): field.default for field in fields(PrepareSettings)}
    defaults |= {"input": None, "tokenizer": None, "strict": False, "processes": None, "decontaminate": []}
    defaults["validation_fraction"] = options.validation_fraction
    if changed := [name for name, default in defaults.items() if getattr(options, name) != default]:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in changed)
        raise UserError(f"--merge takes the documents of the parts as they are: leave out {flags}")
    return merge(options.merge, options.output, options.validation_fraction, overwrite=options.overwrite)


def _summary(prepared: Prepared) -> Iterator[str]:
    """Yield the lines that describe a prepared corpus."""
    from zero_tp.tools.corpus.tokenizer_training import suggested_size

    report = prepared.report
    if prepared.reused:
        yield f"{prepared.output} is up to date: it has the same inputs and settings"
        if any(name.startswith("hf:") for name in report["inputs"]):
            yield "   hf: inputs are compared by name only; --overwrite reads them again"
    if prepared.resumed:
        yield f"resumed an interrupted preparation, which had read {prepared.resumed:,} documents"
    if (documents := report["documents"])["dropped"]:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in documents["dropped"].items())
        dropped = documents["read"] - documents["kept"]
        yield f"   dropped: {dropped:,} of {documents['read']:,} documents: {reasons}"
        yield from (f"            {problem['where']}: {problem['detail']}" for problem in documents["problems"])
    for split, figures in report["splits"].items():
        counts = ", ".join(f"{figures[name]:,} {name}" for name in ("documents", "characters", "tokens"))
        yield f"{split:>10}: {counts}"
    unigram, size = report["unigram"], report["vocabulary_size"]
    advice = f"; a vocab_size of {suggested_size(size):,} suits any TP size" if size != suggested_size(size) else ""
    yield f"vocabulary: {size:,} tokens{advice}"
    if (end := report["end_of_document"]) is not None:
        yield f"   each document ends with {end}"
    yield (
        f"   unigram: {unigram['train_entropy']:.3f} nats a token "
        f"(validation {unigram['validation_cross_entropy']:.3f}): a loss below this means that the model uses context"
    )
    if not prepared.reused:
        yield f"wrote {prepared.output} in {sum(report['seconds'].values()):.1f} s"
    splits = ", ".join(f'"{split}": "{prepared.output / split}"' for split in report["splits"])
    yield f'next: set zero_tp.data to {{{splits}, "sequence_length": N}} in a config, then run zero-tp check CONFIG'
