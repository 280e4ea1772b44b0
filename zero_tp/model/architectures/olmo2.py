"""olmo2 is Hugging Face's Olmo2ForCausalLM: norms after the branches, and a norm of all heads' Q
and K together.
"""

from __future__ import annotations

from functools import partial

from transformers import PretrainedConfig

from zero_tp.model.architectures import common, llama_names
from zero_tp.model.architectures.rotary import rotaries
from zero_tp.model.architectures.spec import TransformerSpec

FIELDS = common.fields(
    sizes=("num_key_value_heads", "head_dim"),
    read=("pad_token_id", "attention_bias"),
    undeclared={"head_dim": int},
)


def spec(config: PretrainedConfig, *, by_type: bool = False) -> TransformerSpec:
    """Return Llama's spec with the differences of OLMo 2 and 3.

    Args:
        by_type: see `rotaries`.
    """
    return common.spec(
        config,
        norm="wide_rms_norm",
        layer="output_norm",
        query_key_norm="whole",
        rotaries=rotaries(config, common.head_size_of(config), by_type=by_type, arithmetic="fp32"),
    )


WEIGHTS = partial(llama_names.weights, norms=llama_names.OUTPUT_NORM_NAMES)
ARCHITECTURE = common.architecture(FIELDS, spec, "Olmo2ForCausalLM", WEIGHTS)
