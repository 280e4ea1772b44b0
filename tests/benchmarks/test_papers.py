"""`python -m benchmarks.papers`: every result at full size by the planner, beside what is
published.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.papers.__main__ import start
from benchmarks.papers.catalogue import PAPERS, names, reproduction
from benchmarks.papers.reproduction import Reproduction, aligned
from tests.support.launched import ROOT
from tests.tiers import THOROUGH
from zero_tp.base.errors import BAD_INPUT

# What the benchmarks publish.
pytestmark = THOROUGH

TIMES = {"ms", "s", "×"}
ROUNDED = {"M": 0.02}
"""The rounding of published figures, by unit."""
FORMULA = {"memory-by-length": 0.3}
"""The tolerance of a formula that counts activations which ours does not keep; else 7 %."""
COMPOSED = "more throughput"
"""The quotient of two times that are compared."""


def command(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        start(words)
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    "name", [name for name in names() if name.startswith(("recomputation-", "memory-"))]
)
def test_plans_are_near_what_is_published_and_stand_in_the_documents(name: str) -> None:
    document = (ROOT / "benchmarks" / "results" / "papers.md").read_text()
    made: Reproduction = reproduction(name)(measured=False)
    for heading, table in made.tables.items():
        assert "\n".join(aligned(heading, table)) in document
    rows = [row for rows in made.tables.values() for row in rows]
    assert rows and all(row.measured is None and row.figures for row in rows)
    for row in rows:
        if row.published is not None and row.planned is not None and row.label != COMPOSED:
            # Times are estimates. Shares of peaks and overheads are quotients of two.
            share = 0.07 if row.unit in TIMES else ROUNDED.get(row.unit, 0.005)
            near = {"abs": 6} if row.unit == "%" else {"rel": share}
            assert row.planned == pytest.approx(row.published, **near), row.label
        if row.formula is not None and (other := row.published or row.planned) is not None:
            near_formula = 0.005 if row.published else FORMULA.get(name, 0.07)
            assert row.formula == pytest.approx(other, rel=near_formula), row.label


@pytest.mark.parametrize(
    ("name", "section", "shown"),
    [
        ("zero-model-states", "ZeRO", r"^ZeRO-|N_d (4|64|1024),.* 128 B"),
        ("zero-largest-model", "ZeRO", "× 64,"),
        ("zero-residual", "ZeRO", "checkpoints whole|P_a|B parameters"),
        ("megatron-sizes", "Megatron-LM", "MP|BERT"),
        ("megatron-scaling", "Megatron-LM", "MP [248]|DP 64|devices|heads"),
    ],
)
def test_plans_stand_in_the_documents_tables(name: str, section: str, shown: str) -> None:
    """Each as some figure of its section, rounded as it is there."""
    (text,) = re.findall(
        rf"^## {section}\n(.*?)^## ",
        (ROOT / "benchmarks" / "results" / "papers.md").read_text(),
        re.DOTALL | re.MULTILINE,
    )
    figures = [each.replace(",", "") for each in re.findall(r"\d[\d,]*\.?\d*", text)]
    rounded = {(float(each), len(each.partition(".")[2])) for each in figures}
    tables = reproduction(name)(measured=False).tables
    rows = [
        row
        for heading, rows in tables.items()
        for row in rows
        if re.search(shown, f"{row.label} {heading}")
    ]
    compared = [row for row in rows if row.planned is not None]
    assert compared
    for row in compared:
        assert any(round(row.planned, digits) == figure for figure, digits in rounded), (
            row.label,
            row.planned,
        )


def test_every_name_is_listed_and_another_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert command() == 0
    output = capsys.readouterr().out
    assert all(f"\n  {name} " in output for name in names()) and all(
        each.title in output for each in PAPERS.values()
    )
    assert command("recomputation-table-9") == BAD_INPUT
    assert capsys.readouterr().err.startswith(
        "error: argument NAME: invalid choice: 'recomputation-table-9'"
    )
    assert command("--plan-only") == BAD_INPUT
    assert capsys.readouterr().err == (
        "error: NAME: required with --plan-only and --output; python -m benchmarks.papers lists "
        "the names\n"
    )


def test_a_page_a_picture_and_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "recomputation-table-5"
    assert command(name, "--plan-only", "--output", str(tmp_path)) == 0
    output = capsys.readouterr().out
    record = json.loads((tmp_path / f"{name}.json").read_text())
    assert all(heading in output for heading in record["tables"])
    assert record["date"] and record["versions"]["torch"]
    row = record["tables"]["22 B on 8 A100"][0]
    assert (row["label"], row["published"], row["measured"]) == ("full recomputation", 1.42, None)
    assert "<svg" in (tmp_path / f"{name}.html").read_text()
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_a_layer_is_measured_on_ranks() -> None:
    made: Reproduction = reproduction("recomputation-table-2")(measured=True)
    small = next(iter(made.tables.values()))
    assert [row.label for row in small][:3] == ["no parallelism", "TP", "TP, SP"]
    for row in small:
        assert row.measured == row.planned == pytest.approx(row.formula, rel=0.002), row.label


def test_the_plan_follows_a_real_run_over_time() -> None:
    """States, gradients, activations and the peaks before and in the update, of the first and
    second step, to 1 %.
    """
    made: Reproduction = reproduction("memory-over-time")(measured=True)
    small = [rows for rows in made.tables.values() if rows[0].measured]
    assert len(small) == 2
    for row in (row for rows in small for row in rows):
        assert row.measured == pytest.approx(row.planned, rel=0.01), row.label
    for rows in small:
        first = {row.label: row.measured for row in rows if row.label.startswith("first step")}
        before, after = (
            first[f"first step: optimizer states {when}"]
            for when in ("before the update", "after it")
        )
        assert before is not None and after == pytest.approx(3 * before, rel=0.001), (
            "the moments came with the update"
        )
