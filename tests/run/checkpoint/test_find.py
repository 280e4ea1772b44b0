"""Finders of a checkpoint: each manifest is read once, and all ranks take what rank 0 finds."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from transformers import GPT2Config

from tests.support.checkpoint_runs import build, train_and_save, write_config
from tests.support.checkpoints import flip_bit, rewritten, write_checkpoint
from tests.support.pools import Pools
from zero_tp.base.errors import UserError
from zero_tp.run.checkpoint import directory, find
from zero_tp.run.checkpoint.directory import MANIFEST, Damaged, step_directory
from zero_tp.run.checkpoint.find import (
    find_checkpoint,
    find_on_all_ranks,
    peek_checkpoint,
)
from zero_tp.run.checkpoint.manifest import states_file

TINY = GPT2Config(n_layer=1, n_embd=16, n_head=2, n_positions=8, vocab_size=31)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two ranks with checkpoints of the steps 1 and 2."""
    for step in (1, 2):
        write_checkpoint(tmp_path / "run", TINY, tensor=2, step=step)
    return tmp_path / "run"


def test_a_manifest_that_was_read_is_not_read_again(run: Path) -> None:
    known = peek_checkpoint(run)
    assert known is not None and known.path == step_directory(run, 2)
    with mock.patch.object(find, "read_manifest", side_effect=AssertionError("read again")):
        found = find_checkpoint(run, known)
    assert found.manifest is known.manifest
    step_directory(run, 3).mkdir()
    assert find_checkpoint(run, known).notes == (
        f"{step_directory(run, 3)}: not a checkpoint (no {MANIFEST})",
    )


@pytest.mark.parametrize("in_place", [True, False])
def test_a_manifest_that_was_replaced_is_read_again(run: Path, in_place: bool) -> None:
    known = peek_checkpoint(run)
    assert known is not None
    if not in_place:
        write_checkpoint(run, TINY, tensor=2, step=2)
    with rewritten(known.path) as manifest:
        manifest["tokenizer"] = "another"
    found = find_checkpoint(run, known)
    assert found.path == known.path and found.manifest.tokenizer == "another"
    assert known.manifest.tokenizer is None


def test_another_checkpoint_than_the_known_one_is_read(run: Path) -> None:
    known = peek_checkpoint(run)
    write_checkpoint(run, TINY, tensor=2, step=3)
    assert find_checkpoint(run, known).step == 3
    assert find_checkpoint(step_directory(run, 1), known).step == 1


def test_an_unreadable_manifest_is_passed_over_until_all_ranks_look(
    run: Path, tmp_path: Path
) -> None:
    (step_directory(run, 2) / MANIFEST).write_text("{")
    found = peek_checkpoint(run)
    assert found is not None and found.step == 1
    found = peek_checkpoint(run, resume_from=tmp_path / "none")
    assert found is not None and found.step == 1
    with pytest.raises(Damaged, match="not valid JSON"):
        find_checkpoint(run, found)
    assert peek_checkpoint(tmp_path / "new") is None


def found_together(run: str, set_aside: bool) -> tuple[str | None, tuple[str, ...]]:
    """Return the step that all ranks find, or the error, and its notes."""

    def search() -> find.RunCheckpoint | None:
        return find_checkpoint(Path(run)) if Path(run).exists() else None

    def on_damage(damage: Damaged) -> str:
        return f"renamed {directory.set_aside(damage.checkpoint).name}"

    try:
        found = find_on_all_ranks(search, on_damage=on_damage if set_aside else None)
    except UserError as error:
        return str(error), ()
    return (None, ()) if found is None else (str(found.step), found.notes)


def test_all_ranks_return_what_they_all_can_read(ranks: Pools, run: Path, tmp_path: Path) -> None:
    """The example of `find_on_all_ranks`."""
    pool = ranks(2)
    assert pool.run(found_together, str(tmp_path / "new"), True) == [(None, ())] * 2
    assert pool.run(found_together, str(run), True) == [("2", ())] * 2
    file = step_directory(run, 2) / states_file(1, 0)
    flip_bit(file, file.stat().st_size // 2)
    for problem, _ in pool.run(found_together, str(run), False):
        assert str(problem).startswith(f"{file}: its hash is "), problem
    assert (
        pool.run(found_together, str(run), True) == [("1", ("renamed damaged_step_00000002",))] * 2
    )


def resumed_with_counts(path: str, run: str, other: str | None) -> tuple[int, int, int]:
    """Resume; return the step, and how often this rank read a manifest and parsed one.

    Args:
        other: rank 0 finds this run's checkpoint, which no rank has read before.
    """
    from zero_tp.run.checkpoint.start_point import Resume

    engine, config = build(path)
    read: Any = mock.Mock(side_effect=directory.read_regular)
    parse: Any = mock.Mock(side_effect=directory.parse_manifest)
    with (
        mock.patch.object(directory, "read_regular", read),
        mock.patch.object(directory, "parse_manifest", parse),
    ):
        known = peek_checkpoint(Path(run))
        start = Resume.find(Path(other or run), config, known=known)
        assert start is not None
        start.restore(engine.zero, config.zero_tp.training.seed)
    return start.step, read.call_count, parse.call_count


def test_a_start_reads_and_parses_one_manifest_on_each_rank(ranks: Pools, tmp_path: Path) -> None:
    path, run = write_config(tmp_path / "run.json", 1, "fp32", 1), tmp_path / "run"
    ranks(2).run(train_and_save, str(path), str(run), [1], 1)
    counts = partial(ranks(2).run, resumed_with_counts, str(path))
    assert counts(str(run), None) == [(1, 1, 1)] * 2
    assert counts(str(tmp_path / "none"), str(run)) == [(1, 1, 1)] * 2
