"""A cache of the hash and the range of a corpus' tokens, PREFIX.content.json, which saves reading PREFIX.bin.

The file is valid while PREFIX.bin has the recorded size and times. It may be deleted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import time
from pathlib import Path
from typing import Any

from zero_tp.errors import UserError, shown
from zero_tp.files import write_atomically
from zero_tp.strict_json import InvalidJson, read_object

REPORT = "report.json"
"""The report of `prepare`, with the checksum of each file of the output."""
_CLOCK_TICK = 0.01  # seconds: the resolution of a coarse file system's times


def bin_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.bin")


def content_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.content.json")


@dataclasses.dataclass(frozen=True)
class Content:
    """The SHA-256 of PREFIX.bin, and the smallest and largest of its ids (0 and -1 if it has none)."""

    sha256: str
    smallest: int
    largest: int


def file_stamp(data: Path) -> dict[str, int]:
    """Return a file's size and times. Every write changes them, because no program can set the ctime."""
    status = data.stat()
    return {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns, "ctime_ns": status.st_ctime_ns}


def stamp_after_tick(data: Path) -> dict[str, int]:
    """Return the stamp of a file after waiting until a later write would change its times."""
    stamp = file_stamp(data)
    if abs(time.time() - max(stamp["mtime_ns"], stamp["ctime_ns"]) / 1e9) < _CLOCK_TICK:
        time.sleep(_CLOCK_TICK)
    return stamp


def load_cached(prefix: str) -> Content | None:
    """Return the cached content of PREFIX.bin; None if there is none or the file was written to since."""
    with contextlib.suppress(OSError, InvalidJson, KeyError, TypeError):
        entry = read_object(content_path(prefix))
        if entry == _cache_entry(file_stamp(bin_path(prefix)), entry["content"]):
            return Content(**entry["content"])
    return None


def save_cached(prefix: str, stamp: dict[str, int], content: Content) -> None:
    """Cache the content that PREFIX.bin had at this stamp, if the folder can be written."""
    with contextlib.suppress(OSError):
        entry = _cache_entry(stamp, dataclasses.asdict(content))
        write_atomically(content_path(prefix), json.dumps(entry) + "\n")


def _cache_entry(stamp: dict[str, int], content: dict[str, Any]) -> dict[str, Any]:
    entry = {"file": stamp, "content": content}
    return {**entry, "sha256": hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest()}


def check_report(path: Path, sha256: str) -> None:
    """Compare a file's SHA-256 with that in `prepare`'s report, if there is one. UserError: they differ."""
    try:
        recorded = read_object(path.with_name(REPORT))["files"][path.name]["sha256"]
    except (OSError, InvalidJson, KeyError, TypeError):  # no report, or one without checksums
        return
    if recorded != sha256:
        raise UserError(
            f"{path} is damaged: its SHA-256 is {sha256[:12]}…, not {shown(recorded)[1:13]}… as in {REPORT}; "
            "copy it again, or prepare it again with zero-tp prepare --overwrite"
        )
