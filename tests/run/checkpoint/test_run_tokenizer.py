"""What reads a checkpoint or an export takes the tokenizer that its model was trained with, or
no other.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.checkpoints import write_checkpoint
from tests.support.tiny_configs import tiny_config
from tests.support.tokenizers import MAKES, OTHER_SCRIPTS, VOCABULARY
from zero_tp.base.errors import UserError
from zero_tp.base.weight_files import ID_FILES
from zero_tp.data import tokenizer_files
from zero_tp.data.tokenizer_fingerprint import FINGERPRINT, TokenizerFingerprint
from zero_tp.run.checkpoint.convert import to_huggingface
from zero_tp.run.checkpoint.directory import read_manifest
from zero_tp.tools.evaluation.model_directory import open_directory

CONFIG = tiny_config("qwen2", VOCABULARY)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return saved(tmp_path / "data" / "tokenizer", "llama_3")


def saved(directory: Path, make: str) -> Path:
    MAKES[make]().save_pretrained(str(directory))
    return directory


def written(run: Path, tokenizer: Path, **options: Any) -> Path:
    """A run whose checkpoint records a tokenizer of the make `llama_3`."""
    write_checkpoint(
        run,
        CONFIG,
        tokenizer=tokenizer,
        fingerprint=TokenizerFingerprint.of(MAKES["llama_3"]()),
        **options,
    )
    return run


def test_an_export_records_the_fingerprint_with_its_weights(
    tmp_path: Path, tokenizer: Path
) -> None:
    run, export = written(tmp_path / "run", tokenizer), tmp_path / "export"
    saved(export, "unigram")
    (export / "vocab.json").write_text("{}")
    CONFIG.save_pretrained(export)
    assert to_huggingface(run, export, max_shard_size="4KB", overwrite=True).notes == ()
    assert not (export / "vocab.json").exists(), "files of another tokenizer would change the ids"
    with safe_open(next(export.glob("model-*.safetensors")), framework="pt") as file:
        assert file.metadata().keys() == {"format", FINGERPRINT}
    AutoModelForCausalLM.from_pretrained(export)
    opened: Any = AutoTokenizer.from_pretrained(str(export))
    assert opened.encode(OTHER_SCRIPTS) == MAKES["llama_3"]().encode(OTHER_SCRIPTS)
    assert open_directory(export).tokenizer.encode("It's 12") == opened.encode("It's 12")
    for file_name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(saved(tmp_path / "other", "smollm") / file_name, export / file_name)
    with pytest.raises(
        UserError,
        match=r"^the tokenizer .*/export differs from the one that .*/export was trained with",
    ):
        _ = open_directory(export).tokenizer


def test_weights_are_written_without_a_tokenizer_that_would_give_other_ids(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_files, "_FORMS", ())
    run, export = written(tmp_path / "run", tokenizer), tmp_path / "export"
    saved(export, "llama_3")
    CONFIG.save_pretrained(export)
    with pytest.raises(UserError) as refused:
        to_huggingface(run, export, overwrite=True)
    written_without = (
        f"{export}: written without a tokenizer, because transformers would open {tokenizer} with "
        "other"
    )
    assert str(refused.value).startswith(written_without) and "\n" not in str(refused.value)
    assert not [name for name in ID_FILES if (export / name).exists()]
    AutoModelForCausalLM.from_pretrained(export)


def test_a_run_and_its_data_move_together_or_apart(tmp_path: Path, tokenizer: Path) -> None:
    run = written(tmp_path / "run", tokenizer)
    assert read_manifest(run / "checkpoints" / "step_00000001").tokenizer == str(tokenizer)
    alone = shutil.copytree(run, tmp_path / "somewhere" / "deep" / "run")
    assert open_directory(alone).tokenizer_path == tokenizer
    place = tmp_path / "moved"
    place.mkdir()
    for name in ("run", "data"):
        shutil.move(tmp_path / name, place / name)
    assert os.path.samefile(
        open_directory(place / "run").tokenizer_path, place / "data" / "tokenizer"
    )
    with pytest.raises(UserError, match="no longer exists; give its new path with --tokenizer DIR"):
        open_directory(alone)
    assert (
        to_huggingface(alone, tmp_path / "export", tokenizer=place / "data" / "tokenizer").notes
        == ()
    )
    for make in ("bpe", "sentencepiece"):
        with pytest.raises(UserError) as refused:
            to_huggingface(alone, tmp_path / make, tokenizer=saved(tmp_path / f"of {make}", make))
        assert str(refused.value).count(" tokens (") == 4 and not (tmp_path / make).exists()


def test_an_older_run_gets_a_note(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_checkpoint(Path("run"), CONFIG, tokenizer=Path("data/tokenizer"), old=True)
    line = (
        "run/checkpoints/step_00000001 has no fingerprint of its tokenizer, so data/tokenizer was "
        "not compared with it"
    )
    assert open_directory(Path("run")).note == line
    assert to_huggingface(Path("run"), Path("export")).notes == (line,)
    assert FINGERPRINT in Path("export/model.safetensors").read_bytes()[:8000].decode(
        errors="replace"
    )
    assert len(open_directory(Path("export")).tokenizer)


def test_a_damaged_record_of_an_export_is_one_line(tmp_path: Path, tokenizer: Path) -> None:
    to_huggingface(written(tmp_path / "run", tokenizer), tmp_path / "export")
    path = tmp_path / "export" / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    for text, problem in (("[", "in its metadata is not valid JSON"), ('{"parts": 1}', "parts: ")):
        header = json.loads(content[8 : 8 + length])
        header["__metadata__"][FINGERPRINT] = text
        new = json.dumps(header).encode()
        path.write_bytes(len(new).to_bytes(8, "little") + new + content[8 + length :])
        with pytest.raises(UserError, match=problem):
            _ = open_directory(tmp_path / "export").tokenizer
