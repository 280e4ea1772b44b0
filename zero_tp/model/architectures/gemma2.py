"""gemma2 is Hugging Face's Gemma2ForCausalLM: norms of 1 + w before and after each branch, scaled
embeddings, and soft caps of scores and logits.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from transformers import PretrainedConfig

from zero_tp.model.architectures import common, llama_names
from zero_tp.model.architectures.fields import Fields
from zero_tp.model.architectures.rotary import rotaries
from zero_tp.model.architectures.spec import TransformerSpec


def fields(
    *, positive: tuple[str, ...] = (), read: tuple[str, ...] = (), **differences: Any
) -> Fields:
    """Return the fields that Gemma 2 and 3 have."""
    return common.fields(
        sizes=("num_key_value_heads", "head_dim", "sliding_window"),
        positive=("query_pre_attn_scalar", "final_logit_softcapping", *positive),
        activation="hidden_activation",
        choices={"layer_types": (common.FULL, common.SLIDING)},
        read=("pad_token_id", "attention_bias", *read),
        **differences,
    )


def scale_in_dtype(scale: float, dtype: torch.dtype) -> float:
    """Return the scale rounded to a dtype, as the class multiplies."""
    return torch.tensor(scale, dtype=dtype).item()


def spec(config: PretrainedConfig, *, by_type: bool = False, **differences: Any) -> TransformerSpec:
    """Return Llama's spec with the differences of Gemma 2, and those given.

    Args:
        by_type: see `rotaries`.
    """
    common.require_window(config)
    return common.spec(
        config,
        norm="offset_rms_norm",
        layer="sandwich",
        activation=common.ACTIVATIONS[config.hidden_activation],
        rotaries=rotaries(config, common.head_size_of(config), by_type=by_type),
        attention_scale=config.query_pre_attn_scalar**-0.5,
        score_cap=config.attn_logit_softcapping,
        logit_cap=config.final_logit_softcapping,
        embedding_scale=partial(scale_in_dtype, config.hidden_size**0.5),
        **differences,
    )


FIELDS = fields(positive=("attn_logit_softcapping",))
WEIGHTS = partial(llama_names.weights, norms=llama_names.SANDWICH_NORM_NAMES)
ARCHITECTURE = common.architecture(FIELDS, spec, "Gemma2ForCausalLM", WEIGHTS)
