"""Turn texts into a training and a validation corpus with their tokenizer."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from zero_tp.base.errors import UserError, show, show_text
from zero_tp.base.options import add_options, from_options, options_of
from zero_tp.tools.corpus.settings import TOKEN_OPTIONS, Prepared, PrepareSettings

EPILOG = """\
example:
  %(prog)s --input $(zero-tp path corpus) --tokenizer bpe:8192 --output data/sotu

writes
  OUTPUT/train.bin, train.idx            training tokens: "data": {"train": "OUTPUT/train"}
  OUTPUT/validation.bin, validation.idx  held-out tokens: {"validation": "OUTPUT/validation"}
  OUTPUT/validation.jsonl                the held-out documents' text, for an evaluation
  OUTPUT/tokenizer/                      opens with AutoTokenizer.from_pretrained
  OUTPUT/report.json                     counts, entropies in nats a token, checksums, settings

inputs: .jsonl and .json (an object is a document), .csv, .parquet, .arrow (a row is a document),
.txt (the file is a document, see --documents); all but .parquet and .arrow also with .gz, .zst,
.bz2 or .xz after it. Directories, globs, - for standard input, hf:NAME[:CONFIGURATION[:SPLIT]] for
a data set of the Hugging Face hub. Details: docs/data.md. Records that cannot be read are counted
by reason and skipped. The split depends only on the documents and the seed, not on their order. The
same command again reuses OUTPUT, or resumes if it was interrupted.
"""
STEPS = ("repair", "min_tokens", "deduplicate", "decontaminate", "sentences")
"""Fields of PrepareSettings that are steps, in their order."""
TOKENS = (*TOKEN_OPTIONS, "max_document_tokens")
"""Fields of PrepareSettings for token files."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument(
        "--input",
        nargs="+",
        action="extend",
        metavar="FILE|DIR|GLOB|-|hf:NAME",
        help="inputs, see below",
    )
    add_options(parser, PrepareSettings, ["tokenizer"])
    parser.add_argument("--output", type=Path, metavar="DIR", help="directory to make")
    add_options(parser, PrepareSettings, ["eos", "tokenizer_documents"])
    tokens = "of other trainers, without text: docs/token_files.md"
    add_options(parser.add_argument_group("token files", tokens), PrepareSettings, TOKENS)
    show = parser.add_argument_group("instead of preparing")
    corpus = (
        "print documents and packed samples of a corpus as text, or with --format the first "
        "documents of token files"
    )
    show.add_argument("--show", type=Path, metavar="DIR", help=corpus)
    number = "how many documents and samples (default: 3)"
    show.add_argument("--sample", type=int, default=3, metavar="N", help=number)
    length = "tokens of a sample (default: 256)"
    show.add_argument("--sequence-length", type=int, default=256, metavar="S", help=length)
    documents = ["validation", "seed", "text_key", "documents", "stdin"]
    add_options(parser, PrepareSettings, documents)
    order = "in this order, each off by default and counted in report.json"
    add_options(parser.add_argument_group("steps", order), PrepareSettings, STEPS)
    _add_run_arguments(parser)


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    strict = "stop at the first record that is no document"
    parser.add_argument("--strict", action="store_true", help=strict)
    processes = "processes that read and tokenise (default: one per core)"
    parser.add_argument("--processes", type=int, metavar="N", help=processes)
    parts = "join the parts that a cluster wrote (launch/prepare_cluster.py)"
    parser.add_argument("--merge", type=Path, metavar="PARTS", help=parts)
    replace = "replace an OUTPUT or an interrupted preparation of other inputs or settings"
    parser.add_argument("--overwrite", action="store_true", help=replace)


def main(options: argparse.Namespace) -> None:
    if options.show is not None:
        for text in _shown_texts(options):
            show_text(text)
        return
    # By hand, because `--show` and `--merge` need other arguments than a preparation.
    required = ["output"] if options.merge is not None else ["input", "tokenizer", "output"]
    if options.format is not None:  # --merge refuses it later
        required = ["input", "output"]
    if missing := [f"--{name}" for name in required if getattr(options, name) is None]:
        raise UserError(f"the following arguments are required: {', '.join(missing)}")
    prepared = _prepare(options) if options.merge is None else _merge(options)
    show(*_summary(prepared))


def _shown_texts(options: argparse.Namespace) -> Iterator[str]:
    if options.format is not None:
        from zero_tp.tools.corpus.tokens.show import show_token_files

        settings = from_options(PrepareSettings, options)
        return show_token_files(options.show, settings, options.sample)
    from zero_tp.tools.corpus.show import show_corpus

    length = options.sequence_length
    return show_corpus(options.show, options.sample, length, options.tokenizer)


def _prepare(options: argparse.Namespace) -> Prepared:
    from zero_tp.tools.corpus.corpus import prepare

    settings = from_options(PrepareSettings, options)
    return prepare(
        options.input,
        options.output,
        settings,
        overwrite=options.overwrite,
        strict=options.strict,
        processes=options.processes,
    )


def _merge(options: argparse.Namespace) -> Prepared:
    from zero_tp.tools.corpus.parts import merge

    settings = options_of(PrepareSettings)
    # Options that --merge would ignore are refused: the parts' settings are those of the cluster's
    # run.
    defaults = {field.name: field.default for field in fields(PrepareSettings)}
    defaults |= {"tokenizer": None, "validation": options.validation, "decontaminate": []}
    defaults |= {"input": None, "strict": False, "processes": None}
    if changed := [name for name, default in defaults.items() if getattr(options, name) != default]:
        flags = ", ".join(
            settings[name].all_flags(name)[0] if name in settings else f"--{name}"
            for name in changed
        )
        raise UserError(f"--merge takes the documents of the parts as they are: leave out {flags}")
    return merge(options.merge, options.output, options.validation, overwrite=options.overwrite)


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
        yield from (
            f"            {problem['where']}: {problem['detail']}"
            for problem in documents["problems"]
        )
    for split, figures in report["splits"].items():
        counts = ", ".join(
            f"{figures[name]:,} {name}"
            for name in ("documents", "characters", "tokens")
            if name in figures
        )
        yield f"{split:>10}: {counts}"
    unigram = report["unigram"]
    size = report["vocabulary_size"]
    advice = (
        f"; a vocab_size of {suggested_size(size):,} suits any TP size"
        if size != suggested_size(size)
        else ""
    )
    yield f"vocabulary: {size:,} tokens{advice}"
    if (end := report["end_of_document"]) is not None:
        yield f"   each document ends with {end}"
    yield (
        f"   unigram: {unigram['train_entropy']:.3f} nats a token "
        f"(validation {unigram['validation_cross_entropy']:.3f}): a loss below this means that the "
        "model uses context"
    )
    if not prepared.reused:
        yield f"wrote {prepared.output} in {sum(report['seconds'].values()):.1f} s"
    splits = ", ".join(f'"{split}": "{prepared.output / split}"' for split in report["splits"])
    yield (
        f'next: set zero_tp.data to {{{splits}, "sequence_length": N}} in a config, then run '
        "zero-tp check CONFIG"
    )
