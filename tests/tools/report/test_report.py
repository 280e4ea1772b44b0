"""The report of runs: what is read of a run that goes on, and the page that is drawn."""

from __future__ import annotations

import json
import math
import os
import random
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.support.launched import zero_tp
from tests.tiers import THOROUGH, in_tiers
from zero_tp.base.errors import UserError
from zero_tp.base.page import TABLE_ROWS
from zero_tp.run.metrics_file import metrics_line
from zero_tp.tools.report.curves import draw_runs, panels, smoothed
from zero_tp.tools.report.run_page import STEPS, write_report
from zero_tp.tools.report.runs import config_differences, read_runs


def make_run(
    directory: Path, steps: int = 6, batch: int = 4, lr: float = 1e-3, end: str = ""
) -> Path:
    directory.mkdir(parents=True)
    lines: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        loss = math.nan if step == 2 else 8 / step
        lines.append(
            {
                "step": step,
                "loss": loss,
                "learning_rate": lr,
                "grad_norm": 1.0,
                "mfu": None,
                "hfu": None,
            }
        )
    lines += [{"step": steps, "validation_loss": 1.5, "validation_perplexity": math.exp(1.5)}]
    lines += [{"step": steps, "lambada/accuracy": 0.25}]
    write_metrics(directory, lines, end)
    block = {
        "data": {"sequence_length": 16, "train": {"<corpus>": 1.0}},
        "training": {"steps": 2 * steps},
    }
    config: dict[str, Any] = {
        "train_batch_size": batch,
        "optimizer": {"params": {"lr": lr}},
        "zero_tp": block,
    }
    config |= {"comet": {"api_key": "secret"}}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def write_metrics(run: Path, lines: Iterable[dict[str, Any]], end: str = "") -> Path:
    (run / "metrics.jsonl").write_text("".join(metrics_line(line) + "\n" for line in lines) + end)
    return run


@THOROUGH
def test_a_run_is_read_while_it_is_written(tmp_path: Path) -> None:
    going = make_run(tmp_path / "one", end='{"step": 7, "lo')
    (found,) = read_runs([going])
    assert found.unreadable == 0, "half a line at the end is being written"
    assert [*found.series["loss"]] == [1, 2, 3, 4, 5, 6] and math.isnan(found.series["loss"][2])
    assert (
        [*found.finite("loss")] == [1, 3, 4, 5, 6]
        and found.finite("mfu") == {}
        and found.tokens_per_step == 64
    )
    with (going / "metrics.jsonl").open("a") as torn:
        torn.write(
            '\n{"step": 7, "loss": 1.0}\n{"step": 7, "loss": 0.5, "experts/layer_0/1": 0.5}\n'
        )
    (found,) = read_runs([going])
    assert found.unreadable == 1 and found.series["loss"][7] == 0.5 and found.last_step == 7
    assert [*panels([found])] == ["loss", "learning rate", "gradient norm", "lambada/accuracy"]
    text = write_report([going])[0].read_text()
    assert "lambada/accuracy" in text and "experts/" not in text, (
        "a table has a row for each task, not each expert"
    )


@pytest.mark.slow
def test_what_is_no_run_is_one_line(tmp_path: Path) -> None:
    names = ("one", "torn", "new", "endless", "other", "folder")
    one, torn, new, endless, other, folder = (make_run(tmp_path / name) for name in names)
    (other / "metrics.jsonl").write_text("time,loss\n1,2\n")
    (torn / "config.json").write_text("{")
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    (new / "metrics.jsonl").write_text('{"step": 1')
    (endless / "metrics.jsonl").unlink()
    (endless / "metrics.jsonl").symlink_to("/dev/zero")
    for runs, message in (
        ([endless], r"metrics\.jsonl: cannot be read \(not a regular file\)"),
        ([tmp_path / "none"], r"none/metrics\.jsonl: cannot be read"),
        ([one, tmp_path / "." / "one"], "given twice"),
        ([torn], "not a run's config"),
        ([folder], r"config\.json: not a run's config \(not a regular file\)$"),
        ([new], "nothing was logged yet"),
        ([other], "other/metrics.jsonl: has no line of a run's metrics"),
    ):
        with pytest.raises(UserError, match=message):
            read_runs(runs)
    with pytest.raises(UserError, match=r"^\.: can't be written \(not a regular file\)"):
        write_report([one], Path("."))


def test_norms_of_updates_share_a_panel(tmp_path: Path) -> None:
    values = {"update_norm/group_0": 0.5, "update_norm/group_1": 0.25, "clipped_heads": 2}
    run = write_metrics(make_run(tmp_path / "one"), [{"step": 1, **values}])
    assert panels(read_runs([run])) == {
        "heads that QK-clip scales": {"clipped_heads": ""},
        "norm of the update": {
            "update_norm/group_0": "group 0",
            "update_norm/group_1": "group 1",
        },
    }


def test_smoothing_is_that_of_pandas(seed: int) -> None:
    """Its exponentially weighted mean, adjusted for the start, over what is there."""
    import pandas

    draw = random.Random(seed)
    values = [
        math.nan if draw.random() < 0.1 else draw.gauss(3, 1)
        for _ in range(draw.randrange(60, 400))
    ]
    span = max(1.0, len(values) / 50)
    expected = pandas.Series(values).ewm(span=span, adjust=True, ignore_na=True).mean()
    assert smoothed(values) == pytest.approx(list(expected), nan_ok=True)


@THOROUGH
def test_a_long_run_makes_no_long_page(tmp_path: Path) -> None:
    """matplotlib leaves out points that do not show."""
    sizes = []
    for steps in (2_000, 100_000):
        lines = ({"step": step, "grad_norm": random.gauss(3, 1)} for step in range(1, steps + 1))
        run = write_metrics(make_run(tmp_path / str(steps)), lines)
        sizes.append(write_report([run], tmp_path / f"{steps}.html")[0].stat().st_size)
    assert sizes[1] < 4 * sizes[0]


@pytest.mark.slow
def test_runs_are_drawn_beside_each_other_with_what_sets_them_apart(tmp_path: Path) -> None:
    name = "run\udcff"  # a byte that is not UTF-8
    runs = [
        make_run(tmp_path / "a" / name),
        make_run(tmp_path / "b" / name, steps=60, batch=8, lr=3e-3),
    ]
    first, second = read_runs(runs)
    assert (first.name, second.name) == (r"a/run\udcff", r"b/run\udcff")
    assert config_differences([first, second]) == [
        ("train_batch_size", ["4", "8"]),
        ("optimizer.params.lr", ["0.001", "0.003"]),
        ("zero_tp.training.steps", ["12", "120"]),
    ]
    page, picture = write_report(runs, tmp_path / "both.html")
    text = page.read_text()
    links = re.findall(r'(?:href|src|xlink:href)="([^"]*)"', text)
    assert all(link.startswith("#") for link in links), "only references inside the page"
    assert "@import" not in text and "<script" not in text and "url(http" not in text
    assert (
        text.count("<svg") == 1
        and "&lt;corpus&gt;" in text
        and "<corpus>" not in text
        and "secret" not in text
    )
    assert "optimizer.params.lr" in text and "1.5000 at step 60" in text and "60 of 120" in text
    with Image.open(picture) as drawn:
        assert drawn.width > 1000 and len(drawn.convert("RGB").getcolors(1 << 24) or ()) > 50


BLOCKS = ["x", {"training": {"steps": "x"}, "data": 3}, {"data": {"sequence_length": 0}}]


@pytest.mark.slow
@pytest.mark.parametrize("block", in_tiers(BLOCKS, BLOCKS[1:2]))
def test_a_config_that_a_person_has_changed_tells_what_is_left(block: Any, tmp_path: Path) -> None:
    made = make_run(tmp_path / "run")
    (made / "config.json").write_text(json.dumps({"train_batch_size": 4, "zero_tp": block}))
    (found,) = read_runs([made])
    assert found.integer(STEPS) is None and found.tokens_per_step is None
    text = write_report([made], tmp_path / "page.html")[0].read_text()
    assert "at step 6" in text and "6 of 12" not in text


@pytest.mark.slow
def test_a_picture_waits_for_no_pipe(tmp_path: Path) -> None:
    made = make_run(tmp_path / "run")
    os.mkfifo(tmp_path / "page_curves.png")
    with pytest.raises(
        UserError, match=r"page_curves\.png: can't be written \(not a regular file\)"
    ):
        write_report([made], tmp_path / "page.html")


@THOROUGH
def test_the_command_draws_a_run_and_refuses_what_is_none(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    drawn = zero_tp(tmp_path, "report", "run")
    assert drawn.returncode == 0, drawn.stderr
    assert drawn.stdout == "wrote run/report.html\nwrote run/report_curves.png\n"
    again = zero_tp(
        tmp_path, "report", "run", "--against", "tokens", "--output", "out/\x1bpage.html"
    )
    assert again.returncode == 0 and (tmp_path / "out" / "\x1bpage.html").is_file()
    assert again.stdout.startswith("wrote out/\\x1bpage.html\n"), (
        "terminals get no control characters"
    )
    refused = zero_tp(tmp_path, "report", "run", "nowhere")
    assert (
        refused.returncode == 2
        and refused.stderr.count("\n") == 1
        and "nowhere/metrics.jsonl" in refused.stderr
    )


@THOROUGH
@pytest.mark.slow
def test_curves_of_many_runs_of_other_length_stay_apart(tmp_path: Path) -> None:
    """One legend of all runs, dashes where colours repeat, a logarithmic axis, and tables of
    values.
    """
    runs = [make_run(tmp_path / f"run_{number}", steps=6 * (number + 1)) for number in range(9)]
    figure = draw_runs(read_runs(runs), "step")
    looks = [(line.get_color(), line.get_linestyle()) for line in figure.legends[0].get_lines()]
    assert len(looks) == len(set(looks)) == 9
    assert all(axes.get_xscale() == "log" for axes in figure.axes)
    text = write_report(runs, tmp_path / "nine.html")[0].read_text()
    assert "<td>4</td><td>2</td>" in table_of(text, "loss, training, run_8")
    assert "<td>6</td><td>0.001</td>" in table_of(text, "learning rate, run_0")
    assert "prefers-color-scheme: dark" in text and "#000000" not in text and "currentColor" in text
    figure = draw_runs(read_runs(runs[:2]), "step")
    assert all(axes.get_xscale() == "linear" for axes in figure.axes)


def table_of(page: str, title: str) -> str:
    """Return the table of a curve's values."""
    (table,) = re.findall(rf"<details><summary>{re.escape(title)}</summary>(.*?)</details>", page)
    return str(table)


@pytest.mark.slow
def test_a_curve_has_a_table_of_at_most_50_values(tmp_path: Path) -> None:
    lines = ({"step": step, "loss": step / 8, "memory_gib": 0.5} for step in range(1, 1002))
    run = write_metrics(make_run(tmp_path / "run"), lines)
    text = write_report([run], tmp_path / "page.html")[0].read_text()
    loss, memory = (
        table_of(text, title) for title in ("loss, training", "peak memory of a rank [GiB]")
    )
    assert "<th>step</th><th>value</th><th>average</th>" in loss
    assert "<th>step</th><th>value</th></tr>" in memory
    assert TABLE_ROWS * 0.8 < loss.count("<tr>") - 1 <= TABLE_ROWS
    assert "<td>1,001</td><td>125.125</td>" in loss, "the last value stays"


def test_differences_are_json(tmp_path: Path) -> None:
    configs = [{"zero_tp": {"interval": value}} for value in (None, "full")]
    runs = []
    for number, config in enumerate(configs):
        lines = ({"step": step, "memory_gib": 0.45 + step / 600} for step in range(1, 61))
        runs.append(write_metrics(make_run(tmp_path / str(number)), lines))
        (runs[-1] / "config.json").write_text(json.dumps(config))
    assert config_differences(read_runs(runs)) == [("zero_tp.interval", ["null", '"full"'])]


@pytest.mark.slow
def test_hfu_is_shown_where_it_differs(tmp_path: Path) -> None:
    pages = []
    for factor in (1, 1.25):
        lines = ({"step": step, "mfu": 0.4, "hfu": 0.4 * factor} for step in range(1, 7))
        run = write_metrics(make_run(tmp_path / str(factor)), lines)
        pages.append(write_report([run], tmp_path / f"{factor}.html")[0].read_text())
    assert ["HFU" in page for page in pages] == [False, True] and all(
        "MFU" in page for page in pages
    )
