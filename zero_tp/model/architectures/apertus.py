"""apertus is Hugging Face's ApertusForCausalLM: plain MLPs with a learnt activation, and norms of
queries and keys.
"""

from __future__ import annotations

from collections.abc import Iterator

from transformers import PretrainedConfig

from zero_tp.model.architectures import common, llama_names
from zero_tp.model.architectures.spec import TransformerSpec
from zero_tp.model.architectures.table import Weight

XIELU = "xielu"
FIELDS = common.fields(
    sizes=("num_key_value_heads", "head_dim"),
    choices={"hidden_act": (*common.ACTIVATIONS, XIELU)},
    read=("pad_token_id", "attention_bias"),
    # Files have them; transformers' class reads none.
    fixed={
        "qk_norm": (True, "the class always has norms of queries and keys"),
        "post_norm": (False, "the class has norms before its branches"),
        "mlp_bias": (False, "the class has no such biases"),
        "hidden_dropout": (0.0, "the class has no such dropout"),
    },
    undeclared={"head_dim": int},
)


def spec(config: PretrainedConfig) -> TransformerSpec:
    """Return Llama's spec with this architecture's differences."""
    mlp = XIELU if config.hidden_act == XIELU else "mlp"
    return common.spec(config, mlp=mlp, query_key_norm="heads")


def weights(spec: TransformerSpec) -> tuple[Weight, ...]:
    """Return every parameter of a model of this spec."""
    listed = llama_names.weights(
        spec,
        mlp={"up": ("up_proj",), "down": ("down_proj",)},
        norms={"attention_norm": "attention_layernorm", "mlp_norm": "feedforward_layernorm"},
    )
    return (*listed, *_activation_weights()) if XIELU in spec.mlps else listed


def _activation_weights() -> Iterator[Weight]:
    ours, theirs = f"{llama_names.OUR_LAYER}mlp.activation", f"{llama_names.HF_LAYER}mlp.act_fn"
    for name in ("alpha_p", "alpha_n"):
        yield Weight(f"{ours}.{name}", f"{theirs}.{name}")
    for name in ("beta", "eps"):
        yield Weight(f"{ours}.{name}", f"{theirs}.{name}", "scalar", is_parameter=False)


ARCHITECTURE = common.architecture(FIELDS, spec, "ApertusForCausalLM", weights)
