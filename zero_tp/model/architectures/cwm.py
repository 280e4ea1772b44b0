"""cwm is Hugging Face's CwmForCausalLM: Llama with windows in some layers."""

from __future__ import annotations

from functools import partial

from zero_tp.model.architectures import common

FIELDS = common.fields(
    sizes=("num_key_value_heads", "head_dim", "sliding_window"),
    choices={"layer_types": (common.FULL, common.SLIDING)},
    read=("pad_token_id", "mlp_bias"),
    irrelevant={"pretraining_tp": "the class never reads it"},
)
ARCHITECTURE = common.architecture(
    FIELDS, partial(common.spec, attention_bias=False), "CwmForCausalLM"
)
