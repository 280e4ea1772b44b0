"""A save that fails costs one checkpoint and no training; one in the background holds its own step."""

from __future__ import annotations

import json
import re
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.test_checkpoint import build, changed, steps_of, straight, write_config
from tests.support.pools import Pools
from tests.support.waits import patience
from zero_tp.checkpoint.directory import (
    TEMPORARY,
    check_content,
    checkpoints_of,
    complete_steps,
    read_manifest,
    step_directory,
)
from zero_tp.checkpoint.manifest import states_file
from zero_tp.checkpoint.reader import CheckpointReader


def saver_of(path: str, run: str, **options: Any) -> tuple[Any, Any]:
    """The engine of a config, and the saver of its run."""
    from zero_tp.checkpoint.save import run_saver

    engine, config = build(path)
    return engine, run_saver(engine.zero, config, Path(run), **options)


def full_disk(path: str, run: str, broken: int) -> list[tuple[int, str] | None]:
    """Outcomes of three saves, in the second of which a rank may write only 10 kB a file."""
    engine, saver = saver_of(path, run)
    outcomes = []
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    for step in (1, 2, 3):
        steps_of(engine, step, step)
        if step == 2 and engine.topology.rank == broken:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limit[1]))
        try:
            saver.save(step)
            saver.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        outcomes.append(saver.outcome())
    return outcomes


def taken_over(path: str, run: str, when: str) -> tuple[int, str]:
    """(steps that are saved, the error of the second save), after another launch has taken the run over."""
    import torch.distributed as dist

    from zero_tp.checkpoint import directory
    from zero_tp.checkpoint.run_directory import OwnerChanged, RunOwner

    checkpoints_of(Path(run)).mkdir(parents=True, exist_ok=True)
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
    path, run = changed(write_config(tmp_path / "run.json", 1, "fp32", 1), async_=background), tmp_path / "run"
    for saved, error in ranks(2).run(taken_over, str(path), str(run), when):
        assert saved == 1 and error.startswith(f"{run}: another launch (process "), error
        assert error.endswith(") has taken the run over; this one writes nothing more")
    assert (checkpoints_of(run) / "latest").read_text() == "step_00000001\n"
    assert not list(checkpoints_of(run).glob(f"{TEMPORARY}/*"))


@pytest.mark.parametrize("broken", [0, 1])
@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_costs_one_checkpoint(ranks: Pools, tmp_path: Path, broken: int, background: bool) -> None:
    path = changed(write_config(tmp_path / "run.json", 2, "bf16", 1), async_=background)
    run = tmp_path / "run"
    for first, second, third in ranks(2).run(full_disk, str(path), str(run), broken):
        assert first == (1, "") and third == (3, "")
        assert second is not None and second[0] == 2
        assert second[1].startswith(f"rank {broken}: File too large"), second[1]
    assert complete_steps(run) == [1, 3]
    assert not (checkpoints_of(run) / TEMPORARY).exists()
    for step in (1, 3):
        check_content(step_directory(run, step), read_manifest(step_directory(run, step)).files)


def beside_one_that_stays(path: str, run: str) -> tuple[tuple[int, str] | None, list[str]]:
    """The outcome of a second save after which the first checkpoint cannot be removed, and what is said of it."""
    from unittest.mock import patch

    from zero_tp.checkpoint import directory

    _, saver = saver_of(path, run)
    saver.save(1)
    busy = OSError(16, "Device or resource busy", "step_00000001")
    with patch.object(directory, "_remove", side_effect=busy):
        saver.save(2)
    return saver.outcome(), saver.notes


def test_a_checkpoint_that_cannot_be_removed_costs_no_save(ranks: Pools, tmp_path: Path) -> None:
    path = changed(write_config(tmp_path / "run.json", 1, "fp32", 1), keep=1)
    first, second = ranks(2).run(beside_one_that_stays, str(path), str(tmp_path / "run"))
    told = "older checkpoints could not be removed: Device or resource busy (step_00000001)"
    assert (first, second) == (((2, ""), [told]), ((2, ""), []))
    assert complete_steps(tmp_path / "run") == [1, 2]


def beside_a_pointer_that_fails(path: str, run: str) -> list[tuple[tuple[int, str] | None, list[str]]]:
    """Outcomes of three saves and what is said of them: since the second `latest` is a directory, at the third the disk
    does not take the new name either."""
    from unittest.mock import patch

    import torch.distributed as dist

    from zero_tp.checkpoint import directory

    sync, latest = directory.sync, checkpoints_of(Path(run)) / directory.LATEST

    def failing(synced: Path, *, below: bool = True) -> None:
        if synced == latest.parent:
            raise OSError(5, "Input/output error")
        sync(synced, below=below)

    engine, saver = saver_of(path, run)
    told = []
    for step in (1, 2, 3):
        if step == 2 and engine.topology.rank == 0:
            latest.unlink()
            latest.mkdir()
        dist.barrier()
        with patch.object(directory, "sync", failing if step == 3 else sync):
            saver.save(step)
        told.append((saver.outcome(), saver.notes))
        saver.notes = []
    return told


def test_a_checkpoint_that_is_complete_is_saved_whatever_fails_after(ranks: Pools, tmp_path: Path) -> None:
    path, run = changed(write_config(tmp_path / "run.json", 1, "fp32", 1), keep=1), tmp_path / "run"
    first, other = ranks(2).run(beside_a_pointer_that_fails, str(path), str(run))
    assert [outcome for outcome, _ in first] == [outcome for outcome, _ in other] == [(1, ""), (2, ""), (3, "")]
    at = checkpoints_of(run)
    assert [notes for _, notes in first] == [
        [],
        [f"{step_directory(run, 2)} is complete, but {at / 'latest'}: not a regular file"],
        [
            f"{step_directory(run, 3)} is complete, but {run}: Input/output error",
            f"older checkpoints could not be removed: Input/output error ({run})",
        ],
    ]
    assert sorted(each.name for each in at.iterdir()) == ["latest", "step_00000002", "step_00000003"]


def trainers_full_disk(path: str, folder: str, broken: int) -> str:
    """Why a checkpoint of transformers' Trainer is not saved, where a rank may write only 10 kB a file."""
    from zero_tp.errors import UserError
    from zero_tp.trainer.checkpoints import save_states

    engine, _ = build(path)
    steps_of(engine, 1, 1)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if engine.topology.rank == broken:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limit[1]))
    try:
        save_states(engine.zero, None, Path(folder), 1, 7)
    except UserError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    return ""


def test_a_full_disk_leaves_nothing_of_trainers_checkpoint(ranks: Pools, tmp_path: Path) -> None:
    path = write_config(tmp_path / "run.json", 1, "fp32", 1)
    for told in ranks(2).run(trainers_full_disk, str(path), str(tmp_path), 1):
        assert told.startswith(f"{tmp_path}: step 1 was not saved: rank 1: File too large (")
    assert not complete_steps(tmp_path) and not (checkpoints_of(tmp_path) / TEMPORARY).exists()


def nowhere_to_write(path: str, run: str) -> list[tuple[int, str] | None]:
    """Outcomes of three saves, before the second of which rank 0 cannot make the temporary directory: the directory
    that it would be in is a file."""
    import torch.distributed as dist

    engine, saver = saver_of(path, run)
    outcomes, checkpoints = [], checkpoints_of(Path(run))
    aside = checkpoints.with_name("aside")
    for step in (1, 2, 3):
        steps_of(engine, step, step)
        if step == 2 and engine.topology.rank == 0:
            checkpoints.rename(aside)
            checkpoints.touch()
        saver.save(step)
        saver.wait()
        outcomes.append(saver.outcome())
        dist.barrier()
        if step == 2 and engine.topology.rank == 0:
            checkpoints.unlink()
            aside.rename(checkpoints)
    return outcomes


@pytest.mark.parametrize("background", [False, True])
def test_a_save_that_cannot_begin_costs_one_checkpoint(ranks: Pools, tmp_path: Path, background: bool) -> None:
    path = changed(write_config(tmp_path / "run.json", 1, "fp32", 1), async_=background)
    for outcomes in ranks(2).run(nowhere_to_write, str(path), str(tmp_path / "run"), timeout=60):
        assert outcomes == [(1, ""), (2, f"Not a directory ({checkpoints_of(tmp_path / 'run') / TEMPORARY})"), (3, "")]
    assert complete_steps(tmp_path / "run") == [1, 3]


def hanging(path: str, run: str) -> str:
    """A save while rank 1's disk hangs: how it ends on this rank."""
    import threading

    from zero_tp.checkpoint import save
    from zero_tp.errors import UserError

    engine, saver = saver_of(path, run)
    steps_of(engine, 1, 1)
    go_on, write = threading.Event(), save.write_tensors

    def never(*arguments: Any) -> Any:
        go_on.wait()
        return write(*arguments)

    if engine.topology.rank == 1:
        save.write_tensors = never  # type: ignore[assignment]
    try:
        saver.save(1)
        return f"outcome: {saver.outcome()}"
    except UserError as error:
        return f"error: {error}"
    finally:
        go_on.set()
        save.write_tensors = write


@pytest.mark.thorough
def test_a_disk_that_hangs_ends_the_save_on_every_rank(ranks: Pools, tmp_path: Path) -> None:
    path, run = write_config(tmp_path / "run.json", 1, "fp32", 1), tmp_path / "run"
    config = json.loads(path.read_text())
    config["zero_tp"]["training"]["timeout_minutes"] = 0.05
    path.write_text(json.dumps(config))
    setting = r"zero_tp\.training\.timeout_minutes \(0\.05\), of Trainer ddp_timeout"
    remedy = rf"in time; look at the disk of {run}, or raise {setting}"
    first, second = ranks(2).run(hanging, str(path), str(run), timeout=60)
    assert re.fullmatch(rf"outcome: \(1, '.*saving step 1: rank 1 has not written {remedy}.*'\)", first), first
    hung = checkpoints_of(run) / TEMPORARY / "[0-9a-f]{16}" / states_file(0, 1)
    assert re.fullmatch(rf"error: saving step 1: writing {hung} has not ended {remedy}", second), second
    assert complete_steps(run) == []


def in_the_background(path: str, run: str) -> dict[str, Any]:
    """Save step 1 while a slow disk lets two more steps pass."""
    import threading

    from zero_tp.checkpoint import save
    from zero_tp.zero.states import MASTER

    engine, saver = saver_of(path, run)
    go_on, write = threading.Event(), save.write_tensors

    def slowly(*arguments: Any) -> Any:
        assert go_on.wait(patience(60))
        return write(*arguments)

    save.write_tensors = slowly  # type: ignore[assignment]
    try:
        steps_of(engine, 1, 1)
        states = engine.zero.states()
        then = {each.name: states.get(each, MASTER).clone() for each in states.fragments}
        saver.save(1)
        steps_of(engine, 2, 3)
        early = saver.outcome()
        go_on.set()
        saver.wait()
    finally:
        save.write_tensors = write
    return {
        "early": early,
        "late": saver.outcome(),
        "again": saver.outcome(),
        "masters": then,
        "rank": engine.topology.rank,
    }


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_save_in_the_background_holds_its_own_step(ranks: Pools, tmp_path: Path, stage: int) -> None:
    path = changed(write_config(tmp_path / "run.json", stage, "fp32", 1), async_=True)
    results = ranks(2).run(in_the_background, str(path), str(tmp_path / "run"))
    for result in results:
        assert result["early"] is None and result["late"] == (1, "") and result["again"] is None
    checkpoint = step_directory(tmp_path / "run", 1)
    reader = CheckpointReader(checkpoint, read_manifest(checkpoint))
    for name in reader.parameters:
        pieces = [result["masters"][name] for result in results if name in result["masters"]]
        held = pieces[0] if stage == 0 else torch.cat(pieces)
        assert torch.equal(reader.whole(name).flatten(), held), name


def test_milestones_stay(ranks: Pools, tmp_path: Path) -> None:
    from zero_tp.checkpoint.directory import prune

    path = changed(write_config(tmp_path / "run.json", 1, "fp32", 1), keep=1, keep_every=2)
    run = tmp_path / "run"
    ranks(2).run(straight, str(path), str(run), [1, 2, 3], 3)
    assert complete_steps(run) == [2, 3], "2 is a milestone"
    prune(run, 1)
    assert complete_steps(run) == [3]
