"""gpt-oss's published files hold experts in MXFP4: what is read of them is what transformers
dequantises, whole and on ranks, and an export is whole again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.utils.quantization_config import Mxfp4Config

from tests.support.native import native_model, perturbed
from zero_tp.base.errors import UserError
from zero_tp.model.huggingface import ZeroTPForCausalLM
from zero_tp.model.weights.mxfp4 import dequantized
from zero_tp.model.weights.native import open_config, open_model
from zero_tp.parallel.layout import layout_of
from zero_tp.parallel.topology import Topology

FIELDS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "swiglu_limit": 0.5,
}
QUANTIZATION = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def packed(shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Random blocks and scales of a layer's matrices [E, out, in]; every byte comes up."""
    experts, outputs, inputs = shape
    blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
    scales = torch.randint(110, 130, (experts, outputs, inputs // 32), dtype=torch.uint8)
    return blocks, scales


def write_quantized(directory: Path) -> dict[str, Tensor]:
    """A model in bf16 whose experts are in MXFP4; its tensors."""
    torch.manual_seed(0)
    model = perturbed(native_model(AutoConfig.for_model(**FIELDS))).bfloat16()
    model.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj")]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks, scales = packed((experts, outputs, inputs))
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    changed = {**config, "quantization_config": QUANTIZATION}
    (directory / "config.json").write_text(json.dumps(changed))
    return tensors


def test_every_number_and_scale_is_that_of_transformers() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(1, 252, 1, 1)
    scales = torch.arange(252, dtype=torch.uint8).view(1, 252, 1).repeat(1, 1, 16)
    expected = convert_moe_packed_tensors(blocks, scales).mT
    assert torch.equal(dequantized(blocks, scales), expected)
    assert expected.isfinite().all() and len(expected.unique()) > 1000


def test_a_model_reads_what_transformers_dequantises(tmp_path: Path) -> None:
    write_quantized(tmp_path / "theirs")
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path / "theirs", quantization_config=Mxfp4Config(dequantize=True)
    )
    with pytest.warns(UserWarning, match="experts in MXFP4 are dequantised to bf16"):
        model = ZeroTPForCausalLM.from_pretrained(
            tmp_path / "theirs", Topology(world=1), dtype=torch.bfloat16
        )
    model.save_pretrained(tmp_path / "ours")
    exported = load_file(tmp_path / "ours" / "model.safetensors")
    expected = reference.state_dict()
    assert exported.keys() == expected.keys()
    for name, tensor in expected.items():
        assert exported[name].dtype == torch.bfloat16
        assert torch.equal(exported[name], tensor), name
    assert "quantization_config" not in json.loads((tmp_path / "ours/config.json").read_text())


def test_an_evaluation_opens_what_transformers_dequantises(tmp_path: Path) -> None:
    write_quantized(tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=Mxfp4Config(dequantize=True)
    )
    found = open_model(tmp_path, open_config(tmp_path)).state_dict()
    for name, tensor in reference.state_dict().items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.filterwarnings("ignore:.*dequantised")
@pytest.mark.parametrize(("tensor", "expert"), [(2, 2), (4, 1)])
def test_a_rank_dequantises_its_slices(tmp_path: Path, tensor: int, expert: int) -> None:
    """4 ranks' rows of gate and up, interleaved in files, and columns that no group of 32 ends."""
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
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("no scales", "expected uint8 and .*gate_up_proj_scales of shape"),
        ("other groups", "and 16 bytes a group"),
        ("both", r"down_proj_blocks and .*down_proj are the same weight"),
        ("other method", "quantization_config: quantized weights; give whole ones"),
        ("infinite", "holds NaN or Inf"),
    ],
)
def test_broken_blocks_are_refused(tmp_path: Path, change: str, words: str) -> None:
    tensors = write_quantized(tmp_path)
    stem = "model.layers.1.mlp.experts"
    if change == "no scales":
        del tensors[f"{stem}.gate_up_proj_scales"]
    elif change == "other groups":
        tensors[f"{stem}.down_proj_scales"] = tensors[f"{stem}.down_proj_scales"][..., :-1]
    elif change == "both":
        tensors[f"{stem}.down_proj"] = torch.zeros(4, 96, 64, dtype=torch.bfloat16)
    elif change == "infinite":
        tensors[f"{stem}.down_proj_scales"][0, 0, 0] = 255
    else:
        config = json.loads((tmp_path / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "bitsandbytes"}
        (tmp_path / "config.json").write_text(json.dumps(config))
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=words) as caught:
        ZeroTPForCausalLM.from_pretrained(tmp_path, Topology(world=1))
    assert len(str(caught.value).splitlines()) == 1
