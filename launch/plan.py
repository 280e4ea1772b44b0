#!/usr/bin/env python3
"""How much memory and time a run will take, before it takes them. Needs no device and no data.

    python launch/plan.py ds_configs/gpt2_8.3b.json --world-size 64 --device h100-80gb
    python launch/plan.py ds_configs/gpt2_8.3b.json --world-size 64 --device a100-40gb --search --write planned.json
    python launch/plan.py ds_configs/gpt2_8.3b.json --world-size 64 --device h100-80gb --html plan.html --dry-run

docs/planning.md says what the figures mean.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from zero_tp import cli
from zero_tp.errors import UserError
from zero_tp.process.quiet import quiet_libraries


def arguments() -> argparse.Namespace:
    parser = cli.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", metavar="FILE", help="the run's JSON file")
    parser.add_argument("--world-size", type=int, required=True, metavar="N", help="number of devices")
    parser.add_argument(
        "--device",
        required=True,
        metavar="NAME|JSON",
        help="v100-16gb, v100-32gb, a100-40gb, a100-80gb, h100-80gb, h200-141gb, b200-180gb, mi300x-192gb, l40s-48gb, "
        "rtx4090-24gb, cpu, or a JSON file that describes one",
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of FILE; may be repeated"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--search", action="store_true", help="try other settings at the same global batch")
    parser.add_argument("--top", type=int, default=10, metavar="N", help="candidates that --search shows (default 10)")
    parser.add_argument("--write", type=Path, metavar="OUT", help="with --search: write the fastest as a run config")
    parser.add_argument("--dry-run", action="store_true", help="run one micro-batch with fake tensors and compare")
    parser.add_argument("--html", type=Path, metavar="OUT", help="write a page with pictures, and PNGs beside it")
    parser.add_argument("--pipeline", type=int, default=1, metavar="P", help="pipeline stages, as the papers count")
    parser.add_argument("--interleaving", type=int, default=1, metavar="M", help="interleaved stages, likewise")
    return parser.parse_args()


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


def main() -> None:
    options = arguments()
    check(options)
    from zero_tp.config import RunConfig
    from zero_tp.planning.devices import device

    chosen = device(options.device, options.world_size)
    config = RunConfig.load(options.file, options.set, options.world_size // options.pipeline)
    from zero_tp.planning import advise, report
    from zero_tp.planning.plan import plan

    made = plan(config, chosen, pipeline=options.pipeline, interleaving=options.interleaving)
    result: dict[str, Any] = made.as_json()
    lines = [report.describe(made)]
    found = shown = comparison = None
    if options.dry_run:
        comparison = advise.compare(made)
        result["dry_run"] = comparison.as_json()
        lines += report.dry_run(comparison)
    if options.search:
        found, shown, chosen_config = advise.search_and_check(made, options.set, options.top)
        result["candidates"] = [advise.candidate_json(one) for one in shown]
        result["tried"], result["fitting"] = found.tried, len(found.fitting)
        lines += report.advice(found, shown, made)
        if options.write:
            advise.write(chosen_config, options.write)
            lines.append(f"wrote {options.write}")
    if options.html:
        from zero_tp.planning.page import write_page

        if found is None:
            found, shown = advise.candidates(made, options.set, options.top)

        for path in write_page(made, options.html, found, shown):
            lines.append(f"wrote {path}")
    print(json.dumps(result, indent=1) if options.json else "\n".join(lines))


if __name__ == "__main__":
    quiet_libraries(False)
    cli.run(main)
