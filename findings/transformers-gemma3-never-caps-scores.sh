#!/usr/bin/env bash
# transformers 5.24.0: Gemma 3 takes `attn_logit_softcapping`, keeps it in each attention module, and never applies it.
#
# Gemma 2, whose field it is, caps the scores under eager attention: cap · tanh(score / cap). A Gemma 3 with the field gives the logits
# of one without, under every attention, and no warning. `final_logit_softcapping` works in both.
#
# Seen: largest change of the logits by a cap of 0.05: Gemma 2 0.5 or more, Gemma 3 0.0.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 transformers==5.24.0 numpy
cd "$folder"
HOME="$folder" "$folder/env/bin/python" - <<'PY'
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig

SIZES = dict(hidden_size=32, intermediate_size=32, num_attention_heads=4, num_key_value_heads=4, head_dim=8, vocab_size=64)
TYPES = ["sliding_attention", "full_attention"]


def change(config_class, model_class, attention, field):
    logits = []
    for cap in (None, 0.05):
        config = config_class(
            **SIZES, num_hidden_layers=2, layer_types=TYPES, query_pre_attn_scalar=1, **{"final_logit_softcapping": None, field: cap}
        )
        config._attn_implementation = attention
        torch.manual_seed(1)
        model = model_class(config).eval()
        for parameter in model.parameters():
            parameter.data.normal_()
        logits.append(model(torch.arange(20)[None]).logits)
    return (logits[1] - logits[0]).abs().max().item()


gemma2 = change(Gemma2Config, Gemma2ForCausalLM, "eager", "attn_logit_softcapping")
gemma3 = [change(Gemma3TextConfig, Gemma3ForCausalLM, attention, "attn_logit_softcapping") for attention in ("eager", "sdpa")]
final = change(Gemma3TextConfig, Gemma3ForCausalLM, "eager", "final_logit_softcapping")
print("Gemma 2:", gemma2, " Gemma 3, eager and sdpa:", gemma3, " its final cap:", final)
assert gemma2 > 0.5 and final > 0.5
assert gemma3 == [0.0, 0.0]
PY
