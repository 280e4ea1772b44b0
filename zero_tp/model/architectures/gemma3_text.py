"""gemma3_text is Hugging Face's Gemma3ForCausalLM: Gemma 2 with norms of each head of Q and K, and
rotary parameters for each type of layer.
"""

from __future__ import annotations

from functools import partial

from zero_tp.model.architectures import common, gemma2

FIELDS = gemma2.fields(
    read=("rope_local_base_freq",),
    fixed={"attn_logit_softcapping": (None, "the class reads it and never applies it")},
    irrelevant={"sliding_window_pattern": "layer_types decides"},
    undeclared={"rope_local_base_freq": float},
)
SPEC = partial(gemma2.spec, by_type=True, query_key_norm="heads")
ARCHITECTURE = common.architecture(FIELDS, SPEC, "Gemma3ForCausalLM", gemma2.WEIGHTS)
