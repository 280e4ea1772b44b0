"""Find a checkpoint: first `peek_checkpoint`, each rank alone, before a run's config is read; then
`find_on_all_ranks`, which start_point.py calls.

A manifest is read and parsed once and handed on. Only the search on all ranks imports torch.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from zero_tp.base.errors import UserError
from zero_tp.base.files import open_regular, wait_until_visible
from zero_tp.base.settings.resolve import SavedStart
from zero_tp.run.checkpoint.directory import (
    MANIFEST,
    Damaged,
    check_content,
    checkpoint_notes,
    complete_steps,
    read_manifest,
    step_directory,
)
from zero_tp.run.checkpoint.manifest import Manifest, states_file

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Check = Callable[[Path, Manifest], None]
"""Raises UserError if a checkpoint and its manifest do not fit the run's other inputs."""


@dataclass(frozen=True)
class RunCheckpoint:
    """A complete checkpoint and its manifest. Its other files are not verified.

    Attributes:
        path: the checkpoint's directory.
        notes: a line on each newer directory that is damaged or incomplete, and on each removed key
            of its config.
        file_id: of the manifest's file (`_file_id`).
    """

    path: Path
    manifest: Manifest
    notes: tuple[str, ...] = ()
    file_id: tuple[int, ...] | None = field(default=None, compare=False)

    @property
    def step(self) -> int:
        """Return the last completed step."""
        return self.manifest.step

    def saved_start(self) -> SavedStart:
        """Return what the config of a run that resumes here depends on."""
        counters = self.manifest.progress.counters
        # Skipped steps do not advance the schedule.
        updates = counters["global_steps"] - counters["skipped_steps"]
        return SavedStart(self.manifest.config, self.manifest.model, updates)

    def hf_config(self) -> PretrainedConfig:
        """Return the Hugging Face config of the model."""
        from transformers import AutoConfig

        fields = copy.deepcopy(self.manifest.model)  # transformers changes nested fields in place
        return AutoConfig.for_model(fields.pop("model_type"), **fields)


def find_checkpoint(source: Path, known: RunCheckpoint | None = None) -> RunCheckpoint:
    """Open `source` if it is a checkpoint, else the newest complete checkpoint of the run `source`.

    Args:
        known: a checkpoint that this process has read already.

    Raises:
        UserError: there is no complete checkpoint, or its manifest cannot be read.
    """
    path = source
    if not (source / MANIFEST).is_file():
        steps = complete_steps(source)
        if not steps:
            raise UserError(
                f"{source}: no complete checkpoint there; give a run directory or "
                "RUN/checkpoints/step_N"
            )
        path = step_directory(source, steps[-1])
    # A directory of this name may hold another checkpoint by now: the run may have gone back and
    # saved the step again.
    file_id = _file_id(path)
    if known is None or file_id is None or (known.path, known.file_id) != (path, file_id):
        known = RunCheckpoint(path, read_manifest(path), file_id=file_id)
    return replace(known, notes=checkpoint_notes(source, known.path, known.manifest))


def _file_id(checkpoint: Path) -> tuple[int, ...] | None:
    """Return what differs after a manifest has been replaced: its inode, time and size.

    Opening the file asks a network file system for its newest version; a stat may not.
    """
    try:
        with open_regular(checkpoint / MANIFEST) as file:
            status = os.fstat(file.fileno())
    except OSError:  # `read_manifest` reports it
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def peek_checkpoint(run: Path, resume_from: Path | None = None) -> RunCheckpoint | None:
    """Open the checkpoint that a run will resume, as far as its manifest tells; None for a new run.

    Each rank calls it alone, before it reads the run's config, which depends on the checkpoint
    (`saved_start`). Later `start_point.find_start` decides on all ranks, and reports what cannot be
    read.

    Args:
        resume_from: a checkpoint or run to resume from, before this run's own.
    """
    sources = [step_directory(run, step) for step in reversed(complete_steps(run))]
    if resume_from is not None:
        sources.insert(0, resume_from)
    for source in sources:
        # A checkpoint that cannot be read is skipped without a word. This search only chooses the
        # config; the search on all ranks reports it.
        with contextlib.suppress(UserError):
            return find_checkpoint(source)
    return None


def find_on_all_ranks(
    find: Callable[[], RunCheckpoint | None],
    *,
    known: RunCheckpoint | None = None,
    check: Check = lambda checkpoint, manifest: None,
    on_damage: Callable[[Damaged], str] | None = None,
) -> RunCheckpoint | None:
    """Return on every rank the checkpoint that rank 0 finds, once all can read it. Collective.

    Two ranks, steps 1 and 2, a flipped bit in rank 1's file of step 2, `on_damage` sets it aside:

        rank 0: find() → step 2, manifest 5e1f…     rank 1: reads the manifest 5e1f… too
        rank 0: its file is intact                  rank 1: Damaged, raised on both ranks
        rank 0: on_damage → damaged_step_2, a note  rank 1: the same note
        rank 0: find() → step 1, manifest 90ab…     rank 1: reads the manifest 90ab… too
        rank 0: its file is intact                  rank 1: its file is intact; both return step 1

    Args:
        find: called on rank 0; None: there is no checkpoint.
        known: a checkpoint that this rank has read already.
        check: called on every rank, for the files of its machine.
        on_damage: called on rank 0 with a damaged checkpoint; returns a note if another search
            may find another one. By default the damage is raised.

    Raises:
        UserError: on every rank; from `find`, `check` or `on_damage`, a file is damaged, or the
            ranks read different manifests.
    """
    from zero_tp.parallel.agreement import on_rank_zero

    notes: tuple[str, ...] = ()
    while True:
        try:
            checkpoint = _find_once(find, known, check)
        except Damaged as damage:
            if on_damage is None:
                raise
            # `Damaged` was raised on every rank, so all come to this broadcast. Only rank 0
            # renames. If it raises, all ranks raise.
            notes += (on_rank_zero(partial(on_damage, damage)),)
            continue
        if checkpoint is None:
            return None
        return replace(checkpoint, notes=(*notes, *checkpoint.notes))


def _find_once(
    find: Callable[[], RunCheckpoint | None],
    known: RunCheckpoint | None,
    check: Check,
) -> RunCheckpoint | None:
    """Search on rank 0; read, check and verify the result on all ranks. Collective."""
    from zero_tp.parallel.agreement import (
        check_on_all_ranks,
        on_rank_zero,
        require_same_on_all_ranks,
    )

    own: RunCheckpoint | None = None

    def search() -> tuple[Path, str, tuple[str, ...]] | None:
        nonlocal own
        own = find()
        # Not the manifest itself: each rank reads it from its own machine, which shows that the
        # machine sees the checkpoint.
        return None if own is None else (own.path, own.manifest.sha256, own.notes)

    choice = on_rank_zero(search)
    if choice is None:
        return None
    path, sha256, notes = choice
    if own is None:  # this is another rank
        own = _read_when_visible(path, sha256, known)
    # A value, not an exception: a rank that raised here would leave the others waiting in the
    # comparison.
    seen = "nothing" if own is None else f"SHA-256 {own.manifest.sha256[:12]}…"
    require_same_on_all_ranks({f"{path}: the ranks do not read the same manifest": seen})
    assert own is not None
    # Before the files are hashed, because it takes seconds and reading all files may take minutes.
    check_on_all_ranks(partial(check, own.path, own.manifest))
    verify_checkpoint(own)
    return replace(own, notes=notes)


def _read_when_visible(
    path: Path, sha256: str, known: RunCheckpoint | None
) -> RunCheckpoint | None:
    """Wait until this machine sees the manifest with this hash; return the last one read, or None.

    A network file system may show the files of another machine late.
    """
    # Usually `peek_checkpoint` has read this manifest already. The hash says that it is
    # the same one.
    if known is not None and (known.path, known.manifest.sha256) == (path, sha256):
        return known
    manifest: Manifest | None = None

    def is_visible() -> bool:
        nonlocal manifest
        with contextlib.suppress(UserError):
            # An old view may have no manifest or an earlier one: look again until the limit.
            manifest = read_manifest(path)
        return manifest is not None and manifest.sha256 == sha256

    wait_until_visible(is_visible, path.parent)
    return None if manifest is None else RunCheckpoint(path, manifest)


def verify_checkpoint(checkpoint: RunCheckpoint) -> None:
    """Compare all files with their hashes; each rank reads its share of them. Collective.

    On the grid that saved it, a rank verifies the file that it loads next, which is then in the
    page cache.

    Raises:
        Damaged: on every rank; names the first damaged file.
    """
    import torch.distributed as dist

    from zero_tp.parallel.agreement import check_on_all_ranks

    rank = 0
    world = 1
    if dist.is_initialized():
        rank = dist.get_rank()
        world = dist.get_world_size()
    files = checkpoint.manifest.files
    tensor = checkpoint.manifest.tensor
    # Rank r has TP rank r mod t and DP rank r // t (`Topology`). In this order, rank r of the same
    # grid gets its own file. With other numbers of ranks, each gets every world-th one.
    names = [states_file(writer % tensor, writer // tensor) for writer in range(len(files))]
    share = {name: files[name] for name in names[rank::world]}
    check_on_all_ranks(partial(check_content, checkpoint.path, share, progress=rank == 0))
