"""The meter, the device table, the log line, metrics.jsonl, quietness."""

from __future__ import annotations

import io
import json
import math
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.run_log import RunLog
from zero_tp.base.settings.schema import Logging
from zero_tp.model.flops import utilisation
from zero_tp.parallel.device_table import DEVICES
from zero_tp.parallel.devices import find_device_spec, peak_flops
from zero_tp.run.callback import Metrics
from zero_tp.run.metrics import memory_gib
from zero_tp.run.metrics_file import cut_metrics
from zero_tp.run.step_logger import RunProgress, StepLogger, StepTimer, format_step


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_steps_are_timed_without_the_work_between_them() -> None:
    clock = Clock()
    timer = StepTimer(window=2, clock=clock)
    clock.now += 50  # the first step compiles
    timer.stop()
    assert timer.read() == 50 and timer.estimate(11) == 11 * 50
    for seconds in (1.0, 3.0):
        timer.start()
        clock.now += seconds
        timer.stop()
        clock.now += 1000
    assert timer.read() == 2.0 and timer.estimate(9) == 9 * 2.0
    assert timer.elapsed == 50 + 1 + 1000 + 3


DEVICES_BY_NAME: dict[str, tuple[float | None, str | None]] = {
    "Tesla V100-SXM2-32GB": (None, "v100-16gb"),
    "NVIDIA A100-SXM4-40GB": (312.0, "a100-40gb"),
    "NVIDIA A100-PCIE-40GB": (312.0, "a100-pcie-40gb"),
    "NVIDIA A100-SXM4-80GB": (312.0, "a100-80gb"),
    "NVIDIA A100 80GB PCIe": (312.0, "a100-pcie-80gb"),
    "NVIDIA A800-SXM4-80GB": (312.0, "a800-80gb"),
    "NVIDIA A800 80GB PCIe": (312.0, None),
    "NVIDIA H800": (989.0, "h800-80gb"),
    "NVIDIA H800 PCIe": (756.0, None),
    "NVIDIA H20": (148.0, "h20-96gb"),
    "NVIDIA H20-3e": (None, None),
    "NVIDIA H100 80GB HBM3": (989.0, "h100-80gb"),
    "NVIDIA H100 PCIe": (756.0, None),
    "NVIDIA H200": (989.0, "h200-141gb"),
    "NVIDIA H200 MIG 1g.18gb": (None, None),
    "NVIDIA GH200 480GB": (989.0, "gh200-96gb"),
    "NVIDIA GH200 120GB": (989.0, "gh200-96gb"),
    "NVIDIA GH200 144G HBM3e": (989.0, None),
    "NVIDIA B200": (2250.0, "b200-180gb"),
    "NVIDIA GB200": (2500.0, "gb200-186gb"),
    "AMD Instinct MI300X": (1307.4, "mi300x-192gb"),
    "NVIDIA L40S": (362.0, "l40s-48gb"),
    "NVIDIA L40": (None, None),
    "NVIDIA GeForce RTX 4090": (165.2, "rtx4090-24gb"),
    "NVIDIA GeForce RTX 4090 Laptop GPU": (None, None),
}
"""The name that a device gives itself → its peak [TFLOP/s] in bf16, and the first plan's name of
it.
"""


def test_a_devices_own_name_finds_its_peak_and_its_plan() -> None:
    for name, (tflops, plan) in DEVICES_BY_NAME.items():
        row = find_device_spec(name)
        assert next(iter(row.memory_gib if row else ()), None) == plan, name
        assert peak_flops(name, torch.bfloat16) == (tflops and pytest.approx(tflops * 1e12)), name
    assert peak_flops("Tesla V100-SXM2-32GB", torch.float16) == 125e12
    assert peak_flops("NVIDIA A100-SXM4-40GB", torch.float32) == 19.5e12
    assert peak_flops("NVIDIA A100-SXM4-40GB", torch.float32, tf32=True) == 156e12
    assert peak_flops("NVIDIA A100-SXM4-40GB", torch.float64) is None
    assert (
        peak_flops("NVIDIA GeForce GTX 1080", torch.float16) is None
        and utilisation(1e12, 1.0, 1, None) is None
    )
    assert find_device_spec("") is None and all(device.source for device in DEVICES)


def test_memory_is_this_process_peak() -> None:
    before = memory_gib()
    assert 0.01 < before < 1000
    block = torch.ones(int((before + 0.1) * 2**30 / 4))
    assert memory_gib() > before
    del block


def record(
    step: int = 7, figures: Mapping[str, float] = MappingProxyType({}), **changes: Any
) -> tuple[Metrics, RunProgress]:
    """A step's line of metrics.jsonl, and what the console shows besides."""
    progress = RunProgress(tokens=14336, devices=4, elapsed=3725.0, left=changes.pop("left", 90.0))
    speeds = {
        "tokens_per_second": changes.pop("tokens", 4096.0),
        "model_tflops": changes.pop("tflops", 0.0123),
    }
    measured = {
        "loss": 10.5,
        "learning_rate": 3e-4,
        "grad_norm": 1.25,
        "mfu": None,
        "hfu": None,
        "memory_gib": 1.5,
    }
    return {"step": step, **measured, **speeds, **changes, **figures}, progress


@pytest.mark.parametrize(
    "line",
    [
        record(),
        record(loss=0.001, grad_norm=1e-7),
        record(loss=math.nan, grad_norm=math.inf),
        record(loss=999.99996, grad_norm=123456.0),
        record(tokens=9.87654e9, tflops=999.96),
        record(tokens=99999.6, tflops=0.99999, mfu=0.415, hfu=0.553),
        record(tokens=3e13, mfu=1.0),
        record(left=86400 * 13 + 3600 * 5, memory_gib=1234.56),
        record(left=86400 * 400.0, step=1),
        record(step=100000),
    ],
)
def test_lines_stay_below_their_header(line: tuple[Metrics, RunProgress]) -> None:
    header, text = format_step(*line, 100000)
    assert len(text) == len(header)
    edges = [
        index
        for index in range(len(header))
        if header[index] != " " and header[index + 1 : index + 3] in ("  ", "")
    ]
    assert len(edges) == 11 + ("MFU" in header) + ("HFU" in header)
    assert ("MFU" in header, "HFU" in header) == (
        line[0]["mfu"] is not None,
        line[0]["hfu"] is not None,
    )
    assert all(text[edge] != " " and text[edge + 1 : edge + 3] in ("  ", "") for edge in edges), (
        f"\n{header}\n{text}"
    )


def test_accuracies_have_columns_and_every_figure_is_in_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = {
        "masked_loss": 6.0,
        "masked_accuracy": 0.1234,
        "sentence_loss": 0.7,
        "sentence_accuracy": 1.0,
    }
    with RunLog(tmp_path, figures=list(figures)) as log:
        log.log(record(1, loss=6.7, figures=figures))
        log.validation(1, {"loss": 6.5, **figures})
    header, line, validation = capsys.readouterr().out.splitlines()
    assert header.split()[:6] == ["step", "loss", "masked", "right", "sentence", "right"]
    assert line.split()[:5] == ["1/4", "6.7000", "12.3%", "100.0%", "3.00e-04"]
    assert len(line) == len(header)
    assert header.index("masked right") + len("masked right") == line.index("12.3%") + len("12.3%")
    assert validation == (
        "validation at step 1: loss 6.5000, masked loss 6.0000, masked accuracy 12.3%, sentence "
        "loss 0.7000, "
        "sentence accuracy 100.0%"
    )
    logged, validated = read(tmp_path / "metrics.jsonl")
    assert logged["loss"] == 6.7 and all(logged[name] == value for name, value in figures.items())
    assert validated == {
        "step": 1,
        "validation_loss": 6.5,
        **{f"validation_{name}": figures[name] for name in figures},
    }


def test_one_line_reads_as_expected() -> None:
    header, text = format_step(*record(mfu=0.415, hfu=0.553), 2000)
    assert header.replace("grad norm", "grad-norm").replace("peak GiB", "peak-GiB").split() == [
        "step",
        "loss",
        "lr",
        "grad-norm",
        "tokens",
        "tok/s/dev",
        "tok/s",
        "TFLOP/s/dev",
        "MFU",
        "HFU",
        "peak-GiB",
        "elapsed",
        "left",
    ]
    assert text.split() == [
        "7/2000",
        "10.5000",
        "3.00e-04",
        "1.2500",
        "14.3k",
        "1024",
        "4096",
        "0.0123",
        "41.5%",
        "55.3%",
        "1.50",
        "1:02:05",
        "01:30",
    ]
    assert format_step(*record(loss=0.001), 2000)[1].split()[1] == "1.00e-03"
    assert "HFU" not in format_step(*record(mfu=0.415, hfu=0.415), 2000)[0], (
        "nothing is computed again"
    )


def read(path: Path) -> list[dict[str, object]]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_metrics_file_is_strict_json_and_each_step_stands_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunLog(tmp_path) as log:
        for step in (1, 2, 3):
            log.logger.bar.update()
            log.log(record(step, loss=math.nan if step == 2 else 3.0))
        log.validation(2, {"loss": 1000.0})
    path = tmp_path / "metrics.jsonl"
    lines = read(path)
    assert lines[1]["loss"] is None and lines[1]["nonfinite"] == {"loss": "nan"}
    assert lines[3] == {
        "step": 2,
        "validation_loss": 1000.0,
        "validation_perplexity": None,
        "nonfinite": {"validation_perplexity": "inf"},
    }

    with path.open("a") as stream:
        stream.write('{"step": 4, "lo')  # killed while writing
    with RunLog(tmp_path, step=2) as log:
        log.log(record(3, loss=2.5))
    assert [(line["step"], line.get("loss", "validation")) for line in read(path)] == [
        (1, 3.0),
        (2, None),
        (2, "validation"),
        (3, 2.5),
    ]
    assert "removed 1 unreadable line" in capsys.readouterr().out
    assert cut_metrics(path, 0) == 0 and path.read_text() == ""
    assert [each.name for each in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_unreadable_lines_are_removed_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'{"step": 1}\n{"st\xff"}\n\n[]\n{"step": "2"}\n{"step": 2}\n{"step": 9}\n{"step": 3}'
    )
    with RunLog(tmp_path, step=3):
        pass
    assert read(path) == [{"step": 1}, {"step": 2}, {"step": 3}]
    assert f"{path}: removed 4 unreadable lines\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "create", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/full")]
)
def test_a_log_that_cannot_be_written_ends_nothing(
    tmp_path: Path, create: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    create(path)
    with RunLog(tmp_path) as log:
        log.log(record(1))
        log.log(record(2))
        path.unlink() if not path.is_dir() else path.rmdir()
        log.log(record(3))
    err = capsys.readouterr().err.splitlines()
    assert err[0] == f"{path} could not be written (not a regular file); training continues"
    assert err[-1] == f"{path}: 3 writes were lost"
    assert [line["step"] for line in read(path)] == [3]


def test_a_full_disk_under_standard_output_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(full))
        with RunLog(tmp_path) as log:
            log.log(record(1))
            log.log(record(2))
        monkeypatch.undo()
    err = capsys.readouterr().err
    assert err.splitlines() == [
        "standard output could not be written (No space left on device); training continues",
        "standard output: 3 writes were lost",
    ]
    assert [line["step"] for line in read(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_disk_that_fills_up_costs_whole_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A limit on the size of files stands for the disk: it too takes the first bytes of a line,
    and then none.
    """
    path = tmp_path / "metrics.jsonl"
    before, handler = (
        resource.getrlimit(resource.RLIMIT_FSIZE),
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
    )
    try:
        with RunLog(tmp_path) as log:
            log.log(record(1))
            resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, before[1]))
            log.log(record(2))
            log.log(record(3))
            assert [line["step"] for line in read(path)] == [1]
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            log.log(record(4))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert [line["step"] for line in read(path)] == [1, 4]
    err = capsys.readouterr().err
    assert (
        err.count("could not be written (File too large); training continues") == 1
        and "2 writes were lost" in err
    )


@pytest.mark.parametrize(
    ("interval", "expected"), [(1, [True] * 6), ("auto", [True, False, True, True, False, True])]
)
def test_with_auto_a_line_is_printed_every_few_seconds(
    interval: int | str, expected: list[bool]
) -> None:
    """And at once for a step that was skipped, and for the last; metrics.jsonl has every step."""
    seconds, written = 0.0, list[int]()
    logger = StepLogger(clock=lambda: seconds)
    state = SimpleNamespace(
        config=SimpleNamespace(zero_tp=SimpleNamespace(logging=Logging(interval=interval))),
        engine=SimpleNamespace(skipped=False, spike=None),
        print=lambda text: None,
        log=lambda values: written.append(values["step"]),
        total_steps=6,
    )
    printed = []
    for step in range(1, 7):
        seconds = 2.0 * (step - 1) + (1.0 if step > 2 else 0.0)
        state.is_last_step, state.engine.skipped = step == 6, step == 4
        printed.append(logger._is_line_due(state))  # type: ignore[arg-type]
        logger.log(state, *record(step), line=printed[-1])  # type: ignore[arg-type]
    assert (printed, written) == (expected, [1, 2, 3, 4, 5, 6])


def test_other_ranks_are_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunLog(tmp_path / "run", terminal=True, rank=1, steps=25) as log:
        log.logger.bar.update()
        log.log(record(10))
        log.validation(10, {"loss": 2.0})
        log.state.print("saved")
    assert capsys.readouterr() == ("", "")
    assert not (tmp_path / "run").exists()


def test_a_terminal_gets_a_bar_below_the_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunLog(tmp_path, terminal=True, steps=5, step=2) as log:
        log.logger.bar.update()
        log.log(record(3))
        log.state.print("checkpoint saved")
    out, err = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()] == ["step", "3/5", "checkpoint"]
    assert "/5" in err
