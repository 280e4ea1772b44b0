"""An export replaces a model at once and nothing else, and takes a tokenizer without the files
beside it.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from tests.support.tokenizers import own_bpe
from tests.tiers import in_tiers
from zero_tp.base import files
from zero_tp.base.errors import UserError
from zero_tp.base.files import partial_directory
from zero_tp.base.weight_files import INDEX, SINGLE, resolve_tokenizer
from zero_tp.model.weights.export import write_native
from zero_tp.parallel.safetensors_files import Entry

TINY = GPT2Config(
    n_layer=1, n_embd=8, n_head=2, n_positions=8, vocab_size=16, bos_token_id=0, eos_token_id=0
)


def export(directory: Path, *, weights: Mapping[str, Tensor] | None = None, **options: Any) -> None:
    entries = [
        Entry(name, tuple(tensor.shape), tensor.dtype, partial(torch.clone, tensor))
        for name, tensor in (weights or GPT2LMHeadModel(TINY).state_dict()).items()
        if name != "lm_head.weight"
    ]
    write_native(directory, TINY, entries, **options)


def test_an_export_replaces_only_a_model(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.json").write_text("{}")
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "thesis.txt").touch()
    for directory in (run, notes, notes / "thesis.txt"):
        with pytest.raises(UserError, match="not replaced"):
            export(directory, overwrite=True)
        assert directory.exists()
    (tmp_path / "empty").mkdir()
    export(tmp_path / "empty", overwrite=True)
    export(tmp_path / "empty", overwrite=True)


@pytest.mark.parametrize(
    ("mask", "directories", "files"),
    in_tiers([(0o077, 0o700, 0o600), (0o022, 0o755, 0o644)], [(0o077, 0o700, 0o600)]),
)
def test_an_export_follows_the_umask_and_copies_a_tokenizer_alone(
    tmp_path: Path, mask: int, directories: int, files: int
) -> None:
    tokenizer = tmp_path / "tokenizer"
    own_bpe().save_pretrained(str(tokenizer))
    for name in ("id_rsa", "notes.json", "config.json", SINGLE, INDEX, "pytorch_model.bin"):
        (tokenizer / name).write_text("{}")
    for path in tokenizer.iterdir():
        path.chmod(0o640)
    before = os.umask(mask)
    try:
        export(tmp_path / "model", tokenizer=tokenizer)
    finally:
        os.umask(before)
    written = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "model").iterdir()}
    assert written == dict.fromkeys(
        (
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        ),
        files,
    )
    assert (tmp_path / "model").stat().st_mode & 0o777 == directories
    assert (tmp_path / "model" / SINGLE).read_bytes() != b"{}", "its own weights"


def test_an_export_takes_the_place_of_a_model_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "model"
    export(target)
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    (target / "model-00001-of-00002.safetensors").write_bytes(b"old")
    (target / "README.md").write_text("mine")
    (target / "figures").mkdir()
    (target / "figures" / "loss.png").touch()

    def killed(*_: object) -> None:
        assert (target / "model.safetensors").read_bytes() == before["model.safetensors"]
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(files, "replace_directory", killed)
        export(target, overwrite=True)
    assert {name: (target / name).read_bytes() for name in before} == before
    export(target, overwrite=True)
    after = {path.name for path in target.iterdir()}
    assert after == {*before, "README.md", "figures"} and (target / "figures" / "loss.png").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_person_s_directories_outlive_an_export_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, replaced = tmp_path / "model", tmp_path / ".model.replaced"
    export(target)
    (target / "figures").mkdir()
    (target / "figures" / "loss.png").touch()
    replace_directory = files.replace_directory

    def ended(written: Path, output: Path) -> None:
        replace_directory(written, output)
        raise SystemExit

    with monkeypatch.context() as patched, pytest.raises(SystemExit):
        patched.setattr(files, "replace_directory", ended)
        export(target, overwrite=True)
    assert (target / "figures" / "loss.png").exists() and not replaced.exists()
    replaced.mkdir()  # as SIGKILL leaves it there
    (target / "figures").rename(replaced / "figures")
    (replaced / "model.safetensors").write_bytes(b"old")
    export(target, overwrite=True)
    assert (target / "figures" / "loss.png").exists() and not replaced.exists()
    with partial_directory(target), pytest.raises(UserError, match="another process writes it now"):
        export(target, overwrite=True)


def test_an_output_that_was_about_to_be_replaced_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, replaced = tmp_path / "model", tmp_path / ".model.replaced"
    export(target)
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    replace = os.replace

    def killed(source: Path, destination: Path) -> None:
        if source.name == ".model.partial":
            raise KeyboardInterrupt
        replace(source, destination)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(os, "replace", killed)
        export(target, overwrite=True)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    target.rename(replaced)  # as SIGKILL between the two renames leaves it
    files.clear_partial(target)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_merge_into_a_mount_point_moves_files_inside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "model"
    target.mkdir()
    replace = os.replace

    def within(source: Path, destination: Path) -> None:
        if target not in source.parents:  # another file system
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        replace(source, destination)

    monkeypatch.setattr(os, "replace", within)
    for _ in range(2):
        export(target, merge=True)
    assert {path.name for path in target.iterdir()} == {
        "config.json",
        "generation_config.json",
        SINGLE,
    }


def test_two_processes_finish_the_same_replacement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that has renamed its directory has no lock any more; the next one may just have
    started.
    """
    target, replaced = tmp_path / "model", tmp_path / ".model.replaced"
    target.mkdir()
    (replaced / "figures").mkdir(parents=True)

    def twice(work: Callable[..., None]) -> Callable[..., None]:
        def run(*arguments: Any, **options: Any) -> None:
            work(*arguments, **options)
            work(*arguments, **options)

        return run

    monkeypatch.setattr(os, "replace", twice(os.replace))
    monkeypatch.setattr(shutil, "rmtree", twice(shutil.rmtree))
    with partial_directory(target):
        assert (target / "figures").is_dir() and not replaced.exists()


def test_weights_beyond_fp16_are_refused(tmp_path: Path) -> None:
    weights = GPT2LMHeadModel(TINY).half().state_dict()
    weights["transformer.wpe.weight"][1, 2] = float("inf")
    with pytest.raises(
        UserError, match=r"^tensor transformer\.wpe\.weight has values beyond fp16's range"
    ):
        export(tmp_path / "model", weights=weights)
    assert not any(tmp_path.iterdir())


def test_links_in_an_export_stay_and_an_export_may_be_one(tmp_path: Path) -> None:
    target, link = tmp_path / "model", tmp_path / "link"
    export(target)
    (target / "notes").symlink_to("nowhere")
    link.symlink_to(target.name)
    export(link, overwrite=True)
    assert link.is_symlink() and os.readlink(target / "notes") == "nowhere"
    assert {path.name for path in tmp_path.iterdir()} == {"model", "link"}
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="Not a directory"):
        export(tmp_path / "loop", overwrite=True)


@pytest.mark.parametrize("size", ["nonsense", "0", "-1GB", "", "5MiB", "1PB"])
def test_a_shard_size_is_a_size(tmp_path: Path, size: str) -> None:
    with pytest.raises(UserError, match="max_shard_size"):
        export(tmp_path / "export", max_shard_size=size)


def test_a_shard_size_without_a_unit_is_in_bytes(tmp_path: Path) -> None:
    shards = []
    for size in ("1KB", "1000"):
        export(tmp_path / size, max_shard_size=size)
        shards.append(
            {path.name: path.stat().st_size for path in (tmp_path / size).glob("*.safetensors")}
        )
    assert shards[0] == shards[1] and len(shards[0]) > 1


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no tokenizer"):
        resolve_tokenizer(tmp_path, None)
    (tmp_path / "tokenizer.json").touch()
    assert resolve_tokenizer(tmp_path, None) == tmp_path


def test_an_exports_tokenizer_knows_the_models_positions(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    own_bpe().save_pretrained(str(tokenizer))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "the"}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(settings))
    export(tmp_path / "model", tokenizer=tokenizer)
    positions = json.loads((tmp_path / "model" / "config.json").read_text())["n_positions"]
    written = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert written == settings | {"model_max_length": positions}
    (tokenizer / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer_config\.json: not valid JSON"):
        export(tmp_path / "other", tokenizer=tokenizer)
    assert not (tmp_path / "other").exists()
    (tokenizer / "tokenizer_config.json").unlink()
    export(tmp_path / "bare", tokenizer=tokenizer)
    assert AutoTokenizer.from_pretrained(str(tmp_path / "bare")).model_max_length == positions


def test_the_end_of_an_export_leaves_the_directory_of_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, partial = tmp_path / "model", tmp_path / ".model.partial"
    with partial_directory(target) as written:
        written.rename(target)
        partial.mkdir()  # by a process that started after the rename
    assert partial.exists()
    # Before this process locks it.
    monkeypatch.setattr(files, "lock", lambda *_: partial.rename(tmp_path / "renamed"))
    with pytest.raises(UserError, match="another process writes it now"), partial_directory(target):
        pytest.fail("the block is not entered")
