"""Small files that exist as a whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` by a file that holds `text`. A reader finds the old file or the new one, also after a crash.

    Raises:
        OSError: the disk is full, or the directory is missing or cannot be written.
    """
    temporary = path.with_name(path.name + ".new")
    with temporary.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)
