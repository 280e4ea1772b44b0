"""A run's directory has one owner, and its checkpoints are complete or absent whatever a kill
left there.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from zero_tp.base.errors import UserError
from zero_tp.parallel.safetensors_files import FileDigest
from zero_tp.run.checkpoint.directory import (
    MANIFEST,
    begin,
    commit,
    complete_steps,
    prune,
    step_directory,
)
from zero_tp.run.checkpoint.run_directory import OWNER, OwnerChanged, run_directory


def test_a_run_holds_its_directory(tmp_path: Path) -> None:
    run = tmp_path / "new" / "run"
    with run_directory(run):
        assert (run / "checkpoints").is_dir()
        with pytest.raises(UserError, match="another run is writing there"), run_directory(run):
            pass
    with run_directory(run):
        pass
    (tmp_path / "file").touch()
    with (
        pytest.raises(UserError, match="cannot be a run's directory"),
        run_directory(tmp_path / "file"),
    ):
        pass


def test_on_a_file_system_without_locks_the_last_launch_owns_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(file: object, kind: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", unknown)
    with run_directory(tmp_path / "run") as first:
        first.check()
        with run_directory(tmp_path / "run") as second:
            taken = (
                rf"{tmp_path}/run: another launch \(process {os.getpid()} on .*\) has taken the "
                "run over"
            )
            with pytest.raises(OwnerChanged, match=taken):
                first.check()
            second.check()
            (tmp_path / "run" / OWNER).unlink()
            first.check()  # no owner


def test_a_checkpoint_that_is_half_removed_is_not_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        step_directory(tmp_path, step).mkdir(parents=True)
        (step_directory(tmp_path, step) / MANIFEST).touch()

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        prune(tmp_path, 1)
    monkeypatch.undo()
    assert complete_steps(tmp_path) == [2]
    begin(tmp_path)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {
        ".writing",
        "step_00000002",
    }
    assert len(list((tmp_path / "checkpoints" / ".writing").iterdir())) == 1


def test_a_file_that_only_its_own_node_sees_fails_the_save(tmp_path: Path) -> None:
    temporary = begin(tmp_path)
    with pytest.raises(
        UserError,
        match=rf"^{temporary}/states: missing or incomplete .* storage that all nodes share$",
    ):
        commit(tmp_path, temporary, 1, {}, {"states": FileDigest(5, "")})
    assert complete_steps(tmp_path) == []


@pytest.mark.parametrize("put", [Path.touch, Path.mkdir, lambda path: path.symlink_to(path.parent)])
def test_what_lies_where_a_save_writes_goes(tmp_path: Path, put: Callable[[Path], None]) -> None:
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "step_00000004").mkdir(parents=True)
    put(checkpoints / ".writing")
    (written := begin(tmp_path)).joinpath("states").touch()
    assert written.parent == checkpoints / ".writing" and not written.parent.is_symlink()
    assert {path.name for path in written.iterdir()} == {"states"} and (
        checkpoints / "step_00000004"
    ).is_dir()
