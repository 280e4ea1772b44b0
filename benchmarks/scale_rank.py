"""Measure one rank's own work of a start, a step, a save and a resume, by part, in a world of fake
ranks.

torch's fake process groups return at once. The job's store is a real TCP store on this machine, and
already has what the other ranks would write. So the times are this rank's own.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - it registers the backend

from benchmarks.fake_world import Clocks, CountedStore, fake_world
from zero_tp.data.indexed_writer import IndexedWriter
from zero_tp.engine.engine import TrainingEngine
from zero_tp.engine.guards import check_duplicates, check_replicas
from zero_tp.parallel.agreement import require_same_on_all_ranks
from zero_tp.parallel.safetensors_files import FileDigest, hash_file
from zero_tp.parallel.topology import Topology
from zero_tp.run.checkpoint import directory
from zero_tp.run.checkpoint.find import RunCheckpoint, peek_checkpoint
from zero_tp.run.checkpoint.manifest import Manifest, states_file
from zero_tp.run.checkpoint.reader import STARTS, ParameterLayout, tensor_name
from zero_tp.run.checkpoint.save import Saver, run_saver
from zero_tp.run.checkpoint.start_point import Resume
from zero_tp.run.config import RunConfig
from zero_tp.run.process.hang_report import RankStatus
from zero_tp.run.process.signals import Requests
from zero_tp.run.process.watch import Watchdog
from zero_tp.run.run_inputs import RunInputs

VOCABULARY = 1024
LENGTH = 64
STATES = 12
"""Bytes of a parameter in a checkpoint: its master and two moments, in fp32."""


@dataclass(frozen=True)
class World:
    """A simulated world.

    Attributes:
        ranks, rank: the number of ranks, and the simulated one.
        tensor, stage: the TP degree, and ZeRO's stage.
        layers, hidden: of the model, a Llama with as many tensors as one of 8 B.
        parameters: of a larger model; its sizes stand for the saved files that rank 0 lists.
        steps: number of timed steps.
    """

    ranks: int
    rank: int
    tensor: int = 8
    stage: int = 1
    layers: int = 32
    hidden: int = 512
    parameters: int = 8_030_261_248
    steps: int = 5

    @property
    def data(self) -> int:
        return self.ranks // self.tensor


def as_rank_zero(work: Callable[[], Any]) -> Any:
    """Stand in for `on_rank_zero`: there is no rank 0 that sends its result, so this rank does
    the work too.
    """
    result = [work()]
    dist.broadcast_object_list(result)
    return result[0]


@mock.patch("zero_tp.parallel.agreement.on_rank_zero", as_rank_zero)
def simulate(world: World, folder: Path) -> dict[str, Any]:
    """Run a rank's work in a world; return its "parts" and other figures."""
    with fake_world(world.ranks, world.rank, folder) as (clocks, store):
        file = furnish(world, folder)
        run = folder / "run"
        with clocks.part("config"):
            config = RunConfig.load(file, (), world.ranks)
        directory.checkpoints_directory(run).mkdir(parents=True, exist_ok=True)
        with clocks.part("corpora, model config"):
            prepared = RunInputs(config, run, hash_tokens=world.rank % 8 == 0)
        with clocks.part("groups"):
            topology = Topology(world.tensor, sequence=True)
        with clocks.part("agreement"):
            require_same_on_all_ranks(prepared.fingerprints())
            assert Resume.find(run, config) is None
        with clocks.part("engine"):
            engine = TrainingEngine(
                prepared.model_config,
                topology,
                config.engine_settings,
                seed=config.zero_tp.training.seed,
            )
        with clocks.part("saver"):
            saver = run_saver(
                engine.zero,
                config,
                run,
                corpora=prepared.corpora,
                validation=prepared.validation_corpora,
            )
        train(world, clocks, prepared, engine)
        watched(world, clocks, store)
        result = save(world, clocks, saver, run)
        with clocks.part("resume: config"):
            known = peek_checkpoint(run)
            assert known is not None
            RunConfig.load(file, (), world.ranks, known.saved_start())
        go_on(clocks, "resume", run, config, engine, prepared, known)
        for name, sizes in moves(world).items():
            moved = folder / name
            write_moved(moved, saver, *sizes)
            go_on(clocks, f"resume, {name}", moved, config, engine, prepared)
            shutil.rmtree(moved)
        return {
            **asdict(world),
            "parts": {name: asdict(part) for name, part in clocks.parts.items()},
            **result,
        }


def furnish(world: World, folder: Path) -> Path:
    """Write a corpus of a hundred thousand documents and a config into the folder; return the
    config's path.
    """
    documents = 100_000
    with IndexedWriter(folder / "corpus", VOCABULARY) as writer:
        writer.add_documents(np.arange(20 * documents) % VOCABULARY, np.full(documents, 20))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": world.stage, "stage3_param_persistence_threshold": 0},
        "zero_tp": {
            "model": {
                **{
                    "model_type": "llama",
                    "num_hidden_layers": world.layers,
                    "hidden_size": world.hidden,
                },
                **{
                    "intermediate_size": 2 * world.hidden,
                    "num_attention_heads": max(8, world.tensor),
                },
                **{"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH},
                **{"bos_token_id": 1, "eos_token_id": 2},
            },
            "parallel": {"tensor": world.tensor, "sequence": True},
            "data": {"train": str(folder / "corpus"), "sequence_length": LENGTH},
            "training": {"steps": 1000},
        },
    }
    file = folder / "run.json"
    file.write_text(json.dumps(config))
    return file


def train(world: World, clocks: Clocks, prepared: RunInputs, engine: TrainingEngine) -> None:
    """Run steps as the loop does, then the guards."""
    config = prepared.config
    topology = engine.topology
    requests = Requests()
    times = list[tuple[float, float]]()

    def step(number: int) -> None:
        batches = prepared.samples.batches_from(
            number * config.global_batch,
            config.micro_batch,
            config.accumulation,
            topology.data_rank,
            topology.data,
        )
        engine.train_step(batches)
        requests.all_reduce(engine.device)

    for number in range(world.steps + 1):  # the first creates the optimizer's states
        with clocks.part("first step" if number == 0 else "step"):
            step(number)
        if number:
            times.append((clocks.parts["step"].seconds, clocks.parts["step"].processor))
    clocks.parts["step"].seconds, clocks.parts["step"].processor = map(
        statistics.median, zip(*times, strict=True)
    )
    with clocks.part("guards"):
        check_replicas(engine.model, topology, 1)
        check_duplicates(engine.zero, 1)


def watched(world: World, clocks: Clocks, store: CountedStore) -> None:
    """Measure how long rank 0 takes to read the status of all ranks, as it does when a run
    hangs.
    """
    told = dist.PrefixStore("zero_tp/watch", store)
    for rank in range(world.ranks):
        status = RankStatus(
            1, "step", 7, "backward", host=f"node{rank // 8}", frame="wait (x.py:1)", waiting=True
        )
        told.set(str(rank), json.dumps(asdict(status)))
    watch = Watchdog()
    watch._rank = world.rank
    watch._world = world.ranks
    watch._store = told
    with clocks.part("watch: all positions"):
        assert len(watch._read(range(world.ranks))) == world.ranks


def save(world: World, clocks: Clocks, saver: Saver, run: Path) -> dict[str, Any]:
    """Save; rank 0 finds the files and the store entries of all others, with the sizes of
    `parameters`.
    """
    size = world.parameters * STATES // world.ranks
    written = FileDigest(size, "0" * 32)
    begin = directory.begin
    stub = run / "stub"
    with stub.open("wb") as file:
        file.truncate(size)

    def begun(run: Path) -> Path:
        temporary = begin(run)
        for data in range(world.data):
            for tensor in range(world.tensor):
                rank = data * world.tensor + tensor
                if rank != world.rank:
                    name = states_file(tensor, data)
                    os.link(stub, temporary / name)
                    if world.rank == 0:
                        saver._store.set(f"1/{rank}", json.dumps({"file": name, **vars(written)}))
        return temporary

    temporary = Path()
    with mock.patch.object(directory, "begin", begun):
        if world.rank:
            temporary = begun(run)
            saver._store.set("1/begin", json.dumps({"directory": temporary.name}))
            saver._store.set("1/outcome", "{}")
        with clocks.part("save: the rank's own"):
            if world.rank == 0:
                with mock.patch.object(
                    saver, "_finish", lambda manifest: kept.update(manifest=manifest) or {}
                ):
                    kept: dict[str, Any] = {}
                    saver.save(1)
            else:
                saver.save(1)
    outcome = saver.outcome()
    assert outcome == (1, ""), outcome
    own = json.loads(saver._store.get(f"1/{world.rank}"))
    if world.rank == 0:
        saver._step = 1
        with clocks.part("save: all others' words, the manifest"):
            saver._finish(kept["manifest"])
    else:
        names = [states_file(*divmod(rank, world.data)) for rank in range(world.ranks)]
        files = dict.fromkeys(names, written) | {
            own["file"]: FileDigest(own["size"], own["xxh3_128"])
        }
        directory.commit(run, temporary, 1, saver._describe(), files)
    manifest = directory.step_directory(run, 1) / directory.MANIFEST
    return {"manifest_bytes": manifest.stat().st_size, "told_bytes": len(json.dumps(vars(written)))}


def go_on(
    clocks: Clocks,
    name: str,
    run: Path,
    config: RunConfig,
    engine: TrainingEngine,
    prepared: RunInputs,
    known: RunCheckpoint | None = None,
) -> None:
    """Resume, as a start does."""
    with clocks.part(f"{name}: what there is"):
        require_same_on_all_ranks(prepared.fingerprints())
        start = Resume.find(run, config, known=known, check=prepared.check_resumed)
        assert start is not None
    with clocks.part(f"{name}: states"):
        start.restore(engine.zero, 1)


def written(file: Path, lengths: dict[str, int], starts: dict[str, int]) -> FileDigest:
    """Write a file of zero states, without a tensor for each as a save has, which is faster."""
    header: dict[str, Any] = {"__metadata__": {STARTS: json.dumps(starts)}}
    at = 0
    for name, length in lengths.items():
        header[name] = {"dtype": "F32", "shape": [length], "data_offsets": [at, at + 4 * length]}
        at += 4 * length
    encoded = json.dumps(header).encode()
    whole = len(encoded).to_bytes(8, "little") + encoded + bytes(at)
    file.write_bytes(whole)
    return FileDigest(len(whole), hash_file(file))


def moves(world: World) -> dict[str, tuple[int, int]]:
    """Return (TP degree, replicas) of the checkpoints to resume: half as many replicas, and all
    ranks without TP.
    """
    found = {}
    if world.data > 1:
        found["moved"] = (world.tensor, world.data // 2)
    if world.tensor > 1:
        found["other TP"] = (1, world.ranks)
    return found


def write_moved(run: Path, saver: Saver, tensor: int, data: int) -> None:
    """Write a checkpoint of `tensor` × `data` ranks: the files of this TP rank, and small ones
    for the others.
    """
    described = {
        name: ParameterLayout.of(parameter)
        for name, parameter in saver.zero.model.named_parameters()
    }
    temporary = directory.begin(run)
    files = dict[str, FileDigest]()
    numels = {
        name: math.prod(one.layout.local_shape(one.shape, tensor))
        for name, one in described.items()
    }
    kinds = saver.zero.states().kinds()
    own = saver.topology.tensor_rank % tensor
    for data_rank in range(data):
        lengths = dict[str, int]()
        starts = dict[str, int]()
        for name, numel in numels.items():
            share = -(-numel // data)
            start = min(numel, data_rank * share)
            stop = min(numel, (data_rank + 1) * share)
            if start < stop:
                starts[name] = start
                lengths |= {tensor_name(name, kind): stop - start for kind in kinds}
        file = states_file(own, data_rank)
        files[file] = written(temporary / file, lengths, starts)
    small = written(temporary / "small", {"x": 1000}, {})
    for tensor_rank in set(range(tensor)) - {own}:
        for data_rank in range(data):
            os.link(temporary / "small", temporary / states_file(tensor_rank, data_rank))
            files[states_file(tensor_rank, data_rank)] = small
    (temporary / "small").unlink()
    manifest = saver._describe() | {"tensor": tensor, "data": data}
    directory.commit(run, temporary, 1, manifest, files)
    assert isinstance(directory.read_manifest(directory.step_directory(run, 1)), Manifest)


if __name__ == "__main__":
    print(json.dumps(simulate(World(**json.loads(sys.argv[1])), Path(sys.argv[2]))))
