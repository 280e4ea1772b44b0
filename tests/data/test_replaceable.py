"""An output that can't be replaced is refused before any work; what a kill leaves after the work
is removed.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launch import prepare_cluster
from tests.support.corpora import TEXTS, run, texts_of, trained_tokenizer, write_jsonl
from zero_tp.base.errors import UserError
from zero_tp.base.files import check_replaceable, hidden_sibling, partial_directory
from zero_tp.data import PrepareSettings, prepare
from zero_tp.run.checkpoint.convert import check_target
from zero_tp.tools.corpus.datatrove import CorpusReader, TokenizedCorpus
from zero_tp.tools.corpus.parts import merge
from zero_tp.tools.corpus.spool import COMMITTED
from zero_tp.tools.corpus.stages import Preparation

REASONS = {
    errno.EBUSY: "it is a mount point",
    errno.EXDEV: "it is in a lower layer",
    errno.EPERM: "it is another user's",
}


def refuse_mount_point(source: Path, destination: Path) -> None:
    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))


@pytest.mark.parametrize("number", REASONS)
def test_prepare_refuses_it_before_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(source: Path, destination: Path) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "rename", refuse)
    monkeypatch.setattr(Preparation, "read", lambda *_: pytest.fail("inputs were read"))
    (tmp_path / "out").mkdir()
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    with pytest.raises(UserError, match=f"out: can't be replaced: {REASONS[number]}"):
        prepare([source], tmp_path / "out", PrepareSettings("bpe:300"))
    assert {path.name for path in tmp_path.iterdir()} == {"out", "a.jsonl"} and not any(
        (tmp_path / "out").iterdir()
    )


def test_a_merge_and_the_cluster_refuse_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = trained_tokenizer(tmp_path)
    reader = CorpusReader([write_jsonl(tmp_path / "a.jsonl", texts_of(random.Random(1), 20))])
    TokenizedCorpus(tokenizer, tmp_path / "parts", reader=reader).run(reader.run())
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(os, "rename", refuse_mount_point)
    words = [
        "--input",
        tmp_path / "a.jsonl",
        "--tokenizer",
        tokenizer,
        "--output",
        tmp_path / "out",
        "--tasks",
        "2",
    ]
    monkeypatch.setattr(sys, "argv", ["prepare_cluster.py", *map(str, words)])
    doors: list[Callable[[], object]] = [
        lambda: merge(tmp_path / "parts", tmp_path / "out"),
        prepare_cluster.main,
        lambda: check_target(tmp_path / "out", overwrite=True),
    ]
    for door in doors:
        with pytest.raises(UserError, match="out: can't be replaced: it is a mount point"):
            door()
    assert not list(tmp_path.glob(".*")) and not list(tmp_path.glob("*.work"))


def test_an_output_that_was_made_elsewhere_is_reused_at_a_mount_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path)
    monkeypatch.setattr(os, "rename", refuse_mount_point)
    assert run(tmp_path).reused


def test_the_check_changes_nothing(tmp_path: Path) -> None:
    """The rename that it asks for fails on every file system, because its target is not empty."""
    (tmp_path / "out/plots").mkdir(parents=True)
    (tmp_path / "out/a.txt").touch()
    before = (tmp_path / "out").stat()
    for _ in range(2):
        check_replaceable(tmp_path / "out")
        check_replaceable(tmp_path / "absent/out")
    assert (tmp_path / "out").stat().st_ctime_ns == before.st_ctime_ns and [
        path.name for path in tmp_path.iterdir()
    ] == ["out"]


UNPRIVILEGED = """
import os, sys
from pathlib import Path
from zero_tp.base.errors import UserError
from zero_tp.base.files import check_replaceable
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
for name in sys.argv[1:]:
    try:
        check_replaceable(Path(name))
    except UserError as error:
        print(error)
"""


def test_an_output_that_this_user_may_not_replace(tmp_path: Path) -> None:
    """With files that can't be removed; in a directory that can't be written; for root's child
    in a sticky one.
    """
    modes = {"inside": (0o777, 0o555), "above": (0o555, 0o777), "own": (0o777, 0o777)}
    closed = dict[Path, int]()
    expected = ["or a directory in it is not writable", f"{tmp_path}/above is not writable"]
    if os.geteuid() == 0:
        modes["sticky"] = (0o1777, 0o777)
        expected.append("it is another user's, and the directory above it has the sticky bit")
        closed = {
            path: path.stat().st_mode
            for path in (tmp_path, *tmp_path.parents)
            if not path.stat().st_mode & 1
        }
    for name, (above, output) in modes.items():
        (tmp_path / name / "out").mkdir(parents=True)
        (tmp_path / name / "out").chmod(output)
        (tmp_path / name).chmod(above)
    words = [sys.executable, "-c", UNPRIVILEGED, *(str(tmp_path / name / "out") for name in modes)]
    try:
        for path, mode in closed.items():
            path.chmod(mode | 0o111)
        lines = subprocess.run(
            words, check=True, capture_output=True, text=True
        ).stdout.splitlines()
    finally:
        for path, mode in closed.items():
            path.chmod(mode)
    assert len(lines) == len(expected), lines
    assert all(text in line for text, line in zip(expected, lines, strict=True)), lines


@pytest.mark.parametrize("left", ["committed", "not committed", "other versions"])
def test_what_a_kill_after_the_last_rename_leaves_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    source, settings = write_jsonl(tmp_path / "a.jsonl", TEXTS), PrepareSettings("bpe:300")
    output, progress = tmp_path / "out", hidden_sibling(tmp_path / "out", "progress")

    def interrupted(self: Preparation, _: Path) -> None:
        self.spool.commit()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Preparation, "select", interrupted)
        prepare([source], output, settings)
    shutil.copytree(progress, tmp_path / "copy")
    prepare([source], output, settings)
    (tmp_path / "copy").rename(progress)
    if left == "not committed":
        (progress / COMMITTED).unlink()
    if left == "other versions":
        monkeypatch.setattr("zero_tp.tools.corpus.settings.library_versions", dict)
    with partial_directory(output):  # of a process that writes the output again
        assert prepare([source], output, settings).reused and progress.exists()
    assert prepare([source], output, settings).reused
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "out"]
