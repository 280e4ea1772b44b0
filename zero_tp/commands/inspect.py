"""Describe a run's newest checkpoint, or one checkpoint: step, topology, model, bytes, files."""

from __future__ import annotations

import argparse
from pathlib import Path

from zero_tp.base.errors import show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--verify", action="store_true", help="read every file and compare its checksum"
    )
    add_source(parser)


def add_source(parser: argparse.ArgumentParser) -> None:
    """Add the argument that names a run or a checkpoint."""
    parser.add_argument(
        "source",
        type=Path,
        metavar="RUN|CHECKPOINT",
        help="a run (its newest checkpoint) or RUN/checkpoints/step_N",
    )


def main(options: argparse.Namespace) -> None:
    from zero_tp.run.checkpoint.inspect import inspect

    show(inspect(options.source, verify=options.verify))
