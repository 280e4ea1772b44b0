"""Weights out: native Hugging Face directories of safetensors."""

from __future__ import annotations

import copy
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from zero_tp.errors import UserError
from zero_tp.models.architectures import architecture_of
from zero_tp.parallel.collectives import Group, all_gather, group_size
from zero_tp.parallel.layout import Sharded, layout_of

if TYPE_CHECKING:
    from zero_tp.models.wrapper import ZeroTPForCausalLM

MAX_SHARD_SIZE = "5GB"
_MODEL_FILES = ("config.json", "generation_config.json")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf")


def whole_parameter(parameter: nn.Parameter, group: Group) -> Tensor:
    """The whole tensor of a live parameter, on every rank.

    Collective over the TP group, and over the DP group under ZeRO-3.
    """
    partitioned = hasattr(parameter, "ds_id")
    if partitioned:
        import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]) if partitioned else nullcontext():
        local = parameter.detach().clone()
    layout = layout_of(parameter)
    if not isinstance(layout, Sharded) or group_size(group) == 1:
        return layout.unshard([local])
    return layout.unshard(list(all_gather(local.unsqueeze(0), group)))


def native_tensors(model: ZeroTPForCausalLM) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, whole tensor) of every parameter of a live model. Collective over all ranks."""
    parameters = dict(model.named_parameters())
    for weight in model.architecture.each_weight(model.spec):
        whole = whole_parameter(parameters[weight.ours], model.topology.tensor_group)
        yield weight.theirs, weight.convert(whole)


def _replaceable(target: Path) -> bool:
    """Is this nothing, an empty directory, or a model of transformers? A run has a config.json too, and checkpoints."""
    if not target.exists():
        return True
    if not target.is_dir():
        return False
    entries = [entry.name for entry in target.iterdir()]
    return not entries or ("config.json" in entries and "checkpoints" not in entries and ".git" not in entries)


def write_native(
    directory: str | os.PathLike[str],
    config: PretrainedConfig,
    tensors: Mapping[str, Tensor],
    *,
    dtype: torch.dtype,
    tokenizer: Path | None = None,
    max_shard_size: str = MAX_SHARD_SIZE,
    overwrite: bool = False,
) -> None:
    """Write a directory that transformers' own classes open: safetensors, config, generation config, tokenizer.

    It is written beside its place and renamed, so that it is complete or not there; with `overwrite`, an existing
    directory's files of the same names are replaced, and its other weights files removed.

    Args:
        tensors: every whole tensor by its Hugging Face name; tied ones once.
        dtype: of the written weights, recorded in the config.
        tokenizer: a directory whose files are copied in.

    Raises:
        UserError: the directory exists and `overwrite` is off, or is no model; `max_shard_size` is not a size; a
            tensor is missing, unexpected or has a wrong shape.
    """
    target = Path(directory)
    if target.exists() and not overwrite:
        raise UserError(f"{target}: exists already; give another --output, or --overwrite to replace it")
    if not _replaceable(target):
        raise UserError(f"{target}: exists and is no Hugging Face model, so it is not replaced; give another --output")
    if not re.fullmatch(r"0*[1-9]\d*([KMGTP]i?B)?", max_shard_size, re.IGNORECASE):
        raise UserError(f"max_shard_size: {max_shard_size!r} is not a positive size such as 5GB or 500MB")
    config = copy.deepcopy(config)
    config.dtype = dtype
    architecture = architecture_of(config)
    config.architectures = [architecture.native_class]
    with init_empty_weights():
        native = AutoModelForCausalLM.from_config(config, dtype=dtype)
    state = {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}
    if config.tie_word_embeddings:
        state.update({alias: state[source] for alias, source in architecture.tied.items()})
    expected = {name: tuple(tensor.shape) for name, tensor in native.state_dict().items()}
    for name in expected.keys() | state.keys():
        found = tuple(state[name].shape) if name in state else None
        if found != expected.get(name):
            raise UserError(f"tensor {name}: {architecture.native_class} expects {expected.get(name)}, found {found}")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        native.save_pretrained(temporary, state_dict=state, max_shard_size=max_shard_size)
        if tokenizer is not None:
            # It may be a whole model's directory: only the tokenizer comes along, and no written file is replaced.
            for file in sorted(tokenizer.iterdir()):
                foreign = file.suffix in _WEIGHTS or file.name.endswith(".index.json") or file.name in _MODEL_FILES
                if file.is_file() and not foreign and not (temporary / file.name).exists():
                    shutil.copy2(file, temporary / file.name)
        temporary.chmod(0o755)
        if not target.exists():
            os.replace(temporary, target)
            return
        # Only the model's own files go: a person may keep others beside them.
        for stale in target.glob("model*.safetensors*"):
            stale.unlink()
        for file in sorted(temporary.iterdir()):
            os.replace(file, target / file.name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def save_pretrained(
    model: ZeroTPForCausalLM,
    directory: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: str = MAX_SHARD_SIZE,
) -> None:
    """Write a live model as its native class. Collective; global rank 0 writes and the others wait for it.

    Raises:
        UserError: see `write_native`; rank 0's own error there, and its text on the other ranks.
    """
    first = model.topology.rank == 0
    # Every rank takes part in every gather; only rank 0 keeps the result.
    tensors = {name: tensor.cpu() for name, tensor in native_tensors(model) if first}
    failure: Exception | None = None
    if first:
        try:
            write_native(
                directory,
                model.config,
                tensors,
                dtype=dtype or next(model.parameters()).dtype,
                max_shard_size=max_shard_size,
                overwrite=True,
            )
        except Exception as error:
            failure = error
    if dist.is_initialized():
        # The others learn how it went; a barrier would leave them waiting for a rank that has failed.
        outcome = [None if failure is None else str(failure)]
        dist.broadcast_object_list(outcome, src=0)
        if failure is None and outcome[0] is not None:
            failure = UserError(outcome[0])
    if failure is not None:
        raise failure
