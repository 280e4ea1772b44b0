"""A manifest is read as it was written or refused; so are its files; a run resumes only its own
checkpoints.
"""

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
from zero_tp.run.checkpoint.directory import (
    MANIFEST,
    Damaged,
    check_content,
    read_manifest,
    step_directory,
)
from zero_tp.run.checkpoint.find import peek_checkpoint
from zero_tp.run.checkpoint.manifest import (
    OWN_HASH,
    check_same_run,
    content_hash,
    differences,
    fixed_settings,
    versions,
)
from zero_tp.run.config import RunConfig

SIZES: dict[str, Any] = {
    "n_layer": 1,
    "n_embd": 16,
    "n_head": 2,
    "n_positions": 8,
    "vocab_size": 31,
}
SIZES |= {"bos_token_id": 0, "eos_token_id": 0}
TINY = GPT2Config(**SIZES)


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


def config_of(folder: Path, **changes: Any) -> RunConfig:
    """Return the config of a run of TINY; `__` in a key stands for a dot."""
    raw = {
        "train_batch_size": 4,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_max_lr": 1e-3}},
        "zero_tp": {
            "model": {"model_type": "gpt2", **SIZES},
            "data": {"train": "nowhere/train", "sequence_length": 8},
            "training": {"steps": 4, "seed": 7},
        },
    }
    (folder / "run.json").write_text(json.dumps(raw))
    options = [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in changes.items()]
    return RunConfig.load(folder / "run.json", options, 2)


@pytest.fixture
def run(checkpoint: Path, tmp_path: Path) -> Path:
    """A run of `config_of`."""
    config = config_of(tmp_path)
    with rewritten(checkpoint) as manifest:
        manifest |= {
            "fixed": fixed_settings(config),
            "config": config.resolved(),
            "versions": versions(),
        }
    return checkpoint.parents[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"zero_tp__training__seed": 8},
            r"zero_tp\.training\.seed: 8, but the run of .* was started with 7; ",
        ),
        (
            {"zero_tp__data__document_attention": "reset"},
            r'zero_tp\.data\.document_attention: "reset", but the run of .* with "continue"',
        ),
        (
            {"zero_tp__model__pad_token_id": None},
            r"zero_tp\.model: .*, but the run of .* was started with ",
        ),
    ],
)
def test_another_run_is_not_resumed(
    run: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    checkpoint = step_directory(run, 1)
    with pytest.raises(UserError, match=message):
        check_same_run(checkpoint, read_manifest(checkpoint), config_of(tmp_path, **change))
    with rewritten(checkpoint) as manifest:
        del manifest["fixed"]["optimizer"]
    with pytest.raises(UserError, match="saved by a Trainer"):
        check_same_run(checkpoint, read_manifest(checkpoint), config_of(tmp_path))


def test_what_differs_from_the_last_start_is_logged(run: Path, tmp_path: Path) -> None:
    manifest = read_manifest(step_directory(run, 1))
    assert differences(manifest, config_of(tmp_path), {}) == []
    changed = config_of(
        tmp_path,
        scheduler__params__warmup_max_lr=0.5,
        gradient_clipping=3.0,
        zero_tp__data__validation="nowhere/validation",
        zero_tp__parallel__tensor=2,
    )
    validation = {"a": {"tokens": 5}, "b": {}}
    other = manifest.model_copy(
        update={"versions": {**manifest.versions, "torch": "1.0"}, "validation": validation}
    )
    lines = differences(other, changed, {"a": {"tokens": 6}, "b": {}})
    saved = "when step 1 was saved"
    for line in (
        f"scheduler.params.warmup_max_lr: 0.5, was 0.001 {saved}",
        f"gradient_clipping: 3.0, was 1.0 {saved}",
        f'zero_tp.data.validation: {{"nowhere/validation": 1.0}}, was not set {saved}',
        f"zero_tp.data.validation: a holds other documents or tokens than {saved}",
    ):
        assert line in lines
    assert any(
        line.startswith("torch's version: ") and line.endswith(f'was "1.0" {saved}')
        for line in lines
    )
    assert not any("parallel" in line for line in lines), "the line on resuming has them"
