"""Find the checkpoint that a run resumes from: rank 0 finds it, and all ranks load the same one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from zero_tp.checkpoint import directory
from zero_tp.checkpoint.directory import Damaged, read_manifest
from zero_tp.checkpoint.manifest import Manifest, check_same_run
from zero_tp.config import RunConfig
from zero_tp.errors import UserError
from zero_tp.files import wait_until_visible
from zero_tp.parallel.agreement import on_rank_zero, require_same_on_all_ranks


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a run resumes from.

    Attributes:
        checkpoint, manifest: None for a new run.
        notes: a line about each newer directory that is damaged or incomplete.
    """

    checkpoint: Path | None = None
    manifest: Manifest | None = None
    notes: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """Return the last completed step, 0 for a new run."""
        return 0 if self.manifest is None else self.manifest.step


def find_resume_point(
    run: Path,
    config: RunConfig,
    given: Path | None = None,
    check: Callable[[Path, Manifest], None] = lambda checkpoint, manifest: None,
) -> ResumePoint:
    """Find the newest complete checkpoint of a run. No communication: rank 0 calls it.

    Args:
        given: the checkpoint to resume from instead.
        check: raises UserError if the checkpoint does not fit what else the run reads.

    Raises:
        UserError: the newest checkpoint is damaged and `checkpoint.on_corrupt` is "stop", another model or run saved
            it, or `given` is no checkpoint.
    """
    try:
        point = _newest(run, config) if given is None else _given(given, config)
        if point.checkpoint is not None and point.manifest is not None:
            check(point.checkpoint, point.manifest)
        return replace(point, notes=(*point.notes, *directory.passed_over(given or run, point.step)))
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read ({error.strerror}); mend the run directory") from error


def _given(path: Path, config: RunConfig) -> ResumePoint:
    checkpoint = directory.find_checkpoint(path)
    manifest = read_manifest(checkpoint)
    check_same_run(checkpoint, manifest, config)
    return ResumePoint(checkpoint, manifest)


def _newest(run: Path, config: RunConfig) -> ResumePoint:
    directory.refresh_view(run)
    notes: tuple[str, ...] = ()
    steps = directory.complete_steps(run)
    while steps:
        checkpoint = directory.step_directory(run, steps.pop())
        try:
            manifest = read_manifest(checkpoint)
        except Damaged as error:
            if config.zero_tp.checkpoint.on_corrupt == "stop" or not steps:
                raise UserError(describe_damage(error, run)) from error
            notes += (f"{error.file}: {error.problem}; going back to the checkpoint before",)
            continue
        check_same_run(checkpoint, manifest, config)
        return ResumePoint(checkpoint, manifest, notes)
    return ResumePoint(notes=notes)


def broadcast_resume_point(find: Callable[[], ResumePoint]) -> ResumePoint:
    """Return on every rank the resume point that `find` returns on rank 0. Collective.

    Every rank reads the manifest itself and compares its hash. Where the run directory is on a network file system, a
    rank waits up to `VIEW_SECONDS` for it.

    Raises:
        UserError: on every rank; `find` raised it, or a rank does not read the same manifest.
    """

    def describe() -> tuple[tuple[Path, str] | None, tuple[str, ...]]:
        point = find()
        if point.checkpoint is None or point.manifest is None:
            return None, point.notes
        return (point.checkpoint, point.manifest.sha256), point.notes

    found, notes = on_rank_zero(describe)
    if found is None:
        return ResumePoint(notes=notes)
    checkpoint, sha256 = found
    manifests: list[Manifest] = []

    def is_visible() -> bool:
        try:
            manifests[:] = [read_manifest(checkpoint)]
        except UserError:  # the ranks that cannot read it are named below
            return False
        return manifests[0].sha256 == sha256

    wait_until_visible(is_visible, checkpoint.parent)
    seen = f"SHA-256 {manifests[0].sha256[:12]}…" if manifests else "nothing"
    require_same_on_all_ranks({f"{checkpoint}: the ranks do not read the same manifest": seen})
    if not manifests or manifests[0].sha256 != sha256:
        raise UserError(f"{checkpoint}: it was removed or changed while this run started; start again")
    return ResumePoint(checkpoint, manifests[0], notes)


def load_resume_point(
    point: ResumePoint,
    run: Path,
    config: RunConfig,
    load: Callable[[Path], object],
    given: Path | None = None,
    check_owner: Callable[[], None] = lambda: None,
) -> ResumePoint:
    """Load the checkpoint; with `on_corrupt` "previous" the newest intact one before it. Collective.

    Args:
        load: raises Damaged, on every rank, for a damaged checkpoint.
        check_owner: raises TakenOver on rank 0 if another launch owns the run directory.

    Returns:
        What was loaded, with a line about each damaged checkpoint that was set aside.

    Raises:
        UserError: it is damaged, and `on_corrupt` is "stop", it was asked for by name, or there is none before it.
    """
    while True:
        assert point.checkpoint is not None
        try:
            load(point.checkpoint)
            return point
        except Damaged as error:
            may_go_back = given is None and config.zero_tp.checkpoint.on_corrupt == "previous"
            point = broadcast_resume_point(partial(_set_aside, error, point, run, config, may_go_back, check_owner))


def _set_aside(
    damage: Damaged,
    point: ResumePoint,
    run: Path,
    config: RunConfig,
    may_go_back: bool,
    check_owner: Callable[[], None],
) -> ResumePoint:
    """Set a damaged checkpoint aside and find the one before it. Rank 0 calls it."""
    if not may_go_back or not _steps_before(damage, run):
        raise UserError(describe_damage(damage, run))
    check_owner()
    aside = directory.set_aside(damage.checkpoint)
    note = f"{damage.file}: {damage.problem}; set aside as {aside}, going back to the checkpoint before"
    before = find_resume_point(run, config)
    if before.checkpoint is None:
        raise UserError(f"{run}: the checkpoints before {damage.checkpoint} are gone; start again")
    return replace(before, notes=(*point.notes, note, *before.notes))


def describe_damage(error: Damaged, run: Path) -> str:
    """Return the error and its remedy: the checkpoint before it, if there is one."""
    message = f"{error.file}: {error.problem}; the checkpoint is damaged"
    steps = _steps_before(error, run)
    if not steps:
        return f"{message}, and there is none before it: give another --output-dir to start anew"
    before = directory.step_directory(run, steps[-1])
    remedy = f'use the one before with --resume-from {before}, or set zero_tp.checkpoint.on_corrupt to "previous"'
    return f"{message}: {remedy}"


def _steps_before(error: Damaged, run: Path) -> list[int]:
    return [step for step in directory.complete_steps(run) if directory.step_directory(run, step) < error.checkpoint]
