"""Hugging Face directories in and out: bit-equal weights on any TP size."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2LMHeadModel

from tests.support.compare import grid
from tests.support.gpt2_reference import SIZES, batch, reference_model
from tests.support.native import parallel_model
from tests.support.pools import Pools, RankError
from zero_tp.base.errors import UserError
from zero_tp.model.huggingface import ZeroTPForCausalLM


def save(world: int, directory: Path, changes: dict[str, Any]) -> None:
    parallel_model(reference_model(**changes), grid(world, True)).save_pretrained(
        directory, max_shard_size="10KB"
    )


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False}])
def test_saved_models_open_in_transformers(
    ranks: Pools, tmp_path: Path, world: int, changes: dict[str, Any]
) -> None:
    ranks(world).run(save, world, tmp_path / "model", changes)
    both: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    opened, info = both
    assert isinstance(opened, GPT2LMHeadModel)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    expected = reference_model(**changes)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(opened.state_dict()[name], tensor), name
    tokens = batch(SIZES["vocab_size"], "")["input_ids"]
    with torch.no_grad():
        assert torch.equal(opened.eval()(tokens).logits, expected(tokens).logits)


def test_a_failed_save_fails_on_every_rank(ranks: Pools, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(RankError, match="file") as caught:
        ranks(2).run(save, 2, tmp_path / "file" / "model", {}, timeout=30)
    # Either rank may report first: rank 0 what happened to it, the other what rank 0 said.
    assert caught.value.kind in ("FileExistsError", "NotADirectoryError", "UserError")


def save_to_a_full_disk(directory: Path) -> None:
    """Rank 0 fails at the second of several files, while the others wait for it in a gather."""
    from zero_tp.model.weights import export

    written: list[Path] = []
    write = export.write_tensors

    def full(path: Path, *rest: Any, **options: Any) -> Any:
        if written:
            raise OSError(28, "No space left on device", str(path))
        written.append(path)
        return write(path, *rest, **options)

    with patch.object(export, "write_tensors", full):
        save(2, directory, {})


def test_a_save_that_fails_half_way_fails_on_every_rank(ranks: Pools, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="No space left on device") as caught:
        ranks(2).run(save_to_a_full_disk, tmp_path / "model", timeout=30)
    assert caught.value.kind in ("OSError", "UserError")
    assert list(tmp_path.iterdir()) == []


def load(world: int, directory: Path, dtype: torch.dtype | None) -> None:
    options: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    native = GPT2LMHeadModel.from_pretrained(directory, **options)
    loaded = ZeroTPForCausalLM.from_pretrained(directory, grid(world, True), **options)
    expected = parallel_model(native, grid(world, True), dtype=native.dtype)
    names = dict(expected.named_parameters())
    assert dict(loaded.named_parameters()).keys() == names.keys()
    for name, parameter in loaded.named_parameters():
        assert parameter.dtype == native.dtype
        assert torch.equal(parameter, names[name]), name


@pytest.mark.parametrize(
    ("shard_size", "saved", "asked"),
    [
        ("5GB", torch.float32, None),
        ("10KB", torch.float32, None),
        ("10KB", torch.bfloat16, None),
        ("5GB", torch.float32, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False}])
def test_from_pretrained(
    ranks: Pools,
    tmp_path: Path,
    shard_size: str,
    saved: torch.dtype,
    asked: torch.dtype | None,
    changes: dict[str, Any],
) -> None:
    reference_model(**changes).to(saved).save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard_size == "10KB")
    ranks(2).run(load, 2, tmp_path, asked)


def test_directories_without_a_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json"):
        ZeroTPForCausalLM.from_pretrained(tmp_path)
    reference_model().config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"no model\.safetensors nor"):
        ZeroTPForCausalLM.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"{}")
    with pytest.raises(
        UserError, match=r"model\.safetensors: its weights can't be read: not a safetensors file"
    ):
        ZeroTPForCausalLM.from_pretrained(tmp_path)
