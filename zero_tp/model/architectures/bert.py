"""bert is Hugging Face's BertForPreTraining (arXiv 1810.04805), with post-norm layers.

`megatron_bert.py` imports the parts that both share.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from transformers import PretrainedConfig

from zero_tp.model.architectures import common, llama_names
from zero_tp.model.architectures.fields import GENERATION_FIELDS, UNTRAINED_HEAD, Fields
from zero_tp.model.architectures.spec import TransformerSpec
from zero_tp.model.architectures.table import Architecture, Weight

FIELDS = Fields(
    sizes=(*common.SIZES, "type_vocab_size"),
    positive=("initializer_range", "layer_norm_eps"),
    dropouts=("hidden_dropout_prob", "attention_probs_dropout_prob"),
    choices={"hidden_act": tuple(common.ACTIVATIONS)},
    read=("pad_token_id",),
    fixed={
        "chunk_size_feed_forward": (0, "each MLP runs on all tokens at once"),
        "is_causal": (False, "attention goes in both directions"),
        "use_bidirectional_attention": (True, "attention goes in both directions"),
        "position_embedding_type": ("absolute", "positions are learned, one vector each"),
    },
    irrelevant={
        **GENERATION_FIELDS,
        "classifier_dropout": UNTRAINED_HEAD,
        # Fields of the first releases' files, which the class never reads.
        **dict.fromkeys(("directionality", "output_past"), "a note by the file's author"),
        **dict.fromkeys(
            (
                "pooler_fc_size",
                "pooler_num_attention_heads",
                "pooler_num_fc_layers",
                "pooler_size_per_head",
                "pooler_type",
            ),
            "the pooler is one dense layer",
        ),
    },
)

MASKED_LM_CLASS = "BertForMaskedLM"
OPTIONAL_HEADS = {
    "the head of masked tokens": r"cls\.predictions\..+",
    "the pooler": r"bert\.pooler\..+",
    "the sentence head": r"cls\.seq_relationship\..+",
}
TIED = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
OBSOLETE_TENSORS = (r"embeddings\.position_ids",)  # 0, 1, 2, …
OBSOLETE_SUFFIXES = {".gamma": ".weight", ".beta": ".bias"}
"""Names of norms in files that were converted from TensorFlow."""


def encoder_spec(
    config: PretrainedConfig, masked_lm_class: str, **overrides: Any
) -> TransformerSpec:
    """Return the spec of an encoder: Llama's with the differences that both encoders share.

    Args:
        masked_lm_class: name of the class that has no sentence head.
        overrides: arguments of TransformerSpec that differ between encoders.
    """
    return common.spec(
        config,
        norm="layer_norm",
        norm_epsilon=config.layer_norm_eps,
        position="learned",
        mlp="mlp",
        attention_bias=True,
        mlp_bias=True,
        dropouts=common.dropouts(
            config,
            embedding="hidden_dropout_prob",
            residual="hidden_dropout_prob",
            attention="attention_probs_dropout_prob",
        ),
        causal=False,
        sentence_head=config.architectures != [masked_lm_class],
        token_types=config.type_vocab_size,
        **overrides,
    )


def encoder_weights(spec: TransformerSpec, norms: dict[str, str]) -> Iterator[Weight]:
    """Yield every parameter of an encoder of this spec.

    Args:
        norms: our name → Hugging Face's, of the norms that differ between encoders.
    """
    for name in ("word", "position", "token_type"):
        yield Weight(
            f"transformer.embedding.{name}.weight", f"bert.embeddings.{name}_embeddings.weight"
        )
    layer = "bert.encoder.layer.{layer}."
    linears: dict[str, tuple[str, ...]] = {
        "attention.qkv": tuple(f"attention.self.{name}" for name in ("query", "key", "value")),
        "attention.output": ("attention.output.dense",),
        "mlp.up": ("intermediate.dense",),
        "mlp.down": ("output.dense",),
    }
    for our_name, hf_names in linears.items():
        yield from llama_names.module_weights(
            llama_names.OUR_LAYER + our_name, *(layer + name for name in hf_names)
        )
    for our_name, hf_name in norms.items():
        yield from llama_names.module_weights(f"transformer.{our_name}", f"bert.{hf_name}")
    yield from llama_names.module_weights("head.dense", "cls.predictions.transform.dense")
    yield from llama_names.module_weights("head.norm", "cls.predictions.transform.LayerNorm")
    yield Weight("head.decoder.bias", "cls.predictions.bias")
    if spec.sentence_head:
        yield from llama_names.module_weights("sentence_head.pooler", "bert.pooler.dense")
        yield from llama_names.module_weights("sentence_head.classifier", "cls.seq_relationship")


def weights(spec: TransformerSpec) -> tuple[Weight, ...]:
    """Return every parameter of a model of this spec."""
    norms = {
        "embedding.norm": "embeddings.LayerNorm",
        "layers.{layer}.attention_norm": "encoder.layer.{layer}.attention.output.LayerNorm",
        "layers.{layer}.mlp_norm": "encoder.layer.{layer}.output.LayerNorm",
    }
    return tuple(encoder_weights(spec, norms))


ARCHITECTURE = Architecture(
    fields=FIELDS,
    translate=partial(
        encoder_spec, masked_lm_class=MASKED_LM_CLASS, layer="post_norm", embedding_norm=True
    ),
    weights=weights,
    tied=TIED,
    native_class="BertForPreTraining",
    masked_lm_class=MASKED_LM_CLASS,
    base_prefix="bert.",
    optional_heads=OPTIONAL_HEADS,
    obsolete_tensors=OBSOLETE_TENSORS,
    obsolete_suffixes=OBSOLETE_SUFFIXES,
)
