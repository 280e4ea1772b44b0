"""arcee is Hugging Face's ArceeForCausalLM: Llama with plain MLPs of relu²."""

from __future__ import annotations

from functools import partial

from zero_tp.model.architectures import common, llama_names

FIELDS = common.fields(
    sizes=("num_key_value_heads", "head_dim"),
    read=("pad_token_id", "attention_bias", "mlp_bias"),
)
WEIGHTS = partial(llama_names.weights, mlp={"up": ("up_proj",), "down": ("down_proj",)})
ARCHITECTURE = common.architecture(
    FIELDS, partial(common.spec, mlp="mlp"), "ArceeForCausalLM", WEIGHTS
)
