"""Check a run's JSON file without ranks: every key, every combination and every sum, and what data is here."""

from __future__ import annotations

import argparse
from pathlib import Path

from zero_tp.shipped import config_file

Parser = argparse._ActionsContainer
"""A parser, or a group of one."""

FILE = "the run's JSON file, or the name of one that is shipped, such as quickstart"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser, "check", FILE)
    add_settings(parser)
    add_parent(parser)


def add_config(parser: Parser, name: str, help_: str) -> None:
    """Add an argument that is a config."""
    parser.add_argument(name, type=config_file, metavar="FILE", help=help_)


def add_parent(parser: Parser) -> None:
    """Add what a new run may start from."""
    parser.add_argument(
        "--from",
        dest="parent",
        type=Path,
        metavar="RUN|CHECKPOINT",
        help="start a new run from the weights and moments of this one, with FILE's own schedule, batch and data",
    )


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add what a check and a run take alike."""
    parser.add_argument("--world-size", type=int, metavar="N", help="the number of ranks to check it for")
    parser.add_argument("--output-dir", type=Path, metavar="RUN", help="run directory (default: runs/<name of FILE>)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key, such as zero_tp.training.steps=100 (VALUE is JSON, else a string); may be repeated",
    )
    parser.add_argument(
        "--allow-pickle",
        action="store_true",
        help="let zero_tp.model.from_pretrained read pickled weights (pytorch_model.bin), if you trust their source",
    )


def main(options: argparse.Namespace) -> None:
    from zero_tp.config import RunConfig, describe
    from zero_tp.monitors.trackers import check_installed
    from zero_tp.weights.files import find_weights, resolve

    config = RunConfig.load(options.check, options.set, options.world_size)
    check_installed(config)
    absent = config.absent()
    if config.pretrained is not None and config.pretrained not in absent:
        find_weights(resolve(config.pretrained, allow_pickle=options.allow_pickle).directory, options.allow_pickle)
    if not absent:
        from zero_tp.training.run import RunInputs

        run = RunInputs(config, options.output_dir or Path("runs") / config.name, allow_pickle=options.allow_pickle)
        if options.parent is not None:
            from zero_tp.checkpoint.parent import find_parent

            find_parent(options.parent, config, run.model_config)
    print(describe(config))
    if absent and options.parent is not None:
        print(f"{'unchecked':<10} --from {options.parent}, before all that a run needs is here")
