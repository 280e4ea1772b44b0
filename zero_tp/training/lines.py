"""A step is one aligned line on the console."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from zero_tp.training.metrics import Speed


@dataclass(frozen=True)
class StepRecord:
    """A record is a step. Its loss is the mean over the global batch, and so is what else the objective has figures of;
    its norm is of all gradients before clipping. `skipped_steps` are those of the run until now; only fp16 has a loss
    scale."""

    step: int
    consumed_samples: int
    loss: float
    learning_rate: float
    grad_norm: float
    speed: Speed
    memory_gib: float
    loss_scale: float | None = None
    skipped_steps: int = 0
    figures: Mapping[str, float] = field(default_factory=dict)


def format_number(value: float, width: int = 9) -> str:
    """Format a loss or norm with four decimals, in scientific form where those would say nothing; right-aligned."""
    if not math.isfinite(value):
        text = str(value)
    elif value == 0 or 1e-2 <= abs(value) < 1e3:
        text = f"{value:.4f}"
    else:
        text = f"{value:.2e}"
    return text.rjust(width)


def format_rate(value: float) -> str:
    """Format a rate in at most 6 characters: 0.0123, 4.567, 732.1, 98765, 123.4k, 1.234M."""
    if not math.isfinite(value):
        return str(value)
    for unit, factor in (("", 1.0), ("k", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12)):
        scaled = value / factor
        if unit == "" and abs(value) < 99999.5:
            if abs(value) >= 999.95:
                return f"{value:.0f}"
            return f"{value:.4f}" if abs(value) < 1 else f"{value:.4g}"
        if unit and abs(scaled) < 999.95:
            return f"{scaled:.4g}{unit}"
    return f"{value:.0e}"


def format_duration(seconds: float | None) -> str:
    """Format the time left in at most 6 characters: 45s, 3m20s, 2h05m, 12d03h, 123d; `-` where unknown."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    whole = round(seconds)
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if whole < 60:
        return f"{whole}s"
    if hours < 1:
        return f"{minutes}m{whole % 60:02d}s"
    if days < 1:
        return f"{hours}h{minutes % 60:02d}m"
    return f"{days}d{hours % 24:02d}h" if days < 100 else f"{days}d"


WIDTHS = (8, 9, 9, 8, 11, 6, 6, 8, 6)


def _columns(step: str, total_steps: int, loss: str, shares: Mapping[str, str], cells: Sequence[str]) -> str:
    first = step.rjust(max(len("step"), 2 * len(str(total_steps)) + 1))
    accuracies = (cell.rjust(len(name)) for name, cell in shares.items())
    others = (cell.rjust(width) for cell, width in zip(cells, WIDTHS, strict=True))
    return "  ".join([first, loss.rjust(9), *accuracies, *others])


def accuracies_of(figures: Iterable[str]) -> dict[str, str]:
    """Return the columns of those figures that are accuracies, and their names."""
    return {name.replace("_accuracy", " right"): name for name in figures if name.endswith("_accuracy")}


def format_header(total_steps: int, figures: Sequence[str] = ()) -> str:
    """Return the names of the columns, with units. "dev" is one device: an accelerator, or a CPU rank."""
    names = ("lr", "grad norm", "tok/s/dev", "tok/s", "TFLOP/s/dev", "MFU", "HFU", "peak GiB", "ETA")
    return _columns("step", total_steps, "loss", {name: name for name in accuracies_of(figures)}, names)


def format_line(record: StepRecord, total_steps: int) -> str:
    """Format one step, aligned below `format_header`."""
    speed = record.speed
    cells = (
        f"{record.learning_rate:.2e}",
        format_number(record.grad_norm),
        format_rate(speed.tokens_per_second_per_device),
        format_rate(speed.tokens_per_second),
        format_rate(speed.model_tflops),
        _percent(speed.mfu),
        _percent(speed.hfu),
        f"{record.memory_gib:.2f}",
        format_duration(speed.eta_seconds),
    )
    shares = {column: f"{record.figures[name]:.1%}" for column, name in accuracies_of(record.figures).items()}
    return _columns(f"{record.step}/{total_steps}", total_steps, format_number(record.loss), shares, cells)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"


def format_figure(name: str, value: float) -> str:
    if name.endswith("accuracy"):
        return f"{value:.1%}"
    return f"{value:.2f}" if name == "perplexity" else f"{value:.4f}"
