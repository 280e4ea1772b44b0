"""Options that several commands have: the config, its overrides, and the run to start from."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from zero_tp.base.shipped import find_config

FILE = "the run's JSON file, or the name of one that is shipped, such as quickstart"


def add_config(parser: argparse._ActionsContainer, name: str, help_: str, **options: Any) -> None:
    """Add an argument that names a config file."""
    parser.add_argument(name, type=find_config, metavar="FILE", help=help_, **options)


def add_parent(parser: argparse._ActionsContainer) -> None:
    """Add `--from`, the run that a new run starts from."""
    parser.add_argument(
        "--from",
        dest="parent",
        type=Path,
        metavar="RUN|CHECKPOINT",
        help="start a new run from the weights and moments of this one, with FILE's own schedule, "
        "batch and data",
    )


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add the options that `check` and `pretrain` share."""
    parser.add_argument(
        "--output-dir",
        type=Path,
        metavar="RUN",
        help="run directory (default: runs/<name of FILE>)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key, such as zero_tp.training.steps=100 (VALUE is JSON, else a string); "
        "may be repeated",
    )
    parser.add_argument(
        "--allow-pickle",
        action="store_true",
        help="let zero_tp.model.from_pretrained read pickled weights (pytorch_model.bin), if you "
        "trust their source",
    )
