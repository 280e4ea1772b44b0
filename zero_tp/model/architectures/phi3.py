"""phi3 is Hugging Face's Phi3ForCausalLM (Phi-3, Phi-4).

Its Q, K and V are one weight, and so are gate and up.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

from transformers import PretrainedConfig

from zero_tp.model.architectures import common, llama_names
from zero_tp.model.architectures.spec import TransformerSpec
from zero_tp.model.architectures.table import Weight

FIELDS = common.fields(
    sizes=("num_key_value_heads", "sliding_window"),
    dropouts=("resid_pdrop",),
    fixed={"attention_bias": (False, "the class has no such biases")},
    irrelevant={
        "embd_pdrop": "the class has no such dropout",
        "original_max_position_embeddings": "of longrope, which is refused",
    },
)


def spec(config: PretrainedConfig) -> TransformerSpec:
    """Return Llama's spec with this architecture's differences."""
    return common.spec(
        config,
        partial_rotary=True,
        dropouts=common.dropouts(config, residual="resid_pdrop", attention="attention_dropout"),
    )


def weights(spec: TransformerSpec) -> tuple[Weight, ...]:
    """Return every parameter of a model of this spec."""
    attention = list(llama_names.layer_weights("attention.qkv", "self_attn.qkv_proj", bias=False))
    if spec.kv_heads != spec.heads:
        # Three parameters here, rows of one tensor there. With 4 heads and 2 KV heads of d
        # features:
        #     qkv_proj [8d, h]    query: rows (0, 4d, 8d)   key: (4d, 6d, 8d)   value: (6d, 8d, 8d)
        parts = {"query": spec.heads, "key": spec.kv_heads, "value": spec.kv_heads}
        ends = list(accumulate(heads * spec.head_size for heads in parts.values()))
        attention = [
            replace(
                attention[0],
                our_name=f"{llama_names.OUR_LAYER}attention.qkv.{our_name}",
                rows=(start, end, ends[-1]),
            )
            for our_name, start, end in zip(parts, (0, *ends), ends, strict=False)
        ]
    attention += llama_names.layer_weights("attention.output", "self_attn.o_proj", bias=False)
    return llama_names.weights(
        spec, attention, {"gate_up": ("gate_up_proj",), "down": ("down_proj",)}
    )


ARCHITECTURE = common.architecture(FIELDS, spec, "Phi3ForCausalLM", weights)
