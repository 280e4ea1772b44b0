"""starcoder2: Hugging Face's Starcoder2ForCausalLM (StarCoder 2), with LayerNorm, plain MLPs and biases everywhere."""

from __future__ import annotations

from transformers import PretrainedConfig

from zero_tp.models.architectures.common import (
    ACTIVATIONS,
    ROPE,
    ROPE_UNDECLARED,
    TOKENS,
    activation,
    attention_of,
    dropout_of,
    rotary,
)
from zero_tp.models.architectures.llama_like import (
    EMBEDDING,
    HEAD,
    architecture,
    attention_weights,
    grouped_heads,
    layer_weights,
)
from zero_tp.models.architectures.table import Fields, Weight
from zero_tp.models.spec import Dropouts, TransformerSpec

FIELDS = Fields(
    sizes=(
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "sliding_window",
    ),
    positive=("initializer_range", "norm_epsilon"),
    dropouts=("attention_dropout", "residual_dropout", "embedding_dropout"),
    choices={"hidden_act": tuple(ACTIVATIONS)},
    read=("tie_word_embeddings", *ROPE, "use_bias", "pad_token_id"),
    # What the files of the first release say besides, and the class never asks.
    fixed={
        "mlp_type": ("default", "the MLP is a plain one"),
        "norm_type": ("layer_norm", "the norms are LayerNorm"),
        "scale_attn_weights": (True, "attention always scales by 1/sqrt(head size)"),
    },
    irrelevant={
        **TOKENS,
        "layer_norm_epsilon": "norm_epsilon decides",
        "attention_softmax_in_fp32": "the softmax is computed in fp32",
        "scale_attention_softmax_in_fp32": "the softmax is computed in fp32",
    },
    undeclared={**ROPE_UNDECLARED, "head_dim": int},
)


def spec(config: PretrainedConfig) -> TransformerSpec:
    """
    Raises:
        UserError: a field whose value is not computed.
    """
    heads, kv_heads, head_size = grouped_heads(config)
    return TransformerSpec(
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        mlp_size=config.intermediate_size,
        vocabulary=config.vocab_size,
        positions=config.max_position_embeddings,
        norm="layer_norm",
        norm_epsilon=config.norm_epsilon,
        position="rotary",
        rotary=rotary(config, head_size),
        mlp="mlp",
        activation=activation(config.hidden_act, "hidden_act"),
        qkv_bias=config.use_bias,
        output_bias=config.use_bias,
        mlp_bias=config.use_bias,
        tied=config.tie_word_embeddings,
        padding_token=config.pad_token_id,
        init_std=config.initializer_range,
        residual_std=config.initializer_range,
        dropouts=Dropouts(
            dropout_of(config, "embedding_dropout"),
            dropout_of(config, "residual_dropout"),
            dropout_of(config, "attention_dropout"),
        ),
        windows=(config.sliding_window,) * config.num_hidden_layers,
        attention=attention_of(config),
    )


def weights(spec: TransformerSpec) -> tuple[Weight, ...]:
    """Every parameter of a model of this spec."""
    return (
        EMBEDDING,
        *layer_weights("attention_norm", "input_layernorm", bias=True),
        *attention_weights(spec),
        *layer_weights("mlp_norm", "post_attention_layernorm", bias=True),
        *layer_weights("mlp.up", "mlp.c_fc", bias=spec.mlp_bias),
        *layer_weights("mlp.down", "mlp.c_proj", bias=spec.mlp_bias),
        Weight("transformer.final_norm.weight", "model.norm.weight"),
        Weight("transformer.final_norm.bias", "model.norm.bias"),
        HEAD,
    )


ARCHITECTURE = architecture(FIELDS, spec, "Starcoder2ForCausalLM", weights)
