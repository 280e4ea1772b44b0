"""Measure one rank's own work of a start, a step, a save and a resume in worlds of 8 to 4,096
ranks.

    python -m benchmarks.scale [--worlds 8 64 512 4096] [--output benchmarks/results/]

It simulates rank 0, and under TP 8 and ZeRO-1 also a rank in the middle, each in its own process
(scale_rank.py). Without TP there are the most replicas. Prints the CPU seconds of each part, which
other work on the machine changes least, the rank's requests to others, and the files that it opens.
benchmarks/results/scaling.md has the results.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.dated import ROOT, write_result

WORLDS = (8, 64, 512, 4096)
START = ("config", "corpora, model config", "groups", "agreement", "engine", "saver")
"""The parts of a start from nothing, without the time of collectives and of network file
systems.
"""
RESUMED = (*START, "resume: config", "resume: what there is", "resume: states")
MOVED = (*START, "resume: config", "resume, moved: what there is", "resume, moved: states")
OTHER = (*START, "resume: config", "resume, other TP: what there is", "resume, other TP: states")
SUMS = {
    "a start": START,
    "a start that resumes": RESUMED,
    "a start that resumes on twice the replicas": MOVED,
    "a start that resumes what was saved without TP": OTHER,
}
CASES: dict[str, tuple[dict[str, int], bool]] = {
    "tp8-zero1": ({"tensor": 8, "stage": 1}, True),
    "tp8-zero3": ({"tensor": 8, "stage": 3}, False),
    "tp1-zero1": ({"tensor": 1, "stage": 1, "hidden": 256}, False),
    "tp1-zero3": ({"tensor": 1, "stage": 3, "hidden": 256}, False),
}
"""Settings of `scale_rank.World`, and whether a rank in the middle is simulated besides rank 0."""

COUNT = """
import json, sys, torch.distributed as dist
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
asked, count = int(sys.argv[1]), 2000
def ask(number):
    store = dist.TCPStore("127.0.0.1", asked, is_master=False, wait_for_workers=False)
    for index in range(count):
        store.check([str(index)])
begun = perf_counter()
with ThreadPoolExecutor(8) as threads:
    list(threads.map(ask, range(8)))
print(8 * count / (perf_counter() - begun))
"""


def simulated(**world: Any) -> dict[str, Any]:
    """Simulate a rank in a process of its own; see `scale_rank.World`."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "benchmarks.scale_rank", json.dumps(world), folder]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{world} failed:\n{done.stderr}")
    record: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return record


def store_rate() -> float:
    """Return the requests per second that a store of this machine answers to 8 clients."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    done = subprocess.run(
        [sys.executable, "-c", COUNT, str(store.port)], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def table(records: list[dict[str, Any]]) -> str:
    """Return a Markdown table of CPU seconds: a line for each part, a column for each rank."""
    names = list(dict.fromkeys(name for each in records for name in each["parts"]))
    heads = [f"{each['ranks']:,}, rank {each['rank']:,}" for each in records]
    lines = [f"| part | {' | '.join(heads)} |", f"| --- |{' ---: |' * len(heads)}"]
    for name in names:
        lines.append(f"| {name} | {' | '.join(_seconds(each, (name,)) for each in records)} |")
    for name, parts in SUMS.items():
        lines.append(f"| **{name}** | {' | '.join(_seconds(each, parts) for each in records)} |")
    sizes = (f"{each['manifest_bytes'] / 1e6:.2f}" for each in records)
    lines.append(f"| manifest of 8 B [MB] | {' | '.join(sizes)} |")
    return "\n".join(lines)


def seconds(record: dict[str, Any], parts: tuple[str, ...]) -> float:
    """Return the CPU seconds of these parts."""
    return sum(record["parts"][name]["processor"] for name in parts)


def _seconds(record: dict[str, Any], parts: tuple[str, ...]) -> str:
    return f"{seconds(record, parts):.3f}" if all(name in record["parts"] for name in parts) else ""


def asked(record: dict[str, Any]) -> str:
    """Return a Markdown table of each part's requests to others, which are equal on all ranks
    but the first.
    """
    lines = [
        "| part | store | object collectives | groups | collectives | host waits | files opened |"
    ]
    lines += ["| --- | --- | ---: | ---: | ---: | ---: | --- |"]
    for name, part in record["parts"].items():
        store = ", ".join(f"{count:,} {kind}" for kind, count in sorted(part["store"].items()))
        opened = ", ".join(f"{count} × {file}" for file, count in part["opened"].items())
        numbers = " | ".join(
            f"{part[key]:,}" for key in ("objects", "groups", "collectives", "waits")
        )
        lines.append(f"| {name} | {store} | {numbers} | {opened} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worlds", type=int, nargs="+", default=WORLDS)
    parser.add_argument("--cases", choices=CASES, nargs="+", default=CASES)
    parser.add_argument("--steps", type=int, default=20, help="steps that are timed (default: 20)")
    parser.add_argument(
        "--output", type=Path, help="directory for the dated results, one for each case"
    )
    options = parser.parse_args()
    rate = store_rate()
    print(f"a store of this machine answers {rate:,.0f} requests/s\n", flush=True)
    for case in options.cases:
        settings, middle = CASES[case]
        records = [
            simulated(ranks=ranks, rank=rank, steps=options.steps, **settings)
            for ranks in options.worlds
            for rank in ((0, ranks // 2 + 3) if middle else (0,))
        ]
        print(f"### {case}\n\n{table(records)}\n", flush=True)
        print(f"What the last of them asks of the others:\n\n{asked(records[-1])}\n", flush=True)
        if options.output:
            result = {
                "store_requests_per_second": rate,
                "load_average": os.getloadavg(),
                "ranks": records,
            }
            write_result(options.output, f"scale-{case}", result)


if __name__ == "__main__":
    main()
