#!/usr/bin/env python3
"""Measure how fast a corpus is prepared and read, and how well duplicates are found; --output DIR
keeps the result.

Parts: duplicates (rensa beside datasketch, against true Jaccard similarities), prepare (beside
tokenizers alone, and beside megatron-core's builder; wants idle cores), work (where its CPU time
goes), read.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.reduction import ForkingPickler as Pickler
from pathlib import Path
from typing import Any

from copies import CORPUS, duplicates  # type: ignore[import-not-found]  # beside this script
from dated import ROOT, write_result  # type: ignore[import-not-found]  # beside this script

sys.path.insert(0, str(ROOT))


# --- preparing ------------------------------------------------------------------------------------

_encoder: Any


def megatron_begin(path: str) -> None:
    global _encoder
    from tokenizers import Tokenizer

    _encoder = Tokenizer.from_file(path)
    _encoder.encode_special_tokens = True


def megatron_encode(line: str) -> list[int]:
    return [*_encoder.encode(json.loads(line)["text"], add_special_tokens=False).ids, 0]


def by_megatron(source: str, tokenizer: str, output: str, processes: int) -> float:
    """Prepare as Megatron-LM's tools/preprocess_data.py does: a pool encodes, one process builds.

    Return the seconds without imports.
    """
    import numpy as np
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    start_time = time.perf_counter()
    pool = multiprocessing.get_context("fork").Pool(
        processes, megatron_begin, (f"{tokenizer}/tokenizer.json",)
    )
    with pool, open(source, encoding="utf-8") as lines:
        builder = IndexedDatasetBuilder(f"{output}.bin", dtype=np.uint16)
        for ids in pool.imap(megatron_encode, lines, 32):
            builder.add_document(ids, [len(ids)])
        builder.finalize(f"{output}.idx")
    return time.perf_counter() - start_time


def alone(source: str, tokenizer: str) -> str:
    """Encode texts in memory by tokenizers' batch encoder in one thread; return seconds and CPU
    seconds.
    """
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_file(f"{tokenizer}/tokenizer.json")
    texts = [json.loads(line)["text"] for line in Path(source).read_text("utf-8").splitlines()]
    start_time = time.perf_counter()
    worked = time.process_time()
    for at in range(0, len(texts), 100):
        _ = [len(each.ids) for each in encoder.encode_batch_fast(texts[at : at + 100])]
    return f"{time.perf_counter() - start_time} {time.process_time() - worked}"


def started(command: Sequence[str], threads: bool = False) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "TOKENIZERS_PARALLELISM": "true" if threads else "false",
        "PYTHONPATH": str(ROOT),
    }
    here = Path(__file__).parent
    return subprocess.Popen(command, env=environment, cwd=here, stdout=subprocess.PIPE, text=True)


def called(call: str) -> list[str]:
    """Return the command that prints the result of calling a function of this file."""
    return [sys.executable, "-c", f"import data; print(data.{call})"]


def ended(process: subprocess.Popen[str]) -> str:
    output = process.communicate()[0]
    assert process.returncode == 0, process.args
    return output


def elapsed(command: Sequence[str], threads: bool = False) -> tuple[str, float, float]:
    """Run a command; return its output, its wall seconds, and its CPU seconds, including its
    children.
    """
    before = sum(os.times()[2:4])
    start_time = time.perf_counter()
    output = ended(started(command, threads))
    return output, time.perf_counter() - start_time, sum(os.times()[2:4]) - before


def write_pieces(path: Path, copies: int, seed: int) -> Path:
    """Write `copies` copies of the shipped corpus, in documents of 600 words, each in another
    order.
    """
    from zero_tp.data.documents import read_documents

    chance = random.Random(seed)
    words = [text.split(" ") for text in read_documents(CORPUS)]
    pieces = [" ".join(each[at : at + 600]) for each in words for at in range(0, len(each), 600)]
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(copies):
            chance.shuffle(pieces)
            file.writelines(json.dumps({"text": piece}) + "\n" for piece in pieces)
    return path


def preparing(options: argparse.Namespace) -> dict[str, Any]:
    """Measure each way as a command of its own, in turns; a ratio compares two ways in the same
    round.
    """
    cores = len(os.sched_getaffinity(0))
    one = "prepare_data.py, one process with threads"
    many = f"prepare_data.py, {cores} processes"
    builder = f"megatron-core's builder, {cores} processes"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = f"{name}/texts.jsonl"
        tokenizer = f"{name}/first/tokenizer"

        def prepare(inputs: object, given: str, output: str, *more: object) -> list[str]:
            words = ("--input", inputs, "--tokenizer", given, "--output", folder / output, *more)
            return [sys.executable, str(ROOT / "launch" / "prepare_data.py"), *map(str, words)]

        ended(started(prepare(CORPUS, "bpe:32768", "first")))
        write_pieces(Path(source), options.copies, options.seed)
        size = Path(source).stat().st_size
        seconds = defaultdict[str, list[float]](list)
        worked = defaultdict[str, list[float]](list)
        parts: list[dict[str, float]] = []

        def note(way: str, wall: float, cpu: float | None = None) -> None:
            seconds[way].append(wall)
            worked[way] += [] if cpu is None else [cpu]
            print(f"{way}: {wall:.2f} s", flush=True)

        alone_at = called(f"alone({source!r}, {tokenizer!r})")
        for turn in range(options.rounds):
            note("tokenizers alone, one thread", *map(float, ended(started(alone_at)).split()))
            both = [ended(each).split() for each in [started(alone_at) for _ in range(cores)]]
            wall, cpu = (max(float(each[i]) for each in both) for i in range(2))
            note(f"tokenizers alone, {cores} processes", wall / cores, cpu)
            for way, processes in ((one, 1), (many, cores)):
                output = f"{processes}-{turn}"
                more = ("--processes", processes)
                note(
                    way,
                    *elapsed(prepare(source, tokenizer, output, *more), threads=processes == 1)[1:],
                )
                report = json.loads((folder / output / "report.json").read_text())
            parts.append(report["seconds"])
            built = (
                f"by_megatron({source!r}, {tokenizer!r}, {str(folder / f'built-{turn}')!r}, "
                f"{cores})"
            )
            told, wall, cpu = elapsed(called(built))
            note(f"{builder}, with its imports", wall, cpu)
            note(builder, float(told))
            for path in folder.glob(f"*-{turn}*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    tokens = sum(split["tokens"] for split in report["splits"].values())

    def spread(ratios: list[float]) -> list[float]:
        """Return the median, the least and the most."""
        return [round(each, 3) for each in (statistics.median(ratios), min(ratios), max(ratios))]

    def against(base: list[float]) -> dict[str, list[float]]:
        """Return the speed of each way over that of `base` in the same round."""
        return {
            way: spread([b / wall for b, wall in zip(base, each, strict=True)])
            for way, each in seconds.items()
        }

    return {
        "bytes": size,
        "tokens": tokens,
        "rounds": options.rounds,
        "seconds": {way: [round(wall, 2) for wall in each] for way, each in seconds.items()},
        "tokens/s": {way: round(tokens / statistics.median(each)) for way, each in seconds.items()},
        "CPU seconds": {
            way: round(statistics.median(each), 2) for way, each in worked.items() if each
        },
        f"of {cores} × tokenizers alone [median, least, most]": against(
            [wall / cores for wall in seconds["tokenizers alone, one thread"]]
        ),
        f"of {builder} [median, least, most]": against(seconds[builder]),
        f"seconds of the parts of {many}": {
            part: round(statistics.median(each[part] for each in parts), 2) for part in parts[0]
        },
    }


def working(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the CPU time of each part of a preparation in one thread, and the start of
    commands and processes.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import zstandard

    from zero_tp.data import PrepareSettings, prepare
    from zero_tp.data.documents import find_sources, read_blocks
    from zero_tp.data.tokenizer import DocumentEncoder, load_tokenizer
    from zero_tp.tools.corpus.blocks import BlockProcessor

    parts = defaultdict[str, float](float)
    clock = time.process_time

    def timed(part: str, call: Callable[[], Any]) -> Any:
        start_time = clock()
        outcome = call()
        parts[part] += clock() - start_time
        return outcome

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = (
            prepare([CORPUS], folder / "first", PrepareSettings("bpe:32768"), processes=1).output
            / "tokenizer"
        )
        source = write_pieces(folder / "texts.jsonl", 1, options.seed)
        small = folder / "small.jsonl"
        encoder = DocumentEncoder(load_tokenizer(tokenizer))
        work = BlockProcessor(options.seed, encoder)
        batch = encoder._backend.encode_batch_fast
        (source_file,) = find_sources([source])
        blocks = timed("reading", lambda: list(read_blocks(source_file)))
        timed("between processes", lambda: Pickler.loads(Pickler.dumps(blocks)))
        for block in blocks:
            texts = timed("JSON", lambda: [document.text for _, document in block.documents()])  # noqa: B023
            encode = partial(batch, texts, add_special_tokens=False)
            outcome = timed("tokenizers' batch encoder", encode)
            timed("ids", lambda: [encoder._ids(each) for each in outcome])  # noqa: B023
            timed("tokenizers' batch encoder", outcome.clear)  # it frees some strings a token
            timed("compressing", lambda: zstandard.compress("".join(texts).encode(), 1))  # noqa: B023
        whole = clock()
        done = [work(0, block) for block in blocks]
        whole = clock() - whole
        timed("between processes", lambda: Pickler.loads(Pickler.dumps(done)))
        start_time = clock()
        report = prepare(
            [source], folder / "out", PrepareSettings(str(tokenizer)), processes=1
        ).report
        everything = clock() - start_time
        small.write_text('{"text": "one"}\n{"text": "two"}\n')
        starts = {}
        for processes in (1, 2):
            words = (
                "--input",
                small,
                "--tokenizer",
                tokenizer,
                "--output",
                folder / f"{processes}",
            )
            command = [sys.executable, str(ROOT / "launch" / "prepare_data.py"), *map(str, words)]
            starts[processes] = elapsed([*command, "--processes", str(processes)])[2]
    encoding = parts["tokenizers' batch encoder"]
    return {
        "tokens": sum(split["tokens"] for split in report["splits"].values()),
        "CPU seconds of": {part: round(seconds, 3) for part, seconds in parts.items()},
        "CPU seconds of all that a worker does": round(whole, 3),
        "CPU seconds of all of prepare()": round(everything, 3),
        "of which the batch encoder": round(encoding / everything, 3),
        "CPU seconds to start the command": round(starts[1], 2),
        "CPU seconds to start it with a process more": round(starts[2], 2),
    }


# --- reading --------------------------------------------------------------------------------------


def reading(options: argparse.Namespace) -> dict[str, Any]:
    """Measure tokens per CPU second in one thread, in batches of 8 × 2048, and opening an index
    of 10¹² tokens.
    """
    import numpy as np
    import torch

    from zero_tp.data.indexed import IndexedCorpus
    from zero_tp.data.indexed_writer import IndexedWriter
    from zero_tp.data.samples import PackedSamples

    torch.set_num_threads(1)
    chance = np.random.default_rng(options.seed)
    result = dict[str, Any]()
    with tempfile.TemporaryDirectory() as name:
        prefix = f"{name}/c"
        with IndexedWriter(prefix, 50_000) as writer:
            for _ in range(50):
                sizes = chance.integers(1, 2000, 1000)
                writer.add_documents(chance.integers(0, 50_000, sizes.sum()), sizes)
        for separate in (False, True):
            samples = PackedSamples({prefix: 1.0}, 2048, options.seed, separate=separate)
            start_time = time.process_time()
            steps = 1000
            for step in range(steps):
                samples.batches_from(step * 8, 8, 1, 0, 1)
            elapsed = time.process_time() - start_time
            result["documents apart" if separate else "documents run on"] = round(
                steps * 8 * 2048 / elapsed
            )
        sequences = 100_000_000
        with open(f"{name}/big.idx", "wb") as file:
            file.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, sequences, sequences + 1))
            for dtype, factor, count in (
                ("<i4", 0, sequences),
                ("<i8", 20_000, sequences),
                ("<i8", 1, sequences + 1),
            ):
                for at in range(0, count, 10**6):
                    numbers = (
                        np.arange(at, min(at + 10**6, count)) * factor
                        if factor
                        else np.full(10**6, 10_000)
                    )
                    file.write(numbers.astype(dtype).tobytes())
        with open(f"{name}/big.bin", "wb") as file:
            file.truncate(sequences * 20_000)
        start_time = time.perf_counter()
        tokens = IndexedCorpus(f"{name}/big").tokens
        result[f"seconds to open {tokens:,} tokens in {sequences:,} documents"] = round(
            time.perf_counter() - start_time, 3
        )
    return result


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "duplicates": duplicates,
    "prepare": preparing,
    "work": working,
    "read": reading,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--copies", type=int, default=16, help="of the shipped corpus, 10.8 MB each (default: 16)"
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="write a dated result there")
    options = parser.parse_args()
    result = PARTS[options.part](options)
    print(json.dumps(result, indent=1, ensure_ascii=False))
    if options.output is not None:
        write_result(options.output, f"data-{options.part}", {"seed": options.seed, **result})


if __name__ == "__main__":
    main()
