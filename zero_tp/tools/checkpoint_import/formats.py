"""The checkpoints of other trainers that are read: one line each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from transformers import PretrainedConfig

from zero_tp.base.errors import UserError
from zero_tp.tools.checkpoint_import import (
    deepspeed,
    gpt_neox,
    megatron,
    megatron_deepspeed,
    nanotron,
    olmo_core,
    torchtitan,
)
from zero_tp.tools.checkpoint_import.source import SourceCheckpoint
from zero_tp.tools.checkpoint_import.steps import find_step


@dataclass(frozen=True)
class Format:
    """How the checkpoints of a trainer are told and opened.

    Attributes:
        is_format: returns whether the folder of a step is one.
        open: opens it; its arguments are the folder, a config that was given, or None, and the
            tokenizer's vocabulary, or None.
    """

    is_format: Callable[[Path], bool]
    open: Callable[[Path, PretrainedConfig | None, int | None], SourceCheckpoint]


FORMATS: dict[str, Format] = {
    "megatron": Format(megatron.is_megatron, megatron.open_megatron),
    "megatron-deepspeed": Format(
        megatron_deepspeed.is_megatron_deepspeed, megatron_deepspeed.open_megatron_deepspeed
    ),
    "gpt-neox": Format(gpt_neox.is_gpt_neox, gpt_neox.open_gpt_neox),
    "nanotron": Format(nanotron.is_nanotron, nanotron.open_nanotron),
    "olmo-core": Format(olmo_core.is_olmo_core, olmo_core.open_olmo_core),
    "torchtitan": Format(torchtitan.is_torchtitan, torchtitan.open_torchtitan),
    "universal": Format(deepspeed.is_universal, deepspeed.open_universal),
    "deepspeed": Format(deepspeed.is_deepspeed, deepspeed.open_deepspeed),
}
"""`--format` → its reader, the most particular first."""


def open_checkpoint(
    source: Path,
    *,
    name: str | None = None,
    step: int | None = None,
    config: PretrainedConfig | None = None,
    vocabulary: int | None = None,
) -> SourceCheckpoint:
    """Open the checkpoint of another trainer. Its tensors are not read.

    Args:
        name: of the format; by default the files tell it.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    folder = find_step(source, step)
    if name is not None:
        try:
            return FORMATS[name].open(folder, config, vocabulary)
        except UserError as error:
            raise UserError(f"--format {name}: {error}") from error
    for known in FORMATS.values():
        if known.is_format(folder):
            return known.open(folder, config, vocabulary)
    raise UserError(
        f"{folder}: no checkpoint of {', '.join(FORMATS)} nor of zero_tp; give the folder that "
        "holds a step's files, or --format"
    )
