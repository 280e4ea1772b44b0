"""A checkpoint as a native Hugging Face directory. One process, no ranks, no DeepSpeed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from zero_tp.checkpoint.directory import find_checkpoint, read_manifest
from zero_tp.checkpoint.masters import MasterReader
from zero_tp.models.architectures import architecture_of
from zero_tp.parallel.layout import Layout, Replicated, Sharded
from zero_tp.weights.export import MAX_SHARD_SIZE, write_native


def _layout(described: dict[str, Any]) -> tuple[Layout, tuple[int, ...]]:
    """A parameter's layout and shard shape from its manifest entry."""
    shard_shape = tuple(described["shard_shape"])
    if described["layout"] == "Sharded":
        return Sharded(described["dim"], tuple(described["parts"]), described["padded"]), shard_shape
    return Replicated(described["gradient"]), shard_shape


def to_huggingface(
    source: Path,
    output: Path,
    *,
    dtype: torch.dtype = torch.float32,
    tokenizer: Path | None = None,
    max_shard_size: str = MAX_SHARD_SIZE,
    overwrite: bool = False,
) -> Path:
    """Write `source`, a run or a checkpoint, as a Hugging Face model made from its fp32 masters.

    Returns:
        The checkpoint that was converted.

    Raises:
        UserError: no complete checkpoint there, a damaged one, or `output` exists.
    """
    checkpoint = find_checkpoint(source)
    manifest = read_manifest(checkpoint)
    fields = dict(manifest["model"])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    architecture = architecture_of(config)
    layouts = {name: _layout(described) for name, described in manifest["parameters"].items()}
    reader = MasterReader(checkpoint, manifest["tensor"], manifest["data"])
    tensors = reader.native(architecture.each_weight(architecture.spec(config)), layouts)
    write_native(
        output,
        config,
        tensors,
        dtype=dtype,
        tokenizer=tokenizer,
        max_shard_size=max_shard_size,
        overwrite=overwrite,
    )
    return checkpoint
