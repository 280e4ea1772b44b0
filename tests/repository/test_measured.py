"""Each measured figure of the pages names the dated result or the test that holds it, and the
result has it.
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.scale import SUMS
from tests.support.launched import ROOT

RESULTS = ROOT / "benchmarks" / "results"
MEASURED = RESULTS / "measured.md"
DOCS = [
    ROOT / "README.md",
    *(page for page in sorted(ROOT.glob("docs/*.md")) if page.name != "config.md"),
]
PAGES = [*DOCS, MEASURED, RESULTS / "papers.md", RESULTS / "scaling.md"]

FIGURE = re.compile(
    r"(?<![\w.,])(?:\d[\d,]*\.\d+(?:e-\d+)?|\d[\d,]*(?= ?(?:%|ms|s\b|MiB|GiB|GB|tokens/s)))"
)
"""A number with decimals or with a unit; the other integers are settings."""
UNITS = {"%": 100, "MiB": 2**-20, "GB": 1e-9, "MB": 1e-6, "M tokens": 1e-6, "ms": 1e3}
"""What a number of a result is multiplied by where its line has this unit."""
RAW = {"step_s", "user_kernel_s", "faults_a_step", "forward_backward_update_s", "tokens_per_s"}
"""Keys of a result that no page quotes."""
COMPUTED = {
    "2026-11-23-same-model.json": lambda result: [
        max(abs(a - b) for a, b in zip(*result["losses"].values(), strict=True))
    ],
    "2026-11-23-norm-order.json": lambda result: [0.08],  # a setting that it leaves out
    "2026-11-27-train-experts-fp32.json": lambda result: [
        _peak(result, "ztp-sp-compiled") / _peak(result, "hf-1p")
    ],
    "2026-11-26-data-duplicates.json": lambda result: [
        0.6,
        0.7,
        0.8,
    ],  # similarities, which its keys name
}
"""Figures of a result that it does not have as numbers."""


def _peak(result: Any, contender: str) -> float:
    return float(statistics.median(result["peak_mib"][contender]))


def blocks(page: Path) -> list[str]:
    """Return the list items and paragraphs of a page, each with the table below it; examples are
    left out.
    """
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return [
        block for block in re.split(r"\n(?=- )|\n\n(?=[^\s|])", text) if not block.startswith("#")
    ]


def dated_results(block: str) -> list[str]:
    return re.findall(r"[(/](\d{4}-\d\d-\d\d-[\w.-]+\.json)\)", block)


def named_tests(block: str) -> list[str]:
    return re.findall(r"`(tests/[\w/]+\.py(?:::\w+)?)`", block)


def numbers(value: Any) -> Iterator[float]:
    """Yield the numbers in a result, of several beside each other the least, the quartiles and
    the most, and `SUMS`.
    """
    if isinstance(value, (int, float)):
        yield float(value)
    elif isinstance(value, (dict, list)):
        inner = (
            [value[key] for key in value if key not in RAW] if isinstance(value, dict) else value
        )
        plain = [float(part) for part in inner if type(part) in (int, float)]
        if len(plain) > 1:
            yield from (
                min(plain),
                *statistics.quantiles(plain, n=4, method="inclusive"),
                max(plain),
            )
        if isinstance(value, dict) and "agreement" in value:
            sums = [
                ("groups", "agreement", "machines"),
                *((*names, "machines") for names in SUMS.values()),
            ]
            yield from (
                sum(value[name]["processor"] for name in names)
                for names in sums
                if {*names} <= {*value}
            )
        for part in inner:
            yield from numbers(part)
    elif isinstance(value, str) and value.endswith("%"):
        yield float(value[:-1])


@cache
def numbers_of(name: str) -> tuple[float, ...]:
    result = json.loads((RESULTS / name).read_text())
    computed = COMPUTED.get(name)
    return (*numbers(result), *(computed(result) if computed else ()))


def is_in(figure: str, block: str, known: tuple[float, ...]) -> bool:
    """Whether a figure is a number of a result, rounded as it is printed."""
    value, unit = (
        float(figure.replace(",", "")),
        10.0 ** -len(figure.partition(".")[2].partition("e")[0]),
    )
    half = unit / 2 * (10.0 ** -int(figure.partition("e-")[2] or 0)) * 1.0001
    scales = [1.0, *(scale for name, scale in UNITS.items() if name in block)]
    return any(abs(abs(number) * scale - value) <= half for number in known for scale in scales)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_figure_of_a_dated_result_is_in_it(page: Path) -> None:
    missing = []
    for block in blocks(page):
        if results := dated_results(block):
            text = re.sub(
                r"`[^`]*`|\]\([^)]*\)|\[?\d{4}-\d\d-\d\d|arXiv [\d.]+|\b\d+\.\d+\.\d+\b", "", block
            )
            known = tuple(itertools.chain.from_iterable(map(numbers_of, results)))
            missing += [
                (block[:60], figure)
                for figure in FIGURE.findall(text)
                if not is_in(figure, block, known)
            ]
    assert not missing


@pytest.mark.parametrize(
    "model", ["wide-bf16-products", "small-bf16", "gpt2-wide-bf16", "gpt2-small-bf16"]
)
def test_the_table_of_peers_has_each_ratio_in_its_column(model: str) -> None:
    for ratio in json.loads((RESULTS / f"2026-11-23-peers-{model}.json").read_text())[
        "ratios"
    ].values():
        speeds, memory = ratio["tokens_per_second"], statistics.median(ratio["peak_memory"])
        rounds = f" ({min(speeds):.2f}–{max(speeds):.2f})" if len(speeds) > 1 else ""
        assert f"| {statistics.median(speeds):.2f}{rounds}; {memory:.2f} |" in MEASURED.read_text()


def test_every_measured_line_names_what_holds_it() -> None:
    lines = [block for block in blocks(MEASURED) if block.startswith("- ")]
    assert len(lines) > 10 and not [
        line[:90] for line in lines if not dated_results(line) and not named_tests(line)
    ]


def test_what_is_named_exists() -> None:
    for block in itertools.chain.from_iterable(map(blocks, PAGES)):
        for name in named_tests(block):
            path, _, function = name.partition("::")
            assert (ROOT / path).is_file(), name
            assert not function or f"def {function}(" in (ROOT / path).read_text(), name
        assert not [name for name in dated_results(block) if not (RESULTS / name).is_file()], block


def test_nothing_measured_stands_in_two_places() -> None:
    named = Counter(
        name for page in PAGES for block in blocks(page) for name in {*dated_results(block)}
    )
    assert len(named) > 15 and not [name for name, count in named.items() if count > 1]
