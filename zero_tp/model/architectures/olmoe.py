"""olmoe is Hugging Face's OlmoeForCausalLM: experts in every layer, and a norm of all heads' Q
and K together.
"""

from __future__ import annotations

from functools import partial

from zero_tp.model.architectures import common

FIELDS = common.fields(
    sizes=("num_key_value_heads", "num_experts", "num_experts_per_tok"),
    positive=("clip_qkv",),
    read=(
        "pad_token_id",
        "attention_bias",
        "output_router_logits",
        "router_aux_loss_coef",
        "norm_topk_prob",
    ),
)
SPEC = partial(common.spec, mlp="experts", query_key_norm="whole")
ARCHITECTURE = common.architecture(FIELDS, SPEC, "OlmoeForCausalLM")
