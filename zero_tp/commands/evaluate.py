"""Evaluate a causal language model, from a Hugging Face directory or a training run, without
fine-tuning it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from zero_tp.base import cli
from zero_tp.base.errors import UserError, show
from zero_tp.base.files import write_named
from zero_tp.base.options import add_options, from_options
from zero_tp.run.process.environment import RankEnvironment
from zero_tp.run.process.lifecycle import run_rank
from zero_tp.tools.evaluation.settings import EvaluationSettings

EPILOG = """\
examples:
  %(prog)s --model runs/quickstart --tasks perplexity \\
      --data perplexity=data/quickstart/validation.jsonl
  %(prog)s --model exports/gpt2 --tasks wikitext103,lambada,arc_easy,piqa --output gpt2.json
  deepspeed --num_accelerators 4 $(zero-tp path evaluate) --tensor-parallel 2 \\
      --model runs/gpt2_355m --tasks lambada

tasks
  perplexity   of any text, --data perplexity=FILE: .jsonl (a document a line) or .txt (one
               document), each also .gz
  wikitext103  word-level perplexity of the test split, or of --data wikitext103=FILE in its
               tokenised form
  lambada      is a passage's last word the most likely one? The test split, or --data lambada=FILE:
               JSON lines with "context" and "continuation" or with the passage as "text", or a
               passage a line in .txt
  multiple_choice  of your own questions, --data multiple_choice=FILE: JSON lines with query,
               choices and gold
  any other    is a task, group or tag of lm-eval: arc_easy, hellaswag, piqa, mmlu, …

Without --data the texts come from the Hugging Face hub or its cache. docs/evaluation.md says what
each figure means.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    model = "a run, a checkpoint, a Hugging Face directory or name"
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help=model)
    parser.add_argument("--tasks", required=True, metavar="TASK[,TASK]", help="what to evaluate")
    parser.add_argument(
        "--data",
        nargs="+",
        action="extend",
        default=[],
        metavar="TASK=FILE",
        help="the text a task reads",
    )
    add_options(parser, EvaluationSettings)
    parser.add_argument("--output", type=Path, metavar="JSON", help="write the results here too")
    verbose = "show what the libraries print, and every traceback"
    parser.add_argument("--verbose", action="store_true", help=verbose)
    # Launchers add it.
    parser.add_argument("--local_rank", "--local-rank", type=int, default=0, help=argparse.SUPPRESS)


def run(options: argparse.Namespace, environment: RankEnvironment) -> None:
    from zero_tp.tools.evaluation.evaluation_report import table, write_samples
    from zero_tp.tools.evaluation.zero_shot import evaluate, parse_data, parse_tasks

    # Before the model is loaded, like all checks of options.
    if options.log_samples and options.output is None:
        raise UserError("--log-samples: the samples are written next to --output JSON; give it too")
    if options.output is not None and environment.rank == 0:
        if options.output.exists() and not options.output.is_file():
            raise UserError(f"--output {options.output}: not a file; give the name of one")
        cli.check_writable(options.output.parent)
    names = parse_tasks(options.tasks)
    settings = from_options(EvaluationSettings, options)
    results = evaluate(options.model, names, parse_data(options.data), settings, environment)
    if environment.rank == 0:
        show(table(results))
        if options.output:
            # It moves the samples out of `results`.
            for file in write_samples(options.output, results):
                show(f"wrote {file}")
            write_named(options.output, json.dumps(results, indent=2, allow_nan=False) + "\n")
            show(f"wrote {options.output}")


def start(parse: Callable[[], argparse.Namespace], verbose: bool) -> NoReturn:
    environment = RankEnvironment.of_this_process()
    if environment.world == 1:  # it has no other rank to tell of an error
        cli.run(lambda: run(parse(), environment))
    else:
        run_rank(lambda: run(parse(), environment), verbose, environment)
