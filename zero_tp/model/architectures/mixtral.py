"""mixtral is Hugging Face's MixtralForCausalLM: every MLP is a mixture of experts."""

from __future__ import annotations

from functools import partial

from zero_tp.model.architectures import common, llama_names

FIELDS = common.fields(
    sizes=(
        "num_key_value_heads",
        "head_dim",
        "sliding_window",
        "num_experts_per_tok",
        "num_local_experts",
    ),
    read=("pad_token_id", "output_router_logits", "router_aux_loss_coef"),
)
# The published names: w1 is the gate, w3 up, w2 down.
WEIGHTS = partial(
    llama_names.weights,
    block="block_sparse_moe",
    linears={"gate_up": ("w1", "w3"), "down": ("w2",)},
)
ARCHITECTURE = common.architecture(
    FIELDS, partial(common.spec, mlp="experts"), "MixtralForCausalLM", WEIGHTS
)
