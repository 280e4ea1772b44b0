"""nanochat is Hugging Face's NanoChatForCausalLM: norms without weights, also of the embedding and
of each head of Q and K after the rotation, plain MLPs of relu², and a soft cap of the logits.
"""

from __future__ import annotations

import math
from functools import partial

from transformers import PretrainedConfig

from zero_tp.model.architectures import common, llama_names
from zero_tp.model.architectures.rotary import rotaries
from zero_tp.model.architectures.spec import TransformerSpec

FIELDS = common.fields(
    sizes=("num_key_value_heads", "head_dim"),
    positive=("final_logit_softcapping",),
    read=("pad_token_id", "attention_bias"),
    undeclared={"head_dim": int},
)


def spec(config: PretrainedConfig) -> TransformerSpec:
    """Return Llama's spec with this architecture's differences."""
    return common.spec(
        config,
        norm="weightless_rms_norm",
        mlp="mlp",
        query_key_norm="heads",
        rotates_before_norm=True,
        embedding_norm=True,
        rotaries=rotaries(config, common.head_size_of(config), backwards=True),
        logit_cap=config.final_logit_softcapping,
        attention_output_std=config.initializer_range / math.sqrt(2 * config.num_hidden_layers),
    )


WEIGHTS = partial(llama_names.weights, mlp={"up": ("fc1",), "down": ("fc2",)})
ARCHITECTURE = common.architecture(FIELDS, spec, "NanoChatForCausalLM", WEIGHTS)
