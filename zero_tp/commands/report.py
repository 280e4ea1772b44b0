"""Draw what runs have logged, as a page in one file and a PNG of its curves.

    zero-tp report runs/quickstart
    zero-tp report runs/small runs/large --output compared.html

A run may be going on: make the page again at any time.
On the page, values show under the pointer. The axis of steps is logarithmic if one run is more than five times as long
as another.
"""

from __future__ import annotations

import argparse
from pathlib import Path

AGAINST = ("step", "tokens")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directories, drawn beside each other")
    parser.add_argument(
        "--output", type=Path, metavar="HTML", help="the page (default: RUN/report.html, of several runs ./report.html)"
    )
    parser.add_argument(
        "--against", choices=AGAINST, help="what the curves lie over (default: step, where all runs' steps are alike)"
    )


def main(options: argparse.Namespace) -> None:
    from zero_tp.report.run_page import write_report

    for path in write_report(options.runs, options.output, options.against):
        print(f"wrote {path}")
