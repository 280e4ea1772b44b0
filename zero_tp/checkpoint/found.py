"""What a run would resume from is found by each rank, and all ranks agree on it before they take it."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch.distributed as dist

from zero_tp.checkpoint import directory
from zero_tp.checkpoint.directory import Damaged, read_manifest
from zero_tp.checkpoint.manifest import Manifest, check_same_run
from zero_tp.config import RunConfig
from zero_tp.errors import UserError
from zero_tp.machine import VIEW_SECONDS, arrives, is_local
from zero_tp.parallel.agreement import by_the_first, from_all, require_alike

LOOK_SECONDS = 5.0


@dataclass(frozen=True)
class Found:
    """A rank has found this to resume from, before it knew of the others; `agree` says whether they found the same.

    Attributes:
        checkpoint, manifest: None where there is nothing to resume.
        notes: a line on each newer directory whose damage made it no candidate.
        refusal: why it cannot be resumed.
    """

    checkpoint: Path | None = None
    manifest: Manifest | None = None
    notes: tuple[str, ...] = ()
    refusal: UserError | None = None

    @property
    def step(self) -> int:
        """Return the last step that is done: 0 where there is nothing to resume."""
        return 0 if self.manifest is None else self.manifest.step

    def describe(self) -> str:
        """Return it as ranks compare it: equal where they found the same."""
        if self.refusal is not None:
            return f"an error ({self.refusal})"
        if self.manifest is None:
            return "no checkpoint"
        return f"step {self.step} (manifest {self.manifest.digest()[:12]})"


def look(
    run: Path,
    config: RunConfig,
    given: Path | None = None,
    check: Callable[[Path, Manifest], None] = lambda checkpoint, manifest: None,
) -> Found:
    """Look what this rank would resume from. No communication; what is wrong with it is the finding's `refusal`.

    Args:
        given: the checkpoint to resume from, instead of the run's newest complete one.
        check: raises UserError where the checkpoint does not fit what else the run reads.
    """
    try:
        checkpoint, manifest, passed = _find(run, config, given)
        if checkpoint is not None and manifest is not None:
            check(checkpoint, manifest)
        lost = [] if given is not None else directory.incomplete_since(run, manifest.step if manifest else 0)
    except UserError as error:  # raised by `agree`, on every rank
        return Found(refusal=error)
    except OSError as error:
        return Found(refusal=UserError(f"{error.filename}: cannot be read ({error.strerror}); mend the run directory"))
    notes = [f"{one.file}: {one.problem}; going back to the checkpoint before" for one in passed]
    notes += [f"{path}: has no {directory.MANIFEST}, so that it is no checkpoint" for path in lost]
    return Found(checkpoint, manifest, tuple(notes))


def _find(run: Path, config: RunConfig, given: Path | None) -> tuple[Path | None, Manifest | None, list[Damaged]]:
    """Return the checkpoint that the run would resume from, its manifest, and what is wrong with the newer ones that
    were passed over.

    Raises:
        UserError: the newest checkpoint is damaged and `checkpoint.on_corrupt` says stop, another model or run saved
            it, or `given` is no checkpoint.
    """
    if given is not None:
        checkpoint = directory.find_checkpoint(given)
        manifest = read_manifest(checkpoint)
        check_same_run(checkpoint, manifest, config)
        return checkpoint, manifest, []
    passed: list[Damaged] = []
    steps = directory.complete_steps(run)
    while steps:
        checkpoint = directory.step_directory(run, steps.pop())
        try:
            manifest = read_manifest(checkpoint)
        except Damaged as error:
            if config.zero_tp.checkpoint.on_corrupt == "stop" or not steps:
                raise UserError(offer(error, run)) from error
            passed.append(error)
            continue
        check_same_run(checkpoint, manifest, config)
        return checkpoint, manifest, passed
    return None, None, passed


@contextmanager
def probed(run: Path) -> Iterator[str]:
    """Give the name of a file that the first rank has just written in a run's directory, or "nothing" on a rank that
    does not see it: machines may each have a directory of that name. Collective.

    Raises:
        UserError: on every rank; it cannot be written.
    """

    def write() -> str:
        name = f".probe.{secrets.token_hex(8)}"
        (run / name).touch()
        return name

    name = by_the_first(write)
    try:
        yield name if arrives((run / name).exists, run) else "nothing"
    finally:
        if dist.get_rank() == 0:
            (run / name).unlink(missing_ok=True)


def agree(
    found: Found, run: Path, read: Mapping[str, str] | None = None, again: Callable[[], Found] | None = None
) -> Found:
    """Return what every rank has found. Collective: each rank comes here whatever it has found.

    Args:
        read: what else this rank has read, by what it is; all must have read the same.
        again: looks again. A network's file system may show a machine for a minute what it was.

    Raises:
        UserError: what they found or read differs, or cannot be resumed.
    """
    for _ in range(math.ceil(VIEW_SECONDS / LOOK_SECONDS) + 1 if again else 0):  # as often on every rank
        views = from_all((found.describe(), is_local(run)))
        if len({seen for seen, _ in views}) == 1 or all(local for _, local in views):
            break
        time.sleep(LOOK_SECONDS)
        found = again() if again else found
    require_alike(
        {
            f"{run}: the ranks do not see the same checkpoint": found.describe(),
            **{f"the ranks do not read the same {what}": content for what, content in (read or {}).items()},
        }
    )
    if found.refusal is not None:
        raise found.refusal
    return found


def offer(error: Damaged, run: Path) -> str:
    """Return the error with what a person can do: resume from the checkpoint before."""
    told = f"{error.file}: {error.problem}; the checkpoint is damaged"
    steps = _steps_before(error, run)
    if not steps:
        return f"{told}, and there is none before it: give another --output-dir to start anew"
    before = directory.step_directory(run, steps[-1])
    return f'{told}: use the one before with --resume-from {before}, or set zero_tp.checkpoint.on_corrupt to "previous"'


def _steps_before(error: Damaged, run: Path) -> list[int]:
    return [step for step in directory.complete_steps(run) if directory.step_directory(run, step) < error.checkpoint]


def take_whole(
    found: Found, run: Path, config: RunConfig, take: Callable[[Path], object], given: Path | None = None
) -> Found:
    """Take the checkpoint, or with `on_corrupt` "previous" the newest before it that is whole. Collective.

    Args:
        take: takes a checkpoint; raises Damaged, on every rank, where it is not whole.

    Returns:
        What was taken, with a line on each damaged one that was set aside.

    Raises:
        UserError: it is damaged and `on_corrupt` says stop, it was asked for by name, or there is none before it.
    """
    while True:
        checkpoint = found.checkpoint
        assert checkpoint is not None
        try:
            take(checkpoint)
            return found
        except Damaged as error:
            stop = given is not None or config.zero_tp.checkpoint.on_corrupt == "stop"
            if any(from_all(stop or not _steps_before(error, run))):  # each has read the directory as it was
                raise UserError(offer(error, run)) from error
            aside = by_the_first(partial(directory.set_aside, checkpoint))
            told = f"{error.file}: {error.problem}; set aside as {aside}, going back to the checkpoint before"
            look_again = partial(look, run, config)
            before = agree(look_again(), run, again=look_again)
            if before.checkpoint is None:
                raise UserError(f"{run}: the checkpoints before {checkpoint} are gone; start again") from error
            found = replace(before, notes=(*found.notes, told, *before.notes))
