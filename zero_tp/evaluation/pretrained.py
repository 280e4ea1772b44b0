"""A Hugging Face model directory can be evaluated, or a training run as it is. Both are checked before anything large
is read, and then loaded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from zero_tp.architectures import ARCHITECTURES, architecture_of
from zero_tp.architectures.configs import pretrained_config
from zero_tp.checkpoint.convert import config_of, tokenizer_of
from zero_tp.checkpoint.directory import (
    MANIFEST,
    check_sizes,
    find_checkpoint,
    in_use,
    passed_over,
    read_manifest,
)
from zero_tp.checkpoint.reader import CheckpointReader
from zero_tp.data.tokenizer import missing_for_masking, open_tokenizer
from zero_tp.errors import UserError, first_line
from zero_tp.evaluation.subject import EncoderScorer, HuggingFaceScorer, ParallelScorer, Scorer, Subject
from zero_tp.huggingface import ZeroTPForCausalLM, ZeroTPForPreTraining
from zero_tp.strict_json import InvalidJson, read_object
from zero_tp.topology import Topology
from zero_tp.training.metrics_file import METRICS_FILE
from zero_tp.weights.files import find_weights, resolve
from zero_tp.weights.load import PretrainedSource, open_config, open_model


@dataclass(frozen=True)
class ModelDirectory:
    """A directory is checked: its config and tokenizer are open and fit each other, weights are there but not read.

    Attributes:
        step: of the training run; None where that isn't known.
        note: what a person has to know of it, in a line; else empty.
    """

    path: Path
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    allow_pickle: bool = False
    step: int | None = None
    note: str = ""

    def sequence_length(self, asked: int | None) -> int:
        """Return the tokens of a window: `asked`, or all positions the model has, where its config says so.

        UserError: more than it has, not known, or not a number of positions.
        """
        positions: int | None = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        if positions is not None and positions < 1:
            raise UserError(f"{self.path}: its config's max_position_embeddings is {positions}: a positive number")
        if asked is None:
            if positions is None:
                raise UserError(
                    f"{self.path}: its config doesn't say how many positions it has: give --sequence-length"
                )
            return positions
        if asked < 1:
            raise UserError(f"--sequence-length {asked}: at least 1")
        if positions is not None and asked > positions:
            raise UserError(f"--sequence-length {asked:,}: the model has {positions:,} positions")
        return asked

    def load(
        self,
        dtype: str,
        device: str,
        topology: Topology | None = None,
        *,
        batch_size: int = 8,
        sequence_length: int | None = None,
    ) -> Subject:
        """Load the model: an encoder, and any over TP ranks, as zero_tp's own, else as transformers' own, whatever its
        architecture.

        UserError: weights missing in the files, no such device, or an architecture that can't be split over TP ranks.
        """
        topology = topology or Topology()
        model = self._model(getattr(torch, dtype), device, topology).eval()
        return Subject(
            SCORERS.get(type(model), HuggingFaceScorer)(model),
            model,
            self.tokenizer,
            self.config,
            self.sequence_length(sequence_length),
            batch_size=batch_size,
            device=device,
            topology=topology,
        )

    @property
    def causal(self) -> bool:
        """Return whether it is a causal model; else it is an encoder that there is a table for."""
        table = ARCHITECTURES.get(self.config.model_type)
        return table is None or table.causal

    def _model(self, dtype: torch.dtype, device: str, topology: Topology) -> Any:
        if not self.causal:
            config = without_sentences(pretrained_config(self.path))
            encoder = PretrainedSource(self.path, config, allow_pickle=self.allow_pickle)
            if encoder.new_heads:
                heads = ", ".join(encoder.new_heads)
                raise UserError(f"{self.path}: it has no weights of {heads}, which predicts tokens")
            return ZeroTPForPreTraining(config, topology, source=encoder, dtype=dtype, device=device)
        if topology.tensor > 1:
            return ZeroTPForCausalLM.from_pretrained(
                self.path, topology, dtype=dtype, device=device, allow_pickle=self.allow_pickle
            )
        model = open_model(self.path, self.config, dtype, allow_pickle=self.allow_pickle)
        try:
            model.to(device)
        except (RuntimeError, AssertionError) as error:
            raise UserError(f"--device {device}: {first_line(error)}") from error
        try:
            with torch.no_grad():
                model(torch.zeros(1, 1, dtype=torch.long, device=device))
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # an architecture that nobody here knows raises anything
            raise UserError(
                f"{self.path}: the model that its config.json describes computes nothing: {first_line(error)}"
            ) from error
        return model


@dataclass(frozen=True)
class CheckpointDirectory(ModelDirectory):
    """A checkpoint of a training run is evaluated without an export; `path` is its own directory."""

    def _model(self, dtype: torch.dtype, device: str, topology: Topology) -> Any:
        """Load the fp32 masters; each rank reads what it holds. UserError: a file is missing or damaged."""
        with in_use(self.path) as manifest:
            source = CheckpointReader(self.path, manifest)
            given: dict[str, Any] = {"source": source, "dtype": dtype, "device": device}
            if self.causal:
                return ZeroTPForCausalLM(self.config, topology, **given)
            return ZeroTPForPreTraining(without_sentences(self.config), topology, **given)


SCORERS: dict[type, Callable[[Any], Scorer]] = {
    ZeroTPForCausalLM: ParallelScorer,
    ZeroTPForPreTraining: EncoderScorer,
}
"""By the model's class; transformers' own are scored by another."""


def without_sentences(config: PretrainedConfig) -> PretrainedConfig:
    """Return an encoder's config for a model without the sentence head, which scores no tokens."""
    changed = copy.deepcopy(config)
    changed.architectures = [str(architecture_of(config).without_sentences)]
    return changed


def open_directory(path: Path, *, allow_pickle: bool = False, tokenizer: Path | None = None) -> ModelDirectory:
    """Check a directory and open its config and tokenizer.

    Args:
        allow_pickle: it may be one of pickled weights.
        tokenizer: a directory to take the tokenizer from, instead of the model's own.

    Raises:
        UserError: it doesn't exist, lacks config, weights or tokenizer, isn't a causal language model, or its tokenizer
            has more tokens than the model.
    """
    path = resolve(path, "--model", allow_pickle=allow_pickle).directory
    tokenizer = None if tokenizer is None else resolve(tokenizer, "--tokenizer", weights=False).directory
    if not path.is_dir():
        raise UserError(f"--model {path}: {'not a directory' if path.exists() else 'no such directory'}")
    if _is_run(path):
        return _open_run(path, tokenizer)
    if not (path / "config.json").is_file():
        raise UserError(f"--model {path}: no config.json in it: not a Hugging Face model directory")
    find_weights(path, allow_pickle)
    config = open_config(path)
    return ModelDirectory(path, config, _open_tokenizer(tokenizer or path, config), allow_pickle)


def _is_run(path: Path) -> bool:
    """Tell whether the directory is a training run or one of its checkpoints."""
    if (path / "checkpoints").is_dir() or "checkpoints" in (path.name, path.parent.name):
        return True
    if (path / METRICS_FILE).is_file() or (path / MANIFEST).is_file():
        return True
    try:
        return "zero_tp" in read_object(path / "config.json")
    except (OSError, InvalidJson):  # told where it is opened
        return False


def _open_run(path: Path, tokenizer: Path | None) -> CheckpointDirectory:
    checkpoint = find_checkpoint(path)
    manifest = read_manifest(checkpoint)
    check_sizes(checkpoint, manifest.files)
    config = config_of(manifest)
    found = tokenizer_of(tokenizer, manifest.tokenizer)
    if found is None:
        raise UserError(f"--model {path}: the run has no tokenizer: say where it is with --tokenizer DIR")
    opened = _open_tokenizer(found, config)
    return CheckpointDirectory(
        checkpoint, config, opened, step=manifest.step, note="; ".join(passed_over(path, manifest.step))
    )


def _open_tokenizer(path: Path, config: PretrainedConfig) -> PreTrainedTokenizerBase:
    tokenizer = open_tokenizer(path)
    check_tokenizer(tokenizer, config, path)
    return tokenizer


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, path: Path) -> None:
    """Raise a UserError if `path`'s tokenizer is empty, has more tokens than the model, or none to stand before a
    text, or around one."""
    if not len(tokenizer):
        raise UserError(f"{path}: no tokenizer in it")
    table = ARCHITECTURES.get(config.model_type)
    if table is not None and not table.causal:
        if missing := missing_for_masking(tokenizer):
            raise UserError(f"{path}: its tokenizer has no {missing[0]} token, which an encoder's rows need")
    elif tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise UserError(f"{path}: its tokenizer has neither a bos nor an eos token to stand before a text")
    vocabulary = config.get_text_config().vocab_size
    largest = max(tokenizer.get_vocab().values())
    if max(len(tokenizer), largest + 1) > vocabulary:
        has = f"{len(tokenizer):,} tokens" if len(tokenizer) > vocabulary else f"a token of id {largest:,}"
        raise UserError(f"{path}: its tokenizer has {has}, the model only {vocabulary:,}: they don't belong together")
