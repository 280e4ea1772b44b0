"""granitemoeshared is Hugging Face's GraniteMoeSharedForCausalLM: granitemoe with an expert that
computes every token.
"""

from __future__ import annotations

from zero_tp.model.architectures import common, granite, granitemoe

FIELDS = common.fields(
    sizes=("num_key_value_heads", "head_dim", "num_local_experts", "num_experts_per_tok"),
    positive=granite.MULTIPLIERS,
    read=(*granitemoe.READ, "shared_intermediate_size"),
    undeclared={"head_dim": int},
)
ARCHITECTURE = common.architecture(
    FIELDS, granitemoe.spec, "GraniteMoeSharedForCausalLM", granitemoe.weights
)
