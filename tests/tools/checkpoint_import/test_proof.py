"""The loss of a written model, read a layer at a time, is that of transformers' class."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.decoders import MODEL_TYPES, decoder, decoder_fields, tokens_for
from tests.support.tiny_configs import tiny_fields
from tests.tiers import examples, in_tiers
from zero_tp.base.errors import UserError
from zero_tp.tools.checkpoint_import import proof
from zero_tp.tools.checkpoint_import.proof import prove, streamed_model

FIRST = ("gpt2", "llama", "qwen3_moe", "gemma2")


@pytest.mark.parametrize("model_type", in_tiers(MODEL_TYPES, FIRST))
@examples(1, 4)
@given(data=st.data())
def test_the_loss_is_that_of_transformers(
    model_type: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("model")
    written = data.draw(decoder_fields(model_type))
    reference = decoder(written, data.draw(st.integers(0, 2**31), label="seed"), "eager").eval()
    reference.save_pretrained(
        folder, max_shard_size=data.draw(st.sampled_from(["5GB", "20KB"]), label="shard")
    )
    tokens = tokens_for(written)[0]
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(proof, "HEAD_ROWS", 7)
        found = prove(folder, tokens)
        logits = reference(input_ids=tokens[None], use_cache=False).logits[0, :-1]
    expected = torch.nn.functional.cross_entropy(logits, tokens[1:]).item()
    assert found.loss == pytest.approx(expected, rel=2e-6)
    assert found.uniform == math.log(written["vocab_size"])


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_one_layer_is_in_memory(model_type: str, tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 4, "n_layer": 4, "tie_word_embeddings": False}
    fields = {**tiny_fields(model_type, 300), **sizes}
    if model_type == "gpt2":
        fields = {name: value for name, value in fields.items() if "hidden" not in name}
    reference = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    reference.save_pretrained(tmp_path)
    model = streamed_model(tmp_path)
    outside = parameters_of(model)
    resident: list[int] = []
    layers = model.base_model.layers if model_type == "llama" else model.base_model.h
    for layer in layers:
        layer.register_forward_hook(lambda *_: resident.append(parameters_of(model)))
    model(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False)
    # Ours is the first hook, so after it the layer has no parameters any more.
    assert resident == [outside] * 4
    assert 0 < outside < 300 * 16  # no row of the embedding
    largest: list[int] = []
    layers[2].register_forward_pre_hook(lambda *_: largest.append(parameters_of(model)))
    model(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False)
    own = sum(parameter.numel() for parameter in layers[2].parameters())
    assert largest == [outside + own]


def parameters_of(model: torch.nn.Module) -> int:
    """Numbers of the parameters that are in memory."""
    return sum(p.numel() for p in model.parameters() if p.device.type == "cpu")


def test_tokens_outside_of_the_vocabulary_are_refused(tmp_path: Path) -> None:
    fields = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 11}
    decoder(fields, 0).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="up to 11"):
        prove(tmp_path, torch.tensor([3, 11]))
    with pytest.raises(UserError, match="has 1 tokens"):
        prove(tmp_path, torch.tensor([3]))
