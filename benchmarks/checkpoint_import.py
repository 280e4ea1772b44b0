#!/usr/bin/env python3
"""Compare the conversion of another trainer's checkpoint with reading and writing its bytes.

The two take turns in processes of their own: one reads the checkpoint's files in parts and writes
as many bytes, flushed; the other converts the checkpoint without the proof. Prints the median of
the rounds with its range, the ratio, and the conversion's peak of memory beyond its imports.

    python -m benchmarks.checkpoint_import CHECKPOINT --rounds 5
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from zero_tp.base.constants import GIB

PART = 8 * 2**20


def copy(source: Path, output: Path) -> None:
    """Read all files of a folder and write one of as many bytes."""
    output.mkdir()
    with (output / "bytes").open("wb") as written:
        for path in sorted(path for path in source.rglob("*") if path.is_file()):
            with path.open("rb") as file:
                while part := file.read(PART):
                    written.write(part)
        written.flush()
        os.fsync(written.fileno())


def resident() -> int:
    """Return this process's memory so far at its peak [bytes]."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(kind: str, source: Path, output: Path) -> tuple[float, int]:
    """Return the seconds of one turn and its memory beyond imports [bytes]."""
    from zero_tp.model.weights.native import native_model
    from zero_tp.tools.checkpoint_import.formats import open_checkpoint
    from zero_tp.tools.checkpoint_import.importing import import_checkpoint

    # Its model's class is imported when it is first made.
    native_model(open_checkpoint(source).config)
    imported = resident()
    begin = time.monotonic()
    if kind == "copy":
        copy(source, output)
    else:
        import_checkpoint(open_checkpoint(source), output)
    return time.monotonic() - begin, resident() - imported


def turn(kind: str, source: Path) -> tuple[float, int]:
    """Run one turn in a process of its own."""
    with tempfile.TemporaryDirectory(dir=source.parent) as folder:
        words = [sys.executable, "-m", __spec__.name, str(source), "--turn", kind, "--output"]
        done = subprocess.run(
            [*words, f"{folder}/out"], check=True, text=True, stdout=subprocess.PIPE
        )
        seconds, memory = json.loads(done.stdout.splitlines()[-1])
        shutil.rmtree(f"{folder}/out")
    return seconds, memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turn", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.turn:
        print(json.dumps(measure(options.turn, options.source, options.output)))
        return
    size = sum(path.stat().st_size for path in options.source.rglob("*") if path.is_file())
    print(f"{options.source}: {size / GIB:.2f} GiB")
    turns: dict[str, list[tuple[float, int]]] = {"copy": [], "convert": []}
    for _ in range(options.rounds):
        for kind, results in turns.items():
            results.append(turn(kind, options.source.absolute()))
    for kind, results in turns.items():
        seconds = [second for second, _ in results]
        print(
            f"{kind}: {statistics.median(seconds):.2f} s ({min(seconds):.2f} to "
            f"{max(seconds):.2f}), {max(memory for _, memory in results) / GIB:.2f} GiB"
        )
    ratios = [
        converted / copied
        for (copied, _), (converted, _) in zip(turns["copy"], turns["convert"], strict=True)
    ]
    print(f"ratio: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
