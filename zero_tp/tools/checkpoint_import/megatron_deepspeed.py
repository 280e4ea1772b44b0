"""Checkpoints of Megatron-DeepSpeed, with and without pipelines.

Source: microsoft/Megatron-DeepSpeed at f4157be (`megatron/checkpointing.py`,
`megatron/model/gpt_model.py`, `megatron/model/transformer.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from zero_tp.base.errors import UserError
from zero_tp.model.architectures import architecture_of
from zero_tp.model.architectures.spec import TransformerSpec
from zero_tp.tools.checkpoint_import import megatron_names
from zero_tp.tools.checkpoint_import.agreement import choose_config
from zero_tp.tools.checkpoint_import.layer_files import (
    first_state,
    join_all,
    layer_numbers,
    read_ranks,
    rename,
)
from zero_tp.tools.checkpoint_import.megatron_config import config_of
from zero_tp.tools.checkpoint_import.source import SourceCheckpoint, SourceWeight
from zero_tp.tools.checkpoint_import.stored_tensors import StoredTensor, join
from zero_tp.tools.checkpoint_import.unpickling import InertObject

NAMESPACE = "argparse.Namespace"
IGNORABLE = (r".*rotary_(pos_)?emb\.inv_freq",)
_QKV = ".linear_qkv."
_COLUMNS = re.compile(r".*\.(linear_proj|linear_fc2)\.weight")
_ROWS = re.compile(
    r".*\.(linear_qkv|linear_fc1)\.(weight|bias)|embedding\.word_embeddings\.weight"
    r"|output_layer\.weight"
)
# Other layers than the transformer's, as a pipeline names their tensors.
_OUTER = {
    "word_embeddings.weight": megatron_names.EMBEDDING,
    "position_embeddings.weight": "embedding.position_embeddings.weight",
    "weight": "decoder.final_layernorm.weight",
    "bias": "decoder.final_layernorm.bias",
    "lm_head.weight": megatron_names.HEAD,
}


def _args_of(state: Mapping[str, Any]) -> dict[str, Any]:
    args = state.get("args")
    return dict(args.fields) if isinstance(args, InertObject) and args.name == NAMESPACE else {}


def is_megatron_deepspeed(folder: Path) -> bool:
    """Return whether a folder is one step of Megatron-DeepSpeed, whose files hold its args."""
    return "padded_vocab_size" in _args_of(first_state(folder))


def open_megatron_deepspeed(
    folder: Path, config: PretrainedConfig | None, vocabulary: int | None
) -> SourceCheckpoint:
    """Open a step of Megatron-DeepSpeed.

    Raises:
        UserError: a file is missing or damaged; its args describe a model that Hugging Face has no
            class for, or whose weights are not read.
    """
    args = _args_of(first_state(folder))
    if not args:
        raise UserError(
            f"{folder}: has no args of its training, which tell the order of its rows; give a step "
            "of Megatron-DeepSpeed, or another --format"
        )
    _check_args(args, folder)
    files = read_ranks(folder)
    degree = args.get("tensor_model_parallel_size") or len(files.ranks)
    if degree != len(files.ranks):
        raise UserError(
            f"{folder}: has files of {len(files.ranks)} TP ranks, and its args say {degree}; copy "
            "the checkpoint again"
        )
    config, notes = choose_config(
        config, lambda: config_of(megatron_args(args, folder), vocabulary, folder), folder
    )
    spec = architecture_of(config).spec(config)
    thirds = has_thirds(args)
    if thirds and spec.kv_heads != spec.heads:
        raise UserError(
            f"{folder}: grouped keys with releases since December 2024 are split in three equal "
            "parts, which no class computes"
        )
    numbers = layer_numbers(folder, files.ranks[0], INSIDE) if files.pipelines else {}
    ranks = [rename(folder, rank, partial(_usual, numbers=numbers)) for rank in files.ranks]
    gated = bool(args.get("swiglu"))
    return SourceCheckpoint(
        trainer="megatron-deepspeed",
        folder=folder,
        config=config,
        tensors=join_all(folder, ranks, partial(_join, gated=gated, thirds=thirds)),
        weights=list(weights(spec, thirds=thirds)),
        padded=megatron_names.PADDED,
        left_out=(f"the optimizer's states ({files.states} files)",) if files.states else (),
        ignorable=IGNORABLE,
        notes=notes,
    )


INSIDE = "input_layernorm.weight"


def _usual(name: str, numbers: Mapping[str, int]) -> str:
    """Return the name in Megatron's table of a tensor of a file.

    Args:
        numbers: of the layers' files → of the layers; empty without pipelines.
    """
    number, _, inner = name.partition(".")
    if not number.isdigit():
        return megatron_names.usual_name(name)
    if number in numbers:
        return megatron_names.usual_name(f"decoder.layers.{numbers[number]}.{inner}")
    return _OUTER.get(inner, name)


def has_thirds(args: Mapping[str, Any]) -> bool:
    """Return whether a rank's rows are its Q, K and V, not theirs group by group.

    So it is since the commit that brought FPDT (676a482, December 2024), and its arguments.
    """
    return "ds_sequence_parallel_fpdt" in args


def _check_args(args: Mapping[str, Any], folder: Path) -> None:
    """Refuse what is not read."""
    experts = args.get("num_experts") or 1
    most = max(experts) if isinstance(experts, (list, tuple)) else experts
    if most > 1:
        raise UserError(f"{folder}: num_experts {most}: experts are not read from this trainer")
    ulysses = (args.get("ds_sequence_parallel_size") or 1) > 1
    ulysses = ulysses or bool(args.get("force_ds_sequence_parallel"))
    kernels = ("v1", "v2", "builder", "triton")
    flash = any(args.get(f"use_flash_attn_{kernel}") for kernel in kernels)
    if has_thirds(args) and args.get("use_rotary_position_embeddings") and not (ulysses and flash):
        raise UserError(
            f"{folder}: use_rotary_position_embeddings: without Ulysses' flash attention, releases "
            "since December 2024 rotate by other angles, which no class computes"
        )


def megatron_args(args: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the args as Megatron-LM names them.

    Raises:
        UserError: it has no positions, or norms of another kind.
    """
    norms = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
    rotary = bool(args.get("use_rotary_position_embeddings"))
    if not rotary and not args.get("add_position_embedding", True):
        raise UserError(
            f"{folder}: no_position_embedding: no family is derived from it; give a config.json of "
            "the model with --config"
        )
    normalization = str(args.get("normalization") or "layernorm")
    heads, groups = (args.get(name) for name in ("num_attention_heads", "num_key_value_heads"))
    return {
        **args,
        "normalization": norms.get(normalization.lower(), normalization),
        "position_embedding_type": "rope" if rotary else "learned_absolute",
        "group_query_attention": groups is not None and groups != heads,
        "num_query_groups": groups,
        "rotary_base": args.get("rotary_position_embeddings_theta"),
        "num_experts": None,
    }


def _join(name: str, tensors: Sequence[StoredTensor], *, gated: bool, thirds: bool) -> StoredTensor:
    """Return the whole tensor."""
    if _COLUMNS.fullmatch(name):
        return join(tensors, dim=1)
    if not _ROWS.fullmatch(name):
        return tensors[0]  # norms and biases of the second matrices are equal on all ranks
    blocks = 1
    if gated and ".linear_fc1." in name:
        blocks = 2
    if thirds and _QKV in name:
        blocks = 3
    return join(tensors, blocks=blocks)


def weights(spec: TransformerSpec, *, thirds: bool) -> Iterator[SourceWeight]:
    """Yield Megatron's table.

    Args:
        thirds: Q, K and V are one after the other.
    """
    for weight in megatron_names.weights(spec):
        yield replace(weight, rows=None) if thirds and _QKV in weight.names[0] else weight
