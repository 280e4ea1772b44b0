#!/usr/bin/env python3
"""Convert a run's checkpoint to a Hugging Face model directory, or say what is in it. Needs no ranks, no accelerator.

    python launch/convert.py to-hf runs/quickstart --output exports/quickstart
    python launch/convert.py inspect runs/quickstart --verify

The weights are the fp32 masters that the optimizer keeps, read one at a time; AutoModelForCausalLM opens the result.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from zero_tp import cli
from zero_tp.constants import DTYPES
from zero_tp.process.quiet import quiet_libraries


def arguments() -> argparse.Namespace:
    parser = cli.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True, parser_class=cli.Parser)
    to_hf = actions.add_parser("to-hf", help="write a Hugging Face model directory")
    to_hf.add_argument("--output", type=Path, required=True, metavar="DIR", help="where to write; must not exist yet")
    to_hf.add_argument("--overwrite", action="store_true", help="replace DIR when it exists")
    to_hf.add_argument("--dtype", choices=DTYPES, default="fp32", help="of the written weights (default: fp32)")
    to_hf.add_argument("--tokenizer", type=Path, metavar="DIR", help="tokenizer to copy in (default: the run's)")
    to_hf.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of one weights file (default: 5GB)")
    inspect = actions.add_parser("inspect", help="say what is in a checkpoint: step, topology, model, bytes, files")
    inspect.add_argument("--json", action="store_true", help="as JSON instead of a table")
    inspect.add_argument("--verify", action="store_true", help="read every file and compare its checksum")
    for action in (to_hf, inspect):
        action.add_argument(
            "source",
            type=Path,
            metavar="RUN|CHECKPOINT",
            help="a run (its newest checkpoint) or RUN/checkpoints/step_N",
        )
    return parser.parse_args()


def inspect(options: argparse.Namespace) -> None:
    from zero_tp.checkpoint.inspect import inspect, table

    found = inspect(options.source, verify=options.verify)
    print(json.dumps(found, indent=2) if options.json else table(found))


def to_hf(options: argparse.Namespace) -> None:
    import torch

    from zero_tp.checkpoint.convert import to_huggingface
    from zero_tp.checkpoint.directory import MANIFEST
    from zero_tp.checkpoint.manifest import UNHASHED

    converted = to_huggingface(
        options.source,
        options.output,
        dtype=getattr(torch, DTYPES[options.dtype]),
        tokenizer=options.tokenizer,
        max_shard_size=options.max_shard_size,
        overwrite=options.overwrite,
    )
    print(f"{converted.checkpoint} → {options.output} ({converted.parameters:,} parameters, {options.dtype})")
    if not converted.hashed:
        print(f"{converted.checkpoint / MANIFEST} is {UNHASHED}")
    if converted.tokenizer is None:
        print("no tokenizer was copied: the run has none beside its data; give one with --tokenizer")
    else:
        print(f"tokenizer from {converted.tokenizer}")


def main() -> None:
    options = arguments()
    {"to-hf": to_hf, "inspect": inspect}[options.action](options)


if __name__ == "__main__":
    quiet_libraries(verbose=False)
    cli.run(main)
