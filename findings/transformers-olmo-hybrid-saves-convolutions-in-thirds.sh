#!/usr/bin/env bash
# transformers 5.24.0: `save_pretrained` of OLMo Hybrid writes convolutions of other sizes than the projections that they follow.
#
# A layer of linear attention convolves queries, keys and values, by one `conv1d` of the class. Files have three, q_conv1d,
# k_conv1d and v_conv1d, and reading joins them. Saving cuts the joined one into thirds, although a value head may be wider than
# a key head (twice in OLMo Hybrid 7B). transformers reads its own files back; whoever reads them by name, or a channel of
# q_conv1d as that of q_proj, gets keys' and values' channels with the queries'.
#
# Seen: with 4 heads of 8 and values of 16, q_proj, k_proj and v_proj have 32, 32 and 64 rows; the convolutions have 43, 43, 42.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 transformers==5.24.0 accelerate==1.14.0
cd "$folder"
export HOME="$folder"
"$folder/env/bin/python" - <<'PY'
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

config = AutoConfig.for_model(
    "olmo_hybrid", vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=4, layer_types=["linear_attention", "full_attention"],
    linear_num_key_heads=4, linear_num_value_heads=4, linear_key_head_dim=8,
    linear_value_head_dim=16, pad_token_id=0,
)
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(config)
model.save_pretrained("saved")
tensors = load_file("saved/model.safetensors")
layer = "model.layers.0.linear_attn."
projections = [len(tensors[f"{layer}{part}_proj.weight"]) for part in "qkv"]
convolutions = [len(tensors[f"{layer}{part}_conv1d.weight"]) for part in "qkv"]
print(f"rows of projections {projections}, of convolutions {convolutions}")
assert projections == [32, 32, 64]
assert convolutions == [43, 43, 42]
whole = model.state_dict()[f"{layer}conv1d.weight"]
same = torch.equal(tensors[f"{layer}q_conv1d.weight"][:32], whole[:32])
mixed = torch.equal(tensors[f"{layer}q_conv1d.weight"][32:], whole[32:43])
print(f"q_conv1d begins with the queries' channels: {same}; ends with keys': {mixed}")
assert same and mixed
PY
