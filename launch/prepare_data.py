"""Turn text files into a corpus that a config's data.train and data.validation can name."""

from __future__ import annotations

import argparse
from pathlib import Path

from zero_tp import cli

DESCRIPTION = "Turn text files into a training and a validation corpus with their tokenizer."
EPILOG = """\
example:
  python launch/prepare_data.py --input launch/corpus/sotu.jsonl.gz --tokenizer bpe:8192 --output data/sotu

writes
  OUTPUT/train.bin, train.idx            training tokens: "data": {"train": "OUTPUT/train"} in a config
  OUTPUT/validation.bin, validation.idx  held-out tokens: "data": {"validation": "OUTPUT/validation"}
  OUTPUT/validation.jsonl                the held-out documents' text, for eval/zero_shot.py
  OUTPUT/tokenizer/                      opens with AutoTokenizer.from_pretrained
  OUTPUT/report.json                     counts, entropies in nats a token, checksums, settings

.jsonl: one JSON object a line, a document each. .txt: the whole file is one document.
The split depends on the documents and the seed only, not on their order. Running the same command again reuses OUTPUT.
"""


def main() -> None:
    parser = cli.Parser(
        description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--input",
        nargs="+",
        action="extend",
        type=Path,
        required=True,
        metavar="FILE",
        help=".jsonl or .txt files, each also .gz",
    )
    parser.add_argument(
        "--tokenizer",
        required=True,
        metavar="DIR|bpe:SIZE",
        help="a Hugging Face tokenizer directory, or bpe:SIZE to train a byte-level BPE of SIZE tokens",
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="directory to make")
    parser.add_argument(
        "--validation-fraction",
        type=float,
        default=0.02,
        metavar="F|COUNT",
        help="documents to hold out: a fraction below 1, or a whole number of documents (default: 0.02)",
    )
    parser.add_argument("--seed", type=int, default=1234, help="of the split (default: 1234)")
    parser.add_argument(
        "--text-key", default="text", metavar="KEY", help="key of the text in JSON lines (default: text)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an OUTPUT made with other inputs or settings")
    arguments = parser.parse_args()

    from zero_tp.data.prepare import PrepareSettings, prepare

    settings = PrepareSettings(arguments.tokenizer, arguments.validation_fraction, arguments.seed, arguments.text_key)
    prepared = prepare(arguments.input, arguments.output, settings, overwrite=arguments.overwrite)

    report = prepared.report
    if prepared.reused:
        by = (
            "" if prepared.compared == "content" else f" (compared by {prepared.compared}: its report has no checksums)"
        )
        print(f"{prepared.output} is up to date: made from the same inputs and settings{by}")
    for split, figures in report["splits"].items():
        print(
            f"{split:>10}: {figures['documents']:,} documents, {figures['characters']:,} characters, "
            f"{figures['tokens']:,} tokens"
        )
    unigram = report["unigram"]
    print(f"vocabulary: {report['vocabulary_size']:,} tokens")
    print(
        f"   unigram: {unigram['train_entropy']:.3f} nats a token "
        f"(validation {unigram['validation_cross_entropy']:.3f}): a model must get below this to have learnt any order"
    )
    if not prepared.reused:
        print(f"wrote {prepared.output} in {sum(report['seconds'].values()):.1f} s")


if __name__ == "__main__":
    cli.run(main)
