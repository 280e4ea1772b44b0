"""Write safetensors directories that transformers' native classes open.

One parameter is whole in memory at a time.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig
from transformers.utils import GENERATION_CONFIG_NAME

from zero_tp.base.errors import UserError, first_line
from zero_tp.base.files import (
    check_replaceable,
    partial_directory,
    put_in_place,
    read_regular,
    sync,
)
from zero_tp.base.weight_files import ID_FILES, INDEX, is_finite
from zero_tp.data.tokenizer_files import copy_tokenizer, match_tokenizer, open_tokenizer
from zero_tp.data.tokenizer_fingerprint import FINGERPRINT, TokenizerFingerprint
from zero_tp.model.architectures import aliases_of, architecture_of, native_class_of
from zero_tp.model.architectures.configs import CONFIG
from zero_tp.model.weights.entries import live_entries, native_entries
from zero_tp.model.weights.native import native_model, stored_shapes
from zero_tp.parallel.agreement import on_rank_zero
from zero_tp.parallel.safetensors_files import Entry, write_tensors
from zero_tp.parallel.topology import Topology

MAX_SHARD_SIZE = "5GB"
CARD = "README.md"


def plan_shards(entries: Iterable[Entry], max_shard_size: str) -> dict[str, list[Entry]]:
    """Return file name → its tensors, packed as transformers does: in order, not by best fit.

    Raises:
        UserError: `max_shard_size` is not a size.
    """
    if not re.fullmatch(r"0*[1-9]\d*([KMGT]B)?", max_shard_size, re.IGNORECASE):
        raise UserError(
            f"max_shard_size: {max_shard_size!r} is not a positive size such as 5GB or 500MB"
        )
    by_name = {entry.name: entry for entry in entries}
    split = split_state_dict_into_shards_factory(
        by_name,
        get_storage_size=lambda entry: entry.size,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=int(max_shard_size) if max_shard_size.isdecimal() else max_shard_size,
    )
    return {
        file: [by_name[name] for name in names] for file, names in split.filename_to_tensors.items()
    }


def check_target(target: Path, overwrite: bool) -> None:
    """Check that the target is absent or, with `overwrite`, empty or a model; a run's directory
    is refused too.
    """
    if not target.exists():
        return
    if not overwrite:
        raise UserError(
            f"{target}: exists already; give another --output, or --overwrite to replace it"
        )
    entries = [entry.name for entry in target.iterdir()] if target.is_dir() else ["a file"]
    if entries and ("config.json" not in entries or "checkpoints" in entries or ".git" in entries):
        raise UserError(
            f"{target}: exists and is no Hugging Face model, so it is not replaced; give another "
            "--output"
        )
    check_replaceable(target)


def write_native(
    directory: str | os.PathLike[str],
    config: PretrainedConfig,
    entries: Sequence[Entry],
    *,
    generation: GenerationConfig | None = None,
    tokenizer: Path | None = None,
    fingerprint: TokenizerFingerprint | None = None,
    max_shard_size: str = MAX_SHARD_SIZE,
    overwrite: bool = False,
    merge: bool = False,
    card: str | None = None,
    check: Callable[[Path], None] | None = None,
) -> None:
    """Write a directory that transformers' own classes open: safetensors, config, generation
    config, tokenizer.

    The files are written to a temporary directory, flushed and renamed, so the result is complete
    or absent. With `overwrite` it replaces an existing model at once and keeps other files.

    Args:
        entries: every whole tensor by its Hugging Face name, tied tensors once; read one at a time,
            in the order of `plan_shards`. The config records their dtype.
        generation: generation config; by default that of the model config.
        tokenizer: a directory whose tokenizer is copied, so that AutoTokenizer opens it with the
            same ids.
        fingerprint: of the tokenizer that the model was trained with; recorded in the files of the
            weights.
        merge: move files into the directory one by one, because other programs write into it too.
        card: text of the model card. A card that a person wrote or edited stays.
        check: called with the temporary directory; what it raises keeps the old target.

    Raises:
        UserError: the model is written, but without the tokenizer, which transformers would open
            with other ids there.
    """
    target = Path(directory)
    if not merge:
        check_target(target, overwrite)
    config = copy.deepcopy(config)
    # transformers opens a model in the dtype of its config.
    config.dtype = entries[0].dtype
    config.architectures = [native_class_of(config)]
    # Its class checks names and shapes, and writes the config as transformers writes it.
    native = native_model(config)
    _check_entries(entries, native, config)
    names = architecture_of(config).file_names
    shards = plan_shards(
        [replace(entry, name=names.get(entry.name, entry.name)) for entry in entries],
        max_shard_size,
    )
    target = Path(os.path.realpath(target))
    problem = ""
    merge = merge and target.is_dir()
    metadata = {"format": "pt"} | (
        {} if fingerprint is None else {FINGERPRINT: fingerprint.model_dump_json()}
    )
    # Files are moved only within a file system, and the target of a merge may be a mount point.
    with partial_directory(target / CONFIG if merge else target) as temporary:
        _write_weights(temporary, shards, metadata)
        _write_configs(temporary, native, generation)
        if tokenizer is not None:
            copy_tokenizer(
                tokenizer, temporary, getattr(native.config, "max_position_embeddings", None)
            )
            problem = match_tokenizer(temporary, open_tokenizer(tokenizer))
        if card is not None and not _is_edited(target / CARD):
            (temporary / CARD).write_text(f"{card}\n{_digest_line(card)}\n", encoding="utf-8")
        if check is not None:
            check(temporary)
        if merge:
            _move_into(temporary, target)
        else:
            # An older tokenizer's files would change the ids.
            replaced = ID_FILES if tokenizer is not None else ()
            put_in_place(temporary, target, lambda name: _is_weights(name) or name in replaced)
    if problem:
        raise _without_tokenizer(target, tokenizer, config.model_type, problem)


def _without_tokenizer(
    target: Path, tokenizer: Path | None, model_type: str, problem: str
) -> UserError:
    return UserError(
        f"{target}: written without a tokenizer, because transformers would open {tokenizer} with "
        "other ids in a "
        f"{model_type} directory: {problem}; open the tokenizer from {tokenizer} itself"
    )


def _write_configs(directory: Path, native: Any, generation: GenerationConfig | None) -> None:
    """Write the config of a model of transformers and, if it generates, its generation config."""
    native.config.save_pretrained(directory)
    settings = generation or getattr(native, "generation_config", None)
    if settings is not None:
        # `save_pretrained` would refuse flags without effect, such as top_p without do_sample, of
        # existing files.
        settings.to_json_file(directory / GENERATION_CONFIG_NAME, keys_to_pop=["compile_config"])


def _check_entries(entries: Iterable[Entry], native: nn.Module, config: PretrainedConfig) -> None:
    """Check that these are the tensors of the native class."""
    aliases = aliases_of(config)
    expected = {
        name: shape for name, shape in stored_shapes(native, config).items() if name not in aliases
    }
    shapes = {entry.name: tuple(entry.shape) for entry in entries}
    for name in sorted(expected.keys() | shapes.keys()):
        if shapes.get(name) != expected.get(name):
            problem = (
                f"{type(native).__name__} expects {expected.get(name)}, found {shapes.get(name)}"
            )
            raise UserError(f"tensor {name}: {problem}")


def _digest_line(card: str) -> str:
    """Return the last line to append to a card: its hash, by which `_is_edited` detects edits."""
    return f"<!-- {hashlib.sha256(card.encode()).hexdigest()} -->"


def _is_edited(path: Path) -> bool:
    """Return whether there is a card that a person wrote or changed."""
    try:
        text = read_regular(path).decode()
    except FileNotFoundError:
        return False
    except (OSError, UnicodeDecodeError):
        return True
    card, _, last = text.removesuffix("\n").rpartition("\n")
    return last != _digest_line(card)


def _is_weights(name: str) -> bool:
    return fnmatch(name, "model*.safetensors*")


def _move_into(written: Path, target: Path) -> None:
    """Move files into a directory, the config last, and remove the weights of an older model."""
    sync(written)
    names = sorted((file.name for file in written.iterdir()), key=lambda name: name == CONFIG)
    # New weights come before the config, by which others open a model, and old ones go last: there
    # is no moment without any.
    for name in names:
        os.replace(written / name, target / name)
    for file in list(target.iterdir()):
        if _is_weights(file.name) and file.name not in names:
            file.unlink()


def _write_weights(
    directory: Path, shards: dict[str, list[Entry]], metadata: dict[str, str]
) -> None:
    for file, entries in shards.items():
        checked = [replace(entry, read=partial(_read_finite, entry)) for entry in entries]
        write_tensors(directory / file, checked, metadata, hashed=False)
    if len(shards) == 1:
        return
    all_entries = [entry for entries in shards.values() for entry in entries]
    index = {
        "metadata": {
            "total_parameters": sum(math.prod(entry.shape) for entry in all_entries),
            "total_size": sum(entry.size for entry in all_entries),
        },
        "weight_map": {entry.name: file for file, entries in shards.items() for entry in entries},
    }
    (directory / INDEX).write_text(
        json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8"
    )


def _read_finite(entry: Entry) -> Tensor:
    tensor = entry.read()
    # bf16 and fp32 have the same exponents, so only fp16 can overflow.
    if entry.dtype == torch.float16 and not is_finite(tensor):
        raise UserError(
            f"tensor {entry.name} has values beyond fp16's range; export it in bf16 or fp32"
        )
    return tensor


def save_pretrained(
    directory: str | os.PathLike[str],
    parameters: Mapping[str, Tensor],
    config: PretrainedConfig,
    topology: Topology,
    *,
    generation: GenerationConfig | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: str = MAX_SHARD_SIZE,
    merge: bool = False,
) -> None:
    """Write a live model as its native class. Collective; global rank 0 writes, and its error is
    raised on all ranks.

    Args:
        parameters: the model's, by name; sharded over the topology's TP group as their layouts say.
        dtype: of the written weights; by default that of the parameters.
        merge: see `write_native`.
    """
    stored_dtype = dtype or next(iter(parameters.values())).dtype
    entries = live_entries(parameters, config, topology, stored_dtype)
    # Every rank takes part in every gather, in the order in which rank 0 writes.
    # A generator, so that each gather happens when rank 0 writes its tensor, and one whole
    # parameter is in memory at a time. The plan depends on sizes and their order only, so
    # `write_native`, which renames tensors, asks in this order, too:
    #     rank 0        write: next(reads) → file, next(reads) → file, …
    #     other ranks   deque(reads): take part in the same gathers and drop the results
    reads = (
        entry.read()
        for planned in plan_shards(entries, max_shard_size).values()
        for entry in planned
    )
    streamed = [replace(entry, read=partial(next, reads)) for entry in entries]

    def write() -> None:
        try:
            write_native(
                directory,
                config,
                streamed,
                generation=generation,
                max_shard_size=max_shard_size,
                overwrite=True,
                merge=merge,
            )
        except (UserError, OSError):
            raise
        except (
            Exception
        ) as error:  # transformers' own: the other ranks must not wait for one that has failed
            raise UserError(f"{directory}: {first_line(error)}") from error
        finally:
            deque(reads, maxlen=0)  # after a failure the other ranks still wait in their gathers

    # Before `on_rank_zero`, which waits for rank 0, which waits for these gathers.
    if topology.rank != 0:
        deque(reads, maxlen=0)
    if dist.is_initialized():
        on_rank_zero(write)
    else:
        write()


def save_state_dict(
    directory: str | os.PathLike[str],
    config: PretrainedConfig,
    state_dict: Mapping[str, Tensor],
    *,
    generation: GenerationConfig | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: str = MAX_SHARD_SIZE,
) -> None:
    """Write whole weights, by our names, as a native model. The directory may have other files."""
    shapes = {name: tuple(tensor.shape) for name, tensor in state_dict.items()}
    stored_dtype = dtype or next(iter(state_dict.values())).dtype
    entries = native_entries(config, shapes, lambda name: state_dict[name].detach(), stored_dtype)
    write_native(
        directory,
        config,
        entries,
        generation=generation,
        max_shard_size=max_shard_size,
        overwrite=True,
        merge=True,
    )
