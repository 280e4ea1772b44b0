"""`to_huggingface` writes a checkpoint as a native Hugging Face directory.

It needs one process, no DeepSpeed, and memory for one parameter at a time.
"""

from __future__ import annotations

import copy
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, GenerationConfig, PretrainedConfig

from zero_tp.architectures import weights_of
from zero_tp.checkpoint.directory import (
    check_sizes,
    find_checkpoint,
    in_use,
    is_run,
    passed_over,
)
from zero_tp.checkpoint.manifest import Manifest
from zero_tp.checkpoint.reader import CheckpointReader
from zero_tp.errors import UserError
from zero_tp.tensors.files import Entry
from zero_tp.weights.export import MAX_SHARD_SIZE, native_entries, write_native
from zero_tp.weights.files import INDEX, SINGLE, TOKENIZER_FILES, has_commit, holds_tokenizer, resolve


@dataclass(frozen=True)
class Converted:
    """A checkpoint was converted.

    Attributes:
        tokenizer: the directory that was copied, if there was one.
        notes: a line on each newer directory of the run that is no checkpoint.
    """

    checkpoint: Path
    parameters: int
    tokenizer: Path | None
    notes: tuple[str, ...] = ()


def tokenizer_of(given: Path | None, recorded: str | None) -> Path | None:
    """Return the directory of a run's tokenizer: the one given, else the one that the run had.

    Raises:
        UserError: it isn't there, or is none.
    """
    if given is not None:
        given = resolve(given, "--tokenizer", weights=False).directory
    elif recorded is not None and has_commit(recorded):
        return resolve(recorded, f"the run's tokenizer {recorded}", weights=False).directory
    if given is not None and not given.is_dir():
        raise UserError(f"--tokenizer: no directory {given}")
    if given is not None and not holds_tokenizer(given):
        raise UserError(f"--tokenizer: {given} holds no tokenizer: none of {', '.join(TOKENIZER_FILES[:2])}")
    if given is None and recorded is not None and not Path(recorded).is_dir():
        raise UserError(f"the run's tokenizer {recorded} is not there any more; say where it is with --tokenizer DIR")
    return given or (Path(recorded) if recorded else None)


def config_of(manifest: Manifest) -> PretrainedConfig:
    """Return the Hugging Face config of a checkpoint's model."""
    fields = copy.deepcopy(manifest.model)  # of which transformers takes and changes parts
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def to_huggingface(
    source: Path,
    output: Path,
    *,
    dtype: torch.dtype = torch.float32,
    tokenizer: Path | None = None,
    max_shard_size: str = MAX_SHARD_SIZE,
    overwrite: bool = False,
    card: Callable[[Path, Manifest], str] | None = None,
) -> Converted:
    """Write `source`, a run or a checkpoint, as a Hugging Face model made from its fp32 masters.

    Args:
        tokenizer: directory to copy in; by default the run's.
        card: makes the model card of a checkpoint and its manifest (zero_tp/report/card.py); by default there is none.

    Raises:
        UserError: no complete checkpoint there, a damaged one, no tokenizer where it should be, or `output` exists.
    """
    checkpoint = find_checkpoint(source)
    with in_use(checkpoint) as manifest:
        check_sizes(checkpoint, manifest.files)
        found_tokenizer = tokenizer_of(tokenizer, manifest.tokenizer)
        config = config_of(manifest)
        entries = checkpoint_entries(CheckpointReader(checkpoint, manifest), config, dtype)
        generation = GenerationConfig(**manifest.generation) if manifest.generation is not None else None
        text = card(checkpoint, manifest) if card is not None else None
        write_native(
            output,
            config,
            entries,
            generation=generation,
            tokenizer=found_tokenizer,
            max_shard_size=max_shard_size,
            overwrite=overwrite,
            card=text,
        )
    parameters = sum(math.prod(entry.shape) for entry in entries)
    return Converted(checkpoint, parameters, found_tokenizer, passed_over(source, manifest.step))


@contextmanager
def as_huggingface(given: Path) -> Iterator[Path]:
    """Give the Hugging Face directory that `--model` means: itself, a hub name's, or that of a run, exported meanwhile.

    Raises:
        UserError: see `resolve` and `to_huggingface`; the run has no tokenizer.
    """
    found = resolve(given, "--model").directory
    if not is_run(found) or any((found / name).is_file() for name in (SINGLE, INDEX)):
        yield found
        return
    with tempfile.TemporaryDirectory() as folder:
        exported = Path(folder) / "model"
        converted = to_huggingface(found, exported)
        for note in converted.notes:
            print(note, file=sys.stderr)
        if converted.tokenizer is None:
            raise UserError(
                f"--model {given}: the run has no tokenizer; export it with zero-tp convert to-hf --tokenizer"
            )
        yield exported


def checkpoint_entries(reader: CheckpointReader, config: PretrainedConfig, dtype: torch.dtype) -> list[Entry]:
    """Return every parameter's fp32 master under its Hugging Face name.

    Raises:
        UserError: the checkpoint lacks a parameter of the config's model.
    """
    for weight in weights_of(config):
        if weight.ours not in reader.parameters:
            raise UserError(f"{reader.directory}: its manifest has no parameter {weight.ours}")
    return native_entries(config, lambda name: reader.parameters[name].shape, reader.whole, dtype)
