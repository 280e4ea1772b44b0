"""exaone4 is Hugging Face's Exaone4ForCausalLM: norms after the branches and of each head of Q and
K; in a model with windows, layers without one do not rotate.
"""

from __future__ import annotations

from functools import partial

from transformers import PretrainedConfig

from zero_tp.model.architectures import common, llama_names
from zero_tp.model.architectures.spec import TransformerSpec

FIELDS = common.fields(
    sizes=("num_key_value_heads", "head_dim", "sliding_window"),
    choices={"layer_types": (common.FULL, common.SLIDING)},
    irrelevant={"sliding_window_pattern": "the config class has made layer_types of it"},
    undeclared={"head_dim": int},
)


def spec(config: PretrainedConfig) -> TransformerSpec:
    """Return Llama's spec with this architecture's differences."""
    rotates = [
        config.sliding_window is None or kind == common.SLIDING for kind in config.layer_types
    ]
    return common.spec(
        config,
        layer="output_norm",
        query_key_norm="heads",
        rotates=rotates,
    )


WEIGHTS = partial(llama_names.weights, norms=llama_names.OUTPUT_NORM_NAMES)
ARCHITECTURE = common.architecture(FIELDS, spec, "Exaone4ForCausalLM", WEIGHTS)
