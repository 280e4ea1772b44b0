"""Reproduce a paper's result: measured at small size on this machine, planned at full size, and
published.

    %(prog)s                                        every NAME, with a line each
    %(prog)s recomputation-table-2 --output papers
    %(prog)s recomputation-table-2 --plan-only

benchmarks/results/papers.md shows all results and their differences.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from benchmarks.papers.catalogue import PAPERS, names, reproduction
from zero_tp.base import cli
from zero_tp.base.cli import check_writable
from zero_tp.base.errors import UserError
from zero_tp.base.page import new_figure
from zero_tp.run.process.quiet import quiet_libraries

PROG = "python -m benchmarks.papers"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name",
        nargs="?",
        choices=names(),
        metavar="NAME",
        help="the result; without NAME, list all",
    )
    parser.add_argument(
        "--plan-only", action="store_true", help="only plan the full size; run nothing"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="write NAME.html, its pictures and NAME.json there",
    )


def main(options: argparse.Namespace) -> None:
    if options.name is None:
        if options.plan_only or options.output:
            raise UserError(f"NAME: required with --plan-only and --output; {PROG} lists the names")
        print("\n".join(listed()))
        return
    if options.output:  # refuse before measuring for minutes
        new_figure(1, 1)
        check_writable(options.output)
    result = reproduction(options.name)(measured=not options.plan_only)
    print(result.text())
    if options.output:
        for path in result.write(options.output, options.name):
            print(f"wrote {path}")


def listed() -> list[str]:
    """Return the lines of a list of all results, by paper."""
    width = max(map(len, names()))
    lines = list[str]()
    for paper, each in PAPERS.items():
        lines += [
            each.title,
            *(f"  {f'{paper}-{name}':{width}}  {what}" for name, what in each.results.items()),
        ]
    return lines


def start(words: Sequence[str] | None = None) -> NoReturn:
    """Run the command with these words, by default the process's arguments, and end the process."""
    quiet_libraries(verbose=False)
    parser = cli.Parser(PROG, description=__doc__)
    add_arguments(parser)
    cli.run(lambda: main(parser.parse_args(words)))


if __name__ == "__main__":
    start()
