"""Estimate memory and time of a run. Needs no device and no data.

    %(prog)s gpt2_8.3b --world-size 64 --device h100-80gb
    %(prog)s gpt2_8.3b --world-size 64 --device a100-40gb --search --write planned.json
    %(prog)s gpt2_8.3b --world-size 64 --device h100-80gb --html plan.html --dry-run

docs/planning.md says what the figures mean.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from zero_tp.base.cli import check_writable
from zero_tp.base.errors import UserError, show
from zero_tp.base.files import write_named
from zero_tp.base.page import new_figure
from zero_tp.base.settings.keys import MAX_NUMBER
from zero_tp.commands.options import FILE, add_config
from zero_tp.parallel.devices import NAMES, WITHOUT_DEVICES, named_device

TOP = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser, "file", FILE)
    parser.add_argument(
        "--world-size", type=int, required=True, metavar="N", help="number of devices"
    )
    parser.add_argument(
        "--device",
        required=True,
        metavar="NAME|JSON",
        help=f"{', '.join(NAMES)}, or a JSON file that describes one",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key of FILE; may be repeated",
    )
    parser.add_argument(
        "--tokens",
        type=float,
        metavar="N",
        help="tokens of the whole run, such as 2e12 (default: those of FILE's steps)",
    )
    parser.add_argument(
        "--expert-imbalance",
        type=float,
        default=1.0,
        metavar="X",
        help="with zero_tp.parallel.expert: the tokens of the busiest expert rank, divided by the "
        "mean (default 1: balanced)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument(
        "--search", action="store_true", help="try other settings at the same global batch"
    )
    parser.add_argument(
        "--top", type=int, metavar="N", help=f"candidates that --search shows (default {TOP})"
    )
    parser.add_argument(
        "--write", type=Path, metavar="OUT", help="with --search: write the fastest as a run config"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="run all layers with fake tensors and compare"
    )
    parser.add_argument(
        "--html", type=Path, metavar="OUT", help="write a page with a picture, and a PNG beside it"
    )


def check(options: argparse.Namespace) -> None:
    for name, number in (("--world-size", options.world_size), ("--top", options.top)):
        if number is not None and number < 1:
            raise UserError(f"{name}: {number} is not positive; give 1 or more")
    if options.tokens is not None and not 1 <= options.tokens <= MAX_NUMBER:
        raise UserError(
            f"--tokens: {options.tokens:g} is no number of tokens; give one from 1 to 2^53"
        )
    if not 1 <= options.expert_imbalance <= MAX_NUMBER:
        raise UserError(
            f"--expert-imbalance: {options.expert_imbalance:g} is no ratio of the greatest to the "
            "mean; give 1 or more"
        )
    for name, value, verb in (
        ("--write", options.write, "writes"),
        ("--top", options.top, "shows"),
    ):
        if value and not options.search:
            raise UserError(f"{name}: {verb} what --search finds; give --search too")
    for name, path in (("--write", options.write), ("--html", options.html)):
        if path is not None:
            if path.is_dir():
                raise UserError(f"{name}: {path} is a directory; give the path of a file")
            check_writable(path.parent)
    if options.html:
        new_figure(1, 1)  # raises before the work if matplotlib is missing


def main(options: argparse.Namespace) -> None:
    check(options)
    # If this process saw a device, each dry run would need a process of its own.
    os.environ.update(WITHOUT_DEVICES)
    from zero_tp.run.config import RunConfig
    from zero_tp.tools.planning import plan_report as report
    from zero_tp.tools.planning.plan import plan
    from zero_tp.tools.planning.search import Search

    config = RunConfig.load(options.file, options.set, options.world_size)
    device = named_device(options.device, options.world_size)
    training = config.zero_tp.training
    if options.search and (training.stages or training.batch_size_rampup is not None):
        raise UserError(
            "--search: looks for the settings of a run whose steps are all alike; leave out "
            "zero_tp.training.stages and batch_size_rampup"
        )
    imbalance = options.expert_imbalance
    if imbalance != 1 and config.zero_tp.parallel.expert == 1 and not options.search:
        raise UserError(
            "--expert-imbalance: no rank of this run has other experts than another; set "
            "zero_tp.parallel.expert, or give --search"
        )
    tokens = options.tokens and int(options.tokens)
    run_plan = plan(config, device, tokens, expert_imbalance=imbalance)

    result: dict[str, Any] = run_plan.as_json()
    lines = [report.describe(run_plan)]
    if options.dry_run:
        dry_run, seconds = run_plan.dry_run_all_layers()
        # "true_view_bytes" is the plan's peak, under the key's old name.
        peaks = {"dry_run_bytes": dry_run.as_json(), "true_view_bytes": run_plan.peak.as_json()}
        result["dry_run"] = {"seconds": seconds, **peaks}
        lines += report.dry_run_lines(run_plan.peak, dry_run, seconds)
    advice: list[str] = []
    fastest = None
    if options.search:
        search = Search(config, device, expert_imbalance=imbalance)
        shown, best = search.fastest(options.set, options.top or TOP)
        result["candidates"] = [estimate.as_json() for estimate in shown]
        result["tried"], result["fitting"] = len(search.ranked), search.fitting
        advice = report.search_lines(search, shown, run_plan)
        fastest = shown[0]
        lines += advice
        if options.write:
            write_named(options.write, json.dumps(best, indent=2) + "\n")
            lines.append(f"wrote {options.write}")
    if options.html:
        from zero_tp.tools.planning.pictures import write_page

        lines += [f"wrote {path}" for path in write_page(run_plan, options.html, advice, fastest)]
    show(*([json.dumps(result, indent=1)] if options.json else lines))
