#!/usr/bin/env bash
# transformers 5.24.0: configs whose rotary parameters are nested by the type of layer (Gemma 3, OLMo 3) drop what other configs read.
#
# Three spellings that LlamaConfig understands leave positions as they were. At most a log line names an unrecognized key "factor":
#   - `rope_scaling` with the key "type" and not "rope_type": the class merges it into its default {"rope_type": "default"}, which wins;
#   - `rope_parameters` that are not nested: they stay beside the nested defaults, which the model reads;
#   - `rope_theta` of OLMo 3 reaches layers with full attention only. Both types read the field by `pop`, so the second finds the default.
#
# Seen: frequency 1 of Gemma 3's full layers 0.03162 with and without linear scaling by 8, which gives 0.00395 under "rope_type";
# thetas of OLMo 3 given 1000: full 1000.0, sliding 500000.0.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 transformers==5.24.0 numpy
cd "$folder"
HOME="$folder" "$folder/env/bin/python" - <<'PY'
from transformers import Gemma3TextConfig, LlamaConfig, Olmo3Config
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

SIZES = dict(hidden_size=32, num_attention_heads=4, head_dim=8, num_hidden_layers=2)
THETA = {"rope_theta": 1e6}
LINEAR = {"type": "linear", "factor": 8.0}
NAMED = {"rope_type": "linear", "factor": 8.0}


def gemma(**fields):
    config = Gemma3TextConfig(layer_types=["full_attention"] * 2, **SIZES, **fields)
    return round(Gemma3RotaryEmbedding(config).full_attention_inv_freq[1].item(), 5)


def llama(**fields):
    return round(LlamaRotaryEmbedding(LlamaConfig(**SIZES, **fields)).inv_freq[1].item(), 5)


print("Llama:", llama(**THETA), llama(**THETA, rope_scaling={**LINEAR}), llama(rope_parameters={**THETA, **NAMED}))
print("Gemma 3:", gemma(), gemma(rope_scaling={**LINEAR}), gemma(rope_parameters={**THETA, **NAMED}))
print("Gemma 3, rope_type:", gemma(rope_scaling={**NAMED}))
assert llama(**THETA) == 0.03162
assert llama(**THETA, rope_scaling={**LINEAR}) == llama(rope_parameters={**THETA, **NAMED}) == 0.00395
assert gemma(rope_scaling={**NAMED}) == 0.00395
assert gemma() == gemma(rope_scaling={**LINEAR}) == gemma(rope_parameters={**THETA, **NAMED}) == 0.03162

thetas = {kind: one["rope_theta"] for kind, one in Olmo3Config(**SIZES, rope_theta=1000.0).rope_parameters.items()}
print("OLMo 3:", thetas)
assert thetas == {"sliding_attention": 500000.0, "full_attention": 1000.0}
PY
