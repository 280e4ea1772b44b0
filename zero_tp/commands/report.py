"""Plot the metrics of runs, as a page in one file and a PNG.

    zero-tp report runs/quickstart
    zero-tp report runs/small runs/large --output compared.html

A run may still be training. On the page, values show under the pointer. The horizontal
axis is logarithmic if one run is more than five times as long as another.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from zero_tp.base.errors import show

AGAINST = ("step", "tokens")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="run directories, drawn together"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="HTML",
        help="the page (default: RUN/report.html, of several runs ./report.html)",
    )
    parser.add_argument(
        "--against",
        choices=AGAINST,
        help="the x axis (default: tokens if runs differ in tokens per step, else step)",
    )


def main(options: argparse.Namespace) -> None:
    from zero_tp.tools.report.run_page import write_report

    for path in write_report(options.runs, options.output, options.against):
        show(f"wrote {path}")
