"""gpt2: Hugging Face's GPT2LMHeadModel."""

from __future__ import annotations

from transformers import PretrainedConfig

from zero_tp.models.architectures.common import (
    ACTIVATIONS,
    OF_A_HEAD,
    TOKENS,
    activation,
    attention_of,
    dropout_of,
    whole_head_size,
)
from zero_tp.models.architectures.table import Architecture, Fields, Weight
from zero_tp.models.spec import Dropouts, TransformerSpec

FIELDS = Fields(
    sizes=("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner"),
    positive=("layer_norm_epsilon", "initializer_range"),
    dropouts=("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    choices={"activation_function": tuple(ACTIVATIONS)},
    read=("tie_word_embeddings",),
    fixed={
        "scale_attn_weights": (True, "attention always scales by 1/sqrt(head size)"),
        "scale_attn_by_inverse_layer_idx": (False, "attention is not scaled by the layer's index"),
        "reorder_and_upcast_attn": (False, "attention computes in the model's dtype"),
        "add_cross_attention": (False, "the model is a decoder alone"),
    },
    irrelevant={
        **TOKENS,
        "n_ctx": "the old name of n_positions, which is in every file beside it",
        "pad_token_id": "the class gives it no row of its own",
        **dict.fromkeys(
            (
                "summary_type",
                "summary_use_proj",
                "summary_activation",
                "summary_proj_to_labels",
                "summary_first_dropout",
            ),
            OF_A_HEAD,
        ),
    },
)


def spec(config: PretrainedConfig) -> TransformerSpec:
    """
    Raises:
        UserError: a field whose value is not computed.
    """
    return TransformerSpec(
        hidden=config.n_embd,
        layers=config.n_layer,
        heads=config.n_head,
        kv_heads=config.n_head,
        head_size=whole_head_size(config),
        mlp_size=config.n_inner or 4 * config.n_embd,
        vocabulary=config.vocab_size,
        positions=config.n_positions,
        norm="layer_norm",
        norm_epsilon=config.layer_norm_epsilon,
        position="learned",
        mlp="mlp",
        activation=activation(config.activation_function, "activation_function"),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        tied=config.tie_word_embeddings,
        init_std=config.initializer_range,
        residual_std=config.initializer_range / (2 * config.n_layer) ** 0.5,
        dropouts=Dropouts(
            dropout_of(config, "embd_pdrop"), dropout_of(config, "resid_pdrop"), dropout_of(config, "attn_pdrop")
        ),
        windows=(None,) * config.n_layer,
        attention=attention_of(config),
    )


_LAYER = "transformer.layers.{layer}."
_THEIRS = "transformer.h.{layer}."


def weights(spec: TransformerSpec) -> tuple[Weight, ...]:
    """Every parameter: it has them all, whatever its config."""
    return (
        Weight("transformer.embedding.word.weight", "transformer.wte.weight"),
        Weight("transformer.embedding.position.weight", "transformer.wpe.weight"),
        Weight(_LAYER + "attention_norm.weight", _THEIRS + "ln_1.weight"),
        Weight(_LAYER + "attention_norm.bias", _THEIRS + "ln_1.bias"),
        Weight(_LAYER + "attention.qkv.weight", _THEIRS + "attn.c_attn.weight", transposed=True),
        Weight(_LAYER + "attention.qkv.bias", _THEIRS + "attn.c_attn.bias"),
        Weight(_LAYER + "attention.output.weight", _THEIRS + "attn.c_proj.weight", transposed=True),
        Weight(_LAYER + "attention.output.bias", _THEIRS + "attn.c_proj.bias"),
        Weight(_LAYER + "mlp_norm.weight", _THEIRS + "ln_2.weight"),
        Weight(_LAYER + "mlp_norm.bias", _THEIRS + "ln_2.bias"),
        Weight(_LAYER + "mlp.up.weight", _THEIRS + "mlp.c_fc.weight", transposed=True),
        Weight(_LAYER + "mlp.up.bias", _THEIRS + "mlp.c_fc.bias"),
        Weight(_LAYER + "mlp.down.weight", _THEIRS + "mlp.c_proj.weight", transposed=True),
        Weight(_LAYER + "mlp.down.bias", _THEIRS + "mlp.c_proj.bias"),
        Weight("transformer.final_norm.weight", "transformer.ln_f.weight"),
        Weight("transformer.final_norm.bias", "transformer.ln_f.bias"),
        Weight("head.weight", "lm_head.weight"),
    )


ARCHITECTURE = Architecture(
    fields=FIELDS,
    translate=spec,
    weights=weights,
    tied={"lm_head.weight": "transformer.wte.weight"},
    native_class="GPT2LMHeadModel",
    base_prefix="transformer.",
    old=(r"h\.\d+\.attn\.(masked_)?bias",),  # the causal mask and its value
)
