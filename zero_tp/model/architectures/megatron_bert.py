"""megatron-bert is Hugging Face's MegatronBertForPreTraining.

It is BERT with pre-norm layers and a final norm (arXiv 1909.08053, section 5.3).
"""

from __future__ import annotations

from functools import partial

from zero_tp.model.architectures import bert
from zero_tp.model.architectures.spec import TransformerSpec
from zero_tp.model.architectures.table import Architecture, Weight

MODEL_TYPE = "megatron-bert"
MASKED_LM_CLASS = "MegatronBertForMaskedLM"


def weights(spec: TransformerSpec) -> tuple[Weight, ...]:
    """Return every parameter of a model of this spec."""
    norms = {
        "layers.{layer}.attention_norm": "encoder.layer.{layer}.attention.ln",
        "layers.{layer}.mlp_norm": "encoder.layer.{layer}.ln",
        "final_norm": "encoder.ln",
    }
    return tuple(bert.encoder_weights(spec, norms))


ARCHITECTURE = Architecture(
    fields=bert.FIELDS,
    translate=partial(bert.encoder_spec, masked_lm_class=MASKED_LM_CLASS),
    weights=weights,
    tied=bert.TIED,
    native_class="MegatronBertForPreTraining",
    masked_lm_class=MASKED_LM_CLASS,
    base_prefix="bert.",
    optional_heads=bert.OPTIONAL_HEADS,
    obsolete_tensors=bert.OBSOLETE_TENSORS,
)
