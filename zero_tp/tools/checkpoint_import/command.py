"""`zero-tp convert to-hf` of another trainer's checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import PretrainedConfig

from zero_tp.base.constants import DTYPES
from zero_tp.base.errors import UserError
from zero_tp.base.weight_files import resolve_tokenizer
from zero_tp.data.tokenizer import vocabulary_size
from zero_tp.data.tokenizer_files import open_tokenizer
from zero_tp.model.architectures.configs import CONFIG
from zero_tp.model.weights.native import open_config
from zero_tp.tools.checkpoint_import.formats import FORMATS, open_checkpoint
from zero_tp.tools.checkpoint_import.importing import import_checkpoint
from zero_tp.tools.checkpoint_import.page import read_ids, text_tokens
from zero_tp.tools.checkpoint_import.proof import Proof, prove
from zero_tp.tools.checkpoint_import.source import SourceCheckpoint


def read_config(path: Path | None) -> PretrainedConfig | None:
    """Return the config of a `config.json` or of its directory."""
    if path is None:
        return None
    if not path.exists():
        raise UserError(f"--config: no file {path}; give the model's {CONFIG}")
    if path.is_file() and path.name != CONFIG:
        raise UserError(f"--config: {path}: give a file of the name {CONFIG}, or its directory")
    return open_config(path.parent if path.is_file() else path)


def proof_tokens(options: argparse.Namespace, tokenizer: Path | None) -> Tensor | None:
    """Return the tokens that the result is scored on; None: it is not."""
    chosen = [options.verify_text, options.verify_ids, options.no_verify or None]
    if sum(choice is not None for choice in chosen) > 1:
        raise UserError("--verify-text, --verify-ids and --no-verify: give one of them")
    if options.no_verify:
        return None
    if options.verify_ids is not None:
        return read_ids(options.verify_ids)
    if tokenizer is None:
        raise UserError(
            "without --tokenizer no text can be scored; give --tokenizer DIR, or tokens with "
            "--verify-ids FILE, or --no-verify"
        )
    return text_tokens(tokenizer, options.verify_text)


def convert(options: argparse.Namespace) -> list[str]:
    """Convert a checkpoint as the options say; return lines on the result."""
    if options.format is not None and options.format not in FORMATS:
        raise UserError(f"--format {options.format}: give one of {', '.join(FORMATS)}")
    tokenizer = resolve_tokenizer(options.tokenizer, None)
    vocabulary = None if tokenizer is None else vocabulary_size(open_tokenizer(tokenizer))
    tokens = proof_tokens(options, tokenizer)
    checkpoint = open_checkpoint(
        options.source,
        name=options.format,
        step=options.step,
        config=read_config(options.config),
        vocabulary=vocabulary,
    )
    proofs = list[Proof]()
    result = import_checkpoint(
        checkpoint,
        options.output,
        dtype=getattr(torch, DTYPES[options.dtype]) if options.dtype else None,
        tokenizer=tokenizer,
        ignored=options.ignore,
        max_shard_size=options.max_shard_size,
        overwrite=options.overwrite,
        proof=None if tokens is None else _proof(checkpoint, tokens, proofs),
    )
    dtype = str(result.dtype).removeprefix("torch.")
    return [
        f"{checkpoint.folder} ({checkpoint.trainer}, {checkpoint.config.model_type}) → "
        f"{options.output} ({result.parameters:,} parameters, {dtype})",
        f"tensors: {result.read} read, {result.unused} unused, {result.tensors} made",
        *(f"left out: {part}" for part in checkpoint.left_out),
        *result.notes,
        *(_line(proof) for proof in proofs),
        f"tokenizer from {tokenizer}"
        if tokenizer is not None
        else "without a tokenizer; --tokenizer DIR adds one",
    ]


def _line(proof: Proof) -> str:
    return (
        f"proof: loss {proof.loss:.4f} on {proof.tokens} tokens, a uniform guess "
        f"{proof.uniform:.4f} ({proof.seconds:.1f} s)"
    )


def _proof(
    checkpoint: SourceCheckpoint, tokens: Tensor, proofs: list[Proof]
) -> Callable[[Path], None]:
    """Return a function that scores a written model, keeps the proof, and refuses a bad one."""

    def check(directory: Path) -> None:
        proof = prove(directory, tokens)
        proofs.append(proof)
        # Not "loss >= …", which is false of NaN.
        if not proof.loss < proof.uniform:
            raise UserError(
                f"{checkpoint.folder}: {_line(proof)}, so its weights were read wrongly, or the "
                "tokens are not the model's; give its own --config and --tokenizer, or --no-verify"
            )

    return check
