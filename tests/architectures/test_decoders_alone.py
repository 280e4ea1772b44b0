"""Every model_type in one process against transformers' own class, for random small configs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from tests.support.compare import check_close
from tests.support.decoders import BATCH, MODEL_TYPES, decoder, decoder_fields, tokens_for, without_router_logits
from tests.support.native import check_gradients, check_widths, parallel_model
from tests.tiers import in_tiers
from zero_tp.huggingface import ZeroTPForCausalLM
from zero_tp.topology import Topology

FEW = settings(max_examples=10)
EACH_TYPE = pytest.mark.parametrize("model_type", MODEL_TYPES)


@EACH_TYPE
@given(data=st.data())
def test_logits_loss_and_every_gradient(model_type: str, data: st.DataObject) -> None:
    fields = data.draw(decoder_fields(model_type))
    attention = data.draw(st.sampled_from(["sdpa", "eager"]), label="attention")
    reference = decoder(fields, data.draw(st.integers(0, 2**31), label="seed"), attention)
    model = parallel_model(reference, Topology(world=1))
    tokens = tokens_for(fields)
    expected, found = reference(input_ids=tokens, labels=tokens), model(tokens, labels=tokens, return_logits=True)
    check_close({"logits": found.logits}, {"logits": expected.logits.detach()})
    assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-5)
    expected.loss.backward()
    found.loss.backward()
    check_gradients(model, reference)


@EACH_TYPE
@FEW
@given(data=st.data())
def test_import_and_export_keep_every_bit(
    model_type: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("models")
    reference = decoder(data.draw(decoder_fields(model_type)), data.draw(st.integers(0, 2**31), label="seed"))
    reference.save_pretrained(folder / "theirs", max_shard_size=data.draw(st.sampled_from(["5GB", "20KB"])))
    reference.generation_config.update(temperature=0.5, do_sample=True, eos_token_id=[0, 3])
    reference.generation_config.save_pretrained(folder / "theirs")
    model = ZeroTPForCausalLM.from_pretrained(folder / "theirs", Topology(world=1))
    model.save_pretrained(folder / "ours")
    again = AutoModelForCausalLM.from_pretrained(folder / "ours")
    assert type(again) is type(reference)
    assert same(again.state_dict(), reference.state_dict())
    assert again.generation_config.to_diff_dict() == reference.generation_config.to_diff_dict()
    assert stored_names(folder / "ours") == stored_names(folder / "theirs")
    assert differing(again.config.to_dict(), reference.config.to_dict()) <= {"_name_or_path", "architectures"}


def stored_names(directory: Path) -> set[str]:
    files = [safe_open(path, framework="pt") for path in directory.glob("*.safetensors")]
    return {name for file in files for name in file.keys()}  # noqa: SIM118 - it is no dict


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def differing(found: dict[str, Any], expected: dict[str, Any]) -> set[str]:
    return {name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)}


@pytest.mark.parametrize("model_type", in_tiers(MODEL_TYPES, ["gpt2", "llama", "qwen3"]))
@FEW
@given(data=st.data())
def test_generate_equals_transformers(model_type: str, data: st.DataObject) -> None:
    """Greedy, sampled and with beams; padded on the left or not; past sliding windows and past the positions that
    scaling reckons with, where there are no learned ones."""
    fields = data.draw(decoder_fields(model_type)) | without_router_logits(model_type)
    reference = decoder(fields, data.draw(st.integers(0, 2**31), label="seed"))
    model = parallel_model(reference, Topology(world=1)).eval()
    prompt = torch.randint(1, fields["vocab_size"], (BATCH, data.draw(st.integers(1, 9), label="prompt")))
    asked: dict[str, Any] = {"max_new_tokens": 7 if model_type == "gpt2" else 14, "pad_token_id": 0}
    ways: list[dict[str, Any]] = [{}, {"use_cache": False}, {"do_sample": True, "top_k": 5}, {"num_beams": 2}]
    ways += [{"cache_implementation": "static"}, {"cache_implementation": "static", "num_beams": 2}]
    asked |= data.draw(st.sampled_from(ways), label="way")
    if data.draw(st.booleans(), label="padded"):
        asked["attention_mask"] = torch.ones_like(prompt)
        asked["attention_mask"][0, : prompt.shape[1] // 2] = 0
    outputs = []
    for each in (reference, model):
        torch.manual_seed(1)
        outputs.append(each.generate(prompt, **asked))
    assert torch.equal(outputs[1], outputs[0])


@EACH_TYPE
def test_a_model_drawn_from_a_seed_is_as_wide_as_transformers_draws_it(model_type: str, tmp_path: Path) -> None:
    """Every matrix has the standard deviation of Hugging Face's own initialisation, norms are 1 and biases 0."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(model_type, vocab_size=200, bos_token_id=0, eos_token_id=0)
    for name, value in {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}.items():
        setattr(config, name, value)
    small = {"intermediate_size": 512, "num_key_value_heads": 2, "head_dim": 64, "num_experts_per_tok": 2}
    small |= {
        "num_experts": 5,
        "num_local_experts": 5,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
    }
    for name, value in small.items():
        if hasattr(config, name):
            setattr(config, name, value)
    if hasattr(config, "layer_types"):
        config.layer_types = ["full_attention"] * 2
    config.pad_token_id = None
    check_widths(config)
