"""Saves a run: every rank writes what it holds, then one rank gives the whole its name.

Ranks tell each other what they wrote through the process group's key-value store and not by collectives, so that a save
can go on in the background while training uses the process groups.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero_tp.checkpoint import directory
from zero_tp.checkpoint.reader import STARTS, Described, states_file, tensor_name
from zero_tp.config import RunConfig
from zero_tp.errors import UserError
from zero_tp.tensors.files import Entry, Written, write_tensors
from zero_tp.zero.states import Held, OptimizerStates

if TYPE_CHECKING:
    from zero_tp.training.engine import TrainingEngine

POLL_SECONDS = 0.02
COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def place_of(config: RunConfig) -> dict[str, Any]:
    """Where a run computes: what may change when it is resumed."""
    parallel = config.zero_tp.parallel
    return {
        "tensor": parallel.tensor,
        "data": config.data_parallel,
        "sequence": parallel.sequence,
        "zero_stage": config.zero_stage,
        "dtype": config.dtype,
    }


def fixed_of(config: RunConfig) -> dict[str, Any]:
    """What a run is: the keys that cannot change when it is resumed."""
    block = config.zero_tp
    optimizer = config.deepspeed_config()["optimizer"]
    # Which implementation steps is a choice of the place, as offload is.
    parameters = {key: value for key, value in optimizer.get("params", {}).items() if key != "torch_adam"}
    return {
        "zero_tp.model": {key: block.model[key] for key in sorted(block.model)},
        "zero_tp.training.seed": block.training.seed,
        # Pairs: the order of the corpora decides which samples a step sees.
        "zero_tp.data.train": [[prefix, weight] for prefix, weight in block.data.train.items()],
        "zero_tp.data.sequence_length": block.data.sequence_length,
        "zero_tp.data.document_attention": block.data.document_attention,
        "train_batch_size": config.global_batch,
        "optimizer": {**optimizer, "params": parameters},
    }


def loss_scaler(optimizer: Any) -> Any:
    """What holds the loss scale of fp16: an object of the ZeRO optimizers, or of the ones without ZeRO."""
    return getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", None)


def loss_scale_of(optimizer: Any) -> dict[str, Any]:
    """The loss scale, and what decides when it changes next."""
    scaler = loss_scaler(optimizer)
    return {name: getattr(scaler, name) for name in LOSS_SCALE if hasattr(scaler, name)}


def set_loss_scale(optimizer: Any, saved: dict[str, Any]) -> None:
    """Bring it to what `loss_scale_of` gave, as far as this optimizer's has the same parts."""
    scaler = loss_scaler(optimizer)
    for name, value in saved.items():
        if hasattr(scaler, name):
            setattr(scaler, name, value)


def progress_of(engine: TrainingEngine, states: OptimizerStates) -> dict[str, Any]:
    """What is one number for all ranks: counts, the schedule's position, learning rates, the loss scale."""
    return {
        "optimizer_steps": states.steps,
        "counters": {name: getattr(engine.engine, name) for name in COUNTERS},
        "schedule": engine.scheduler.state_dict() if engine.scheduler is not None else None,
        "learning_rates": [float(group["lr"]) for group in engine.optimizer.param_groups],
        "loss_scale": loss_scale_of(engine.optimizer),
    }


class Saver:
    """Saves one run, one checkpoint at a time.

    Attributes:
        background: whether writing goes on while training does (`checkpoint.async`).
    """

    def __init__(
        self,
        engine: TrainingEngine,
        config: RunConfig,
        run: Path,
        tokenizer: Path | None = None,
        corpora: dict[str, dict[str, Any]] | None = None,
    ):
        """Collective.

        Args:
            tokenizer: the directory that an export copies, noted in the manifest.
            corpora: what the training corpora are, by prefix, noted too (see `PackedSamples.identities`).
        """
        self.engine, self.config, self.run = engine, config, run
        self.tokenizer, self.corpora = tokenizer, corpora or {}
        self.background = config.zero_tp.checkpoint.async_
        self.topology = engine.topology
        name = [uuid.uuid4().hex]
        dist.broadcast_object_list(name)
        self._store = dist.PrefixStore(f"zero_tp/save/{name[0]}", dist.distributed_c10d._get_default_store())
        self._minutes = config.zero_tp.training.timeout_minutes
        self._file = (
            directory.checkpoints_of(run)
            / directory.TEMPORARY
            / states_file(self.topology.tensor_rank, self.topology.data_rank)
        )
        self._thread: threading.Thread | None = None
        self._count = 0
        self._step = 0
        self._told = True

    def save(self, step: int) -> None:
        """Start the checkpoint of `step`, after the one before has ended; it waits for the end of this one unless it
        writes in the background. Collective. `outcome` says how it went.
        """
        self.wait()
        self._count, self._step, self._told = self._count + 1, step, False
        if self.topology.rank == 0:
            begun = self._attempt(lambda: {"directory": str(directory.begin(self.run))})
            self._store.set(self._key(self._count, "begun"), begun.get("error", ""))
        problem = self._collect(self._key(self._count, "begun"), self._deadline())
        if problem:  # on every rank
            self._store.set(self._key(self._count, "outcome"), problem)
            return
        states = OptimizerStates(self.engine)
        metadata = {STARTS: json.dumps({run.name: start for run, start, _ in self._runs(states)})}
        entries = list(self._entries(states))
        manifest = self._manifest(states)
        if self.background:
            entries = [_in_host_memory(entry) for entry in entries]
        arguments = (self._count, step, entries, metadata, manifest)
        self._thread = threading.Thread(target=self._write, args=arguments, daemon=True)
        self._thread.start()
        if not self.background:
            self.wait()

    def wait(self) -> None:
        """Until the save that was started has ended, on all ranks.

        Raises:
            UserError: it has not in the time that a rank has to write, and as much again for the others to say so.
        """
        if self._thread is None:
            return
        deadline = self._deadline(2)
        self._thread.join(deadline - time.monotonic())
        if self._thread.is_alive():
            raise self._late(f"writing {self._file} has not ended")
        self._thread = None
        self._collect(self._key(self._count, "outcome"), deadline)

    def outcome(self) -> tuple[int, str] | None:
        """Once for each save that has ended: (step, what went wrong or ""). On every rank after `wait`; while a save
        writes in the background, on the rank that leads it only."""
        done = self._thread is None or (self.topology.rank == 0 and not self._thread.is_alive())
        if self._told or not done:
            return None
        self._told = True
        return self._step, self._collect(self._key(self._count, "outcome"), self._deadline())

    def _key(self, count: int, what: object) -> str:
        return f"{count}/{what}"

    def _deadline(self, limits: int = 1) -> float:
        return time.monotonic() + limits * 60 * self._minutes

    def _late(self, what: str) -> UserError:
        return UserError(
            f"saving step {self._step}: {what} in time; look at the disk of {self.run}, or raise "
            f"zero_tp.training.timeout_minutes ({self._minutes:g})"
        )

    def _collect(self, key: str, deadline: float) -> str:
        """A value of the store once it is there.

        Raises:
            UserError: it is not there by the deadline.
        """
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                what = key.rsplit("/", 1)[1]
                raise self._late(
                    f"rank {what} has not written" if what.isdigit() else f"rank 0 has not said its {what}"
                )
            time.sleep(POLL_SECONDS)
        value: bytes = self._store.get(key)
        return value.decode()

    def _runs(self, states: OptimizerStates) -> Iterator[tuple[Held, int, slice]]:
        """(run, its first element in the TP shard, which of its elements this rank writes). Without ZeRO each DP rank
        writes its share."""
        for run in states.held:
            first, last = 0, run.numel
            if self.engine.stage == 0:
                share = -(-run.numel // self.topology.data)
                first, last = (
                    min(run.numel, share * rank) for rank in (self.topology.data_rank, self.topology.data_rank + 1)
                )
            if last > first:
                yield run, run.start + first, slice(first, last)

    def _entries(self, states: OptimizerStates) -> Iterator[Entry]:
        kinds = states.kinds()
        for run, _, part in self._runs(states):
            for kind in kinds:
                read = partial(_part, states, run, kind, part)
                yield Entry(tensor_name(run.name, kind), (part.stop - part.start,), read().dtype, read)
        for name, state in self.engine.model.streams.state_dict().items():
            yield Entry(f"random/{name}", tuple(state.shape), state.dtype, partial(torch.clone, state))

    def _manifest(self, states: OptimizerStates) -> dict[str, Any]:
        model = self.engine.model
        return {
            **place_of(self.config),
            "model": model.config.to_dict(),
            "generation": model.generation_config.to_dict(),
            "parameters": {name: Described.of(parameter).to_json() for name, parameter in model.named_parameters()},
            "kinds": states.kinds(),
            "progress": progress_of(self.engine, states),
            "fixed": fixed_of(self.config),
            "corpora": self.corpora,
            "tokenizer": str(self.tokenizer) if self.tokenizer else None,
            "versions": {package: version(package) for package in ("torch", "deepspeed", "transformers")},
        }

    def _write(
        self, count: int, step: int, entries: list[Entry], metadata: dict[str, str], manifest: dict[str, Any]
    ) -> None:
        """Every rank: write its file and say so. The first rank: wait for all, then commit or give up."""
        told = self._attempt(lambda: {"file": self._file.name, **vars(write_tensors(self._file, entries, metadata))})
        self._store.set(self._key(count, self.topology.rank), json.dumps(told))
        if self.topology.rank:
            return
        outcome = self._attempt(lambda: self._finish(count, step, manifest))
        if "error" in outcome:
            directory.abandon(self.run)
        self._store.set(self._key(count, "outcome"), outcome.get("error", ""))

    def _attempt(self, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What `work` gives, or the error as text: the other ranks wait to hear of it."""
        try:
            return work()
        except UserError as error:
            return {"error": str(error)}
        except OSError as error:
            return {"error": f"{error.strerror or error} ({error.filename or self.run})"}
        except Exception as error:  # on a thread of its own; the ranks agree on it and say it
            return {"error": f"{type(error).__name__}: {error}"}

    def _finish(self, count: int, step: int, manifest: dict[str, Any]) -> dict[str, Any]:
        files: dict[str, Written] = {}
        deadline = self._deadline()
        for rank in range(self.topology.world):
            told = json.loads(self._collect(self._key(count, rank), deadline))
            if "error" in told:
                raise OSError(0, f"rank {rank}: {told['error']}")
            files[told["file"]] = Written(told["size"], told["sha256"])
        directory.commit(self.run, self._file.parent, step, manifest, files)
        settings = self.config.zero_tp.checkpoint
        directory.prune(self.run, settings.keep, settings.keep_every)
        return {}


def _part(states: OptimizerStates, run: Held, kind: str, part: slice) -> Tensor:
    return states.get(run, kind)[part]


def _in_host_memory(entry: Entry) -> Entry:
    """The entry with a copy of its data that later steps do not change."""
    copy = entry.read().detach().to("cpu", copy=True)
    return Entry(entry.name, entry.shape, entry.dtype, partial(Tensor.detach, copy))
