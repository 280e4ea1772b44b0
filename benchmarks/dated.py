"""The frame of a dated result: when, on what, of which commit."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def write_result(directory: Path, name: str, result: dict[str, Any], machine: str | None = None) -> Path:
    """Write `DATE-NAME.json` into the directory and say so."""
    date = datetime.date.today().isoformat()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    frame = {
        "date": date,
        "machine": machine or f"{platform.machine()}, {os.cpu_count()} cores",
        "commit": commit,
        "versions": {package: version(package) for package in ("torch", "deepspeed", "transformers")},
    }
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{date}-{name}.json"
    path.write_text(json.dumps({**frame, **result}, indent=1, ensure_ascii=False) + "\n")
    print(f"wrote {path}")
    return path
