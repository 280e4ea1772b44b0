"""A manifest is read as it was written or refused; so are its files."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config

from tests.support.checkpoints import flip_bit, flip_master, rewritten, write_checkpoint
from zero_tp.base.errors import UserError
from zero_tp.base.settings.resolve import SavedStart
from zero_tp.parallel import safetensors_files as files
from zero_tp.run.checkpoint import convert, directory
from zero_tp.run.checkpoint.directory import MANIFEST, Damaged, check_content, read_manifest
from zero_tp.run.checkpoint.find import peek_checkpoint
from zero_tp.run.checkpoint.manifest import OWN_HASH, content_hash

TINY = GPT2Config(
    n_layer=1, n_embd=16, n_head=2, n_positions=8, vocab_size=31, bos_token_id=0, eos_token_id=0
)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "run", TINY, tensor=2, data=2)


def test_a_flipped_bit_of_the_manifest_is_found_or_means_the_same(
    checkpoint: Path, seed: int
) -> None:
    path, chance = checkpoint / MANIFEST, random.Random(seed)
    whole, text = read_manifest(checkpoint), path.read_bytes()
    found = 0
    for _ in range(300):
        flip_bit(path, chance.randrange(len(text)), chance.randrange(8))
        try:
            assert read_manifest(checkpoint) == whole
        except UserError as error:
            assert str(path) in str(error)
            found += 1
        path.write_bytes(text)
    assert found > 200


FREE = {("config", dict), ("model", dict), ("fixed", dict), ("corpora", dict), ("tokenizer", str)}
"""Keys and types whose values only their use can judge."""


def test_missing_and_wrong_keys_are_named(checkpoint: Path) -> None:
    text = (checkpoint / MANIFEST).read_text()
    optional = {"validation", "sha256", "generation"}
    for key in sorted(json.loads(text).keys() - {"format", *optional}):
        values: tuple[Any, ...] = (None, [3], "nonsense", -1, {"a": {"b": []}})
        for wrong in values:
            if (key, type(wrong)) in FREE:
                continue
            with rewritten(checkpoint) as manifest:
                manifest.pop(key)
                if wrong is not None:
                    manifest[key] = wrong
            with pytest.raises(Damaged, match=rf"manifest\.json: {key}"):
                read_manifest(checkpoint)
            (checkpoint / MANIFEST).write_text(text)


EDITS: dict[str, tuple[Callable[[dict[str, Any]], Any], bool, type[UserError], str]] = {
    "count": (lambda m: m["progress"].update(optimizer_steps=5), False, Damaged, "sha256: "),
    "model": (lambda m: m["model"].update(layer_norm_epsilon=0.1), False, Damaged, "sha256: "),
    "hash": (lambda m: m.update(sha256=None), False, Damaged, "sha256: "),
    "no hash": (lambda m: m.pop("sha256"), False, Damaged, "sha256: "),
    "no config": (lambda m: m.pop("config"), True, Damaged, "config: "),
    "step": (
        lambda m: m.update(step=2),
        True,
        Damaged,
        "step is 2, but the directory is step_00000001",
    ),
    "unknown key": (
        lambda m: m.update(kidns=m.pop("kinds")),
        True,
        Damaged,
        "kidns: unknown key; ",
    ),
    "a rank's file": (
        lambda m: m["files"].pop(next(iter(m["files"]))),
        True,
        Damaged,
        "files: not those of tensor 2",
    ),
    "format": (
        lambda m: m.update(format=3),
        True,
        UserError,
        "format 3, this version reads 4 and 5; use the version that",
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_manifest_is_refused(checkpoint: Path, edit: str) -> None:
    change, rehash, kind, message = EDITS[edit]
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    change(manifest)
    if rehash:
        manifest[OWN_HASH] = content_hash(manifest)
    (checkpoint / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(kind, match=rf"manifest\.json: {message}"):
        read_manifest(checkpoint)


def test_a_checkpoint_may_have_another_name_but_not_another_steps(checkpoint: Path) -> None:
    read_manifest(checkpoint.rename(checkpoint.with_name("the_best")))


def test_any_flipped_bit_of_any_file_is_found(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(files, "PART_BYTES", 256)
    checkpoint = write_checkpoint(checkpoint.parents[1], TINY, tensor=2, data=2, step=2)
    manifest, chance = read_manifest(checkpoint), random.Random(seed)
    for _ in range(40):
        file = checkpoint / chance.choice(sorted(manifest.files))
        at, bit = chance.randrange(file.stat().st_size), chance.randrange(8)
        flip_bit(file, at, bit)
        with pytest.raises(Damaged) as damage:
            check_content(checkpoint, manifest.files)
        assert damage.value.file == file
        flip_bit(file, at, bit)
    check_content(checkpoint, manifest.files)


@pytest.mark.parametrize(
    ("number", "is_damage"),
    [(errno.EIO, True), (errno.ENOTCONN, False), (errno.ESTALE, False), (errno.EACCES, False)],
)
def test_a_file_that_cannot_be_read_now_is_not_damaged(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_damage: bool
) -> None:
    manifest = read_manifest(checkpoint)

    def fail(path: Path) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(directory, "read_regular", fail)
    monkeypatch.setattr(files, "hash_file", fail)
    for read in (
        partial(read_manifest, checkpoint),
        partial(check_content, checkpoint, manifest.files),
    ):
        with pytest.raises(UserError) as error:
            read()
        assert isinstance(error.value, Damaged) == is_damage


def test_files_of_format_4_are_compared_by_their_sha256(checkpoint: Path) -> None:
    with rewritten(checkpoint) as manifest:
        manifest["format"] = 4
        for name, listed in manifest["files"].items():
            part = hashlib.sha256((checkpoint / name).read_bytes()).digest()  # below 8 MiB
            del listed["xxh3_128"]
            listed |= {"sha256": hashlib.sha256(part).hexdigest(), "parts": [part.hex()]}
    check_content(checkpoint, read_manifest(checkpoint).files)
    flip_master(checkpoint / "states_tp01_dp0001.safetensors")
    with pytest.raises(Damaged, match=r"states_tp01_dp0001\.safetensors: its hash is"):
        check_content(checkpoint, read_manifest(checkpoint).files)
    with rewritten(checkpoint) as manifest:
        del manifest["files"]["states_tp01_dp0001.safetensors"]["sha256"]
    with pytest.raises(Damaged, match="must have xxh3_128 or, in format 4, sha256"):
        read_manifest(checkpoint)


def test_an_export_of_damaged_masters_is_no_export(checkpoint: Path, tmp_path: Path) -> None:
    file = checkpoint / "states_tp01_dp0001.safetensors"
    flip_master(file)
    with pytest.raises(Damaged, match=r"states_tp01_dp0001\.safetensors: its hash is"):
        convert.to_huggingface(checkpoint, tmp_path / "export")
    assert not (tmp_path / "export").exists()


def test_a_checkpoint_carries_what_a_start_needs(checkpoint: Path) -> None:
    run = checkpoint.parents[1]
    with rewritten(checkpoint) as manifest:
        manifest["config"] = {"scheduler": {"params": {"total_num_steps": 7}}}
        manifest["progress"]["counters"] = {
            "global_steps": 5,
            "global_samples": 10,
            "skipped_steps": 1,
        }
    (run / "config.json").write_text("")
    model = read_manifest(checkpoint).model
    found = peek_checkpoint(run)
    assert found is not None
    schedule = {"scheduler": {"params": {"total_num_steps": 7}}}
    assert found.saved_start() == SavedStart(schedule, model, 4)
    (checkpoint / MANIFEST).unlink()
    assert peek_checkpoint(run) is None
