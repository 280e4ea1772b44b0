"""What trackers know of a run: its name, its config, and the ids that services gave it."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_tp.base.files import write_atomically
from zero_tp.base.settings.keys import leaves
from zero_tp.base.strict_json import read_json
from zero_tp.run.config import RunConfig

RUN_IDS = "monitors.json"
"""File in the run directory with the id that each service gave the run. A resumed run continues
under this id.
"""
# Each tracker is opened by a thread of its own.
_RUN_IDS_LOCK = threading.Lock()

Values = dict[str, float]
Options = Mapping[str, Any]
"""A monitor's block, or its arguments in `zero_tp.logging.trackers`."""


@dataclass(frozen=True)
class RunInfo:
    """One start of a run. `step` is the step that it resumes from, 0 for a new run."""

    directory: Path
    config: RunConfig
    step: int

    @property
    def name(self) -> str:
        return self.directory.resolve().name

    def public_config(self) -> dict[str, Any]:
        """Return the config without Comet's API key: a service shows it to others."""
        config = self.config.resolved()
        config.get("comet", {}).pop("api_key", None)
        return config

    def parameters(self) -> dict[str, Any]:
        """Return `public_config` with dotted keys.

        Values that are not strings or numbers are written as JSON.
        """
        parameters = leaves(self.public_config())
        return {
            key: value if isinstance(value, (str, int, float)) else json.dumps(value)
            for key, value in parameters
        }

    def saved_id(self, name: str) -> str | None:
        """Return the id that any earlier start in this run directory has saved."""
        return self._run_ids().get(name)

    def save_run_id(self, name: str, run_id: object) -> None:
        # Each tracker's thread reads the file, adds its id and writes it again. Without the lock
        # one of two ids would be lost.
        with _RUN_IDS_LOCK:
            run_ids = self._run_ids() | {name: str(run_id)}
            write_atomically(self.directory / RUN_IDS, json.dumps(run_ids, indent=2) + "\n")

    def _run_ids(self) -> dict[str, Any]:
        path = self.directory / RUN_IDS
        return read_json(path, "") if path.exists() else {}
