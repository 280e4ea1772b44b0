"""Checkpoints of torchtitan: a step's distributed checkpoint, which holds no config.

Source: torchtitan 0.3.0 (`components/checkpointer/dcp.py`, `models/llama3/`, `models/qwen3/`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from transformers import PretrainedConfig

from zero_tp.base.errors import UserError
from zero_tp.model.architectures import architecture_of
from zero_tp.model.architectures.spec import TransformerSpec
from zero_tp.tools.checkpoint_import.distributed_checkpoint import (
    METADATA,
    is_distributed,
    open_distributed,
)
from zero_tp.tools.checkpoint_import.row_maps import in_order, paired, stacked
from zero_tp.tools.checkpoint_import.source import (
    OUR_LAYER,
    SourceCheckpoint,
    SourceWeight,
    without_tied_head,
)

LAYER = "layers.{layer}."
EMBEDDING = "tok_embeddings.weight"
HEAD = "lm_head.weight"
FAMILIES = ("llama", "qwen3")
"""Families that are read, of which Llama rotates neighbouring features."""
# Everything but the model has one of these first; the optimizer's moments keep fused Q, K and V.
_STATES = re.compile(r"(optimizer|lr_scheduler|dataloader|train_state)\b.*")
# Names of earlier releases.
_FORMER = (
    (r"\.attention\.(w[qkv])\.", r".attention.qkv_linear.\1."),
    (r"^output\.", "lm_head."),
)


def is_torchtitan(folder: Path) -> bool:
    """Return whether a folder is one step of torchtitan: Megatron-LM has more files beside."""
    others = ("common.pt", "metadata.json")
    return is_distributed(folder) and not any((folder / name).is_file() for name in others)


def open_torchtitan(
    folder: Path, config: PretrainedConfig | None, vocabulary: int | None
) -> SourceCheckpoint:
    """Open a step of torchtitan.

    Raises:
        UserError: it is damaged; no config is given, or one of a family that is not read.
    """
    content = open_distributed(folder)
    tensors = {}
    states = 0
    for stored_name, tensor in content.tensors.items():
        if _STATES.fullmatch(stored_name):
            states += 1
            continue
        name = stored_name
        for pattern, new in _FORMER:
            name = re.sub(pattern, new, name)
        tensors[name] = tensor
    if EMBEDDING not in tensors:
        raise UserError(
            f"{folder / METADATA}: has no {EMBEDDING}, as torchtitan's models do; give a step of "
            "torchtitan, or --format"
        )
    if config is None:
        raise UserError(
            f"{folder}: torchtitan stores no config of its model; give a config.json with --config"
        )
    if config.model_type not in FAMILIES:
        raise UserError(
            f"--config: {config.model_type} is not read from torchtitan; give a config of "
            f"{' or '.join(FAMILIES)}"
        )
    if config.tie_word_embeddings:
        tensors = without_tied_head(folder, tensors, EMBEDDING, HEAD)
    spec = architecture_of(config).spec(config)
    return SourceCheckpoint(
        trainer="torchtitan",
        folder=folder,
        config=config,
        tensors=tensors,
        weights=list(weights(spec, neighbours=config.model_type == "llama")),
        padded=(EMBEDDING, HEAD),
        left_out=(f"the optimizer's states ({states} tensors)",) if states else (),
    )


def weights(spec: TransformerSpec, *, neighbours: bool) -> Iterator[SourceWeight]:
    """Yield the table.

    Args:
        neighbours: rotary features are pairs (0, 1), (2, 3), …
    """
    yield SourceWeight("transformer.embedding.word.weight", (EMBEDDING,))
    for ours, theirs in (
        ("attention_norm", "attention_norm"),
        ("mlp_norm", "ffn_norm"),
        ("attention.query_norm", "attention.q_norm"),
        ("attention.key_norm", "attention.k_norm"),
        ("attention.output", "attention.wo"),
        ("mlp.down", "feed_forward.w2"),
    ):
        yield SourceWeight(f"{OUR_LAYER}{ours}.weight", (f"{LAYER}{theirs}.weight",))
    gate_up = tuple(f"{LAYER}feed_forward.{name}.weight" for name in ("w1", "w3"))
    yield SourceWeight(f"{OUR_LAYER}mlp.gate_up.weight", gate_up)
    names = tuple(f"{LAYER}attention.qkv_linear.w{letter}.weight" for letter in "qkv")
    rows = [
        paired(heads, spec.head_size) if neighbours else in_order()
        for heads in (spec.heads, spec.kv_heads)
    ]
    rows.append(in_order())
    for ours, name, order in zip(("query", "key", "value"), names, rows, strict=True):
        yield SourceWeight(f"{OUR_LAYER}attention.qkv.{ours}", (name,), order)
    # One parameter only if all three are of one size.
    yield SourceWeight(f"{OUR_LAYER}attention.qkv.weight", names, stacked(*rows))
    yield SourceWeight("transformer.final_norm.weight", ("norm.weight",))
    yield SourceWeight("head.weight", (HEAD,))
