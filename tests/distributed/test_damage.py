"""Damaged checkpoints are found before training and named; disks that fill up cost no training; saves in the
background hold the step they were asked for."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.distributed.test_checkpoint import build, masters_of, steps_of, straight, write_config
from tests.pools import Pools
from tests.waits import patience
from zero_tp.checkpoint.directory import (
    MANIFEST,
    TEMPORARY,
    check_file,
    checkpoints_of,
    complete_steps,
    read_manifest,
    step_directory,
)
from zero_tp.checkpoint.manifest import states_file
from zero_tp.checkpoint.reader import CheckpointReader


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def break_manifest(file: Path) -> None:
    (file.parent / MANIFEST).write_text("{")


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "flipped bit": (flip_a_bit, r"states_tp00_dp0001\.safetensors: SHA-256 is [0-9a-f]{12}…, not [0-9a-f]{12}…"),
    "truncated": (truncate, r"states_tp00_dp0001\.safetensors: has \d+ bytes, not \d+"),
    "missing": (Path.unlink, r"states_tp00_dp0001\.safetensors: is missing"),
    "manifest": (break_manifest, r"manifest\.json: not valid JSON: .*"),
}


def changed(path: Path, **checkpoint: Any) -> Path:
    config = json.loads(path.read_text())
    config["zero_tp"]["checkpoint"] |= {key.rstrip("_"): value for key, value in checkpoint.items()}
    changed = path.with_name("changed.json")
    changed.write_text(json.dumps(config))
    return changed


def start(path: str, run: str, given: str | None = None, *, sizes: bool = True) -> tuple[str, list[str]]:
    """(the checkpoint that a start takes, or its error; what it says of others).

    Without `sizes` as where a file is damaged after they were compared.
    """
    import torch.distributed as dist

    from zero_tp.checkpoint.resume import Verification, agree, check_all_there, look, take_whole
    from zero_tp.config import RunConfig
    from zero_tp.errors import UserError

    def verify(checkpoint: Path) -> None:
        with Verification(checkpoint, read_manifest(checkpoint).files) as whole:
            whole.agree()

    config = RunConfig.load(path, world_size=dist.get_world_size())
    chosen = Path(given) if given else None
    try:
        found = agree(look(Path(run), config, chosen), Path(run))
        for take in (check_all_there, verify) if sizes else (verify,):
            found = take_whole(found, Path(run), config, take, chosen)
    except UserError as error:
        return f"error: {error}", []
    return str(found.checkpoint), list(found.notes)


@pytest.fixture(scope="module")
def saved(ranks: Pools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks with checkpoints of the steps 1 and 2."""
    directory = tmp_path_factory.mktemp("saved")
    path = write_config(directory / "run.json", 1, "fp32", 1)
    ranks(2).run(straight, str(path), str(directory / "run"), [1, 2], 2)
    return directory


def copy_of(saved: Path, directory: Path) -> tuple[Path, Path]:
    shutil.copytree(saved, directory, dirs_exist_ok=True)
    return directory / "run.json", directory / "run"


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_and_the_checkpoint_before_is_offered(
    ranks: Pools, saved: Path, tmp_path: Path, damage: str
) -> None:
    path, run = copy_of(saved, tmp_path)
    hurt, words = DAMAGES[damage]
    hurt(step_directory(run, 2) / states_file(0, 1))
    before = step_directory(run, 1)
    pattern = rf"error: .*{words}; the checkpoint is damaged: use the one before with --resume-from {before}, or set "
    for sizes in (True, False):
        for said, _ in ranks(2).run(start, str(path), str(run), sizes=sizes):
            assert re.match(pattern, said), said
    assert ranks(2).run(start, str(path), str(run), str(before)) == [(str(before), [])] * 2
    tolerant = changed(path, on_corrupt="previous")
    for found, _ in ranks(2).run(start, str(tolerant), str(run)):
        assert found == str(before)
    for found, _ in ranks(2).run(start, str(tolerant), str(run)):  # again, with the damaged one set aside or not
        assert found == str(before)


def touched(path: str, run: str) -> tuple[list[str], list[str]]:
    """The states files that a start looks at and opens on this rank."""
    looked: list[str] = []
    opened: list[str] = []
    stat, read = os.stat, Path.open

    def looking(file: Any, **options: Any) -> Any:
        looked.append(str(file))
        return stat(file, **options)

    def opening(file: Path, *options: Any, **named: Any) -> Any:
        opened.append(str(file))
        return read(file, *options, **named)

    with patch.object(os, "stat", looking), patch.object(Path, "open", opening):
        start(path, run)
    return tuple([name for name in names if name.endswith(".safetensors")] for names in (looked, opened))  # type: ignore[return-value]


def test_each_file_is_looked_at_and_read_by_one_rank(ranks: Pools, saved: Path) -> None:
    """At a thousand ranks each can't look at those of all."""
    run = saved / "run"
    files = [str(step_directory(run, 2) / states_file(0, rank)) for rank in range(2)]
    for names in zip(*ranks(2).run(touched, str(saved / "run.json"), str(run)), strict=True):
        assert sorted(name for own in names for name in own) == files


def test_a_set_aside_checkpoint_is_said_and_kept(ranks: Pools, saved: Path, tmp_path: Path) -> None:
    path, run = copy_of(saved, tmp_path)
    flip_a_bit(step_directory(run, 2) / states_file(0, 0))
    for _, notes in ranks(2).run(start, str(changed(path, on_corrupt="previous")), str(run)):
        assert len(notes) == 1 and "set aside" in notes[0] and "states_tp00_dp0000" in notes[0]
    assert complete_steps(run) == [1]
    assert (checkpoints_of(run) / "damaged_step_00000002" / states_file(0, 0)).is_file()


def test_the_only_checkpoint_damaged_stops_whatever_is_set(ranks: Pools, saved: Path, tmp_path: Path) -> None:
    path, run = copy_of(saved, tmp_path)
    for step in (1, 2):
        truncate(step_directory(run, step) / states_file(0, 0))
    for said, _ in ranks(2).run(start, str(changed(path, on_corrupt="previous")), str(run)):
        assert said.startswith("error: ") and "there is none before it: give another --output-dir" in said


def damage_header(file: Path) -> None:
    """A name in the header: what reads the file fails at it, before its checksum is known."""
    content = file.read_bytes()
    file.write_bytes(content.replace(b'/exp_avg"', b'/exp_avh"', 1))


def resume_with_an_engine(path: str, run: str) -> tuple[str, list[str], dict[str, torch.Tensor]]:
    """(the checkpoint that an engine resumed or the error, what it says of others, this rank's masters)."""
    from zero_tp.checkpoint.resume import look, resume, take_whole
    from zero_tp.errors import UserError

    engine, config = build(path)
    steps_of(engine, 1, 1)
    found = look(Path(run), config)
    try:
        found = take_whole(found, Path(run), config, lambda checkpoint: resume(engine.zero, checkpoint, config))
    except UserError as error:
        return f"error: {error}", [], {}
    return str(found.checkpoint), list(found.notes), masters_of(engine)


@pytest.mark.parametrize("hurt", [flip_a_bit, damage_header])
def test_an_engine_that_read_a_damaged_checkpoint_resumes_the_one_before(
    ranks: Pools, saved: Path, tmp_path: Path, hurt: Callable[[Path], None]
) -> None:
    path, run = copy_of(saved, tmp_path)
    file = step_directory(run, 2) / states_file(0, 1)
    hurt(file)
    for said, _, _ in ranks(2).run(resume_with_an_engine, str(path), str(run)):
        assert said.startswith(f"error: {file}: SHA-256 is ") and "--resume-from" in said, said
    results = ranks(2).run(resume_with_an_engine, str(changed(path, on_corrupt="previous")), str(run))
    reader = CheckpointReader(step_directory(run, 1), read_manifest(step_directory(run, 1)))
    for taken, notes, _ in results:
        assert taken == str(step_directory(run, 1)) and len(notes) == 1
    for name in reader.parameters:
        held = torch.cat([masters[name] for _, _, masters in results if name in masters])
        assert torch.equal(held, reader.whole(name).flatten()), name


def test_a_flipped_bit_in_the_only_checkpoint_starts_nothing_anew(ranks: Pools, saved: Path, tmp_path: Path) -> None:
    path, run = copy_of(saved, tmp_path)
    shutil.rmtree(step_directory(run, 1))
    flip_a_bit(step_directory(run, 2) / states_file(0, 0))
    for _ in range(2):  # nor does starting again
        for said, _ in ranks(2).run(start, str(changed(path, on_corrupt="previous")), str(run)):
            assert said.startswith("error: ") and "there is none before it: give another --output-dir" in said


def full_disk(path: str, run: str, broken: int) -> list[tuple[int, str] | None]:
    """Outcomes of three saves, in the second of which a rank may write only 10 kB a file."""
    from zero_tp.checkpoint.save import Saver

    engine, config = build(path)
    saver = Saver(engine.zero, config, Path(run))
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
        manifest = read_manifest(step_directory(run, step))
        for name, written in manifest.files.items():
            check_file(step_directory(run, step) / name, written)


def nowhere_to_write(path: str, run: str) -> list[tuple[int, str] | None]:
    """Outcomes of three saves, before the second of which rank 0 cannot make the temporary directory: the directory
    that it would be in is a file."""
    import torch.distributed as dist

    from zero_tp.checkpoint.save import Saver

    engine, config = build(path)
    saver = Saver(engine.zero, config, Path(run))
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

    engine, config = build(path)
    saver = save.Saver(engine.zero, config, Path(run))
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


def test_a_disk_that_hangs_ends_the_save_on_every_rank(ranks: Pools, tmp_path: Path) -> None:
    path, run = write_config(tmp_path / "run.json", 1, "fp32", 1), tmp_path / "run"
    config = json.loads(path.read_text())
    config["zero_tp"]["training"]["timeout_minutes"] = 0.05
    path.write_text(json.dumps(config))
    remedy = rf"in time; look at the disk of {run}, or raise zero_tp\.training\.timeout_minutes \(0\.05\)"
    first, second = ranks(2).run(hanging, str(path), str(run), timeout=60)
    assert re.fullmatch(rf"outcome: \(1, '.*saving step 1: rank 1 has not written {remedy}.*'\)", first), first
    hung = checkpoints_of(run) / TEMPORARY / states_file(0, 1)
    assert re.fullmatch(rf"error: saving step 1: writing {hung} has not ended {remedy}", second), second
    assert complete_steps(run) == []


def in_the_background(path: str, run: str) -> dict[str, Any]:
    """Save step 1 while a slow disk lets two more steps pass."""
    import threading

    from zero_tp.checkpoint import save
    from zero_tp.zero.states import MASTER

    engine, config = build(path)
    saver = save.Saver(engine.zero, config, Path(run))
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


def test_milestones_and_checkpoints_in_use_stay(ranks: Pools, tmp_path: Path) -> None:
    from zero_tp.checkpoint.directory import in_use, prune

    path = changed(write_config(tmp_path / "run.json", 1, "fp32", 1), keep=1, keep_every=2)
    run = tmp_path / "run"
    ranks(2).run(straight, str(path), str(run), [1, 2, 3], 3)
    assert complete_steps(run) == [2, 3], "2 is a milestone"
    with in_use(step_directory(run, 2)):
        prune(run, 1)
        assert complete_steps(run) == [2, 3]
    prune(run, 1)
    assert complete_steps(run) == [3]
