"""Export a checkpoint, or a mean of several, to a native Hugging Face directory.

It runs in one process without DeepSpeed, and holds one parameter in memory at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationConfig

from zero_tp.base.errors import UserError
from zero_tp.data.tokenizer_files import open_tokenizer
from zero_tp.data.tokenizer_fingerprint import TokenizerFingerprint
from zero_tp.model.architectures import architecture_of, weights_of
from zero_tp.model.weights.entries import native_entries
from zero_tp.model.weights.export import MAX_SHARD_SIZE, check_target, write_native
from zero_tp.run.checkpoint.directory import check_content, complete_steps, step_directory
from zero_tp.run.checkpoint.find import RunCheckpoint, find_checkpoint
from zero_tp.run.checkpoint.reader import CheckpointReader
from zero_tp.run.checkpoint.run_tokenizer import (
    check_run_tokenizer,
    find_run_tokenizer,
    uncompared_tokenizer,
)

Card = Callable[[RunCheckpoint, str], str]
"""Returns the model card of a checkpoint and of a description of its weights, "" for the last."""


@dataclass(frozen=True)
class ExportResult:
    """The result of an export.

    Attributes:
        tokenizer: the directory that was copied, or None.
        causal: whether the model is a causal language model.
        notes: see `RunCheckpoint` and `uncompared_tokenizer`.
        weights: which average they are, or "".
    """

    checkpoint: Path
    parameters: int
    tokenizer: Path | None
    causal: bool
    notes: tuple[str, ...] = ()
    weights: str = ""


def to_huggingface(
    source: Path,
    output: Path,
    *,
    ema: bool = False,
    dtype: torch.dtype = torch.float32,
    tokenizer: Path | None = None,
    max_shard_size: str = MAX_SHARD_SIZE,
    overwrite: bool = False,
    card: Card | None = None,
) -> ExportResult:
    """Export the fp32 masters of `source`, a run or a checkpoint, to a Hugging Face model.

    Args:
        ema: export the average of the weights that the run kept instead.
        tokenizer: directory to copy in; by default the run's.
        card: returns the model card (zero_tp/tools/report/card.py); by default none is written.

    Raises:
        UserError: no checkpoint; no average in it; the output exists; a wrong tokenizer.
    """
    checkpoint = find_checkpoint(source)
    manifest = checkpoint.manifest
    averaged = averaged_parameters(checkpoint) if ema else frozenset()
    reader = CheckpointReader(checkpoint.path, manifest, averaged=averaged)
    name = f"moving average of the weights, decay {manifest.ema:g}" if ema else ""
    options = Export(output, dtype, tokenizer, max_shard_size, overwrite, card)
    return options.write([checkpoint], reader.weight, name)


def average_checkpoints(
    run: Path,
    steps: Sequence[int],
    output: Path,
    *,
    weights: Sequence[float] | None = None,
    dtype: torch.dtype = torch.float32,
    tokenizer: Path | None = None,
    max_shard_size: str = MAX_SHARD_SIZE,
    overwrite: bool = False,
    card: Card | None = None,
) -> ExportResult:
    """Export the weighted mean of the masters of a run's checkpoints to a Hugging Face model.

    They may have been saved on any topologies. The mean is taken in fp64; buffers, such as routers'
    biases, and the config are those of the last step.

    Args:
        weights: of each step; only their proportions count. By default they are equal.
        others: as in `to_huggingface`.

    Raises:
        UserError: a step without a checkpoint or given twice; weights that are not positive, or
            another number of them; and as in `to_huggingface`.
    """
    shares = _shares(steps, weights)
    checkpoints = [_checkpoint_of_step(run, step) for step in steps]
    readers = [CheckpointReader(saved.path, saved.manifest) for saved in checkpoints]
    last = max(checkpoints, key=lambda checkpoint: checkpoint.step)
    for checkpoint in checkpoints:
        if _shapes(checkpoint) != _shapes(last):
            raise UserError(
                f"{checkpoint.path}: has other parameters than {last.path}; leave it out"
            )
    stored = weights_of(last.hf_config())
    buffers = {weight.our_name for weight in stored if not weight.is_parameter}
    last_reader = readers[checkpoints.index(last)]

    def read(name: str) -> Tensor:
        if name in buffers:
            return last_reader.whole(name)
        mean = torch.zeros(last_reader.parameters[name].shape, dtype=torch.float64)
        for reader, share in zip(readers, shares, strict=True):
            mean.add_(reader.whole(name), alpha=share)
        return mean.float()

    parts = (f"{step:,} ({share:.4g})" for step, share in zip(steps, shares, strict=True))
    options = Export(output, dtype, tokenizer, max_shard_size, overwrite, card)
    suffix = f"; buffers and routers' biases of step {last.step:,}" if buffers else ""
    earlier = [checkpoint for checkpoint in checkpoints if checkpoint is not last]
    return options.write([last, *earlier], read, f"mean of the steps {', '.join(parts)}{suffix}")


def averaged_parameters(checkpoint: RunCheckpoint) -> frozenset[str]:
    """Return the names of the parameters of a checkpoint, which have an average; buffers have none.

    Raises:
        UserError: the run kept no average.
    """
    if checkpoint.manifest.ema is None:
        raise UserError(
            f"{checkpoint.path}: has no average of the weights; leave out --ema, or train with "
            'zero_tp.training.ema, such as {"decay": 0.999}'
        )
    weights = weights_of(checkpoint.hf_config())
    return frozenset(weight.our_name for weight in weights if weight.is_parameter)


def _shapes(checkpoint: RunCheckpoint) -> dict[str, tuple[int, ...]]:
    parameters = checkpoint.manifest.parameters
    return {name: tuple(entry.shape) for name, entry in parameters.items()}


def _shares(steps: Sequence[int], weights: Sequence[float] | None) -> list[float]:
    """Return each step's share of the mean; they add up to 1."""
    if len(steps) < 2:
        raise UserError("--steps: a mean needs two steps or more; export one with convert to-hf")
    repeated = [step for number, step in enumerate(steps) if step in steps[:number]]
    if repeated:
        raise UserError(f"--steps: step {repeated[0]} is there twice; give it a larger --weights")
    weights = [1.0] * len(steps) if weights is None else weights
    if len(weights) != len(steps):
        raise UserError(f"--weights: {len(weights)} for {len(steps)} steps; give one for each")
    wrong = [weight for weight in weights if not (math.isfinite(weight) and weight > 0)]
    if wrong:
        raise UserError(f"--weights: {wrong[0]} is no positive number; leave its step out")
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def _checkpoint_of_step(run: Path, step: int) -> RunCheckpoint:
    steps = complete_steps(run)
    if step not in steps:
        existing = ", ".join(map(str, steps)) or "none"
        raise UserError(
            f"--steps: {run} has no complete checkpoint of step {step}; it has {existing}"
        )
    return find_checkpoint(step_directory(run, step))


@dataclass(frozen=True)
class Export:
    """Where and how a Hugging Face model is written; `to_huggingface` has the arguments."""

    output: Path
    dtype: torch.dtype
    tokenizer: Path | None
    max_shard_size: str
    overwrite: bool
    card: Card | None

    def write(
        self, checkpoints: Sequence[RunCheckpoint], read: Callable[[str], Tensor], name: str
    ) -> ExportResult:
        """Verify the checkpoints and write the model.

        Args:
            checkpoints: all that `read` reads; the config and the tokenizer are the first one's.
            read: parameter → its whole weight, fp32.
            name: of the average that the weights are, or "".
        """
        checkpoint = checkpoints[0]
        manifest = checkpoint.manifest
        tokenizer = find_run_tokenizer(self.tokenizer, checkpoint)
        fingerprint = manifest.tokenizer_fingerprint
        config = checkpoint.hf_config()
        check_target(self.output, self.overwrite)  # before a long read
        if tokenizer is not None:
            opened = open_tokenizer(tokenizer)
            check_run_tokenizer(opened, tokenizer, checkpoint)
            fingerprint = fingerprint or TokenizerFingerprint.of(opened)
        # An export of damaged weights would look like a model that has learned badly.
        for source in checkpoints:
            check_content(source.path, source.manifest.files)
        shapes = _shapes(checkpoint)
        # Entries hold functions, not tensors: each parameter is read when its turn to be written
        # comes.
        entries = native_entries(config, shapes, read, self.dtype)
        generation = manifest.generation
        write_native(
            self.output,
            config,
            entries,
            generation=GenerationConfig(**generation) if generation is not None else None,
            tokenizer=tokenizer,
            fingerprint=fingerprint,
            max_shard_size=self.max_shard_size,
            overwrite=self.overwrite,
            card=self.card(checkpoint, name) if self.card is not None else None,
        )
        weights = [weight for weight in weights_of(config) if weight.is_parameter]
        parameters = sum(math.prod(shapes[weight.our_name]) for weight in weights)
        causal = architecture_of(config).spec(config).causal
        notes = checkpoint.notes + uncompared_tokenizer(tokenizer, checkpoint)
        return ExportResult(checkpoint.path, parameters, tokenizer, causal, notes, name)
