"""Write dated results with the date, the machine, the commit and versions."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from zero_tp.base.versions import versions

ROOT = Path(__file__).resolve().parent.parent


def provenance() -> dict[str, Any]:
    """Return the date, the machine, the commit and versions."""
    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": versions(),
    }


def write_result(
    directory: Path,
    name: str,
    result: dict[str, Any],
    machine: str | None = None,
    *,
    tell: bool = True,
) -> Path:
    """Write `DATE-NAME.json` into the directory; print its path if `tell`."""
    frame = provenance()
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    frame |= {"commit": commit, **({"machine": machine} if machine else {})}
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{frame['date']}-{name}.json"
    path.write_text(json.dumps({**frame, **result}, indent=1, ensure_ascii=False) + "\n")
    if tell:
        print(f"wrote {path}")
    return path
