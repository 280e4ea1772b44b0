"""Format a step as one aligned line of the console."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tqdm import tqdm

from zero_tp.training.metrics import Speed


def format_number(value: float, width: int = 9) -> str:
    """Format a loss or norm with four decimals, very small or large ones in scientific form; right-aligned."""
    if not math.isfinite(value):
        text = str(value)
    elif value == 0 or 1e-2 <= abs(value) < 1e3:
        text = f"{value:.4f}"
    else:
        text = f"{value:.2e}"
    return text.rjust(width)


def format_rate(value: float) -> str:
    """Format a rate in few characters: 0.0123, 4.567, 732.1, 98.8k, 1.23M."""
    return f"{value:.4g}" if abs(value) < 1e4 else tqdm.format_sizeof(value)


def format_duration(seconds: float | None) -> str:
    """Format the time left as minutes and seconds, with hours if there are any; `-` where unknown."""
    return "-" if seconds is None or not math.isfinite(seconds) else tqdm.format_interval(seconds)


WIDTHS = (8, 9, 9, 8, 11, 6, 6, 8, 10)


def _columns(step: str, total_steps: int, loss: str, figures: Mapping[str, str], cells: Sequence[str]) -> str:
    first = step.rjust(max(len("step"), 2 * len(str(total_steps)) + 1))
    own = (cell.rjust(len(name)) for name, cell in figures.items())
    others = (cell.rjust(width) for cell, width in zip(cells, WIDTHS, strict=True))
    return "  ".join([first, loss.rjust(9), *own, *others])


def figure_columns(figures: Iterable[str]) -> dict[str, str]:
    """Return the names of the model's figures that have a column, by its title: accuracies, the load-balancing loss."""
    names = [name for name in figures if name.endswith("_accuracy") or name == "aux_loss"]
    return {name.replace("_accuracy", " right").replace("aux_loss", " aux loss"): name for name in names}


def format_header(total_steps: int, figures: Sequence[str] = ()) -> str:
    """Return the names of the columns, with units. "dev" is one device: an accelerator, or a CPU rank."""
    names = ("lr", "grad norm", "tok/s/dev", "tok/s", "TFLOP/s/dev", "MFU", "HFU", "peak GiB", "ETA")
    return _columns("step", total_steps, "loss", {name: name for name in figure_columns(figures)}, names)


def format_line(values: Mapping[str, Any], speed: Speed, total_steps: int) -> str:
    """Format a step's line of metrics.jsonl, aligned below `format_header`."""
    cells = (
        f"{values['learning_rate']:.2e}",
        format_number(values["grad_norm"]),
        format_rate(speed.tokens_per_second_per_device),
        format_rate(speed.tokens_per_second),
        format_rate(speed.model_tflops),
        _percent(speed.mfu),
        _percent(speed.hfu),
        f"{values['memory_gib']:.2f}",
        format_duration(speed.eta_seconds),
    )
    own = {
        column: format_number(values[name]) if name == "aux_loss" else f"{values[name]:.1%}"
        for column, name in figure_columns(values).items()
    }
    return _columns(f"{values['step']}/{total_steps}", total_steps, format_number(values["loss"]), own, cells)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"


def format_figure(name: str, value: float) -> str:
    if name.endswith("accuracy"):
        return f"{value:.1%}"
    return f"{value:.2f}" if name == "perplexity" else f"{value:.4f}"
