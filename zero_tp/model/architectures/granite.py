"""granite is Hugging Face's GraniteForCausalLM: Llama with multipliers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PretrainedConfig

from zero_tp.model.architectures import common
from zero_tp.model.architectures.spec import TransformerSpec

MULTIPLIERS = (
    "embedding_multiplier",
    "attention_multiplier",
    "residual_multiplier",
    "logits_scaling",
)
FIELDS = common.fields(
    sizes=("num_key_value_heads", "head_dim"),
    positive=MULTIPLIERS,
    read=("pad_token_id", "attention_bias", "mlp_bias"),
    undeclared={"head_dim": int},
)


def spec(config: PretrainedConfig, **overrides: Any) -> TransformerSpec:
    """Return Llama's spec with this architecture's differences.

    Args:
        overrides: as for `common.spec`.
    """

    def embedding_scale(dtype: torch.dtype) -> float:
        return float(config.embedding_multiplier)

    return common.spec(
        config,
        layer="scaled",
        residual_scale=config.residual_multiplier,
        attention_scale=config.attention_multiplier,
        logit_scale=1.0 / config.logits_scaling,
        embedding_scale=embedding_scale,
        **overrides,
    )


ARCHITECTURE = common.architecture(FIELDS, spec, "GraniteForCausalLM")
