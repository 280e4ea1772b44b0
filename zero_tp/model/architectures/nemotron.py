"""nemotron is Hugging Face's NemotronForCausalLM: LayerNorm times 1 + w, plain MLPs of relu², and a
part of each head rotates.
"""

from __future__ import annotations

from functools import partial

from transformers import PretrainedConfig

from zero_tp.model.architectures import common, llama_names
from zero_tp.model.architectures.spec import TransformerSpec

FIELDS = common.fields(
    sizes=("num_key_value_heads", "head_dim"),
    epsilon="norm_eps",
    read=("pad_token_id", "attention_bias", "mlp_bias"),
)


def spec(config: PretrainedConfig) -> TransformerSpec:
    """Return Llama's spec with this architecture's differences."""
    return common.spec(
        config,
        partial_rotary=True,
        norm="offset_layer_norm",
        norm_epsilon=config.norm_eps,
        mlp="mlp",
    )


WEIGHTS = partial(llama_names.weights, mlp={"up": ("up_proj",), "down": ("down_proj",)})
ARCHITECTURE = common.architecture(FIELDS, spec, "NemotronForCausalLM", WEIGHTS)
