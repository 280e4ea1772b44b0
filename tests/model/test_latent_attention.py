"""Latent attention: what the draws of all model types do not reach (test_decoders.py).

FLOPs, norms with an epsilon of their own, two scales of YaRN, refused fields.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.compare import check_close
from tests.support.decoders import decoder, tokens_for
from tests.support.native import check_gradients, parallel_model
from tests.support.tiny_configs import general_fields
from zero_tp.base.errors import ConfigError
from zero_tp.model.architectures import architecture_of
from zero_tp.model.architectures.configs import config_from_block, config_from_directory
from zero_tp.model.attention import fill_widths
from zero_tp.model.flops import model_flops
from zero_tp.model.huggingface import ZeroTPForCausalLM
from zero_tp.model.weights.load import PretrainedSource
from zero_tp.parallel.topology import Topology


def fields(model_type: str = "youtu", **changes: Any) -> dict[str, Any]:
    return {**general_fields(model_type), "bos_token_id": 0, **changes}


YARN = {
    **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
    **{"rope_theta": 100.0, "mscale": 1.0, "mscale_all_dim": 0.7},
}


@pytest.mark.parametrize(
    "changes",
    [
        {"rms_norm_eps": 0.3},
        {"rope_parameters": YARN},
        {"v_head_dim": 14},
        {"rope_interleave": False, "attention_bias": True},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_logits_and_every_gradient(changes: dict[str, Any]) -> None:
    written = fields(**changes)
    reference = decoder(written, 3)
    tokens = tokens_for(written)
    model = parallel_model(reference, Topology(world=1)).train()
    expected = reference(input_ids=tokens, labels=tokens)
    found = model(tokens, labels=tokens, return_logits=True)
    check_close({"logits": found.logits}, {"logits": expected.logits.detach()})
    expected.loss.backward()
    found.loss.backward()
    check_gradients(model, reference)


def test_heads_of_two_widths_attend_alike() -> None:
    """torch's own maths, with values narrower and wider than queries."""
    for sizes in ((10, 10, 6), (6, 6, 10), (8, 8, 8)):
        query, key, value = (torch.randn(2, 3, 5, size) for size in sizes)
        expected = (query @ key.mT * 0.4).softmax(-1) @ value
        filled = fill_widths(query, key, value)
        assert {tensor.shape[-1] for tensor in filled} == {max(sizes)}
        attended = torch.nn.functional.scaled_dot_product_attention(
            filled[0], filled[1], filled[2], scale=0.4
        )
        torch.testing.assert_close(attended[..., : sizes[2]], expected)
        assert not attended[..., sizes[2] :].any()


@pytest.mark.parametrize("queries", [10, None])
def test_flops_are_those_that_torch_counts(queries: int | None) -> None:
    written = fields(q_lora_rank=queries)
    reference = decoder(written, 1, "eager")  # torch counts no fused kernel of a CPU
    tokens = tokens_for(written)
    with FlopCounterMode(display=False) as ran:
        reference(input_ids=tokens, labels=tokens).loss.backward()
    spec = architecture_of(reference.config).spec(reference.config)
    assert ran.get_total_flops() == pytest.approx(model_flops(spec, *tokens.shape), rel=0.03)


@pytest.mark.parametrize(
    ("model_type", "changes", "words"),
    [
        ("youtu", {"num_key_value_heads": 2}, "num_key_value_heads: 2, but each of the 4 heads"),
        ("youtu", {"head_dim": 8}, "head_dim: 8, but .*; give qk_rope_head_dim, 4"),
        ("youtu", {"v_head_dim": None}, "v_head_dim: null, with which transformers fails"),
        ("glm4_moe_lite", {"mlp_layer_types": ["sparse"]}, "mlp_layer_types: 1 entries for 3"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense"] * 3}, "mlp_layer_types: no layer has"),
    ],
)
def test_what_is_not_computed_is_named(
    model_type: str, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        config_from_block(fields(model_type, **changes))


@pytest.mark.parametrize(
    ("model_type", "layer"), [("deepseek_v3", 61), ("glm4_moe_lite", 47), ("glm4_moe", 92)]
)
def test_multi_token_prediction_is_left_out_with_a_line(
    model_type: str, layer: int, tmp_path: Path
) -> None:
    reference = decoder(fields(model_type), 1)
    reference.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"model.layers.{layer}.eh_proj.weight"] = torch.zeros(2, 4)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    words = rf"left out: multi-token prediction \(.* model\.layers\.{layer}\.eh_proj\.weight, 1 in"
    with pytest.warns(UserWarning, match=words):
        model = ZeroTPForCausalLM.from_pretrained(tmp_path, Topology(world=1))
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        found, expected = model(tokens).logits, reference(input_ids=tokens).logits
    check_close({"logits": found}, {"logits": expected})


@pytest.mark.slow
def test_a_layer_of_that_number_is_read(tmp_path: Path) -> None:
    """A model that is deeper than the published ones leaves nothing out."""
    sizes = {"num_hidden_layers": 48, "mlp_layer_types": ["dense"] * 47 + ["sparse"]}
    config = AutoConfig.for_model(**fields("glm4_moe_lite", **sizes))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    source = PretrainedSource(tmp_path, config_from_directory(tmp_path))
    assert list(source.notes()) == []
