"""seed_oss is Hugging Face's SeedOssForCausalLM: Q, K and V have biases, the output projection may
have one.
"""

from __future__ import annotations

from transformers import PretrainedConfig

from zero_tp.model.architectures import common
from zero_tp.model.architectures.spec import TransformerSpec

FIELDS = common.fields(
    sizes=("num_key_value_heads", "head_dim"),
    dropouts=("residual_dropout",),
    read=("pad_token_id", "attention_bias", "attention_out_bias", "mlp_bias"),
    irrelevant={"pretraining_tp": "the class never reads it"},
)


def spec(config: PretrainedConfig) -> TransformerSpec:
    """Return Llama's spec with this architecture's differences."""
    return common.spec(
        config,
        output_bias=config.attention_out_bias,
        dropouts=common.dropouts(
            config, residual="residual_dropout", attention="attention_dropout"
        ),
    )


ARCHITECTURE = common.architecture(FIELDS, spec, "SeedOssForCausalLM")
