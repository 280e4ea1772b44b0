"""The content of a corpus' tokens, remembered in PREFIX.content.json so that PREFIX.bin is not read at each start.

The file is valid as long as the size and times of PREFIX.bin are those it records. It may be deleted.
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
"""In a directory that `prepare` wrote: the checksum of each file, among others."""
_CLOCK_TICK = 0.01  # seconds: a file system's times can be as coarse


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
    """Return what every write to a file changes: also if its times were set back, because nobody can set ctime."""
    status = data.stat()
    return {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns, "ctime_ns": status.st_ctime_ns}


def stamp_after_tick(data: Path) -> dict[str, int]:
    """Return the stamp of a file, once any later write will change its times."""
    stamp = file_stamp(data)
    if abs(time.time() - max(stamp["mtime_ns"], stamp["ctime_ns"]) / 1e9) < _CLOCK_TICK:
        time.sleep(_CLOCK_TICK)
    return stamp


def recall(prefix: str) -> Content | None:
    """Return the remembered content of PREFIX.bin; None if there is none or the file was written to since."""
    try:
        memory = read_object(content_path(prefix))
        if memory == _memory(file_stamp(bin_path(prefix)), memory["content"]):
            return Content(**memory["content"])
    except (OSError, InvalidJson, KeyError, TypeError):  # nothing usable: all of PREFIX.bin is read
        pass
    return None


def remember(prefix: str, stamp: dict[str, int], content: Content) -> None:
    """Remember the content that PREFIX.bin had at this stamp, if the folder can be written."""
    with contextlib.suppress(OSError):
        memory = _memory(stamp, dataclasses.asdict(content))
        write_atomically(content_path(prefix), json.dumps(memory) + "\n")


def _memory(stamp: dict[str, int], content: dict[str, Any]) -> dict[str, Any]:
    memory = {"file": stamp, "content": content}
    return {**memory, "sha256": hashlib.sha256(json.dumps(memory, sort_keys=True).encode()).hexdigest()}


def check_recorded(path: Path, sha256: str) -> None:
    """Compare a file's SHA-256 with that of the report beside it, if `prepare` wrote one.

    Raises:
        UserError: they differ.
    """
    try:
        recorded = read_object(path.with_name(REPORT))["files"][path.name]["sha256"]
    except (OSError, InvalidJson, KeyError, TypeError):  # no report, or not one with checksums
        return
    if recorded != sha256:
        raise UserError(
            f"{path} is damaged: its SHA-256 is {sha256[:12]}…, not {shown(recorded)[1:13]}… as in {REPORT}; "
            "copy it again, or make it again with zero-tp prepare --overwrite"
        )
