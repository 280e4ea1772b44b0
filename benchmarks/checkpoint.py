#!/usr/bin/env python3
"""Compare saving and loading with plain writing and reading of as many bytes on the same disk, in
turns.

    python benchmarks/checkpoint.py --output benchmarks/results/

One process holds a model's masters and moments. Saving (hashed, flushed to the disk) is compared
with writing one file of the same bytes and flushing it, with torch's distributed checkpoint of the
same tensors and with DeepSpeed's `save_checkpoint` (which adds the weights); loading (hashed, and
filled into the optimizer's states) with reading that file. Files are dropped from the page cache
before each reading where the system allows it. A shared disk is as fast as its other users let it
be, so the processor's seconds stand beside the clock's, and --folder /dev/shm measures without a
disk. Also: how long training stands still for a save in the background, and the memory that
resharding and exporting take on a checkpoint of a billion parameters (--memory, 12 GB of disk).
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dated import write_result  # type: ignore[import-not-found]  # beside this script

from zero_tp.engine.engine import TrainingEngine
from zero_tp.engine.zero.ops import disable_shared_memory_collectives
from zero_tp.parallel.topology import Topology
from zero_tp.run.checkpoint import directory
from zero_tp.run.checkpoint.find import find_checkpoint, verify_checkpoint
from zero_tp.run.checkpoint.reader import CheckpointReader, Place
from zero_tp.run.checkpoint.save import run_saver
from zero_tp.run.checkpoint.start_point import Resume
from zero_tp.run.config import RunConfig

WARM_UP = 4  # until saves remove old checkpoints
# Of plain writing and reading: larger ones are slower, they leave the processor's cache.
CHUNK = 2**20

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
    "zero_tp": {
        "model": {
            "model_type": "gpt2",
            "n_layer": 8,
            "n_embd": 768,
            "n_head": 12,
            "n_positions": 64,
        },
        "data": {"train": "nowhere/train", "sequence_length": 64},
        "training": {"steps": 10},
    },
}


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """(wall seconds, CPU seconds of this process)."""
    begin = time.perf_counter()
    spent = time.process_time()
    work()
    return time.perf_counter() - begin, time.process_time() - spent


def quartiles(values: list[float]) -> str:
    """Return the median and, in brackets, the first and third quartiles."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.2f} [{low:.2f} to {high:.2f}]"


def write_plainly(path: Path, chunk: memoryview, size: int, old: Path | None = None) -> None:
    """Write and flush a file, and remove an old one, as a save does."""
    with path.open("wb", buffering=0) as file:
        for start in range(0, size, len(chunk)):
            file.write(chunk[: min(len(chunk), size - start)])
        os.fsync(file.fileno())
    if old is not None:
        old.unlink(missing_ok=True)


def read_plainly(path: Path) -> None:
    buffer = bytearray(CHUNK)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def copy_plainly(source: Path, target: Path) -> None:
    buffer = memoryview(bytearray(CHUNK))
    with source.open("rb", buffering=0) as reading, target.open("wb", buffering=0) as writing:
        while count := reading.readinto(buffer):
            writing.write(buffer[:count])
        os.fsync(writing.fileno())


def forget(folder: Path) -> None:
    """Drop a folder's files from the page cache."""
    for path in [folder, *folder.rglob("*")]:
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def build(folder: Path, background: bool) -> tuple[TrainingEngine, RunConfig]:
    import json

    path = folder / "run.json"
    CONFIG["zero_tp"]["checkpoint"] = {"async": background}
    path.write_text(json.dumps(CONFIG))
    config = RunConfig.load(path, world_size=1)
    engine = TrainingEngine(config.hf_config(), Topology(), config.engine_settings, seed=1)
    tokens = torch.randint(0, 50257, (1, 65))
    engine.train_step([(tokens[:, :-1], tokens[:, 1:])])
    return engine, config


def save_by_torch(engine: TrainingEngine, folder: Path) -> None:
    """Save masters and moments by torch's distributed checkpoint, which flushes its files."""
    states = engine.zero.states()
    tensors = {
        f"{fragment.name}.{kind}": states.get(fragment, kind)
        for kind in states.kinds()
        for fragment in states.fragments
    }
    dcp.save(tensors, checkpoint_id=folder)


def save_by_deepspeed(engine: TrainingEngine, folder: Path) -> None:
    """Save by DeepSpeed, and flush its files, which it does not."""
    engine.deepspeed_engine.save_checkpoint(str(folder), tag="step")
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


OTHERS: dict[str, Callable[[TrainingEngine, Path], None]] = {
    "torch": save_by_torch,
    "deepspeed": save_by_deepspeed,
}


def speeds(folder: Path, rounds: int) -> dict[str, Any]:
    """Measure the seconds of saving, plain writing, loading and plain reading, in turns."""
    engine, config = build(folder, False)
    saver = run_saver(engine.zero, config, folder / "run")
    run = folder / "run"
    random = torch.randint(0, 256, (CHUNK,), dtype=torch.uint8).numpy().data
    names = ("save", *OTHERS, "write", "load", "read")
    times: dict[str, list[float]] = {name: [] for name in names}
    sizes = dict.fromkeys(names, 0)
    processor: dict[str, list[float]] = {name: [] for name in times}
    size = 0
    for turn in range(rounds + WARM_UP):
        durations = {"save": timed(partial(saver.save, turn + 1))}
        assert saver.outcome() == (turn + 1, "")
        checkpoint = directory.step_directory(run, turn + 1)
        size = sum(file.bytes for file in directory.read_manifest(checkpoint).files.values())
        for name, save in OTHERS.items():
            target = folder / f"{name}{turn}"
            durations[name] = timed(partial(save, engine, target))
            sizes[name] = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
            shutil.rmtree(folder / f"{name}{turn - 3}", ignore_errors=True)
        # Use a new file each time and keep as many: the first write to a disk's blocks can take
        # several times as long.
        plain = folder / f"plain{turn}"
        durations["write"] = timed(
            partial(write_plainly, plain, random, size, folder / f"plain{turn - 3}")
        )
        forget(checkpoint)
        durations["load"] = timed(partial(load, engine, checkpoint, config.zero_tp.training.seed))
        forget(plain)
        durations["read"] = timed(partial(read_plainly, plain))
        if turn >= WARM_UP:
            for name, (seconds, spent) in durations.items():
                times[name].append(seconds)
                processor[name].append(spent)
    gigabytes = size / 1e9
    sizes = {name: sizes[name] or size for name in names}
    print(f"{gigabytes:.2f} GB, {rounds} rounds in {folder.parent}: median [quartiles]")
    for name, found in times.items():
        rates = [sizes[name] / 1e9 / seconds for seconds in found]
        print(
            f"  {name:>9}: {quartiles(rates)} GB/s, {quartiles(processor[name])} s on the processor"
        )
    ratios = {}
    pairs = (("save", "write"), *(("save", name) for name in OTHERS), ("load", "read"))
    for ours, plainly in pairs:
        ratios[f"{ours}_to_{plainly}"] = [
            (sizes[ours] / a) / (sizes[plainly] / b)
            for a, b in zip(times[ours], times[plainly], strict=True)
        ]
        print(f"  rate of {ours} / {plainly}: {quartiles(ratios[f'{ours}_to_{plainly}'])}")
    return {"bytes": sizes, "seconds": times, "processor_seconds": processor, **ratios}


def load(engine: TrainingEngine, checkpoint: Path, seed: int) -> None:
    """Verify and resume a checkpoint, as a start does."""
    opened = find_checkpoint(checkpoint)
    verify_checkpoint(opened)
    Resume(opened).restore(engine.zero, seed)


def standing_still(folder: Path, rounds: int) -> dict[str, Any]:
    """Measure how long training waits for a background save, the copy to host memory, and the
    whole save.
    """
    engine, config = build(folder, True)
    saver = run_saver(engine.zero, config, folder / "background")
    waits: list[float] = []
    wholes: list[float] = []
    copies: list[float] = []
    for step in range(1, rounds + 1):
        begin = time.perf_counter()
        saver.save(step)
        waits.append(time.perf_counter() - begin)
        saver.wait()
        wholes.append(time.perf_counter() - begin)
        assert saver.outcome() == (step, "")
        tensors = [
            tensor
            for state in engine.zero.optimizer.optimizer.state.values()
            for tensor in state.values()
        ]
        tensors += list(engine.zero.optimizer.single_partition_of_fp32_groups)
        begin = time.perf_counter()
        copied = [tensor.detach().clone() for tensor in tensors]
        copies.append(time.perf_counter() - begin)
        del copied
    wait, whole, copy = (statistics.median(values) for values in (waits, wholes, copies))
    print(
        f"a save in the background: training waits {wait:.3f} s, of {whole:.3f} s; copying alone "
        f"takes {copy:.3f} s"
    )
    return {"wait_seconds": waits, "whole_seconds": wholes, "copy_seconds": copies}


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    sys.exit("RssAnon: not told by this system")


def resharding_memory(folder: Path, rounds: int) -> dict[str, Any]:
    """Reads a checkpoint of 1.0 B parameters, saved by fake ranks at TP 2 × DP 2, as TP 4 × DP 3
    ranks would.
    """
    import json

    from zero_tp.model.huggingface import ZeroTPForCausalLM
    from zero_tp.parallel.safetensors_files import Entry, write_tensors
    from zero_tp.run.checkpoint.manifest import states_file
    from zero_tp.run.checkpoint.reader import STARTS, ParameterLayout, tensor_name

    model = {"model_type": "gpt2", "n_layer": 18, "n_embd": 2048, "n_head": 16, "n_positions": 1024}
    CONFIG["zero_tp"]["model"] = model
    (folder / "big.json").write_text(json.dumps(CONFIG))
    config = RunConfig.load(folder / "big.json", world_size=1).hf_config()
    whole = ZeroTPForCausalLM(config, Topology(), device="meta")
    described = {
        name: ParameterLayout.of(parameter) for name, parameter in whole.named_parameters()
    }
    kinds = ["master", "exp_avg", "exp_avg_sq"]
    temporary = directory.begin(folder / "big")
    files = {}
    for tensor_rank in range(2):
        for data_rank in range(2):
            entries = []
            starts = {}
            for name, parameter in described.items():
                numel = torch.Size(parameter.layout.local_shape(parameter.shape, 2)).numel()
                share = -(-numel // 2)
                starts[name] = data_rank * share
                length = min(numel, starts[name] + share) - starts[name]
                for kind in kinds:
                    entries.append(
                        Entry(
                            tensor_name(name, kind),
                            (length,),
                            torch.float32,
                            partial(torch.rand, length),
                        )
                    )
            name = states_file(tensor_rank, data_rank)
            files[name] = write_tensors(temporary / name, entries, {STARTS: json.dumps(starts)})
    manifest = {
        **{
            "tensor": 2,
            "data": 2,
            "sequence": True,
            "zero_stage": 2,
            "dtype": "fp32",
            "kinds": kinds,
        },
        "parameters": {name: each.to_json() for name, each in described.items()},
        "progress": {
            "optimizer_steps": 1,
            "counters": {},
            "schedule": None,
            "learning_rates": [],
            "loss_scale": {},
        },
        **{
            "model": config.to_dict(),
            "generation": {},
            "fixed": {},
            "corpora": {},
            "tokenizer": None,
        },
        **{"versions": {}, "config": {}},
    }
    assert directory.commit(folder / "big", temporary, 1, manifest, files) == []
    big = directory.step_directory(folder / "big", 1)
    largest = max(torch.Size(parameter.shape).numel() for parameter in described.values())
    parameters = sum(torch.Size(parameter.shape).numel() for parameter in described.values())
    allowed = 2 * 12 * largest + 200 * 10**6
    before = anonymous_bytes()
    peak = 0
    reader = CheckpointReader(big, directory.read_manifest(big))
    begin = time.perf_counter()
    for name, parameter in described.items():
        for kind in kinds:
            piece = reader.piece(name, kind, parameter, Place(3, 4))
            peak = max(peak, anonymous_bytes() - before)
            del piece
    seconds = time.perf_counter() - begin
    print(
        f"resharding {parameters / 1e9:.2f} B parameters for one of 4 TP ranks: {peak / 1e6:.0f} "
        "MB of anonymous "
        f"memory (allowed: {allowed / 1e6:.0f}), {seconds:.1f} s"
    )
    result = {
        "parameters": parameters,
        "peak_bytes": peak,
        "allowed_bytes": allowed,
        "seconds": seconds,
    }
    return result | {"export": exporting(big, parameters, rounds)}


def exporting(big: Path, parameters: int, rounds: int) -> dict[str, Any]:
    """Seconds of `convert.py to-hf` in fp32, against copying a file of as many bytes, flushed to
    the disk; in turns.
    """
    from zero_tp.run.checkpoint.convert import to_huggingface

    chunk = torch.randint(0, 256, (CHUNK,), dtype=torch.uint8).numpy().data
    original = big.parent / "original"
    times = {"export": [0.0] * 0, "copy": [0.0] * 0}
    processor = {"export": [0.0] * 0, "copy": [0.0] * 0}
    write_plainly(original, chunk, 4 * parameters)
    for turn in range(rounds):
        output = big.parent / f"export{turn}"
        copied = big.parent / f"copy{turn}"
        forget(big)
        durations = {"export": timed(partial(to_huggingface, big, output))}
        forget(original)
        durations["copy"] = timed(partial(copy_plainly, original, copied))
        for name, (seconds, spent) in durations.items():
            times[name].append(seconds)
            processor[name].append(spent)
        shutil.rmtree(output)
        copied.unlink()
    ratios = [a / b for a, b in zip(times["export"], times["copy"], strict=True)]
    print(
        f"exporting / copying {4 * parameters / 1e9:.1f} GB, {rounds} rounds: {quartiles(ratios)} "
        "× the time"
    )
    for name, values in times.items():
        print(
            f"  {name:>6}: {quartiles(values)} s, {quartiles(processor[name])} s on the processor"
        )
    return {"seconds": times, "processor_seconds": processor, "export_to_copy": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="times that each is measured (default: 5)"
    )
    parser.add_argument(
        "--folder", type=Path, help="on the disk to measure (default: the temporary directory)"
    )
    parser.add_argument(
        "--memory", action="store_true", help="also measure a checkpoint of a billion parameters"
    )
    parser.add_argument("--only-memory", action="store_true", help="measure only that")
    parser.add_argument("--output", type=Path, help="directory for the dated result")
    options = parser.parse_args()
    os.environ.update(
        {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    )
    os.environ.setdefault("MASTER_PORT", "29712")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    disable_shared_memory_collectives()
    deepspeed.init_distributed("gloo", verbose=False)
    try:
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            folder = Path(name)
            # Above the number of cores, what is measured shares them with other work.
            result: dict[str, Any] = {
                "folder": str(options.folder or "temporary"),
                "load_before": os.getloadavg(),
            }
            if not options.only_memory:
                result["speeds"] = speeds(folder, options.rounds)
                result["background"] = standing_still(folder, options.rounds)
            if options.memory or options.only_memory:
                result["memory"] = resharding_memory(folder, options.rounds)
            result["load_after"] = os.getloadavg()
    finally:
        dist.destroy_process_group()
    if options.output:
        write_result(options.output, "checkpoint", result)


if __name__ == "__main__":
    main()
