"""qwen2 is Hugging Face's Qwen2ForCausalLM.

Q, K and V have biases, and some layers may have sliding windows.
"""

from __future__ import annotations

from functools import partial

from zero_tp.model.architectures import common

FIELDS = common.fields(
    sizes=("num_key_value_heads", "sliding_window", "head_dim"),
    choices={"layer_types": (common.FULL, common.SLIDING)},
    read=("pad_token_id", "use_sliding_window", "max_window_layers"),
    fixed={"use_mrope": (False, "of models that see images")},
    undeclared={"head_dim": int},
)
ARCHITECTURE = common.architecture(FIELDS, partial(common.spec, qkv_bias=True), "Qwen2ForCausalLM")
