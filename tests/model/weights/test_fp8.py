"""DeepSeek-V3's published files hold matrices in FP8 with a factor for each block: what is read is
number times factor, whole and on ranks, and an export is whole again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config

from tests.support.native import native_model, perturbed
from zero_tp.base.errors import UserError
from zero_tp.model.huggingface import ZeroTPForCausalLM
from zero_tp.model.weights.native import open_config, open_model
from zero_tp.parallel.layout import layout_of
from zero_tp.parallel.topology import Topology

FIELDS: dict[str, Any] = {
    **{"model_type": "deepseek_v3", "vocab_size": 61, "hidden_size": 256},
    **{"num_hidden_layers": 2, "first_k_dense_replace": 1, "intermediate_size": 256},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 128},
    # 128 + 16 rows to the latent of keys and values: the last block has 16.
    **{"kv_lora_rank": 128, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16},
    **{"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 128},
}
QUANTIZATION = {
    **{"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"},
    "weight_block_size": [128, 128],
}
PARTLY = "kv_a_proj_with_mqa.weight"
"""transformers takes blocks of 72 rows for it (findings/transformers-fp8-last-block-…sh)."""


def write_quantized(directory: Path) -> dict[str, Tensor]:
    """A model in bf16 whose projections are in FP8; the weights that they stand for."""
    torch.manual_seed(0)
    perturbed(native_model(AutoConfig.for_model(**FIELDS))).bfloat16().save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    expected = dict(tensors)
    for name in [name for name in tensors if "_proj" in name]:
        rows, columns = tensors[name].shape
        factors = torch.rand(-(-rows // 128), -(-columns // 128)) + 0.1
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = factors
        # Each block by itself.
        parts = [
            torch.cat(
                [block.float() * factors[i, j] for j, block in enumerate(row.split(128, 1))], 1
            )
            for i, row in enumerate(tensors[name].split(128))
        ]
        expected[name] = torch.cat(parts).bfloat16()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    changed = {**config, "quantization_config": QUANTIZATION}
    (directory / "config.json").write_text(json.dumps(changed))
    return expected


def test_an_export_has_numbers_times_factors(tmp_path: Path) -> None:
    expected = write_quantized(tmp_path / "theirs")
    with pytest.warns(UserWarning, match="matrices in FP8 are dequantised to bf16"):
        model = ZeroTPForCausalLM.from_pretrained(
            tmp_path / "theirs", Topology(world=1), dtype=torch.bfloat16
        )
    model.save_pretrained(tmp_path / "ours")
    exported = load_file(tmp_path / "ours" / "model.safetensors")
    assert exported.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(exported[name], tensor), name
    assert "quantization_config" not in json.loads((tmp_path / "ours/config.json").read_text())


def test_whole_blocks_are_what_transformers_dequantises(tmp_path: Path) -> None:
    write_quantized(tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=FineGrainedFP8Config(dequantize=True), dtype=torch.bfloat16
    )
    found = open_model(tmp_path, open_config(tmp_path)).state_dict()
    compared = 0
    for name, tensor in reference.state_dict().items():
        if not name.endswith(PARTLY):
            assert torch.equal(found[name].to(tensor.dtype), tensor), name
            compared += 1
    assert compared == len(found) - 2


@pytest.mark.filterwarnings("ignore:.*dequantised")
@pytest.mark.parametrize(("tensor", "expert"), [(2, 2), (4, 1)])
def test_a_rank_dequantises_its_slices(tmp_path: Path, tensor: int, expert: int) -> None:
    write_quantized(tmp_path)
    opened = ZeroTPForCausalLM.from_pretrained
    whole = dict(opened(tmp_path, Topology(world=1)).named_parameters())
    ranks = [
        dict(
            opened(tmp_path, Topology(tensor, expert=expert, world=4, rank=rank)).named_parameters()
        )
        for rank in range(4)
    ]
    for name, expected in whole.items():
        layout = layout_of(ranks[0][name])
        pieces = [of_rank[name].detach() for of_rank in ranks[: tensor * layout.experts]]
        assert torch.equal(layout.unshard(pieces), expected.detach()), name


@pytest.mark.filterwarnings("ignore:.*dequantised")
@pytest.mark.parametrize("change", ["none", "other shape", "other dtype"])
def test_broken_factors_are_refused(tmp_path: Path, change: str) -> None:
    write_quantized(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    factors = tensors.pop(f"{name}_scale_inv")
    if change == "other shape":
        tensors[f"{name}_scale_inv"] = torch.cat([factors, factors])
    elif change == "other dtype":
        tensors[f"{name}_scale_inv"] = factors.double()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    words = r"kv_b_proj\.weight in FP8: expected fp32 .*_scale_inv of shape \(1, 1\)"
    with pytest.raises(UserError, match=words) as caught:
        ZeroTPForCausalLM.from_pretrained(tmp_path, Topology(world=1))
    assert len(str(caught.value).splitlines()) == 1
