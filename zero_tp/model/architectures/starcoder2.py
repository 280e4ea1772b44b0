"""starcoder2 is Hugging Face's Starcoder2ForCausalLM (StarCoder 2), with LayerNorm, plain MLPs,
all biases.
"""

from __future__ import annotations

from transformers import PretrainedConfig

from zero_tp.model.architectures import common, llama_names
from zero_tp.model.architectures.spec import TransformerSpec
from zero_tp.model.architectures.table import Weight

FIELDS = common.fields(
    sizes=("num_key_value_heads", "head_dim", "sliding_window"),
    epsilon="norm_epsilon",
    dropouts=("residual_dropout", "embedding_dropout"),
    read=("use_bias", "pad_token_id"),
    # Fields of the first release's files, which the class never reads.
    fixed={
        "mlp_type": ("default", "the MLP is a plain one"),
        "norm_type": ("layer_norm", "the norms are LayerNorm"),
        "scale_attn_weights": (True, "attention always scales by 1/sqrt(head size)"),
    },
    irrelevant={
        "layer_norm_epsilon": "norm_epsilon decides",
        "attention_softmax_in_fp32": "the softmax is computed in fp32",
        "scale_attention_softmax_in_fp32": "the softmax is computed in fp32",
    },
    undeclared={"head_dim": int},
)


def spec(config: PretrainedConfig) -> TransformerSpec:
    """Return Llama's spec with this architecture's differences."""
    return common.spec(
        config,
        norm="layer_norm",
        norm_epsilon=config.norm_epsilon,
        mlp="mlp",
        attention_bias=config.use_bias,
        mlp_bias=config.use_bias,
        dropouts=common.dropouts(
            config,
            embedding="embedding_dropout",
            residual="residual_dropout",
            attention="attention_dropout",
        ),
    )


def weights(spec: TransformerSpec) -> tuple[Weight, ...]:
    """Return every parameter of a model of this spec."""
    return llama_names.weights(spec, mlp={"up": ("c_fc",), "down": ("c_proj",)})


ARCHITECTURE = common.architecture(FIELDS, spec, "Starcoder2ForCausalLM", weights)
