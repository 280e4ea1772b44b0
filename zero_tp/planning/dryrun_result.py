"""A dry run beside the true view of the same kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zero_tp.planning.memory import Point


@dataclass(frozen=True)
class Comparison:
    """Both peaks, and how long the dry run took [s]."""

    measured: Point
    ours: Point
    seconds: float

    def as_json(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "dry_run_bytes": {"phase": self.measured.phase, "total": self.measured.total, **self.measured.bytes},
            "true_view_bytes": {"phase": self.ours.phase, "total": self.ours.total, **self.ours.bytes},
        }
