"""The tensors of Megatron's GPTModel: its table, and one name for each however it was saved.

Source: megatron-core 0.16.1 (`models/gpt/gpt_model.py`, `transformer/`). The names of the table are
those of local layers, one layer and one expert at a time; `canonical_names` translates the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from zero_tp.model.architectures.spec import TransformerSpec
from zero_tp.tools.checkpoint_import.row_maps import grouped, in_order
from zero_tp.tools.checkpoint_import.source import OUR_LAYER, SourceWeight
from zero_tp.tools.checkpoint_import.stored_tensors import SelectedTensor, StoredTensor, join

LAYER = "decoder.layers.{layer}."
EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"
PADDED = (EMBEDDING, HEAD)
"""Tensors with a row for each token, padded to a multiple."""

# Transformer Engine has each norm inside of the linear layer after it, and `torch_dist` has these
# names for both kinds of layers.
_RENAMED = (
    (r"self_attention\.linear_qkv\.layer_norm_", "input_layernorm."),
    (r"mlp\.linear_fc1\.layer_norm_", "pre_mlp_layernorm."),
    # Of Transformer Engine's grouped linear layers: weight0, weight1, …
    (r"mlp\.experts\.(linear_fc\d)\.(weight|bias)(\d+)$", r"mlp.experts.\3.\1.\2"),
    (r"mlp\.experts\.(?:local_)?experts\.(\d+)\.", r"mlp.experts.\1."),
)
# Megatron-LM before megatron-core, and Megatron-DeepSpeed.
_FORMER = (
    (r"^(?:language_model\.)?(?:encoder|transformer)\.", "decoder."),
    (r"^language_model\.embedding\.", "embedding."),
    (r"^language_model\.output_layer\.", "output_layer."),
    (r"\.attention\.", ".self_attention."),
    (r"\.query_key_value\.", ".linear_qkv."),
    (r"\.self_attention\.dense\.", ".self_attention.linear_proj."),
    (r"\.post_attention_layernorm\.", ".pre_mlp_layernorm."),
    (r"\.dense_h_to_4h\.", ".linear_fc1."),
    (r"\.dense_4h_to_h\.", ".linear_fc2."),
)


def usual_name(name: str) -> str:
    """Return the name in the table of a tensor of any kind of layers."""
    for pattern, new in (*_FORMER, *_RENAMED):
        name = re.sub(pattern, new, name)
    return name


def canonical_names(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return one tensor for each layer and expert, by the names of the table.

    Of `torch_dist`'s three shapes, with 2 layers and 4 experts:

        decoder.layers.mlp.linear_fc2.weight [2, h, f]           one a layer
        decoder.layers.0.mlp.experts.experts.linear_fc2.weight [4, h, f]   one an expert
        decoder.layers.0.mlp.linear_fc1.weight_w, …weight_v      gate, up
    """
    single: dict[str, StoredTensor] = {}
    for stored_name, tensor in tensors.items():
        for name, part in _layers(stored_name, tensor):
            for matrix_name, matrix in _experts(name, part):
                single[usual_name(matrix_name)] = matrix
    for gate_name in [name for name in single if name.endswith("_w")]:
        gate = single.pop(gate_name)
        name = gate_name.removesuffix("_w")
        up = single.pop(f"{name}_v", None)
        single[name] = gate if up is None else join([gate, up])
    return single


def _layers(name: str, tensor: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
    prefix = "decoder.layers."
    inner = name.removeprefix(prefix)
    if inner == name or inner[0].isdigit():
        yield name, tensor
        return
    for number in range(tensor.shape[0]):
        yield f"{prefix}{number}.{inner}", SelectedTensor(tensor, number)


def _experts(name: str, tensor: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
    prefix = ".mlp.experts.experts."
    before, _, inner = name.partition(prefix)
    if not inner or inner[0].isdigit():
        yield name, tensor
        return
    for number in range(tensor.shape[0]):
        yield f"{before}{prefix}{number}.{inner}", SelectedTensor(tensor, number)


def weights(spec: TransformerSpec) -> Iterator[SourceWeight]:
    """Yield the table of a model of this spec: every parameter that GPTModel can have."""
    yield SourceWeight("transformer.embedding.word.weight", (EMBEDDING,))
    if spec.position == "learned":
        positions = "embedding.position_embeddings.weight"
        yield SourceWeight("transformer.embedding.position.weight", (positions,))
    for part in ("weight", "bias"):
        for ours, theirs in (
            ("attention_norm", "input_layernorm"),
            ("mlp_norm", "pre_mlp_layernorm"),
            ("attention.query_norm", "self_attention.q_layernorm"),
            ("attention.key_norm", "self_attention.k_layernorm"),
            ("attention.output", "self_attention.linear_proj"),
        ):
            yield SourceWeight(f"{OUR_LAYER}{ours}.{part}", (f"{LAYER}{theirs}.{part}",))
        yield SourceWeight(f"transformer.final_norm.{part}", (f"decoder.final_layernorm.{part}",))
        yield from _qkv(spec, part)
        yield from _mlp(spec, part)
    yield SourceWeight("head.weight", (HEAD,))


def _qkv(spec: TransformerSpec, part: str) -> Iterator[SourceWeight]:
    """Yield Q, K and V, whose rows stand group by group."""
    names = (f"{LAYER}self_attention.linear_qkv.{part}",)
    sizes = (spec.heads, spec.kv_heads, spec.head_size)
    yield SourceWeight(f"{OUR_LAYER}attention.qkv.{part}", names, grouped(*sizes))
    suffix = "_bias" if part == "bias" else ""
    for number, ours in enumerate(("query", "key", "value")):
        rows = grouped(*sizes, parts=(number,))
        yield SourceWeight(f"{OUR_LAYER}attention.qkv.{ours}{suffix}", names, rows)


def _mlp(spec: TransformerSpec, part: str) -> Iterator[SourceWeight]:
    """Yield dense MLPs, routers and experts. Gate and up are one matrix in both."""
    dense = spec.dense_layers
    sparse = spec.expert_layers
    count = spec.experts.count if spec.experts is not None else None
    for ours, theirs in (("gate_up", "linear_fc1"), ("up", "linear_fc1"), ("down", "linear_fc2")):
        name = f"{OUR_LAYER}mlp.{ours}.{part}"
        if dense:
            yield SourceWeight(name, (f"{LAYER}mlp.{theirs}.{part}",), layers=dense)
        if sparse:
            experts = (f"{LAYER}mlp.experts.{{expert}}.{theirs}.{part}",)
            yield SourceWeight(name, experts, in_order(), sparse, count)
            shared = f"{LAYER}mlp.shared_experts.{theirs}.{part}"
            yield SourceWeight(f"{OUR_LAYER}mlp.shared.{ours}.{part}", (shared,), layers=sparse)
    if part == "weight" and sparse:
        router = f"{LAYER}mlp.router."
        yield SourceWeight(f"{OUR_LAYER}mlp.router.weight", (f"{router}weight",), layers=sparse)
        bias = f"{OUR_LAYER}mlp.router.correction_bias"
        yield SourceWeight(bias, (f"{router}expert_bias",), layers=sparse)
        gate = f"{LAYER}mlp.shared_experts.gate_weight"
        yield SourceWeight(f"{OUR_LAYER}mlp.shared.gate", (gate,), layers=sparse)
