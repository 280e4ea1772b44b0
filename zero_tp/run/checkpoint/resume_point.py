"""Find the checkpoint that a run resumes from: rank 0 chooses it, all ranks verify it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch.distributed as dist

from zero_tp.base.errors import UserError
from zero_tp.base.files import wait_until_visible
from zero_tp.parallel.agreement import check_on_all_ranks, on_rank_zero, require_same_on_all_ranks
from zero_tp.run.checkpoint import directory
from zero_tp.run.checkpoint.directory import Damaged, check_content, read_manifest
from zero_tp.run.checkpoint.manifest import Manifest, check_same_run, states_file
from zero_tp.run.config import RunConfig


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a run resumes from.

    Attributes:
        checkpoint, manifest: None for a new run.
        notes: a line on each newer directory that is damaged or incomplete, and on each removed key of its config.
    """

    checkpoint: Path | None = None
    manifest: Manifest | None = None
    notes: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """Return the last completed step, 0 for a new run."""
        return 0 if self.manifest is None else self.manifest.step


Check = Callable[[Path, Manifest], None]
"""Raises UserError if a checkpoint and its manifest do not fit the run's other inputs."""


def find_resume_point(run: Path, config: RunConfig, resume_from: Path | None = None) -> ResumePoint:
    """Find the newest complete checkpoint of a run, or `resume_from`, and check that this config may resume it.

    No communication: rank 0 calls it.
    """
    if resume_from is None:
        directory.refresh_view(run)
        if not directory.complete_steps(run):
            return ResumePoint(notes=directory.incomplete_after(run, 0))
    point = open_checkpoint(resume_from or run)
    assert point.checkpoint is not None and point.manifest is not None
    check_same_run(point.checkpoint, point.manifest, config)
    return point


def open_checkpoint(source: Path) -> ResumePoint:
    """Return `source` if it is a checkpoint, else the newest checkpoint of the run `source`. Files are not verified."""
    checkpoint = directory.find_checkpoint(source)
    manifest = read_manifest(checkpoint)
    return ResumePoint(checkpoint, manifest, directory.checkpoint_notes(source, checkpoint, manifest))


def broadcast_resume_point(
    find: Callable[[], ResumePoint], check: Check = lambda checkpoint, manifest: None
) -> ResumePoint:
    """Return on every rank the resume point that `find` returns on rank 0, verified. Collective.

    Every other rank reads the manifest itself and compares its hash, after waiting up to `files.NFS_VIEW_SECONDS` for a
    network file system. Then all ranks run `check` on their machine's other files and verify a share of the checkpoint.

    Raises:
        UserError, Damaged: on every rank; from `find`, `check` or `verify_checkpoint`, or the manifests differ.
    """
    manifest: Manifest | None = None

    def describe() -> tuple[Path | None, str, tuple[str, ...]]:
        nonlocal manifest
        point = find()
        manifest = point.manifest
        return point.checkpoint, manifest.sha256 if manifest is not None else "", point.notes

    checkpoint, sha256, notes = on_rank_zero(describe)
    if checkpoint is None:
        return ResumePoint(notes=notes)
    manifest = manifest or _read_when_visible(checkpoint, sha256)
    seen = f"SHA-256 {manifest.sha256[:12]}…" if manifest is not None else "nothing"
    require_same_on_all_ranks({f"{checkpoint}: the ranks do not read the same manifest": seen})
    assert manifest is not None
    check_on_all_ranks(partial(check, checkpoint, manifest))
    verify_checkpoint(checkpoint, manifest)
    return ResumePoint(checkpoint, manifest, notes)


def _read_when_visible(checkpoint: Path, sha256: str) -> Manifest | None:
    """Wait until this machine sees the manifest with this hash; return the last one read, or None."""
    manifest: Manifest | None = None

    def is_visible() -> bool:
        nonlocal manifest
        with contextlib.suppress(UserError):
            manifest = read_manifest(checkpoint)
        return manifest is not None and manifest.sha256 == sha256

    wait_until_visible(is_visible, checkpoint.parent)
    return manifest


def verify_checkpoint(checkpoint: Path, manifest: Manifest) -> None:
    """Compare all files of a checkpoint with their hashes; each rank reads its share of them. Collective.

    On the grid that saved it, a rank verifies the file that it loads next, which is then in the page cache.

    Raises:
        Damaged: on every rank; names the first damaged file.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    names = [states_file(writer % manifest.tensor, writer // manifest.tensor) for writer in range(len(manifest.files))]
    share = {name: manifest.files[name] for name in names[rank::world]}
    check_on_all_ranks(partial(check_content, checkpoint, share, progress=rank == 0))


def find_intact_resume_point(
    run: Path,
    config: RunConfig,
    resume_from: Path | None = None,
    check: Check = lambda checkpoint, manifest: None,
    check_owner: Callable[[], None] = lambda: None,
) -> ResumePoint:
    """Find and verify a checkpoint; with `on_corrupt` "previous", set damaged ones aside and try older. Collective.

    Args:
        resume_from: see `find_resume_point`. A damaged one is never replaced by another.
        check: see `broadcast_resume_point`.
        check_owner: raises OwnerChanged on rank 0 if another launch owns the run directory.
    """
    notes: tuple[str, ...] = ()
    may_go_back = resume_from is None and config.zero_tp.checkpoint.on_corrupt == "previous"

    def fall_back(damage: Damaged) -> str:
        problem, damaged = f"{damage.file}: {damage.problem}", damage.checkpoint.absolute()
        its_run = damaged.parent.parent  # another run if resume_from names a checkpoint of it
        complete = [directory.step_directory(its_run, step) for step in directory.complete_steps(its_run)]
        before = complete[: complete.index(damaged)] if damaged in complete else []
        if not before:
            raise UserError(
                f"{problem}; the checkpoint is damaged, and there is none before it: give another --output-dir"
            )
        if not may_go_back:
            raise UserError(
                f"{problem}; the checkpoint is damaged: use the one before with --resume-from {before[-1]}, or set "
                'zero_tp.checkpoint.on_corrupt to "previous"'
            )
        check_owner()
        aside = directory.set_aside(damage.checkpoint)
        return f"{problem}; set aside as {aside}, going back to the checkpoint before"

    while True:
        try:
            point = broadcast_resume_point(partial(find_resume_point, run, config, resume_from), check)
        except Damaged as damage:
            notes += (on_rank_zero(partial(fall_back, damage)),)
        else:
            return replace(point, notes=(*notes, *point.notes))
