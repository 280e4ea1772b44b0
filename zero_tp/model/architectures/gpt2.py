"""gpt2 is Hugging Face's GPT2LMHeadModel."""

from __future__ import annotations

from transformers import PretrainedConfig

from zero_tp.model.architectures import common, llama_names
from zero_tp.model.architectures.fields import (
    FIXED_IN_DECODERS,
    IRRELEVANT_IN_DECODERS,
    UNTRAINED_HEAD,
    Fields,
)
from zero_tp.model.architectures.spec import TransformerSpec
from zero_tp.model.architectures.table import Architecture, Weight

FIELDS = Fields(
    sizes=("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner"),
    positive=("layer_norm_epsilon", "initializer_range"),
    dropouts=("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    choices={"activation_function": tuple(common.ACTIVATIONS)},
    read=("tie_word_embeddings",),
    fixed=FIXED_IN_DECODERS,
    irrelevant={
        **IRRELEVANT_IN_DECODERS,
        "n_ctx": "old name of n_positions; files have both",
        "pad_token_id": "the class has no padding row",
        **dict.fromkeys(
            (
                "summary_type",
                "summary_use_proj",
                "summary_activation",
                "summary_proj_to_labels",
                "summary_first_dropout",
            ),
            UNTRAINED_HEAD,
        ),
    },
)


def spec(config: PretrainedConfig) -> TransformerSpec:
    """Return Llama's spec with this architecture's differences."""
    return common.spec(
        config,
        mlp_size=config.n_inner or 4 * config.n_embd,
        norm="layer_norm",
        norm_epsilon=config.layer_norm_epsilon,
        position="learned",
        mlp="mlp",
        activation=common.ACTIVATIONS[config.activation_function],
        attention_bias=True,
        mlp_bias=True,
        padding_token=None,
        word_token_types=True,
        # Each layer adds two branches to the residual stream (arXiv 1909.08053), as in
        # transformers' class.
        residual_std=config.initializer_range / (2 * config.n_layer) ** 0.5,
        dropouts=common.dropouts(
            config, embedding="embd_pdrop", residual="resid_pdrop", attention="attn_pdrop"
        ),
    )


def weights(spec: TransformerSpec) -> tuple[Weight, ...]:
    """Return every parameter; the config does not change the list."""
    listed = [
        Weight("transformer.embedding.word.weight", "transformer.wte.weight"),
        Weight("transformer.embedding.position.weight", "transformer.wpe.weight"),
    ]
    # transformers' GPT-2 has Conv1D layers, whose weights are [in, out].
    for our_name, hf_name, transposed in (
        ("attention_norm", "ln_1", False),
        ("attention.qkv", "attn.c_attn", True),
        ("attention.output", "attn.c_proj", True),
        ("mlp_norm", "ln_2", False),
        ("mlp.up", "mlp.c_fc", True),
        ("mlp.down", "mlp.c_proj", True),
    ):
        names = llama_names.OUR_LAYER + our_name, "transformer.h.{layer}." + hf_name
        listed += llama_names.module_weights(*names, transposed=transposed)
    return (
        *listed,
        *llama_names.module_weights("transformer.final_norm", "transformer.ln_f"),
        llama_names.HEAD,
    )


ARCHITECTURE = Architecture(
    fields=FIELDS,
    translate=spec,
    weights=weights,
    tied={"lm_head.weight": "transformer.wte.weight"},
    native_class="GPT2LMHeadModel",
    base_prefix="transformer.",
    obsolete_tensors=(r"h\.\d+\.attn\.(masked_)?bias",),  # the causal mask and its value
)
