"""Evaluate a causal language model, from a Hugging Face directory or a training run, without fine-tuning it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import NoReturn

from zero_tp.base import cli
from zero_tp.base.errors import UserError, visible
from zero_tp.base.files import write_named
from zero_tp.run.process.environment import RankEnvironment
from zero_tp.run.process.lifecycle import run_rank

EPILOG = """\
examples:
  %(prog)s --model runs/quickstart --tasks perplexity --data perplexity=data/quickstart/validation.jsonl
  %(prog)s --model exports/gpt2 --tasks wikitext103,lambada,arc_easy,piqa --output gpt2.json
  deepspeed --num_accelerators 4 $(zero-tp path evaluate) --tensor-parallel 2 --model runs/gpt2_355m --tasks lambada

tasks
  perplexity   of any text, --data perplexity=FILE: .jsonl (a document a line) or .txt (one document), each also .gz
  wikitext103  word-level perplexity of the test split, or of --data wikitext103=FILE in its tokenised form
  lambada      is a passage's last word the most likely one? The test split, or --data lambada=FILE: JSON lines with
               "context" and "continuation" or with the passage as "text", or a passage a line in .txt
  multiple_choice  of your own questions, --data multiple_choice=FILE: JSON lines with query, choices and gold
  any other    is a task, group or tag of lm-eval: arc_easy, hellaswag, piqa, mmlu, …

Without --data the texts come from the Hugging Face hub or its cache. docs/evaluation.md says what each figure means.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument(
        "--model", type=Path, required=True, metavar="DIR", help="a run, a checkpoint, a Hugging Face directory or name"
    )
    parser.add_argument("--tasks", required=True, metavar="TASK[,TASK]", help="what to evaluate")
    parser.add_argument(
        "--data", nargs="+", action="extend", default=[], metavar="TASK=FILE", help="the text a task reads"
    )
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="batch size of each rank (default: 8)")
    parser.add_argument(
        "--sequence-length",
        type=int,
        metavar="N",
        help="tokens of a window, with its context (default: the model's maximum)",
    )
    parser.add_argument(
        "--overlap",
        type=int,
        metavar="N",
        help="stride of the windows in tokens: after a text's first window, each scores only its last N tokens "
        "(default: 32 for wikitext103; for perplexity the window's length, so windows don't overlap)",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N examples of each task")
    _add_lm_eval_arguments(parser)
    parser.add_argument(
        "--tensor-parallel", type=int, default=1, metavar="T", help="ranks, of those launched, that share one model"
    )
    parser.add_argument("--dtype", default="float32", help="float32, bfloat16 or float16 (default: float32)")
    parser.add_argument("--device", help="such as cpu or cuda:0 (default: cuda if there is one, else cpu)")
    parser.add_argument(
        "--text-key", default="text", metavar="KEY", help="field of the text in JSON lines (default: text)"
    )
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="another tokenizer's directory or hub name")
    parser.add_argument(
        "--allow-pickle",
        action="store_true",
        help="read pickled weights if there are no safetensors; only if you trust them",
    )
    parser.add_argument("--output", type=Path, metavar="JSON", help="write the results here too")
    parser.add_argument("--verbose", action="store_true", help="show what the libraries print, and every traceback")
    parser.add_argument("--local_rank", "--local-rank", type=int, default=0, help=argparse.SUPPRESS)  # launchers add it


def _add_lm_eval_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-fewshot", type=int, metavar="N", help="examples before each question of lm-eval's tasks")
    parser.add_argument(
        "--apply-chat-template",
        "--apply_chat_template",
        action="store_true",
        help="format the requests of lm-eval's tasks by the tokenizer's chat template, examples as turns of their own",
    )
    parser.add_argument(
        "--log-samples",
        "--log_samples",
        action="store_true",
        help="write each request of lm-eval's tasks with its answer next to --output, as JSON lines for each task",
    )
    parser.add_argument("--include-path", type=Path, metavar="DIR", help="a directory with lm-eval task files (.yaml)")
    parser.add_argument(
        "--allow-task-code",
        action="store_true",
        help="let task files of --include-path run Python; only if you trust them",
    )


def run(options: argparse.Namespace, environment: RankEnvironment) -> None:
    from zero_tp.tools.evaluation.evaluation_report import table, write_samples
    from zero_tp.tools.evaluation.zero_shot import EvaluationSettings, evaluate, parse_data, parse_tasks

    if options.log_samples and options.output is None:
        raise UserError("--log-samples: the samples are written next to --output JSON; give it too")
    if options.output is not None and environment.rank == 0:
        if options.output.exists() and not options.output.is_file():
            raise UserError(f"--output {options.output}: not a file; give the name of one")
        cli.check_writable(options.output.parent)
    names = parse_tasks(options.tasks)
    settings = EvaluationSettings(**{field.name: getattr(options, field.name) for field in fields(EvaluationSettings)})
    results = evaluate(options.model, names, parse_data(options.data), settings, environment)
    if environment.rank == 0:
        print(table(results))
        if options.output:
            for file in write_samples(options.output, results):
                print(visible(f"wrote {file}"))
            write_named(options.output, json.dumps(results, indent=2, allow_nan=False) + "\n")
            print(visible(f"wrote {options.output}"))


def start(parse: Callable[[], argparse.Namespace], verbose: bool) -> NoReturn:
    environment = RankEnvironment.of_this_process()
    if environment.world == 1:
        cli.run(lambda: run(parse(), environment))
    run_rank(lambda: run(parse(), environment), verbose, environment)
