"""A save that fails costs one checkpoint and no training; one in the background holds its own
step.
"""

from __future__ import annotations

import contextlib
import json
import re
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.checkpoint_runs import build, masters_of, steps_of, write_changed, write_config
from tests.support.pools import Pools
from tests.support.waits import patience
from tests.tiers import in_tiers
from zero_tp.run.checkpoint.directory import (
    TEMPORARY,
    check_content,
    checkpoints_directory,
    complete_steps,
    read_manifest,
    step_directory,
)
from zero_tp.run.checkpoint.manifest import states_file
from zero_tp.run.checkpoint.reader import CheckpointReader


def saver_of(path: str, run: str, **options: Any) -> tuple[Any, Any]:
    """The engine of a config, and the saver of its run."""
    from zero_tp.run.checkpoint.save import run_saver

    engine, config = build(path)
    return engine, run_saver(engine.zero, config, Path(run), **options)


@contextlib.contextmanager
def disk_full() -> Iterator[None]:
    """Let this process write only 10 kB a file."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


@contextlib.contextmanager
def no_directory(run: Path) -> Iterator[None]:
    """Put a file in the place of the directory of checkpoints."""
    checkpoints = checkpoints_directory(run)
    aside = checkpoints.rename(checkpoints.with_name("aside"))
    checkpoints.touch()
    yield
    checkpoints.unlink()
    aside.rename(checkpoints)


def three_saves(path: str, run: str, full_rank: int | None) -> list[tuple[int, str] | None]:
    """Return the outcomes of three saves. In the second, a rank's disk is full, or rank 0 (None)
    has no directory.
    """
    import torch.distributed as dist

    engine, saver = saver_of(path, run)
    outcomes = []
    for step in (1, 2, 3):
        steps_of(engine, step, step)
        with contextlib.ExitStack() as stack:
            if step == 2 and engine.topology.rank == (full_rank or 0):
                stack.enter_context(no_directory(Path(run)) if full_rank is None else disk_full())
            saver.save(step)
            saver.wait()
            outcomes.append(saver.outcome())
            dist.barrier()
    return outcomes


@pytest.mark.parametrize(
    ("full_rank", "background"),
    in_tiers(
        [(rank, background) for rank in (0, 1, None) for background in (False, True)],
        [(0, True), (1, False), (None, True)],
    ),
)
def test_a_failed_save_costs_one_checkpoint(
    ranks: Pools, tmp_path: Path, full_rank: int | None, background: bool
) -> None:
    path = write_changed(write_config(tmp_path / "run.json", 2, "bf16", 1), async_=background)
    run = tmp_path / "run"
    temporary = checkpoints_directory(run) / TEMPORARY
    words = (
        f"Not a directory ({temporary})"
        if full_rank is None
        else f"rank {full_rank}: File too large ("
    )
    for first, second, third in ranks(2).run(
        three_saves, str(path), str(run), full_rank, timeout=60
    ):
        assert first == (1, "") and third == (3, "")
        assert second is not None and second[0] == 2 and second[1].startswith(words), second
    assert complete_steps(run) == [1, 3] and not temporary.exists()
    for step in (1, 3):
        check_content(step_directory(run, step), read_manifest(step_directory(run, step)).files)


def taken_over(path: str, run: str, when: str) -> tuple[int, str]:
    """(steps that are saved, the error of the second save), after another launch has taken the
    run over.
    """
    import torch.distributed as dist

    from zero_tp.run.checkpoint import directory
    from zero_tp.run.checkpoint.run_directory import OwnerChanged, RunOwner

    checkpoints_directory(Path(run)).mkdir(parents=True, exist_ok=True)
    first = RunOwner(Path(run)) if dist.get_rank() == 0 else None
    _, saver = saver_of(path, run, check_owner=first.check if first else lambda: None)
    saver.save(1)
    saver.wait()
    assert saver.outcome() == (1, "")
    begin = directory.begin

    def begin_and_lose(folder: Path) -> Path:
        temporary = begin(folder)
        RunOwner(folder)
        return temporary

    with pytest.MonkeyPatch.context() as patch:
        if when == "before it begins" and first:
            RunOwner(Path(run))
        if when == "while it writes":
            patch.setattr(directory, "begin", begin_and_lose)
        saver.save(2)
        saver.wait()
    with pytest.raises(OwnerChanged) as error:
        saver.outcome()
    return len(complete_steps(Path(run))), str(error.value)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("when", ["before it begins", "while it writes"])
def test_a_run_that_was_taken_over_writes_nothing_more(
    ranks: Pools, tmp_path: Path, when: str, background: bool
) -> None:
    path, run = (
        write_changed(write_config(tmp_path / "run.json", 1, "fp32", 1), async_=background),
        tmp_path / "run",
    )
    for saved, error in ranks(2).run(taken_over, str(path), str(run), when):
        assert saved == 1 and error.startswith(f"{run}: another launch (process "), error
        assert error.endswith(") has taken the run over; this one writes nothing more")
    assert (checkpoints_directory(run) / "latest").read_text() == "step_00000001\n"
    assert not list(checkpoints_directory(run).glob(f"{TEMPORARY}/*"))


def saves_with_later_failures(
    path: str, run: str
) -> list[tuple[tuple[int, str] | None, list[str]]]:
    """Return (outcome, notes) of four saves; something after each checkpoint is complete fails in
    all but the first.

    At the second, the old checkpoint is busy. From the third on, `latest` is a directory. At the
    fourth, the disk does not flush the new name.
    """
    import torch.distributed as dist

    from zero_tp.run.checkpoint import directory

    sync, latest = directory.sync, checkpoints_directory(Path(run)) / directory.LATEST

    def failing(synced: Path, *, below: bool = True) -> None:
        if synced == latest.parent:
            raise OSError(5, "Input/output error")
        sync(synced, below=below)

    busy = mock.patch.object(
        directory, "_remove", side_effect=OSError(16, "Device or resource busy", "step_00000001")
    )
    faults: dict[int, Any] = {2: busy, 4: mock.patch.object(directory, "sync", failing)}
    engine, saver = saver_of(path, run)
    results = []
    for step in (1, 2, 3, 4):
        if step == 3 and engine.topology.rank == 0:
            latest.unlink()
            latest.mkdir()
        dist.barrier()
        with faults.get(step, contextlib.nullcontext()):
            saver.save(step)
        results.append((saver.outcome(), saver.notes))
        saver.notes = []
    return results


def test_a_checkpoint_that_is_complete_is_saved_whatever_fails_after(
    ranks: Pools, tmp_path: Path
) -> None:
    path, run = (
        write_changed(write_config(tmp_path / "run.json", 1, "fp32", 1), keep=1),
        tmp_path / "run",
    )
    first, other = ranks(2).run(saves_with_later_failures, str(path), str(run))
    assert (
        [outcome for outcome, _ in first]
        == [outcome for outcome, _ in other]
        == [(step, "") for step in (1, 2, 3, 4)]
    )
    checkpoints = checkpoints_directory(run)
    assert [notes for _, notes in first] == [
        [],
        ["older checkpoints could not be removed: Device or resource busy (step_00000001)"],
        [f"{step_directory(run, 3)} is complete, but {checkpoints / 'latest'}: not a regular file"],
        [
            f"{step_directory(run, 4)} is complete, but {run}: Input/output error",
            f"older checkpoints could not be removed: Input/output error ({run})",
        ],
    ]
    assert sorted(path.name for path in checkpoints.iterdir()) == [
        "latest",
        "step_00000003",
        "step_00000004",
    ]


def trainers_full_disk(path: str, folder: str, full_rank: int) -> str:
    """Return the error of saving a checkpoint of transformers' Trainer while a rank's disk is
    full.
    """
    from zero_tp.base.errors import UserError
    from zero_tp.tools.trainer.checkpoints import save_states

    engine, _ = build(path)
    steps_of(engine, 1, 1)
    with (
        disk_full() if engine.topology.rank == full_rank else contextlib.nullcontext(),
        pytest.raises(UserError) as error,
    ):
        save_states(engine.zero, None, Path(folder), 1, 7)
    return str(error.value)


def test_a_full_disk_leaves_nothing_of_trainers_checkpoint(ranks: Pools, tmp_path: Path) -> None:
    path = write_config(tmp_path / "run.json", 1, "fp32", 1)
    for told in ranks(2).run(trainers_full_disk, str(path), str(tmp_path), 1):
        assert told.startswith(f"{tmp_path}: step 1 was not saved: rank 1: File too large (")
    assert (
        not complete_steps(tmp_path) and not (checkpoints_directory(tmp_path) / TEMPORARY).exists()
    )


@contextlib.contextmanager
def slow_disk() -> Iterator[Callable[[], None]]:
    """Let this process write a checkpoint's file only after the yielded function is called, or
    at the end.
    """
    from zero_tp.run.checkpoint import save

    proceed, write = threading.Event(), save.write_tensors

    def slowly(*arguments: Any) -> Any:
        assert proceed.wait(patience(60))
        return write(*arguments)

    with mock.patch.object(save, "write_tensors", slowly):
        try:
            yield proceed.set
        finally:
            proceed.set()


def hanging(path: str, run: str) -> str:
    """Save while rank 1's disk hangs; return the result on this rank."""
    from zero_tp.base.errors import UserError

    engine, saver = saver_of(path, run)
    steps_of(engine, 1, 1)
    with slow_disk() if engine.topology.rank == 1 else contextlib.nullcontext():
        try:
            saver.save(1)
            return f"outcome: {saver.outcome()}"
        except UserError as error:
            return f"error: {error}"


@pytest.mark.thorough
def test_a_disk_that_hangs_ends_the_save_on_every_rank(ranks: Pools, tmp_path: Path) -> None:
    path, run = write_config(tmp_path / "run.json", 1, "fp32", 1), tmp_path / "run"
    config = json.loads(path.read_text())
    config["zero_tp"]["training"]["timeout_minutes"] = 0.05
    path.write_text(json.dumps(config))
    setting = r"zero_tp\.training\.timeout_minutes \(0\.05\), in a Trainer ddp_timeout"
    remedy = rf"in time; look at the disk of {run}, or raise {setting}"
    first, second = ranks(2).run(hanging, str(path), str(run), timeout=60)
    assert re.fullmatch(
        rf"outcome: \(1, '.*saving step 1: rank 1 has not written {remedy}.*'\)", first
    ), first
    hung = checkpoints_directory(run) / TEMPORARY / "[0-9a-f]{16}" / states_file(0, 1)
    assert re.fullmatch(rf"error: saving step 1: writing {hung} has not ended {remedy}", second), (
        second
    )
    assert complete_steps(run) == []


def in_the_background(path: str, run: str) -> dict[str, Any]:
    """Save step 1 while a slow disk lets two more steps pass."""
    engine, saver = saver_of(path, run)
    steps_of(engine, 1, 1)
    masters = masters_of(engine)
    with slow_disk() as proceed:
        saver.save(1)
        steps_of(engine, 2, 3)
        early = saver.outcome()
        proceed()
        saver.wait()
    return {"outcomes": [early, saver.outcome(), saver.outcome()], "masters": masters}


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_save_in_the_background_holds_its_own_step(
    ranks: Pools, tmp_path: Path, stage: int
) -> None:
    path = write_changed(write_config(tmp_path / "run.json", stage, "fp32", 1), async_=True)
    results = ranks(2).run(in_the_background, str(path), str(tmp_path / "run"))
    for result in results:
        assert result["outcomes"] == [None, (1, ""), None]
    checkpoint = step_directory(tmp_path / "run", 1)
    reader = CheckpointReader(checkpoint, read_manifest(checkpoint))
    for name in reader.parameters:
        pieces = [result["masters"][name] for result in results if name in result["masters"]]
        held = pieces[0] if stage == 0 else torch.cat(pieces)
        assert torch.equal(reader.whole(name).flatten(), held), name
