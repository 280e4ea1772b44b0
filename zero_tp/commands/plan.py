"""How much memory and time a run will take, before it takes them. Needs no device and no data.

    %(prog)s gpt2_8.3b --world-size 64 --device h100-80gb
    %(prog)s gpt2_8.3b --world-size 64 --device a100-40gb --search --write planned.json
    %(prog)s gpt2_8.3b --world-size 64 --device h100-80gb --html plan.html --dry-run

docs/planning.md says what the figures mean.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from zero_tp.commands.check import FILE, add_config
from zero_tp.devices import NAMES
from zero_tp.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser, "file", FILE)
    parser.add_argument("--world-size", type=int, required=True, metavar="N", help="number of devices")
    parser.add_argument(
        "--device",
        required=True,
        metavar="NAME|JSON",
        help=f"{', '.join(NAMES)}, or a JSON file that describes one",
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of FILE; may be repeated"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--search", action="store_true", help="try other settings at the same global batch")
    parser.add_argument("--top", type=int, default=10, metavar="N", help="candidates that --search shows (default 10)")
    parser.add_argument("--write", type=Path, metavar="OUT", help="with --search: write the fastest as a run config")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="run all layers with fake tensors and compare",
    )
    parser.add_argument("--html", type=Path, metavar="OUT", help="write a page with pictures, and PNGs beside it")
    parser.add_argument("--pipeline", type=int, default=1, metavar="P", help="pipeline stages, as the papers count")
    parser.add_argument("--interleaving", type=int, default=1, metavar="M", help="interleaved stages, likewise")


def check(options: argparse.Namespace) -> None:
    for name in ("world_size", "pipeline", "interleaving", "top"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name.replace('_', '-')}: {getattr(options, name)} is not positive; give 1 or more")
    if options.world_size % options.pipeline:
        raise UserError(
            f"--pipeline: {options.world_size} devices do not divide by {options.pipeline} stages; "
            f"use a multiple of {options.pipeline}"
        )
    if options.write and not options.search:
        raise UserError("--write: writes what --search finds; give --search too")
    if options.pipeline > 1 and (options.search or options.dry_run or options.html):
        raise UserError("--pipeline: only the papers' accounting has it; leave out --search, --dry-run and --html")


def main(options: argparse.Namespace) -> None:
    check(options)
    from zero_tp.config import RunConfig
    from zero_tp.planning.plan import device, plan

    config = RunConfig.load(options.file, options.set, options.world_size // options.pipeline)
    chosen = device(options.device, options.world_size)
    made = plan(config, chosen, pipeline=options.pipeline, interleaving=options.interleaving)
    from zero_tp.planning import report
    from zero_tp.planning.search import Candidate, Search, write

    result: dict[str, Any] = made.as_json()
    lines = [report.describe(made)]
    if options.dry_run:
        comparison = made.compare()
        result["dry_run"] = comparison.as_json()
        lines += report.dry_run(comparison)
    search = Search(config, chosen) if options.search or options.html else None
    shown: list[Candidate] = []
    if search is not None and (options.search or search.fitting):
        try:
            shown, best = search.fastest(options.set, options.top)
        except UserError:
            if options.search:
                raise  # else the page shows the plan itself, without others
    if search is not None and options.search:
        result["candidates"] = [one.as_json() for one in shown]
        result["tried"], result["fitting"] = len(search.ranked), search.fitting
        lines += report.advice(search, shown, made)
        if options.write:
            write(best, options.write)
            lines.append(f"wrote {options.write}")
    if options.html:
        from zero_tp.planning.page import write_page

        for path in write_page(made, options.html, search, shown):
            lines.append(f"wrote {path}")
    print(json.dumps(result, indent=1) if options.json else "\n".join(lines))
