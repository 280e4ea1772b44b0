#!/usr/bin/env python3
"""Convert a run's checkpoint to a Hugging Face model directory. Needs no ranks and no accelerator.

    python launch/convert.py to-hf runs/quickstart --output exports/quickstart

The weights are the fp32 masters that the optimizer keeps; AutoModelForCausalLM opens the result.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from zero_tp import cli
from zero_tp.errors import UserError
from zero_tp.training.quiet import quiet_libraries

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def arguments() -> argparse.Namespace:
    parser = cli.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True, parser_class=cli.Parser)
    to_hf = actions.add_parser("to-hf", help="write a Hugging Face model directory")
    to_hf.add_argument(
        "source", type=Path, metavar="RUN|CHECKPOINT", help="a run (its newest checkpoint) or RUN/checkpoints/step_N"
    )
    to_hf.add_argument("--output", type=Path, required=True, metavar="DIR", help="where to write; must not exist yet")
    to_hf.add_argument("--overwrite", action="store_true", help="replace DIR when it exists")
    to_hf.add_argument("--dtype", choices=DTYPES, default="fp32", help="of the written weights (default: fp32)")
    to_hf.add_argument("--tokenizer", type=Path, metavar="DIR", help="tokenizer to copy in (default: the run's)")
    to_hf.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of one weights file (default: 5GB)")
    actions.add_parser("inspect", help="not built yet")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    if options.action == "inspect":
        raise UserError("convert.py inspect: not built yet")
    import torch

    from zero_tp.checkpoint.convert import to_huggingface

    converted = to_huggingface(
        options.source,
        options.output,
        dtype=getattr(torch, DTYPES[options.dtype]),
        tokenizer=options.tokenizer,
        max_shard_size=options.max_shard_size,
        overwrite=options.overwrite,
    )
    print(f"{converted.checkpoint} → {options.output} ({converted.parameters:,} parameters, {options.dtype})")
    if converted.tokenizer is None:
        print("no tokenizer was copied: the run has none beside its data; give one with --tokenizer")
    else:
        print(f"tokenizer from {converted.tokenizer}")


if __name__ == "__main__":
    quiet_libraries(verbose=False)
    cli.run(main)
