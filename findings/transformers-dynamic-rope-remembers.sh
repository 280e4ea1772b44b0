#!/usr/bin/env bash
# transformers 5.24.0: with dynamic rope, the logits of a text depend on the texts that the model has read before.
#
# A batch longer than the longest so far changes the frequencies, and they stay: a shorter text (still beyond the pretrained
# length) gets other logits afterwards. A text within the pretrained length resets them. So an evaluation depends on its order.
#
# Seen: 20 tokens, then 48, then the same 20: logits differ by about 2e-4 (a random model); after 8 tokens, equal bit for bit again.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 transformers==5.24.0
cd "$folder"
HOME="$folder" HF_HUB_OFFLINE=1 "$folder/env/bin/python" - <<'PY'
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=16,
    rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
)
model = LlamaForCausalLM(config).eval()
text, longer = torch.randint(64, (1, 20)), torch.randint(64, (1, 48))
with torch.no_grad():
    first = model(text).logits
    model(longer)
    after_a_longer_text = model(text).logits
    model(text[:, :8])
    after_a_short_text = model(text).logits
difference = float((after_a_longer_text - first).abs().max())
print("difference after a longer text:", difference)
assert difference > 1e-5, difference
assert torch.equal(after_a_short_text, first)
PY
