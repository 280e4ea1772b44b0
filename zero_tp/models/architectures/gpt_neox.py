"""gpt_neox: Hugging Face's GPTNeoXForCausalLM (GPT-NeoX-20B, Pythia)."""

from __future__ import annotations

from transformers import PretrainedConfig

from zero_tp.models.architectures.common import (
    ACTIVATIONS,
    OF_A_HEAD,
    ROPE_UNDECLARED,
    TOKENS,
    activation,
    attention_of,
    dropout_of,
    rotary,
    whole_head_size,
)
from zero_tp.models.architectures.table import Architecture, Fields, Weight
from zero_tp.models.spec import Dropouts, TransformerSpec

FIELDS = Fields(
    sizes=(
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
    ),
    positive=("initializer_range", "layer_norm_eps"),
    dropouts=("attention_dropout", "hidden_dropout"),
    choices={"hidden_act": tuple(ACTIVATIONS)},
    read=("tie_word_embeddings", "rope_parameters", "use_parallel_residual", "attention_bias"),
    irrelevant={
        **TOKENS,
        "pad_token_id": "the class gives it no row of its own",
        "is_decoder": "the model is a causal decoder whatever it says",
        "classifier_dropout": OF_A_HEAD,
    },
    undeclared={**ROPE_UNDECLARED, "rotary_pct": float, "rotary_emb_base": float},
)


def spec(config: PretrainedConfig) -> TransformerSpec:
    """
    Raises:
        UserError: a field whose value is not computed.
    """
    head_size, residual = whole_head_size(config), dropout_of(config, "hidden_dropout")
    return TransformerSpec(
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_attention_heads,
        head_size=head_size,
        mlp_size=config.intermediate_size,
        vocabulary=config.vocab_size,
        positions=config.max_position_embeddings,
        norm="layer_norm",
        norm_epsilon=config.layer_norm_eps,
        layer="parallel" if config.use_parallel_residual else "sequential",
        position="rotary",
        rotary=rotary(config, head_size, partly=True),
        mlp="mlp",
        activation=activation(config.hidden_act, "hidden_act"),
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
        mlp_bias=True,
        tied=config.tie_word_embeddings,
        init_std=config.initializer_range,
        residual_std=config.initializer_range,
        dropouts=Dropouts(residual, residual, dropout_of(config, "attention_dropout")),
        windows=(None,) * config.num_hidden_layers,
        attention=attention_of(config),
    )


_OURS, _THEIRS = "transformer.layers.{layer}.", "gpt_neox.layers.{layer}."


def weights(spec: TransformerSpec) -> tuple[Weight, ...]:
    """Every parameter of a model of this spec."""
    found = [Weight("transformer.embedding.word.weight", "gpt_neox.embed_in.weight")]
    for ours, theirs, bias, heads in (
        ("attention_norm", "input_layernorm", True, None),
        ("attention.qkv", "attention.query_key_value", spec.qkv_bias, spec.heads),
        ("attention.output", "attention.dense", spec.output_bias, None),
        ("mlp_norm", "post_attention_layernorm", True, None),
        ("mlp.up", "mlp.dense_h_to_4h", True, None),
        ("mlp.down", "mlp.dense_4h_to_h", True, None),
    ):
        for name in ("weight", "bias") if bias else ("weight",):
            found.append(Weight(f"{_OURS}{ours}.{name}", f"{_THEIRS}{theirs}.{name}", heads=heads))
    found += [
        Weight(f"transformer.final_norm.{name}", f"gpt_neox.final_layer_norm.{name}") for name in ("weight", "bias")
    ]
    return (*found, Weight("head.weight", "lm_head.weight"))


ARCHITECTURE = Architecture(
    fields=FIELDS,
    translate=spec,
    weights=weights,
    tied={"lm_head.weight": "gpt_neox.embed_in.weight"},
    native_class="GPTNeoXForCausalLM",
    base_prefix="gpt_neox.",
    stored={"lm_head.weight": "embed_out.weight"},
    # The causal mask, its value, and the frequencies, computed from the config.
    old=(r"layers\.\d+\.attention\.(masked_)?bias", r"(layers\.\d+\.attention\.)?rotary_emb\.inv_freq"),
)
