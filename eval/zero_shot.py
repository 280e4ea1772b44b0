"""Evaluate a Hugging Face causal language model without any training on the task."""

from __future__ import annotations

import argparse
from pathlib import Path

from zero_tp import cli

EPILOG = """\
example:
  python eval/zero_shot.py --model exports/sotu --tasks perplexity --data perplexity=data/sotu/validation.jsonl

tasks
  perplexity   of a text, --data perplexity=FILE: .jsonl (a document a line) or .txt (one document), each also .gz.
               Every document is scored by itself, after the tokenizer's bos token (or eos).

A training run must be exported first: python launch/convert.py to-hf RUN --output DIR
"""


def main() -> None:
    parser = cli.Parser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", type=Path, required=True, metavar="HF_DIR", help="a Hugging Face model directory")
    parser.add_argument("--tasks", required=True, metavar="TASK[,TASK]", help="what to evaluate")
    parser.add_argument(
        "--data", nargs="+", action="extend", default=[], metavar="TASK=FILE", help="the text a task reads"
    )
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="windows at once (default: 8)")
    parser.add_argument(
        "--sequence-length", type=int, metavar="N", help="tokens of a window (default: all positions the model has)"
    )
    parser.add_argument(
        "--overlap",
        type=int,
        metavar="N",
        help="tokens a window advances by; each window after a document's first scores its last N only "
        "(default: the whole window, so that none overlap)",
    )
    parser.add_argument("--dtype", default="float32", help="float32, bfloat16 or float16 (default: float32)")
    parser.add_argument("--device", help="such as cpu or cuda:0 (default: cuda if there is one, else cpu)")
    parser.add_argument(
        "--text-key", default="text", metavar="KEY", help="key of the text in JSON lines (default: text)"
    )
    parser.add_argument(
        "--allow-pickle",
        action="store_true",
        help="read pickled weights (pytorch_model.bin) where there are no safetensors, if you trust their source",
    )
    parser.add_argument("--output", type=Path, metavar="JSON", help="write the results here too")
    arguments = parser.parse_args()

    from zero_tp.evaluation import zero_shot

    tasks = zero_shot.parse_tasks(arguments.tasks)
    data = zero_shot.parse_data(arguments.data, tasks)
    settings = zero_shot.EvaluationSettings(
        batch_size=arguments.batch_size,
        sequence_length=arguments.sequence_length,
        overlap=arguments.overlap,
        dtype=arguments.dtype,
        device=arguments.device,
        text_key=arguments.text_key,
        allow_pickle=arguments.allow_pickle,
    )
    report = zero_shot.evaluate(arguments.model, tasks, data, settings)
    print(zero_shot.table(report))
    if arguments.output:
        zero_shot.write_report(arguments.output, report)
        print(f"wrote {arguments.output}")


if __name__ == "__main__":
    cli.run(main)
