"""gpt_neox is Hugging Face's GPTNeoXForCausalLM (GPT-NeoX-20B, Pythia)."""

from __future__ import annotations

from transformers import PretrainedConfig

from zero_tp.model.architectures import common, llama_names
from zero_tp.model.architectures.fields import UNTRAINED_HEAD
from zero_tp.model.architectures.spec import TransformerSpec
from zero_tp.model.architectures.table import Architecture, Weight

FIELDS = common.fields(
    sizes=(),
    epsilon="layer_norm_eps",
    dropouts=("hidden_dropout",),
    read=("rotary_pct", "rotary_emb_base", "use_parallel_residual", "attention_bias"),
    irrelevant={
        "pad_token_id": "the class has no padding row",
        "classifier_dropout": UNTRAINED_HEAD,
        **dict.fromkeys(
            ("attention_probs_dropout_prob", "hidden_dropout_prob"), "the class has no such dropout"
        ),
    },
    undeclared={"rotary_pct": float, "rotary_emb_base": float},
)


def spec(config: PretrainedConfig) -> TransformerSpec:
    """Return Llama's spec with this architecture's differences."""
    return common.spec(
        config,
        partial_rotary=True,
        norm="layer_norm",
        norm_epsilon=config.layer_norm_eps,
        layer="parallel" if config.use_parallel_residual else "sequential",
        mlp="mlp",
        mlp_bias=True,
        padding_token=None,
        dropouts=common.dropouts(
            config,
            embedding="hidden_dropout",
            residual="hidden_dropout",
            attention="attention_dropout",
        ),
    )


def weights(spec: TransformerSpec) -> tuple[Weight, ...]:
    """Return every parameter of a model of this spec."""
    listed = [Weight("transformer.embedding.word.weight", "gpt_neox.embed_in.weight")]
    for our_name, hf_name, bias, heads in (
        ("attention_norm", "input_layernorm", True, None),
        ("attention.qkv", "attention.query_key_value", spec.qkv_bias, spec.heads),
        ("attention.output", "attention.dense", spec.output_bias, None),
        ("mlp_norm", "post_attention_layernorm", True, None),
        ("mlp.up", "mlp.dense_h_to_4h", True, None),
        ("mlp.down", "mlp.dense_4h_to_h", True, None),
    ):
        names = llama_names.OUR_LAYER + our_name, "gpt_neox.layers.{layer}." + hf_name
        listed += llama_names.module_weights(*names, bias=bias, heads=heads)
    return (
        *listed,
        *llama_names.module_weights("transformer.final_norm", "gpt_neox.final_layer_norm"),
        llama_names.HEAD,
    )


ARCHITECTURE = Architecture(
    fields=FIELDS,
    translate=spec,
    weights=weights,
    tied={"lm_head.weight": "gpt_neox.embed_in.weight"},
    native_class="GPTNeoXForCausalLM",
    base_prefix="gpt_neox.",
    file_names={"lm_head.weight": "embed_out.weight"},
    # The causal mask, its value, and the frequencies, computed from the config.
    obsolete_tensors=(
        r"layers\.\d+\.attention\.(masked_)?bias",
        r"(layers\.\d+\.attention\.)?rotary_emb\.inv_freq",
    ),
)
