"""Two outputs change their places at once where the system can do that, else in three renames."""

from __future__ import annotations

import ctypes
import errno
from pathlib import Path
from types import SimpleNamespace

import pytest

from zero_tp import files


def answers(number: int) -> SimpleNamespace:
    """A C library whose renameat2 fails with this error."""

    def renameat2(*_: object) -> int:
        ctypes.set_errno(number)
        return -1

    return SimpleNamespace(renameat2=renameat2)


WITHOUT = [None, SimpleNamespace(), answers(errno.EINVAL), answers(errno.ENOSYS)]


@pytest.mark.parametrize("library", WITHOUT, ids=["with it", "no such function", "file system without", "old kernel"])
@pytest.mark.parametrize("directories", [True, False])
def test_both_have_the_others_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: SimpleNamespace | None, directories: bool
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    inner = "content" if directories else "."
    for path in (first, second):
        if directories:
            path.mkdir()
        (path / inner).write_text(path.name)
    if library is not None:
        monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: library)
    files.exchange(first, second)
    assert ((first / inner).read_text(), (second / inner).read_text()) == ("second", "first")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["first", "second"], "nothing is left between"


def test_another_error_moves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first", "second"):
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: answers(errno.EACCES))
    with pytest.raises(OSError, match="Permission denied"):
        files.exchange(tmp_path / "first", tmp_path / "second")
    assert [(tmp_path / name).read_text() for name in ("first", "second")] == ["first", "second"]
