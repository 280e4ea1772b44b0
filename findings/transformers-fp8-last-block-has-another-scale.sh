#!/usr/bin/env bash
# transformers 5.24.0: FP8 weights whose rows are no multiple of the block are dequantised with wrong scales, without an error.
#
# DeepSeek-V3's files scale blocks of 128 × 128 (`weight_block_size`); the last block of a matrix may be smaller. With
# `FineGrainedFP8Config(dequantize=True)` the size of a block is not taken from the config: it is rows divided by rows of scales.
# The projection to keys' and values' latent has kv_lora_rank + qk_rope_head_dim rows. With 128 + 64 there are 2 rows of scales,
# so blocks of 96: rows 96 to 127 get the next block's scales. With 512 + 64, as in DeepSeek-V3, there are 5, which do not
# divide 576: loading ends with an error.
#
# Seen: 160 of 192 rows are equal to weight · scale; with 576 rows the load ends with an error.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 transformers==5.24.0 accelerate==1.14.0
cd "$folder"
export HOME="$folder"
"$folder/env/bin/python" - <<'PY'
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config

BLOCK = 128
LATENT = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"


def write(folder, latent):
    """A model of one dense layer, its matrices in FP8 as DeepSeek-V3's; the latent's, dequantised."""
    config = AutoConfig.for_model(
        "deepseek_v3", vocab_size=64, hidden_size=256, intermediate_size=256,
        num_hidden_layers=1, first_k_dense_replace=1, num_attention_heads=2,
        num_key_value_heads=2, q_lora_rank=None, kv_lora_rank=latent, qk_nope_head_dim=64,
        qk_rope_head_dim=64, v_head_dim=64, n_routed_experts=2, n_group=1, topk_group=1,
        num_experts_per_tok=1, moe_intermediate_size=128,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "_proj" in name]:
        rows, columns = tensors[name].shape
        scale = torch.rand(-(-rows // BLOCK), -(-columns // BLOCK)) + 0.1
        tensors[name] = torch.randn(rows, columns).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    written = json.loads((folder / "config.json").read_text())
    written["quantization_config"] = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    }
    (folder / "config.json").write_text(json.dumps(written))
    scale = tensors[f"{LATENT}_scale_inv"].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    weight = tensors[LATENT].float()
    return (weight * scale[: weight.shape[0], : weight.shape[1]]).bfloat16()


def read(folder):
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=FineGrainedFP8Config(dequantize=True), dtype=torch.bfloat16
    )
    return model.state_dict()[LATENT]


torch.manual_seed(0)
expected = write(Path("small"), 128)
rows = (read("small") == expected).all(1)
print(f"192 rows: {int(rows.sum())} are weight times scale; wrong are {(~rows).nonzero().flatten().tolist()}")
assert (~rows).nonzero().flatten().tolist() == list(range(96, 128))
write(Path("published"), 512)
try:
    read("published")
except Exception as error:
    print(f"576 rows: {type(error).__name__}: {str(error).splitlines()[0][:150]}")
else:
    raise AssertionError("576 rows were read")
PY
