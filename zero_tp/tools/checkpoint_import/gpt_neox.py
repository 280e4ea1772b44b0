"""Checkpoints of GPT-NeoX, with and without pipelines.

Source: EleutherAI/gpt-neox at ea7aefd (`megatron/checkpointing.py`, `megatron/model/`); the names
of releases before September 2024 from `tools/ckpts/convert_neox_to_hf.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from transformers import PretrainedConfig

from zero_tp.base.errors import UserError
from zero_tp.model.architectures import architecture_of
from zero_tp.model.architectures.spec import TransformerSpec
from zero_tp.tools.checkpoint_import.agreement import choose_config
from zero_tp.tools.checkpoint_import.gpt_neox_config import config_of, recorded_settings
from zero_tp.tools.checkpoint_import.layer_files import (
    RankSum,
    first_state,
    join_all,
    layer_numbers,
    read_ranks,
    rename,
)
from zero_tp.tools.checkpoint_import.row_maps import grouped, in_order, swapped, within
from zero_tp.tools.checkpoint_import.source import OUR_LAYER, SourceCheckpoint, SourceWeight
from zero_tp.tools.checkpoint_import.stored_tensors import StoredTensor, join

FAMILIES = ("gpt_neox", "llama")
LAYER = "layers.{layer}."
EMBEDDING = "word_embeddings.weight"
HEAD = "final_linear.weight"
INSIDE = re.compile(r"input_layernorm\.(weight|scale)")
IGNORABLE = (r"layers\.\d+\.attention\.rotary_emb\.inv_freq",)
_COLUMNS = re.compile(r".*\.(attention\.dense|mlp\.linear2)\.weight")
_ROW_BIAS = re.compile(r".*\.(attention\.dense|mlp\.linear2)\.bias")
_ROWS = re.compile(
    r".*\.(attention\.query_key_value|mlp\.linear1|mlp\.w1|mlp\.w3)\.(weight|bias)"
    r"|word_embeddings\.weight|final_linear\.weight"
)
# Names of releases before September 2024; RMSNorm calls its weight `scale`.
_FORMER = (
    (r"\.mlp\.dense_h_to_4h\.", ".mlp.linear1."),
    (r"\.mlp\.(dense_4h_to_h|w2)\.", ".mlp.linear2."),
    (r"norm\.scale$", "norm.weight"),
)


def is_gpt_neox(folder: Path) -> bool:
    """Return whether a folder is one step of GPT-NeoX, whose files hold a dict of its sizes."""
    args = first_state(folder).get("args")
    return isinstance(args, dict) and "padded_vocab_size" in args


def open_gpt_neox(
    folder: Path, config: PretrainedConfig | None, vocabulary: int | None
) -> SourceCheckpoint:
    """Open a step of GPT-NeoX.

    Raises:
        UserError: a file is missing or damaged; its settings describe a model that Hugging Face
            has no class for, or the config is of another family.
    """
    state = first_state(folder)
    args = state.get("args")
    args = args if isinstance(args, dict) else {}
    files = read_ranks(folder)
    degree = args.get("model_parallel_size") or len(files.ranks)
    if degree != len(files.ranks):
        raise UserError(
            f"{folder}: has files of {len(files.ranks)} TP ranks, and its args say {degree}; copy "
            "the checkpoint again"
        )
    ranks = [_usual_names(folder, rank) for rank in files.ranks]
    is_new = any(".mlp.linear1." in name for name in ranks[0])
    settings = {**recorded_settings(folder), **args}
    config, notes = choose_config(config, lambda: config_of(settings, vocabulary, folder), folder)
    if config.model_type not in FAMILIES:
        raise UserError(
            f"--config: {config.model_type} is not read from GPT-NeoX; give a config of "
            f"{' or '.join(FAMILIES)}"
        )
    spec = architecture_of(config).spec(config)
    gated = is_new and config.model_type == "llama"
    parallel = spec.layer == "parallel"
    return SourceCheckpoint(
        trainer="gpt-neox",
        folder=folder,
        config=config,
        tensors=join_all(folder, ranks, partial(_join, spec, gated, parallel)),
        weights=list(weights(spec, fused_gate=is_new)),
        padded=(EMBEDDING, HEAD),
        left_out=(f"the optimizer's states ({files.states} files)",) if files.states else (),
        ignorable=IGNORABLE,
        notes=notes,
    )


def _usual_names(folder: Path, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors by one name however they were saved."""
    prefix = "sequential."
    numbered = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    inside = next(
        (part for name in numbered if INSIDE.fullmatch(part := name.partition(".")[2])),
        "input_layernorm.weight",
    )
    numbers = layer_numbers(folder, numbered, inside)

    def new_name(stored_name: str) -> str:
        number, _, inner = stored_name.partition(".")
        name = f"layers.{numbers[number]}.{inner}" if number in numbers else inner
        for pattern, new in _FORMER:
            name = re.sub(pattern, new, name)
        return name

    return rename(folder, numbered, new_name)


def _join(
    spec: TransformerSpec,
    gated: bool,
    parallel: bool,
    name: str,
    tensors: Sequence[StoredTensor],
) -> StoredTensor:
    """Return the whole tensor."""
    if _COLUMNS.fullmatch(name):
        return join(tensors, dim=1)
    if _ROW_BIAS.fullmatch(name):
        # Each rank adds its own before the sum over ranks if both branches are summed at once.
        return RankSum(tensors, is_mean=not parallel) if len(tensors) > 1 else tensors[0]
    if not _ROWS.fullmatch(name):
        return RankSum(tensors, is_mean=True) if len(tensors) > 1 else tensors[0]
    if ".query_key_value." in name and spec.kv_heads != spec.heads:
        return join(tensors, blocks=(spec.heads, spec.kv_heads, spec.kv_heads))
    return join(tensors, blocks=2 if gated and ".linear1." in name else 1)


def weights(spec: TransformerSpec, *, fused_gate: bool) -> Iterator[SourceWeight]:
    """Yield the table.

    Args:
        fused_gate: up and gate of a gated MLP are one matrix, in this order.
    """
    yield SourceWeight("transformer.embedding.word.weight", (EMBEDDING,))
    for part in ("weight", "bias"):
        for ours, theirs in (
            ("attention_norm", "input_layernorm"),
            ("mlp_norm", "post_attention_layernorm"),
            ("attention.output", "attention.dense"),
            ("mlp.up", "mlp.linear1"),
            ("mlp.down", "mlp.linear2"),
        ):
            yield SourceWeight(f"{OUR_LAYER}{ours}.{part}", (f"{LAYER}{theirs}.{part}",))
        gate_up = f"{OUR_LAYER}mlp.gate_up.{part}"
        if fused_gate:
            yield SourceWeight(gate_up, (f"{LAYER}mlp.linear1.{part}",), swapped())
        else:
            yield SourceWeight(gate_up, tuple(f"{LAYER}mlp.{name}.{part}" for name in ("w1", "w3")))
        yield from _qkv(spec, part)
        yield SourceWeight(f"transformer.final_norm.{part}", (f"norm.{part}",))
    yield SourceWeight("head.weight", (HEAD,))


def _qkv(spec: TransformerSpec, part: str) -> Iterator[SourceWeight]:
    """Yield Q, K and V: head by head, or with fewer key heads one after the other."""
    names = (f"{LAYER}attention.query_key_value.{part}",)
    by_head = grouped(spec.heads, spec.heads, spec.head_size)
    yield SourceWeight(f"{OUR_LAYER}attention.qkv.{part}", names, by_head)
    suffix = "_bias" if part == "bias" else ""
    sizes = [heads * spec.head_size for heads in (spec.heads, spec.kv_heads, spec.kv_heads)]
    for number, ours in enumerate(("query", "key", "value")):
        rows = within(in_order(), sum(sizes[:number]), sum(sizes))
        yield SourceWeight(f"{OUR_LAYER}attention.qkv.{ours}{suffix}", names, rows)
