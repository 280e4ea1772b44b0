"""Save checkpoints: every rank writes its file, then rank 0 commits them under the step's name.

Ranks report to each other through the process group's key-value store, because training may run
collectives while a save runs in the background. The fourth save of a run with DP 2, of step 500:

    rank 0                                        rank 1
    makes .writing/3f9a…, posts 4/begin           waits for 4/begin, which names the directory
    writes states_tp00_dp0000, posts 4/0          writes states_tp00_dp0001, posts 4/1: size, hash
    waits for 4/0 and 4/1, writes the manifest
    renames .writing/3f9a… to step_00000500
    posts 4/outcome                               `wait` returns with 4/outcome
"""

from __future__ import annotations

import json
import os
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

from zero_tp.base.errors import UserError
from zero_tp.base.settings.schema import Checkpoint
from zero_tp.base.versions import versions
from zero_tp.base.weight_files import has_commit
from zero_tp.data.tokenizer_fingerprint import TokenizerFingerprint
from zero_tp.engine.zero.states import MASTER
from zero_tp.engine.zero.zero_engine import ZeroEngine
from zero_tp.parallel.host_copy import HostCopy
from zero_tp.parallel.layout import stored_buffers, stored_tensors
from zero_tp.parallel.safetensors_files import Entry, FileDigest, write_tensors
from zero_tp.run.checkpoint import directory
from zero_tp.run.checkpoint.manifest import Parallelism, Parent, states_file
from zero_tp.run.checkpoint.reader import RANDOM, STARTS, ParameterLayout, tensor_name
from zero_tp.run.checkpoint.run_directory import OwnerChanged
from zero_tp.run.checkpoint.same_run import fixed_settings, stage_entries
from zero_tp.run.config import RunConfig

# Between two looks for a message [seconds]: at first, and after a long wait.
POLL_SECONDS = 0.02
LONGEST_POLL_SECONDS = 0.5


class Saver:
    """Saves checkpoints into one run directory, one at a time.

    Attributes:
        notes: on rank 0, problems after a checkpoint was complete.
        removed: on rank 0, the steps that the last save removed.
    """

    def __init__(
        self,
        zero: ZeroEngine,
        run: Path,
        describe: Callable[[], dict[str, Any]],
        *,
        timeout_minutes: float,
        settings: Checkpoint | None = None,
        check_owner: Callable[[], None] = lambda: None,
    ):
        """Make the key-value store for messages between ranks. Collective.

        Args:
            describe: returns the manifest without format, step, files and hash.
            timeout_minutes: limit of the time in which a rank writes its file.
            settings: the config's `checkpoint`; None: no checkpoint is removed, and training waits
                for a save.
            check_owner: raises OwnerChanged on rank 0 if another launch owns the run directory.
        """
        self.zero = zero
        self.run = run
        self.topology = zero.topology
        self._describe = describe
        self._settings = settings
        self._check_owner = check_owner
        self._minutes = timeout_minutes
        # A name for each saver, because the store outlives it: a second one would count from 1
        # again and read the messages of the first.
        name = [uuid.uuid4().hex]
        dist.broadcast_object_list(name)
        self._store = dist.PrefixStore(
            f"zero_tp/save/{name[0]}", dist.distributed_c10d._get_default_store()
        )
        self._file = Path()
        self._thread: threading.Thread | None = None
        self._count = 0
        self._step = 0
        self.notes: list[str] = []
        self.removed: list[int] = []
        self._is_reported = True

    def save(self, step: int) -> None:
        """Save a checkpoint of `step`, or start to save it in the background. Collective.

        A failure raises nothing here: `outcome` returns it.
        """
        # One save at a time: the thread, its file and the number of the messages are those of one.
        self.wait()
        self._count = self._count + 1
        self._step = step
        self._is_reported = False
        self.removed = []
        if self.topology.rank == 0:
            self._post("begin", self._attempt(self._begin))
        message = self._collect("begin", self._deadline())
        if "error" in message:  # on every rank
            if self.topology.rank == 0:
                self._post("outcome", message)
            return
        # The directory's random name comes from rank 0. Without it, a rank could write into the
        # directory of a killed save.
        name = states_file(self.topology.tensor_rank, self.topology.data_rank)
        self._file = (
            directory.checkpoints_directory(self.run)
            / directory.TEMPORARY
            / message["directory"]
            / name
        )
        entries, metadata = own_entries(self.zero)
        background = self._settings is not None and self._settings.async_
        if background:
            # The next step changes masters and moments in place while the thread writes.
            entries = [_copy_to_host(entry) for entry in entries]
        # The manifest is made now, in the main thread: its counts and schedule must be those of
        # this step.
        arguments = (entries, metadata, self._describe())
        # Also a save that training waits for runs in a thread, so that a disk that hangs can be
        # given up after the limit. No exception can end a blocked write.
        self._thread = threading.Thread(target=self._write, args=arguments, daemon=True)
        self._thread.start()
        if not background:
            self.wait()

    def _begin(self) -> dict[str, Any]:
        # Of the save before last, whose messages all ranks have read.
        for key in ("begin", "outcome"):
            self._store.delete_key(f"{self._count - 2}/{key}")
        self._check_owner()  # `begin` removes temporary files, which may be another launch's
        return {"directory": directory.begin(self.run).name}

    def wait(self) -> None:
        """Wait until the last save has ended on all ranks.

        One limit is for this rank's own write, another for the other ranks' messages.

        Raises:
            UserError: that took longer than twice `timeout_minutes`.
        """
        if self._thread is None:
            return
        deadline = self._deadline(2)
        self._thread.join(deadline - time.monotonic())
        if self._thread.is_alive():
            raise self._timeout_error(f"writing {self._file} has not ended")
        self._thread = None
        self._collect("outcome", deadline)

    def outcome(self) -> tuple[int, str] | None:
        """Return (step, error or "") once per save; None before the save has ended.

        During a save in the background, only rank 0 sees that it has ended; after `wait`, every
        rank does.

        Raises:
            OwnerChanged: another launch owns the run directory.
        """
        # Another rank's own thread ends before rank 0 has committed, so only the thread of rank 0
        # tells that a save has ended.
        done = self._thread is None or (self.topology.rank == 0 and not self._thread.is_alive())
        if self._is_reported or not done:
            return None
        self._is_reported = True
        outcome = self._collect("outcome", self._deadline())
        if outcome.get("taken_over"):
            raise OwnerChanged(outcome["error"])
        return self._step, outcome.get("error", "")

    def _deadline(self, limits: int = 1) -> float:
        return time.monotonic() + limits * 60 * self._minutes

    def _timeout_error(self, what: str) -> UserError:
        return UserError(
            f"saving step {self._step}: {what} in time; look at the disk of {self.run}, or raise "
            f"zero_tp.training.timeout_minutes ({self._minutes:g}), in a Trainer ddp_timeout"
        )

    def _post(self, key: str, message: dict[str, Any]) -> None:
        self._store.set(f"{self._count}/{key}", json.dumps(message))

    def _collect(self, key: str, deadline: float) -> dict[str, Any]:
        """Wait for a message and return it.

        Args:
            deadline: of `time.monotonic`.

        Raises:
            UserError: the message has not arrived by then.
        """
        path = f"{self._count}/{key}"
        start = time.monotonic()
        # `check` answers at once, while `get` would wait for the key and hold the client, which
        # other threads of this process use, too.
        while not self._store.check([path]):
            waited = time.monotonic() - start
            if start + waited > deadline:
                raise self._timeout_error(
                    f"rank {key} has not written"
                    if key.isdigit()
                    else f"rank 0 has not reported the save's {key}"
                )
            # A thousand ranks poll one store.
            time.sleep(max(POLL_SECONDS, min(LONGEST_POLL_SECONDS, waited / 20)))
        message: dict[str, Any] = json.loads(self._store.get(path))
        return message

    def _write(
        self, entries: list[Entry], metadata: dict[str, str], manifest: dict[str, Any]
    ) -> None:
        """Write this rank's file and report it.

        Rank 0 then waits for all ranks, and commits the files or removes them. Runs in a thread.
        """
        written = self._attempt(
            lambda: {"file": self._file.name, **vars(write_tensors(self._file, entries, metadata))}
        )
        self._post(str(self.topology.rank), written)
        if self.topology.rank:
            return
        outcome = self._attempt(lambda: self._finish(manifest))
        if "error" in outcome:
            directory.abandon(self._file.parent)
        self._post("outcome", outcome)

    def _attempt(self, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the result of `work`, or its error as a message to all ranks."""
        try:
            return work()
        except Exception as error:  # all ranks receive and report it
            return {
                "error": describe_problem(error, self.run),
                "taken_over": isinstance(error, OwnerChanged),
            }

    def _finish(self, manifest: dict[str, Any]) -> dict[str, Any]:
        files: dict[str, FileDigest] = {}
        deadline = self._deadline()
        for rank in range(self.topology.world):
            written = self._collect(str(rank), deadline)
            self._store.delete_key(f"{self._count}/{rank}")  # only rank 0 reads it
            if "error" in written:
                # Caught by `_attempt`, whose message becomes the outcome on every rank.
                raise OSError(0, f"rank {rank}: {written['error']}")
            files[written["file"]] = FileDigest(written["size"], written["xxh3_128"])
        # Only after every rank has reported. A commit before that could name files that a rank has
        # not flushed.
        self.notes += directory.commit(
            self.run, self._file.parent, self._step, manifest, files, self._check_owner
        )
        if self._settings is not None:
            keep = self._settings.keep
            keep_every = self._settings.keep_every
            try:
                self.removed = directory.prune(self.run, keep, keep_every)
            except OSError as error:  # the new checkpoint is complete
                self.notes.append(
                    f"older checkpoints could not be removed: {describe_problem(error, self.run)}"
                )
        return {}


def run_saver(
    zero: ZeroEngine,
    config: RunConfig,
    run: Path,
    *,
    tokenizer: str | None = None,
    fingerprint: TokenizerFingerprint | None = None,
    corpora: dict[str, dict[str, Any]] | None = None,
    validation: dict[str, dict[str, Any]] | None = None,
    parent: Parent | None = None,
    check_owner: Callable[[], None] = lambda: None,
) -> Saver:
    """Return the saver of a training run. Collective.

    Args:
        tokenizer: recorded for exports: a directory, or a hub name with its commit.
        fingerprint: recorded: the tokenizer's, or that of the corpora.
        corpora, validation: recorded identities of the corpora by prefix (see
            `PackedSamples.identities`).
        parent: recorded: the checkpoint that the run was started from.
        check_owner: see `Saver`.
    """

    def describe() -> dict[str, Any]:
        return {
            **Parallelism.of(config).to_json(),
            **describe_model(zero),
            "fixed": fixed_settings(config),
            "corpora": corpora or {},
            "validation": validation or {},
            **describe_tokenizer(tokenizer, fingerprint, run),
            **({} if parent is None else {"parent": parent.model_dump()}),
            **stage_entries(config, zero.deepspeed_engine.global_steps),
            "config": config.resolved(),
        }

    block = config.zero_tp
    minutes = block.training.timeouts.save
    return Saver(
        zero,
        run,
        describe,
        timeout_minutes=minutes,
        settings=block.checkpoint,
        check_owner=check_owner,
    )


def describe_problem(error: Exception, run: Path) -> str:
    """Describe in one line why a rank could not write."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.strerror or error} ({error.filename or run})"
    return f"{type(error).__name__}: {error}"


def own_entries(zero: ZeroEngine) -> tuple[list[Entry], dict[str, str]]:
    """Return (tensors, metadata) of this rank's file."""
    states = zero.states()
    entries = []
    starts = dict[str, int]()
    kinds = states.kinds()
    for fragment in states.fragments:
        # Without ZeRO every replica has all states: each saves an equal slice, so no bytes are
        # written twice.
        own = zero.checkpoint_slice(fragment)
        if not own.span.length:
            continue
        starts[own.name] = own.span.whole_start
        for kind in (kind for kind in kinds if states.has(own, kind)):
            read = partial(states.get, own, kind)
            # A fragment is flat: under ZeRO it may begin inside a row. The parameter's shape stands
            # in the manifest.
            shape = (own.span.length,)
            entries.append(Entry(tensor_name(own.name, kind), shape, read().dtype, read))
    # Every rank writes its whole copy, which is small: a rank that resumes on the same grid then
    # opens its own file alone.
    for name, buffer in stored_buffers(zero.model):
        starts[name] = 0
        read = partial(torch.flatten, buffer)
        entries.append(Entry(tensor_name(name, MASTER), (buffer.numel(),), buffer.dtype, read))
    for name, state in zero.model.streams.state_dict().items():
        entries.append(
            Entry(f"{RANDOM}/{name}", tuple(state.shape), state.dtype, partial(torch.clone, state))
        )
    # In the file itself, because a manifest with the fragments of every rank would grow with
    # parameters times ranks.
    return entries, {STARTS: json.dumps(starts)}


def describe_tokenizer(
    name: str | None, fingerprint: TokenizerFingerprint | None, run: Path
) -> dict[str, Any]:
    """Return a manifest's entries on the tokenizer of a run.

    Args:
        name: a directory, or a hub name with its commit. The paths that are recorded for a
            directory do not depend on the working directory, and one of them stays right if the run
            is moved, alone or together with the data.
    """
    entries: dict[str, Any] = {"tokenizer": name}
    if name is not None and not has_commit(name):
        entries |= {
            "tokenizer": os.path.abspath(name),
            # Relative to the run: still right if both were moved together.
            "tokenizer_from_run": os.path.relpath(name, run),
        }
    return entries | (
        {} if fingerprint is None else {"tokenizer_fingerprint": fingerprint.model_dump()}
    )


def describe_model(zero: ZeroEngine) -> dict[str, Any]:
    """Return a manifest's entries on the model, its states, their progress, and the libraries."""
    model = zero.model
    return {
        "model": model.config.to_dict(),
        "generation": model.generation_config.to_dict()
        if model.generation_config is not None
        else None,
        "parameters": {
            name: ParameterLayout.of(tensor).to_json() for name, tensor in stored_tensors(model)
        },
        "kinds": zero.states().kinds(),
        # Only if there is one, because earlier versions do not read it.
        **({} if zero.average is None else {"ema": zero.average.decay}),
        "progress": zero.progress(),
        "versions": versions(),
    }


def _copy_to_host(entry: Entry) -> Entry:
    """Return the entry with a copy of its data, which later steps do not change.

    From a device, the copy to page-locked memory is asynchronous; the writing thread waits for it.
    """
    data = entry.read().detach()
    # `HostCopy` of a CPU tensor is the tensor itself, so it needs a copy of its own.
    copy = HostCopy(data.clone() if data.device.type == "cpu" else data)
    return replace(entry, read=copy.wait)
