"""Save a run: every rank writes what it holds, then one rank gives the whole its name.

Ranks tell each other what they wrote through the process group's key-value store and not by collectives, so that a save
can go on in the background while training uses the process groups.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero_tp.checkpoint import directory
from zero_tp.checkpoint.manifest import Parallelism, Parent, fixed_of, states_file, versions
from zero_tp.checkpoint.owner import TakenOver
from zero_tp.checkpoint.reader import RANDOM, STARTS, Described, tensor_name
from zero_tp.config import RunConfig
from zero_tp.errors import UserError
from zero_tp.parallel.deferred import Deferred
from zero_tp.tensors.files import Entry, Written, write_tensors
from zero_tp.zero.engine import ZeroEngine
from zero_tp.zero.states import Fragment, OptimizerStates

POLL_SECONDS = 0.02
LONGEST_POLL_SECONDS = 0.5


class Saver:
    """A saver saves one run, one checkpoint at a time.

    Attributes:
        background: whether writing goes on while training does (`checkpoint.async`).
        notes, removed: on the rank that leads a save, lines on older checkpoints that were not removed and on what
            failed after a complete one had its name, and the steps that `checkpoint.keep` no longer keeps.
    """

    def __init__(
        self,
        zero: ZeroEngine,
        config: RunConfig,
        run: Path,
        tokenizer: str | None = None,
        corpora: dict[str, dict[str, Any]] | None = None,
        validation: dict[str, dict[str, Any]] | None = None,
        parent: Parent | None = None,
        check_owner: Callable[[], None] = lambda: None,
    ):
        """Set up the ranks' common store of messages. Collective.

        Args:
            tokenizer: that an export copies, noted in the manifest: a directory, or a name on the hub with its commit.
            corpora, validation: what these corpora are, by prefix, noted too (see `PackedSamples.identities`).
            parent: the checkpoint that the run was started from, noted too.
            check_owner: raises TakenOver on rank 0 if another launch owns the run directory.
        """
        self.zero, self.config, self.run = zero, config, run
        self.tokenizer, self.corpora, self.validation = tokenizer, corpora or {}, validation or {}
        self.parent, self._check_owner = parent, check_owner
        self.background = config.zero_tp.checkpoint.async_
        self.topology = zero.topology
        name = [uuid.uuid4().hex]
        dist.broadcast_object_list(name)
        self._store = dist.PrefixStore(f"zero_tp/save/{name[0]}", dist.distributed_c10d._get_default_store())
        self._minutes = config.zero_tp.training.timeouts.save
        self._file = Path()
        self._thread: threading.Thread | None = None
        self._count = 0
        self._step = 0
        self.notes: list[str] = []
        self.removed: list[int] = []
        self._told = True

    def save(self, step: int) -> None:
        """Start the checkpoint of `step`, after the one before has ended; it waits for the end of this one unless it
        writes in the background. Collective. `outcome` says how it went.
        """
        self.wait()
        self._count, self._step, self._told, self.removed = self._count + 1, step, False, []
        if self.topology.rank == 0:
            self._tell("begun", json.dumps(self._attempt(self._begin)))
        begun = json.loads(self._collect("begun", self._deadline()))
        if "error" in begun:  # on every rank
            if self.topology.rank == 0:
                self._tell("outcome", json.dumps(begun))
            return
        name = states_file(self.topology.tensor_rank, self.topology.data_rank)
        self._file = directory.checkpoints_of(self.run) / directory.TEMPORARY / begun["directory"] / name
        entries, metadata = own_entries(self.zero)
        manifest = self._manifest()
        if self.background:
            entries = [_in_host_memory(entry) for entry in entries]
        arguments = (entries, metadata, manifest)
        self._thread = threading.Thread(target=self._write, args=arguments, daemon=True)
        self._thread.start()
        if not self.background:
            self.wait()

    def _begin(self) -> dict[str, Any]:
        """Make room for a save: what a killed save left goes."""
        for what in ("begun", "outcome"):  # of two saves ago: every rank has read them before it came to the last one
            self._store.delete_key(f"{self._count - 2}/{what}")
        self._check_owner()  # before another launch's files are removed
        return {"directory": directory.begin(self.run).name}

    def wait(self) -> None:
        """Wait until the save that was started has ended, on all ranks.

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
        self._collect("outcome", deadline)

    def outcome(self) -> tuple[int, str] | None:
        """Return, once for each save that has ended, (step, what went wrong or ""). On every rank after `wait`; while a
        save writes in the background, on the rank that leads it only.

        Raises:
            TakenOver: another launch owns the run directory.
        """
        done = self._thread is None or (self.topology.rank == 0 and not self._thread.is_alive())
        if self._told or not done:
            return None
        self._told = True
        outcome = json.loads(self._collect("outcome", self._deadline()))
        if outcome.get("taken_over"):
            raise TakenOver(outcome["error"])
        return self._step, outcome.get("error", "")

    def _deadline(self, limits: int = 1) -> float:
        return time.monotonic() + limits * 60 * self._minutes

    def _late(self, what: str) -> UserError:
        return UserError(
            f"saving step {self._step}: {what} in time; look at the disk of {self.run}, or raise "
            f"zero_tp.training.timeout_minutes ({self._minutes:g})"
        )

    def _tell(self, what: str, told: str) -> None:
        """Put what this rank has to say of the save into the store."""
        self._store.set(f"{self._count}/{what}", told)

    def _collect(self, what: str, deadline: float) -> str:
        """Return what a rank has told, once it has.

        Raises:
            UserError: it is not there by the deadline.
        """
        key, begun = f"{self._count}/{what}", time.monotonic()
        while not self._store.check([key]):
            waited = time.monotonic() - begun
            if begun + waited > deadline:
                raise self._late(
                    f"rank {what} has not written" if what.isdigit() else f"rank 0 has not said its {what}"
                )
            time.sleep(max(POLL_SECONDS, min(LONGEST_POLL_SECONDS, waited / 20)))  # a thousand ranks ask one store
        value: bytes = self._store.get(key)
        return value.decode()

    def _manifest(self) -> dict[str, Any]:
        return {
            **Parallelism.of(self.config)._asdict(),
            **described(self.zero),
            "fixed": fixed_of(self.config),
            "corpora": self.corpora,
            "validation": self.validation,
            "tokenizer": self.tokenizer,
            **({} if self.parent is None else {"parent": self.parent.model_dump()}),
            "config": self.config.resolved(),
        }

    def _write(self, entries: list[Entry], metadata: dict[str, str], manifest: dict[str, Any]) -> None:
        """Every rank: write its file and say so. The first rank: wait for all, then commit or give up."""
        told = self._attempt(lambda: {"file": self._file.name, **vars(write_tensors(self._file, entries, metadata))})
        self._tell(str(self.topology.rank), json.dumps(told))
        if self.topology.rank:
            return
        outcome = self._attempt(lambda: self._finish(manifest))
        if "error" in outcome:
            directory.abandon(self._file.parent)
        self._tell("outcome", json.dumps(outcome))

    def _attempt(self, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return what `work` gives, or the error as text: the other ranks wait to hear of it."""
        try:
            return work()
        except Exception as error:  # on a thread of its own; the ranks agree on it and say it
            return {"error": in_words(error, self.run), "taken_over": isinstance(error, TakenOver)}

    def _finish(self, manifest: dict[str, Any]) -> dict[str, Any]:
        files: dict[str, Written] = {}
        deadline = self._deadline()
        for rank in range(self.topology.world):
            told = json.loads(self._collect(str(rank), deadline))
            self._store.delete_key(f"{self._count}/{rank}")  # nobody else reads it
            if "error" in told:
                raise OSError(0, f"rank {rank}: {told['error']}")
            files[told["file"]] = Written(told["size"], told["sha256"], told["parts"])
        self.notes += directory.commit(self.run, self._file.parent, self._step, manifest, files, self._check_owner)
        settings = self.config.zero_tp.checkpoint
        try:
            self.removed = directory.prune(self.run, settings.keep, settings.keep_every, saved=self._step)
        except OSError as error:  # this one is saved all the same
            self.notes.append(f"older checkpoints could not be removed: {in_words(error, self.run)}")
        return {}


def in_words(error: Exception, run: Path) -> str:
    """Return what has kept a rank from writing into a run's directory."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.strerror or error} ({error.filename or run})"
    return f"{type(error).__name__}: {error}"


def own_entries(zero: ZeroEngine) -> tuple[list[Entry], dict[str, str]]:
    """Return (tensors, metadata) of the file that this rank writes into a checkpoint."""
    states, entries, starts = zero.states(), [], dict[str, int]()
    kinds = states.kinds()
    for fragment in states.fragments:
        share = zero.share(fragment)
        if share.stop <= share.start:
            continue
        starts[fragment.name] = fragment.start + share.start
        for kind in kinds:
            read = partial(_read, states, fragment, kind, share)
            entries.append(Entry(tensor_name(fragment.name, kind), (share.stop - share.start,), read().dtype, read))
    for name, state in zero.model.streams.state_dict().items():
        entries.append(Entry(f"{RANDOM}/{name}", tuple(state.shape), state.dtype, partial(torch.clone, state)))
    return entries, {STARTS: json.dumps(starts)}


def described(zero: ZeroEngine) -> dict[str, Any]:
    """Return what a manifest says of the model, its states, how far they are, and the libraries."""
    model = zero.model
    return {
        "model": model.config.to_dict(),
        "generation": model.generation_config.to_dict() if model.generation_config is not None else None,
        "parameters": {name: Described.of(parameter).to_json() for name, parameter in model.named_parameters()},
        "kinds": zero.states().kinds(),
        "progress": zero.progress(),
        "versions": versions(),
    }


def _read(states: OptimizerStates, fragment: Fragment, kind: str, share: slice) -> Tensor:
    return states.get(fragment, kind)[share]


def _in_host_memory(entry: Entry) -> Entry:
    """Return the entry with a copy of its data that later steps do not change.

    A device makes the copy between this step and the next, into page-locked memory; the host waits when it writes it.
    """
    data = entry.read().detach()
    copy = Deferred(data.clone() if data.device.type == "cpu" else data)
    return replace(entry, read=copy.wait)
