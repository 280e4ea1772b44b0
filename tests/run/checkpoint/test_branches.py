"""Going back starts a branch; all ranks resume the checkpoint that rank 0 finds."""

from __future__ import annotations

import errno
import json
import os
import shutil
from itertools import count
from pathlib import Path
from unittest import mock

import pytest

from tests.support.checkpoint_runs import (
    build,
    steps_of,
    train_and_save,
    write_changed,
    write_config,
)
from tests.support.checkpoints import rewritten
from tests.support.pools import Pools
from tests.support.run_log import RunLog
from zero_tp.run.checkpoint.directory import (
    LATEST,
    MANIFEST,
    checkpoints_directory,
    complete_steps,
    read_manifest,
    set_aside,
    set_aside_newer,
    step_directory,
)
from zero_tp.run.checkpoint.manifest import Manifest
from zero_tp.run.checkpoint.run_directory import write_config as write_run_config
from zero_tp.run.config import RunConfig
from zero_tp.run.metrics_file import METRICS_FILE


@pytest.fixture(scope="module")
def saved(ranks: Pools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks with checkpoints of the steps 1, 2 and 3."""
    directory = tmp_path_factory.mktemp("saved")
    path = write_config(directory / "run.json", 1, "fp32", 1)
    ranks(2).run(
        train_and_save, str(write_changed(path, keep=3)), str(directory / "run"), [1, 2, 3], 3
    )
    return directory


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Its config and its directory."""
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    return tmp_path / "run.json", tmp_path / "run"


def latest(run: Path) -> Path:
    return checkpoints_directory(run) / (checkpoints_directory(run) / LATEST).read_text().strip()


def go_back(path: str, run: str, to: int, last: int) -> tuple[list[str], list[int]]:
    """Resume a step, save each one up to `last`; return the notes and the removed steps."""
    from zero_tp.run.checkpoint import directory, save
    from zero_tp.run.checkpoint.find import find_checkpoint
    from zero_tp.run.checkpoint.start_point import Resume

    engine, config = build(path)
    start = Resume(find_checkpoint(step_directory(Path(run), to)))
    start.restore(engine.zero, config.zero_tp.training.seed)
    assert start.step == to
    saver = save.run_saver(engine.zero, config, Path(run))
    notes = directory.set_aside_newer(Path(run), to) if engine.topology.rank == 0 else []
    removed = []
    for step in range(to + 1, last + 1):
        steps_of(engine, step, step)
        saver.save(step)
        removed += saver.removed
        assert saver.outcome() == (step, "")
    return notes + saver.notes, removed


def test_going_back_starts_a_branch_and_loses_nothing(
    ranks: Pools, copied: tuple[Path, Path]
) -> None:
    path, run = copied
    path = write_changed(path, keep=1)
    contents = {step: (step_directory(run, step) / MANIFEST).read_bytes() for step in (2, 3)}
    notes, removed = ranks(2).run(go_back, str(path), str(run), 1, 2)[0]
    assert complete_steps(run) == [2] and latest(run) == step_directory(run, 2)
    assert removed == [1], "what was just saved stays"
    assert len(notes) == 2
    for step, note in zip((2, 3), notes, strict=True):
        aside = checkpoints_directory(run) / f"abandoned_step_{step:08d}"
        assert (aside / MANIFEST).read_bytes() == contents[step] and read_manifest(
            aside
        ).step == step
        assert (
            note == f"step {step} belongs to the branch abandoned at step 1: set aside as {aside}"
        )
    assert ranks(2).run(go_back, str(path), str(run), 2, 4)[0] == ([], [2, 3])
    assert complete_steps(run) == [4]


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


def killed_after(
    renames: int, run: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> bool:
    """Begin a branch at step 1 as a start does, and be killed before a rename; return whether
    one came.
    """
    done = 0

    def replace(source: str | Path, target: str | Path) -> None:
        nonlocal done
        if done == renames:
            raise Killed
        done += 1
        os.rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        try:
            write_run_config(run, config.resolved())
            set_aside_newer(run, 1)
            with RunLog(run, step=1):
                pass
        except Killed:
            return True
    return False


def test_a_kill_while_a_branch_begins_leaves_one_of_both_whole(
    copied: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, saved = copied
    outcomes = []
    for renames in count():
        run = tmp_path / f"killed-{renames}"
        shutil.copytree(saved, run)
        (run / METRICS_FILE).write_text("".join(f'{{"step": {step}}}\n' for step in (1, 2, 3)))
        killed = killed_after(renames, run, RunConfig.load(path, world_size=2), monkeypatch)
        newest, lines = complete_steps(run)[-1], (run / METRICS_FILE).read_text().splitlines()
        assert newest in (1, 3), "the abandoned branch, or the new one"
        assert [json.loads(line)["step"] for line in lines][:newest] == list(
            range(1, newest + 1)
        ), "with all its lines"
        outcomes.append((newest, len(lines)))
        if not killed:
            break
    assert outcomes[0] == (3, 3) and (1, 3) in outcomes and outcomes[-1] == (1, 1)


def test_what_is_set_aside_replaces_nothing(copied: tuple[Path, Path]) -> None:
    _, run = copied
    whole = step_directory(run, 3)
    names = []
    for _ in range(3):
        shutil.copytree(whole, run / "copy")
        names.append(set_aside(whole).name)
        assert latest(run) == step_directory(run, 2)
        (run / "copy").rename(whole)
    assert names == [f"damaged_step_00000003{ending}" for ending in ("", ".2", ".3")]
    for step in (3, 2, 1):
        set_aside(step_directory(run, step), "abandoned")
    assert not (checkpoints_directory(run) / LATEST).exists(), "it would name a missing step"


UNREADABLE = "/run/manifest.json"


def resumed(path: str, run: str, seen: list[str | None], resume_from: str | None) -> str:
    """Return the checkpoint that this rank resumes, or the error, if it reads the manifest of
    `seen[rank]`.
    """
    import torch.distributed as dist

    from zero_tp.base.errors import UserError
    from zero_tp.run.checkpoint import find
    from zero_tp.run.checkpoint.start_point import Resume

    config = RunConfig.load(path, world_size=dist.get_world_size())
    own = seen[dist.get_rank()]

    def read(checkpoint: Path) -> Manifest:
        if own == UNREADABLE:
            raise PermissionError(errno.EACCES, "Permission denied", UNREADABLE)
        return read_manifest(checkpoint if own is None else Path(own))

    with mock.patch.object(find, "read_manifest", read):
        try:
            start = Resume.find(
                Path(run), config, None if resume_from is None else Path(resume_from)
            )
            assert start is not None
            return str(start.checkpoint.path)
        except UserError as error:
            return f"error: {error}"


def test_rank_0_finds_what_all_ranks_resume(
    ranks: Pools, copied: tuple[Path, Path], tmp_path: Path
) -> None:
    path, run = copied
    other, newest = tmp_path / "other" / "step_00000003", step_directory(run, 3)

    def resume(
        second: Path | None = None, resume_from: Path | None = None, first: str | None = None
    ) -> list[str]:
        seen = [first, None if second is None else str(second)]
        return ranks(2).run(
            resumed, str(path), str(run), seen, None if resume_from is None else str(resume_from)
        )

    shutil.copytree(newest, other)
    assert resume() == resume(other) == [str(newest)] * 2
    assert resume(resume_from=step_directory(run, 1)) == [str(step_directory(run, 1))] * 2
    pattern = f"error: {newest}: the ranks do not read the same manifest: SHA-256 "
    with rewritten(other) as manifest:
        manifest["progress"]["optimizer_steps"] = 5
    for problem in resume(other):
        assert (
            problem.startswith(pattern) and problem.count("SHA-256") == 2 and "\n" not in problem
        ), problem
    (other / MANIFEST).unlink()
    for problem in resume(other):
        assert problem.startswith(pattern) and "; nothing on rank 1 (" in problem, problem
    for problem in resume(resume_from=tmp_path / "nothing"):
        assert problem.startswith(f"error: {tmp_path / 'nothing'}: no complete checkpoint there"), (
            problem
        )
    assert (
        resume(first=UNREADABLE)
        == [f"error: {UNREADABLE}: Permission denied; check its permissions and the free space"] * 2
    )
