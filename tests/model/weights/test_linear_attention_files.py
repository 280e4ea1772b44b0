"""Files of models with linear attention: parts that are left out, and names of other writers."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.tiny_configs import general_fields
from zero_tp.base.errors import UserError
from zero_tp.model.huggingface import ZeroTPForCausalLM
from zero_tp.parallel.topology import Topology

FILE = "model.safetensors"
TOKENS = torch.arange(20)[None]


def saved(model_type: str, directory: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    config = AutoConfig.for_model(**general_fields(model_type))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(directory)
    return model, load_file(directory / FILE)


def opened(directory: Path, tensors: dict[str, torch.Tensor]) -> tuple[Any, list[str]]:
    """Our model of the directory with these tensors, and the warnings of what is left out."""
    save_file(tensors, directory / FILE, {"format": "pt"})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = ZeroTPForCausalLM.from_pretrained(directory, Topology(world=1)).eval()
    lines = [str(one.message) for one in caught]
    return model, [line for line in lines if "left out" in line]


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_multi_token_prediction_is_left_out_with_a_line(model_type: str, tmp_path: Path) -> None:
    reference, tensors = saved(model_type, tmp_path)
    model, lines = opened(tmp_path, tensors | {f"mtp.{n}.weight": torch.ones(2) for n in "ab"})
    part = "multi-token prediction (tensors such as mtp.a.weight, 2 in all)"
    assert lines == [f"{tmp_path}: left out: {part}; exports lack it"]
    assert torch.allclose(model(TOKENS).logits, reference(TOKENS).logits, atol=1e-6)


def test_names_of_a_text_model_of_one_that_reads_pictures(tmp_path: Path) -> None:
    reference, tensors = saved("qwen3_5_text", tmp_path)
    renamed = {
        name.replace("model.", "model.language_model.", 1): one for name, one in tensors.items()
    }
    model, lines = opened(tmp_path, renamed)
    assert not lines
    assert torch.allclose(model(TOKENS).logits, reference(TOKENS).logits, atol=1e-6)
    embedding = "model.embed_tokens.weight"
    with pytest.raises(UserError, match=rf"there is a second {embedding}$"):
        opened(tmp_path, renamed | {embedding: tensors[embedding].clone()})


def test_a_model_that_reads_pictures_is_refused_with_the_way_round(tmp_path: Path) -> None:
    text = general_fields("qwen3_5_text")
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "qwen3_5", "text_config": text, "vision_config": {}})
    )
    remedy = r"give its qwen3_5_text alone, as transformers' Qwen3_5ForCausalLM\.from_pretrained"
    with pytest.raises(UserError, match=rf'"qwen3_5" is not supported, .* pictures .*; {remedy}'):
        ZeroTPForCausalLM.from_pretrained(tmp_path)


def test_olmo_hybrids_convolution_is_cut_by_queries_keys_and_values(tmp_path: Path) -> None:
    """transformers saves thirds, 44 rows as 15, 15 and 14; published files have 12, 12 and 20."""
    reference, tensors = saved("olmo_hybrid", tmp_path)
    names = [f"model.layers.0.linear_attn.{letter}_conv1d.weight" for letter in "qkv"]
    assert [len(tensors[name]) for name in names] == [15, 15, 14]
    model, _ = opened(tmp_path, tensors)
    model.save_pretrained(tmp_path / "ours")
    exported = load_file(tmp_path / "ours" / FILE)
    assert [len(exported[name]) for name in names] == [12, 12, 20]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert torch.equal(again(TOKENS).logits, reference(TOKENS).logits)
    with pytest.raises(UserError, match=r"q_conv1d.*: expected 44 rows, found 43$"):
        opened(tmp_path, tensors | {names[2]: tensors[names[2]][1:].clone()})


def test_olmo_hybrids_norms_may_have_the_classs_names(tmp_path: Path) -> None:
    reference, tensors = saved("olmo_hybrid", tmp_path)
    older = {"attention_layer_norm": "input_layernorm"}
    older |= {"feedforward_layer_norm": "post_attention_layernorm"}
    renamed = {}
    for name, one in tensors.items():
        for new, old in older.items():
            name = name.replace(new, old)
        renamed[name] = one
    assert renamed.keys() != tensors.keys()
    model, _ = opened(tmp_path, renamed)
    assert torch.allclose(model(TOKENS).logits, reference(TOKENS).logits, atol=1e-6)
