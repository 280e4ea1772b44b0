"""Format a step as one aligned line of the console."""

from __future__ import annotations

import math
from collections.abc import Mapping
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
    """Format a time as minutes and seconds, with hours if there are any; `-` where unknown."""
    return "-" if seconds is None or not math.isfinite(seconds) else tqdm.format_interval(seconds)


def format_step(values: Mapping[str, Any], speed: Speed, total_steps: int) -> tuple[str, str]:
    """Format a step's line of metrics.jsonl for the console; return the names of its columns, and the line below them.

    "dev" is one device: an accelerator, or a CPU rank. MFU has a column where the device's peak is known, HFU where
    backward also computes some of forward again.
    """
    done = f"{values['step']}/{total_steps}"
    cells = [("step", 2 * len(str(total_steps)) + 1, done), ("loss", 9, format_number(values["loss"]))]
    for name, value in values.items():
        if name.endswith("_accuracy"):
            cells.append((name.replace("_accuracy", " right"), 0, f"{value:.1%}"))
        elif name == "aux_loss":
            cells.append(("aux loss", 9, format_number(value)))
    cells += [
        ("lr", 8, f"{values['learning_rate']:.2e}"),
        ("grad norm", 9, format_number(values["grad_norm"])),
        ("tokens", 5, format_rate(speed.tokens)),
        ("tok/s/dev", 9, format_rate(speed.tokens_per_second_per_device)),
        ("tok/s", 6, format_rate(speed.tokens_per_second)),
        ("TFLOP/s/dev", 11, format_rate(speed.model_tflops)),
    ]
    if speed.mfu is not None:
        cells.append(("MFU", 6, f"{speed.mfu:.1%}"))
        if speed.hfu is not None and speed.hfu != speed.mfu:
            cells.append(("HFU", 6, f"{speed.hfu:.1%}"))
    cells += [
        ("peak GiB", 8, f"{values['memory_gib']:.2f}"),
        ("elapsed", 9, format_duration(speed.elapsed_seconds)),
        ("left", 10, format_duration(speed.eta_seconds)),
    ]
    widths = [max(width, len(title)) for title, width, _ in cells]
    header = "  ".join(title.rjust(width) for (title, _, _), width in zip(cells, widths, strict=True))
    return header, "  ".join(text.rjust(width) for (_, _, text), width in zip(cells, widths, strict=True))


def format_figure(name: str, value: float) -> str:
    if name.endswith("accuracy"):
        return f"{value:.1%}"
    return f"{value:.2f}" if name == "perplexity" else f"{value:.4f}"
