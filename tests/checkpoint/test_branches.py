"""Going back starts a branch, ranks agree on what they resume, and what differs from the start before is said."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from tests.checkpoint.test_checkpoint import SEQUENCE, VOCABULARY, build, steps_of, straight, write_config
from tests.support.checkpoints import rewritten
from tests.support.pools import Pools
from tests.support.run_log import RunLog
from zero_tp.checkpoint.directory import (
    LATEST,
    MANIFEST,
    checkpoints_of,
    complete_steps,
    prune,
    read_manifest,
    set_aside,
    start_branch,
    step_directory,
)
from zero_tp.checkpoint.manifest import differences
from zero_tp.checkpoint.resume_point import find_resume_point
from zero_tp.checkpoint.run_directory import write_config as write_run_config
from zero_tp.config import RunConfig
from zero_tp.data.indexed import IndexedWriter
from zero_tp.training.metrics_file import METRICS_FILE


@pytest.fixture(scope="module")
def saved(ranks: Pools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks with checkpoints of the steps 1, 2 and 3."""
    directory = tmp_path_factory.mktemp("saved")
    path = write_config(directory / "run.json", 1, "fp32", 1)
    config = json.loads(path.read_text())
    config["zero_tp"]["checkpoint"]["keep"] = 3
    path.write_text(json.dumps(config))
    ranks(2).run(straight, str(path), str(directory / "run"), [1, 2, 3], 3)
    return directory


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Its config and its directory."""
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    return tmp_path / "run.json", tmp_path / "run"


def latest(run: Path) -> Path:
    return checkpoints_of(run) / (checkpoints_of(run) / LATEST).read_text().strip()


def go_back(path: str, run: str, to: int, last: int, broken: bool = False) -> tuple[list[str], list[int], list[str]]:
    """Resume a step, save each one up to `last` → what is said of others, what is removed, its keys in the store."""
    from zero_tp.checkpoint import directory, save
    from zero_tp.checkpoint.resume import resume

    engine, config = build(path)
    assert resume(engine.zero, step_directory(Path(run), to), config.zero_tp.training.seed) == to
    saver = save.run_saver(engine.zero, config, Path(run))
    notes = directory.start_branch(Path(run), to) if engine.topology.rank == 0 else []
    removed = []
    for step in range(to + 1, last + 1):
        steps_of(engine, step, step)
        commit = directory.commit
        if broken:
            directory.commit = full  # type: ignore[assignment]
        saver.save(step)
        directory.commit = commit
        removed += saver.removed
        outcome = saver.outcome()
        assert outcome is not None and bool(outcome[1]) == broken
    told = [f"{count}/{what}" for count in range(saver._count + 1) for what in ("begun", "outcome", "0", "1")]
    return notes + saver.notes, removed, [key for key in told if saver._store.check([key])]


def full(*arguments: Any) -> None:
    raise OSError(28, "No space left on device")


def test_going_back_starts_a_branch_and_loses_nothing(ranks: Pools, copied: tuple[Path, Path]) -> None:
    path, run = copied
    config = json.loads(path.read_text())
    config["zero_tp"]["checkpoint"]["keep"] = 1
    path.write_text(json.dumps(config))
    contents = {step: (step_directory(run, step) / MANIFEST).read_bytes() for step in (2, 3)}
    notes, removed, _ = ranks(2).run(go_back, str(path), str(run), 1, 2)[0]
    assert complete_steps(run) == [2] and latest(run) == step_directory(run, 2)
    assert removed == [1], "what was just saved stays"
    assert len(notes) == 2
    for step, note in zip((2, 3), notes, strict=True):
        aside = checkpoints_of(run) / f"abandoned_step_{step:08d}"
        assert (aside / MANIFEST).read_bytes() == contents[step] and read_manifest(aside).step == step
        assert note == f"step {step} is of the branch that was left at step 1: set aside as {aside}"
    assert read_manifest(step_directory(run, 2)).versions == read_manifest(aside).versions

    notes, removed, keys = ranks(2).run(go_back, str(path), str(run), 2, 4)[0]
    assert (notes, removed) == ([], [2, 3]) and complete_steps(run) == [4]
    assert {key.partition("/")[2] for key in keys} <= {"begun", "outcome"}, "what a rank told is read once"


def test_a_branch_whose_first_save_fails_is_followed_all_the_same(ranks: Pools, copied: tuple[Path, Path]) -> None:
    path, run = copied
    notes, *_ = ranks(2).run(go_back, str(path), str(run), 1, 2, True)[0]
    assert len(notes) == 2 and complete_steps(run) == [1] and latest(run) == step_directory(run, 1)


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


def killed_after(renames: int, run: Path, inputs: Any, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Begin a branch at step 1 as a start does, and be killed before a rename; return whether one came."""
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
            write_run_config(run, inputs.config.resolved())
            start_branch(run, 1)
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
        inputs = SimpleNamespace(config=RunConfig.load(path, world_size=2), directory=run)
        killed = killed_after(renames, run, inputs, monkeypatch)
        newest, lines = complete_steps(run)[-1], (run / METRICS_FILE).read_text().splitlines()
        assert newest in (1, 3), "the branch that was left, or the new one"
        assert [json.loads(line)["step"] for line in lines][:newest] == list(range(1, newest + 1)), "with all its lines"
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
    assert not (checkpoints_of(run) / LATEST).exists(), "it would name a missing step"


def test_what_was_just_saved_is_never_pruned(copied: tuple[Path, Path]) -> None:
    _, run = copied
    assert prune(run, 1, saved=1) == [2]
    assert complete_steps(run) == [1, 3]


def test_a_checkpoint_whose_manifest_is_gone_is_named(copied: tuple[Path, Path]) -> None:
    path, run = copied
    config = RunConfig.load(path, world_size=2)
    assert find_resume_point(run, config).notes == ()
    gone = [step_directory(run, step) for step in (2, 3)]
    for checkpoint in reversed(gone):
        (checkpoint / MANIFEST).unlink()
        found = find_resume_point(run, config)
        assert found.checkpoint is not None and found.checkpoint < checkpoint
        assert (
            find_resume_point(run, config, run) == found
            and find_resume_point(run, config, found.checkpoint).notes == ()
        )
    assert found.notes == tuple(f"{each}: has no {MANIFEST}, so that it is no checkpoint" for each in gone)


def resumed(path: str, run: str, seen: list[str | None], given: str | None) -> str:
    """What this rank, which sees the manifest of a directory of its own, resumes, or why not."""
    import torch.distributed as dist

    from zero_tp.checkpoint import resume_point
    from zero_tp.errors import UserError

    config = RunConfig.load(path, world_size=dist.get_world_size())
    own = seen[dist.get_rank()]
    find = partial(resume_point.find_resume_point, Path(run), config, None if given is None else Path(given))
    with pytest.MonkeyPatch.context() as patch:
        if own is not None:
            patch.setattr(resume_point, "read_manifest", lambda checkpoint: read_manifest(Path(own)))
        try:
            return str(resume_point.broadcast_resume_point(find).checkpoint)
        except UserError as error:
            return f"error: {error}"


def test_rank_0_finds_what_all_ranks_resume(ranks: Pools, copied: tuple[Path, Path], tmp_path: Path) -> None:
    path, run = copied
    other, newest = tmp_path / "other" / "step_00000003", step_directory(run, 3)

    def ask(second: Path | None = None, given: Path | None = None) -> list[str]:
        seen = [None, None if second is None else str(second)]
        return ranks(2).run(resumed, str(path), str(run), seen, None if given is None else str(given))

    shutil.copytree(newest, other)
    assert ask() == ask(other) == [str(newest)] * 2
    assert ask(given=step_directory(run, 1)) == [str(step_directory(run, 1))] * 2
    pattern = f"error: {newest}: the ranks do not read the same manifest: SHA-256 "
    with rewritten(other) as manifest:
        manifest["progress"]["optimizer_steps"] = 5
    for said in ask(other):
        assert said.startswith(pattern) and said.count("SHA-256") == 2 and "\n" not in said, said
    (other / MANIFEST).unlink()
    for said in ask(other):
        assert said.startswith(pattern) and "; nothing on rank 1 (" in said, said
    for said in ask(given=tmp_path / "nothing"):
        assert said.startswith(f"error: {tmp_path / 'nothing'}: no complete checkpoint there"), said


def unreadable(path: str) -> str:
    """What this rank is told if rank 0 may not read a checkpoint."""
    from zero_tp.checkpoint.resume_point import ResumePoint, broadcast_resume_point
    from zero_tp.errors import UserError

    def find() -> ResumePoint:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    try:
        broadcast_resume_point(find)
    except UserError as error:
        return str(error)
    return ""


def test_what_rank_0_may_not_read_ends_every_rank_with_one_line(ranks: Pools) -> None:
    assert (
        ranks(2).run(unreadable, "/run/manifest.json")
        == ["/run/manifest.json: Permission denied; check its permissions and the free space"] * 2
    )


def reading(path: str, corpora: list[str], changed_for_the_last: str = "") -> str:
    """What a rank, for which the config names a corpus of its own, is told of what the others read."""
    import torch.distributed as dist

    from zero_tp.errors import UserError
    from zero_tp.parallel.agreement import require_same_on_all_ranks
    from zero_tp.training.run_inputs import RunInputs

    last = dist.get_rank() == dist.get_world_size() - 1
    changes = [changed_for_the_last] if last and changed_for_the_last else []
    config = RunConfig.load(path, changes, dist.get_world_size())
    with contextlib.chdir(corpora[dist.get_rank()]):
        try:
            read = RunInputs(config, Path("RUN"), whole=dist.get_rank() == 0).read()
            require_same_on_all_ranks({f"the ranks do not read the same {what}": it for what, it in read.items()})
        except UserError as error:
            return str(error)
    return ""


def test_ranks_agree_on_what_they_read(ranks: Pools, copied: tuple[Path, Path], tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        (folder / "nowhere").mkdir(parents=True)
        with IndexedWriter(folder / "nowhere" / "train", VOCABULARY) as writer:
            writer.add_document(np.arange(3 * SEQUENCE) % VOCABULARY)
    words = str(copied[0]), list(map(str, folders))
    assert ranks(2).run(reading, *words) == ["", ""]
    for said in ranks(2).run(reading, *words, "zero_tp.training.steps=5"):
        assert said.startswith("the ranks do not read the same config: zero_tp.training.steps: 4 on rank 0 ("), said
        assert "; 5 on rank 1 (" in said
    data = folders[1] / "nowhere" / "train.bin"
    data.write_bytes(data.read_bytes()[::-1])
    for said in ranks(2).run(reading, *words):
        assert said.startswith("the ranks do not read the same corpus nowhere/train: SHA-256 "), said
        assert "… on rank 0 (" in said and "… on rank 1 (" in said
    tokenizer = Tokenizer(WordLevel({"<end>": 0, "<unknown>": 1}, unk_token="<unknown>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(
        folders[0] / "nowhere" / "tokenizer"
    )
    different = "the ranks do not read the same tokenizer"
    for said in ranks(2).run(reading, *words):
        assert said.startswith(f"{different}: nowhere/tokenizer on rank 0 ("), said
        assert "; nothing on rank 1 (" in said
    shutil.copytree(folders[0] / "nowhere" / "tokenizer", folders[1] / "nowhere" / "tokenizer")
    data.write_bytes(data.read_bytes()[::-1])
    assert ranks(2).run(reading, *words) == ["", ""]
    (folders[1] / "nowhere" / "tokenizer" / "chat_template.jinja").write_text("{{ messages }}")
    for said in ranks(2).run(reading, *words):
        assert said.startswith(f"{different} nowhere/tokenizer: SHA-256 ") and "… on rank 1 (" in said, said
    shutil.rmtree(folders[1] / "nowhere" / "tokenizer")
    shutil.copytree(folders[0] / "nowhere" / "tokenizer", folders[1] / "nowhere" / "tokenizer")
    raw = json.loads(copied[0].read_text())
    raw["zero_tp"]["evaluation"] = {"tasks": ["perplexity"], "task_data": {"perplexity": "nowhere/a.txt"}}
    copied[0].write_text(json.dumps(raw))
    for folder in folders:
        (folder / "nowhere" / "a.txt").write_text(folder.name)
    for said in ranks(2).run(reading, *words):
        assert said.startswith("the ranks do not read the same file of the task perplexity: SHA-256 "), said


def test_what_differs_from_the_last_start_is_said(copied: tuple[Path, Path]) -> None:
    path, run = copied
    raw = json.loads(path.read_text())
    manifest = read_manifest(step_directory(run, 3))
    before = RunConfig.load(path, world_size=2)
    assert differences(manifest, before, {}) == []
    raw["scheduler"]["params"]["warmup_max_lr"] = 0.5
    raw["gradient_clipping"] = 3.0
    raw["zero_tp"]["data"]["validation"] = "nowhere/validation"
    raw["zero_tp"]["parallel"]["tensor"] = 2
    path.write_text(json.dumps(raw))
    changed = RunConfig.load(path, world_size=2)
    other = manifest.model_copy(
        update={"versions": {**manifest.versions, "torch": "1.0"}, "validation": {"a": {"tokens": 5}, "b": {}}}
    )
    lines = differences(other, changed, {"a": {"tokens": 6}, "b": {}})
    when = "when step 3 was saved"
    for line in (
        f"scheduler.params.warmup_max_lr: 0.5, was 0.01 {when}",
        f"gradient_clipping: 3.0, was 1.0 {when}",
        f'zero_tp.data.validation: {{"nowhere/validation": 1.0}}, was not set {when}',
        f"zero_tp.data.validation: a holds other documents or tokens than {when}",
    ):
        assert line in lines
    assert any(line.startswith("torch's version: ") and line.endswith(f'was "1.0" {when}') for line in lines)
    assert not any("parallel" in line for line in lines), "said with the topology"
