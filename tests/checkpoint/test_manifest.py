"""A manifest is read as it was written, or what is wrong in it is named; what it lists is compared as it is read."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from transformers import GPT2Config

from tests.support.checkpoints import rewritten, write_checkpoint
from zero_tp.checkpoint.convert import config_of, to_huggingface
from zero_tp.checkpoint.directory import MANIFEST, Damaged, check_content, read_manifest
from zero_tp.checkpoint.manifest import OWN_HASH, content_hash
from zero_tp.checkpoint.run_directory import saved_start
from zero_tp.config.resolve import SavedStart
from zero_tp.errors import UserError
from zero_tp.tensors import safetensors_files as files

TINY = GPT2Config(n_layer=1, n_embd=16, n_head=2, n_positions=8, vocab_size=31, bos_token_id=0, eos_token_id=0)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "run", TINY, tensor=2, data=2)


def flip(file: Path, at: int, bit: int = 0) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1 << bit
    file.write_bytes(content)


def test_a_flipped_bit_of_the_manifest_is_found_or_means_the_same(checkpoint: Path, seed: int) -> None:
    path, chance = checkpoint / MANIFEST, random.Random(seed)
    whole, text = read_manifest(checkpoint), path.read_bytes()
    found = 0
    for _ in range(300):
        flip(path, chance.randrange(len(text)), chance.randrange(8))
        try:
            assert read_manifest(checkpoint) == whole
        except UserError as error:
            assert str(path) in str(error)
            found += 1
        path.write_bytes(text)
    assert found > 200


@pytest.mark.parametrize(
    ("key", "value"),
    [("progress.optimizer_steps", 5), ("model.layer_norm_epsilon", 0.1), ("sha256", None), ("format", 3), ("step", 2)],
)
def test_an_edited_value_is_found(checkpoint: Path, key: str, value: Any) -> None:
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    *blocks, name = key.split(".")
    block = manifest
    for each in blocks:
        block = block[each]
    block[name] = value
    (checkpoint / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(Damaged, match=r"manifest\.json: .*; the checkpoint is damaged"):
        read_manifest(checkpoint)


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


def test_an_older_format_is_refused(checkpoint: Path) -> None:
    with rewritten(checkpoint) as manifest:
        manifest["format"] = 3
    with pytest.raises(
        UserError, match=r"manifest\.json: format 3, this version reads 4; use the version that wrote it"
    ):
        read_manifest(checkpoint)


@pytest.mark.parametrize("key", ["sha256", "config"])
def test_a_manifest_needs_its_hash_and_its_config(checkpoint: Path, key: str) -> None:
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    del manifest[key]
    if key != OWN_HASH:
        manifest[OWN_HASH] = content_hash(manifest)
    (checkpoint / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(Damaged, match=rf"manifest\.json: {key}: "):
        read_manifest(checkpoint)


def test_a_manifest_that_is_read_again_is_checked_again_only_where_it_changed(checkpoint: Path) -> None:
    path, found = checkpoint / MANIFEST, read_manifest(checkpoint)
    assert read_manifest(checkpoint) is found
    path.write_bytes(path.read_bytes().replace(b'"step"', b'"stop"', 1))
    with pytest.raises(Damaged):
        read_manifest(checkpoint)


def test_a_model_that_is_made_of_a_manifest_changes_nothing_of_it(checkpoint: Path) -> None:
    """transformers completes and keeps the dicts that it is given; a manifest that is read again is the same one."""
    with rewritten(checkpoint) as manifest:
        manifest["model"] = {"model_type": "llama", "rope_parameters": {"rope_theta": 1e4}}
    found = read_manifest(checkpoint)
    before = found.model_dump()
    config_of(found).rope_parameters["factor"] = 2
    assert read_manifest(checkpoint).model_dump() == before


def test_a_checkpoint_under_another_step_s_name_is_named(checkpoint: Path) -> None:
    other = checkpoint.rename(checkpoint.with_name("step_00000007"))
    with pytest.raises(
        Damaged, match=r"step_00000007/manifest\.json: is of step 1, but its directory is step_00000007"
    ):
        read_manifest(other)
    read_manifest(other.rename(other.with_name("the_best")))


def test_any_flipped_bit_of_any_file_is_found(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(files, "PART", 256)
    checkpoint = write_checkpoint(checkpoint.parents[1], TINY, tensor=2, data=2, step=2)
    manifest, chance = read_manifest(checkpoint), random.Random(seed)
    for _ in range(40):
        file = checkpoint / chance.choice(sorted(manifest.files))
        at, bit = chance.randrange(file.stat().st_size), chance.randrange(8)
        flip(file, at, bit)
        with pytest.raises(Damaged) as damage:
            check_content(checkpoint, manifest.files)
        assert damage.value.file == file
        flip(file, at, bit)
    check_content(checkpoint, manifest.files)


def test_an_export_of_damaged_masters_is_no_export(checkpoint: Path, tmp_path: Path) -> None:
    file = checkpoint / "states_tp01_dp0001.safetensors"
    with safe_open(file, framework="pt") as opened:
        name = next(key for key in opened.keys() if key.endswith("/master"))  # noqa: SIM118 - not a mapping
    header, base = files.read_header(file)
    flip(file, base + header[name]["data_offsets"][0])
    with pytest.raises(Damaged, match=r"states_tp01_dp0001\.safetensors: SHA-256 is"):
        to_huggingface(checkpoint, tmp_path / "export")
    assert not (tmp_path / "export").exists()


def test_a_checkpoint_carries_what_a_start_needs(checkpoint: Path) -> None:
    run = checkpoint.parents[1]
    with rewritten(checkpoint) as manifest:
        manifest["config"] = {"scheduler": {"params": {"total_num_steps": 7}}}
        manifest["progress"]["counters"] = {"global_steps": 5, "global_samples": 10, "skipped_steps": 1}
    (run / "config.json").write_text("")
    model = read_manifest(checkpoint).model
    assert saved_start(run) == SavedStart({"scheduler": {"params": {"total_num_steps": 7}}}, model, 4)


def test_an_unknown_key_is_named(checkpoint: Path) -> None:
    """A nearer name is looked for, also within a parent, which may have a parent."""
    with rewritten(checkpoint) as manifest:
        manifest["kidns"] = manifest.pop("kinds")
    with pytest.raises(UserError, match=r"manifest\.json: kidns: unknown key; "):
        read_manifest(checkpoint)
