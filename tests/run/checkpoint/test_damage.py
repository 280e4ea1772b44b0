"""A damaged checkpoint is named before training; a run goes back to the one before, or stops."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.support.checkpoint_runs import (
    build,
    masters_of,
    steps_of,
    train_and_save,
    write_changed,
    write_config,
)
from tests.support.checkpoints import flip_bit
from tests.support.pools import Pools
from zero_tp.run.checkpoint.directory import (
    MANIFEST,
    Damaged,
    checkpoints_directory,
    complete_steps,
    read_manifest,
    step_directory,
)
from zero_tp.run.checkpoint.manifest import Manifest, states_file
from zero_tp.run.checkpoint.reader import CheckpointReader


def flip_a_bit(file: Path) -> None:
    flip_bit(file, file.stat().st_size // 2)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def break_manifest(file: Path) -> None:
    (file.parent / MANIFEST).write_text("{")


def damage_header(file: Path) -> None:
    """Change a tensor's name in the header."""
    file.write_bytes(file.read_bytes().replace(b'/exp_avg"', b'/exp_avh"', 1))


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "flipped bit": (
        flip_a_bit,
        r"states_tp00_dp0001\.safetensors: its hash is [0-9a-f]{12}…, not [0-9a-f]{12}…",
    ),
    "header": (damage_header, r"states_tp00_dp0001\.safetensors: its hash is "),
    "truncated": (truncate, r"states_tp00_dp0001\.safetensors: has \d+ bytes, not \d+"),
    "missing": (Path.unlink, r"states_tp00_dp0001\.safetensors: is missing"),
    "manifest": (break_manifest, r"manifest\.json: not valid JSON: .*"),
}


def start(path: str, run: str, resume_from: str | None = None) -> tuple[str, list[str]]:
    """(the checkpoint that a start resumes, or its error; its notes on others)."""
    import torch.distributed as dist

    from zero_tp.base.errors import UserError
    from zero_tp.run.checkpoint.start_point import Resume
    from zero_tp.run.config import RunConfig

    config = RunConfig.load(path, world_size=dist.get_world_size())
    try:
        found = Resume.find(Path(run), config, Path(resume_from) if resume_from else None)
    except UserError as error:
        return f"error: {error}", []
    assert found is not None
    return str(found.checkpoint.path), list(found.notes)


def start_with_an_old_view(path: str, run: str) -> str:
    """The checkpoint that a start resumes, if the last rank sees the older one only after a
    while.
    """
    import torch.distributed as dist

    from zero_tp.run.checkpoint import find
    from zero_tp.run.checkpoint.start_point import Resume
    from zero_tp.run.config import RunConfig

    def read_late(checkpoint: Path) -> Manifest:
        if views and checkpoint == step_directory(Path(run), 1):
            raise Damaged(checkpoint / MANIFEST, views.pop())
        return read_manifest(checkpoint)

    config = RunConfig.load(path, world_size=dist.get_world_size())
    views = ["is of an old view"] if dist.get_rank() == dist.get_world_size() - 1 else []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(find, "read_manifest", read_late)
        patch.setattr("zero_tp.base.files.is_local", lambda directory: False)
        found = Resume.find(Path(run), config)
    assert not views and found is not None
    return str(found.checkpoint.path)


@pytest.fixture(scope="module")
def saved(ranks: Pools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks with checkpoints of the steps 1 and 2."""
    directory = tmp_path_factory.mktemp("saved")
    path = write_config(directory / "run.json", 1, "fp32", 1)
    ranks(2).run(train_and_save, str(path), str(directory / "run"), [1, 2], 2)
    return directory


def copy_of(saved: Path, directory: Path) -> tuple[Path, Path]:
    shutil.copytree(saved, directory, dirs_exist_ok=True)
    return directory / "run.json", directory / "run"


def test_going_back_waits_for_a_machine_with_an_old_view(
    ranks: Pools, saved: Path, tmp_path: Path
) -> None:
    path, run = copy_of(saved, tmp_path)
    damaged = step_directory(run, 2) / states_file(0, 1)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    tolerant = write_changed(path, on_corrupt="previous")
    for taken in ranks(2).run(start_with_an_old_view, str(tolerant), str(run)):
        assert taken == str(step_directory(run, 1))


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_and_the_checkpoint_before_is_offered(
    ranks: Pools, saved: Path, tmp_path: Path, damage: str
) -> None:
    path, run = copy_of(saved, tmp_path)
    damage_file, words = DAMAGES[damage]
    damage_file(step_directory(run, 2) / states_file(0, 1))
    before = step_directory(run, 1)
    pattern = (
        rf"error: .*{words}.*; the checkpoint is damaged: use the one before with "
        rf"--resume-from {before}, or set "
    )
    for problem, _ in ranks(2).run(start, str(path), str(run)):
        assert re.match(pattern, problem), problem
    for problem, _ in ranks(2).run(
        start, str(path), str(tmp_path / "other"), str(step_directory(run, 2))
    ):
        assert re.match(pattern, problem), problem
    assert ranks(2).run(start, str(path), str(run), str(before)) == [(str(before), [])] * 2
    tolerant, aside = (
        write_changed(path, on_corrupt="previous"),
        checkpoints_directory(run) / "damaged_step_00000002",
    )
    for resumed, notes in ranks(2).run(start, str(tolerant), str(run)):
        assert resumed == str(before)
        assert (
            len(notes) == 1
            and re.search(words, notes[0])
            and f"; set aside as {aside}, " in notes[0]
        )
    assert complete_steps(run) == [1] and aside.is_dir()


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
    return tuple(
        [name for name in names if name.endswith(".safetensors")] for names in (looked, opened)
    )  # type: ignore[return-value]


def test_each_file_is_looked_at_and_read_by_one_rank(ranks: Pools, saved: Path) -> None:
    """At a thousand ranks each can't look at those of all."""
    run = saved / "run"
    files = [str(step_directory(run, 2) / states_file(0, rank)) for rank in range(2)]
    for names in zip(*ranks(2).run(touched, str(saved / "run.json"), str(run)), strict=True):
        assert sorted(name for own in names for name in own) == files


def test_damage_of_every_checkpoint_stops_every_start(
    ranks: Pools, saved: Path, tmp_path: Path
) -> None:
    path, run = copy_of(saved, tmp_path)
    for step in (1, 2):
        flip_a_bit(step_directory(run, step) / states_file(0, 0))
    for _ in range(2):
        for problem, _ in ranks(2).run(
            start, str(write_changed(path, on_corrupt="previous")), str(run)
        ):
            assert (
                problem.startswith("error: ")
                and "none before it: give another --output-dir" in problem
            )


def test_a_step_of_eight_digits_is_before_one_of_nine(
    ranks: Pools, saved: Path, tmp_path: Path
) -> None:
    for step in (99_999_999, 100_000_000):
        shutil.copytree(step_directory(saved / "run", 1), step_directory(tmp_path, step))
        break_manifest(step_directory(tmp_path, step) / MANIFEST)
    for problem, _ in ranks(2).run(start, str(saved / "run.json"), str(tmp_path)):
        assert f"--resume-from {step_directory(tmp_path, 99_999_999)}, or set" in problem


def resume_with_an_engine(path: str, run: str) -> dict[str, torch.Tensor]:
    """Return this rank's masters after one step and a resume."""
    from zero_tp.run.checkpoint.start_point import Resume

    engine, config = build(path)
    steps_of(engine, 1, 1)
    found = Resume.find(Path(run), config)
    assert found is not None and len(found.notes) == 1
    assert found.checkpoint.path == step_directory(Path(run), 1)
    found.restore(engine.zero, config.zero_tp.training.seed)
    return masters_of(engine)


def test_an_engine_resumes_the_checkpoint_before_a_damaged_one(
    ranks: Pools, saved: Path, tmp_path: Path
) -> None:
    path, run = copy_of(saved, tmp_path)
    flip_a_bit(step_directory(run, 2) / states_file(0, 1))
    results = ranks(2).run(
        resume_with_an_engine, str(write_changed(path, on_corrupt="previous")), str(run)
    )
    reader = CheckpointReader(step_directory(run, 1), read_manifest(step_directory(run, 1)))
    for name in reader.parameters:
        master = torch.cat([masters[name] for masters in results if name in masters])
        assert torch.equal(master, reader.whole(name).flatten()), name
