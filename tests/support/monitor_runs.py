"""Lines that a run logs, and the state of a run that logs them."""

from __future__ import annotations

import math
import types
from pathlib import Path
from typing import Any

from tests.support.mistakes import written
from zero_tp.run.config import RunConfig

LINES: list[dict[str, Any]] = [
    {"step": 1, "loss": 2.5, "mfu": None, "skipped_steps": 0},
    {"step": 2, "loss": math.nan, "mfu": None, "skipped_steps": 1},
    {"step": 2, "validation_loss": 2.25, "lambada/accuracy": 0.5},
    {"step": 3, "loss": 1.75, "mfu": 0.25, "skipped_steps": 1},
]


def config_of(tmp_path: Path, *overrides: str) -> RunConfig:
    return RunConfig.load(written(tmp_path), overrides, world_size=4)


def start_state(config: RunConfig, run: Path, step: int = 0) -> Any:
    """The state of a run that resumes from `step`; `printed` has the lines of its trackers."""
    run.mkdir(exist_ok=True)
    printed: list[str] = []
    return types.SimpleNamespace(
        is_rank_zero=True,
        directory=run,
        config=config,
        step=step,
        error=None,
        print=printed.append,
        printed=printed,
    )
