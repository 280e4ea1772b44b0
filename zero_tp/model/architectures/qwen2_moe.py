"""qwen2_moe is Hugging Face's Qwen2MoeForCausalLM: one expert of each layer computes every
token.
"""

from __future__ import annotations

from zero_tp.model.architectures import common

SIZES = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step")
READ = (
    "pad_token_id",
    "output_router_logits",
    "router_aux_loss_coef",
    "norm_topk_prob",
    "mlp_only_layers",
)

FIELDS = common.fields(
    sizes=("num_key_value_heads", "head_dim", "shared_expert_intermediate_size", *SIZES),
    choices={"layer_types": (common.FULL, common.SLIDING)},
    read=(*READ, "qkv_bias", "use_sliding_window", "sliding_window", "max_window_layers"),
    undeclared={"head_dim": int},
)
ARCHITECTURE = common.architecture(FIELDS, common.spec, "Qwen2MoeForCausalLM")
