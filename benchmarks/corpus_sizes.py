#!/usr/bin/env python3
"""Measure tokens/s and peak memory of preparing a corpus, by its size: `zero-tp prepare` and
launch/prepare_cluster.py.

    python benchmarks/corpus_sizes.py --megabytes 250 1000 --rounds 2 [--deduplicate] [--output DIR]

The text is generated: documents of 25 sentences of the shipped corpus, drawn anew for each. Both
commands use all cores and take turns. Without deduplication their .bin and .idx files must be
equal. Memory is the largest sum of PSS over a command's processes; memory and CPU seconds are read
twice a second.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from dated import ROOT, write_result  # type: ignore[import-not-found]  # beside this script

sys.path.insert(0, str(ROOT))
CORPUS = ROOT / "launch" / "corpus" / "sotu.jsonl.gz"
FILES = 8


def write_texts(folder: Path, megabytes: int, seed: int) -> None:
    """Write documents of 25 random sentences into `FILES` files of JSON lines, about `megabytes`
    in all.
    """
    from zero_tp.data.documents import read_documents

    draw = random.Random(seed)
    sentences = [
        f"{sentence}."
        for text in read_documents(CORPUS)
        for sentence in text.split(". ")
        if sentence
    ]
    folder.mkdir()
    for number in range(FILES):
        with open(folder / f"{number}.jsonl", "w", encoding="utf-8") as file:
            while file.tell() < megabytes * 1_000_000 // FILES:
                file.writelines(
                    json.dumps({"text": " ".join(draw.choices(sentences, k=25))}) + "\n"
                    for _ in range(50)
                )


def measure(command: list[str]) -> dict[str, float]:
    """Run a command; return its seconds, CPU seconds and peak memory [GiB], including its
    children.
    """
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT)}
    begin = time.perf_counter()
    peak = 0
    cpu_seconds = dict[int, float]()
    command_process = psutil.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while command_process.poll() is None:
        memory = 0
        for process in [command_process, *command_process.children(recursive=True)]:
            try:
                memory += process.memory_full_info().pss
                cpu_seconds[process.pid] = sum(process.cpu_times()[:2])
            except psutil.Error:  # it has ended
                continue
        peak = max(peak, memory)
        time.sleep(0.5)
    assert command_process.wait() == 0, command
    return {
        "seconds": round(time.perf_counter() - begin, 2),
        "CPU seconds": round(sum(cpu_seconds.values()), 1),
        "peak GiB": round(peak / 2**30, 3),
    }


def hashes(directory: Path) -> dict[str, str]:
    files = [*directory.glob("*.bin"), *directory.glob("*.idx")]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, nargs="+", default=[250, 1000])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--deduplicate", action="store_true", help="remove near duplicates in both")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--output", type=Path, help="directory of the dated result")
    options = parser.parse_args()
    cores = str(len(os.sched_getaffinity(0)))
    sizes: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first = [
            str(ROOT / "launch" / "prepare_data.py"),
            "--input",
            str(CORPUS),
            "--tokenizer",
            "bpe:32768",
        ]
        measure([sys.executable, *first, "--output", str(folder / "first")])
        for megabytes in options.megabytes:
            texts = folder / "texts"
            write_texts(texts, megabytes, options.seed)
            rows: dict[str, list[dict[str, float]]] = {
                "zero-tp prepare": [],
                "prepare_cluster.py": [],
            }
            for _ in range(options.rounds):
                for way in rows:
                    output = folder / way.split(".")[0]
                    words = [
                        "--input",
                        str(texts),
                        "--tokenizer",
                        str(folder / "first" / "tokenizer"),
                    ]
                    if way == "zero-tp prepare":
                        script = "prepare_data.py"
                        more = ["--processes", cores]
                        more += ["--deduplicate", "near"] if options.deduplicate else []
                    else:
                        script = "prepare_cluster.py"
                        more = ["--tasks", str(FILES)]
                        more += [] if options.deduplicate else ["--no-deduplicate"]
                    script = str(ROOT / "launch" / script)
                    rows[way].append(
                        measure([sys.executable, script, *words, "--output", str(output), *more])
                    )
                    print(megabytes, way, rows[way][-1], flush=True)
                outputs = [folder / way.split(".")[0] for way in rows]
                report = json.loads((outputs[0] / "report.json").read_text())
                if not options.deduplicate:
                    assert hashes(outputs[0]) == hashes(outputs[1]), "the corpora differ"
                for path in [*outputs, *folder.glob("*.work")]:
                    shutil.rmtree(path)
            tokens = sum(split["tokens"] for split in report["splits"].values())
            sizes[f"{megabytes} MB"] = {"tokens": tokens, **rows}
            shutil.rmtree(texts)
    if options.output:
        kind = "near duplicates removed" if options.deduplicate else "without deduplication"
        write_result(
            options.output, "corpus-sizes", {"kind": kind, "seed": options.seed, "sizes": sizes}
        )


if __name__ == "__main__":
    main()
