"""qwen3_5_text is Hugging Face's Qwen3_5ForCausalLM: Qwen3-Next with dense MLPs, and other tensors
of the gated delta rule.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from zero_tp.model.architectures import common, llama_names, qwen3_next
from zero_tp.model.architectures.delta_names import (
    delta_weights,
    joined_projection,
    mixer_weights,
)
from zero_tp.model.architectures.spec import TransformerSpec
from zero_tp.model.architectures.table import Weight

UNREAD = ("mrope_section", "mrope_interleaved")
"""Keys of `rope_parameters`: of a text, a token's three positions are the same."""

FIELDS = common.fields(
    sizes=qwen3_next.SIZES,
    choices=qwen3_next.CHOICES,
    read=("pad_token_id", "attention_bias"),
    irrelevant=qwen3_next.IRRELEVANT,
    undeclared=qwen3_next.UNDECLARED,
)
spec = partial(qwen3_next.spec, unread=UNREAD)


def weights(spec: TransformerSpec) -> tuple[Weight, ...]:
    """Return every parameter of a model of this spec."""
    of_delta = delta_weights(joined_projection(spec))
    return llama_names.weights(spec, mixer_weights(spec, of_delta))


FILES: dict[str, Any] = {
    "untrained_parts": qwen3_next.MULTI_TOKEN,
    # As transformers saves the text model of one that reads pictures.
    "other_prefixes": {"model.language_model.": "model."},
}
ARCHITECTURE = common.architecture(FIELDS, spec, "Qwen3_5ForCausalLM", weights, **FILES)
