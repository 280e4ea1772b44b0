"""Checkpoints of Megatron-LM: `torch_dist` and the files of each rank."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from zero_tp.base.errors import UserError, shown
from zero_tp.base.strict_json import read_json
from zero_tp.model.architectures import architecture_of
from zero_tp.tools.checkpoint_import import megatron_names
from zero_tp.tools.checkpoint_import.agreement import choose_config
from zero_tp.tools.checkpoint_import.distributed_checkpoint import (
    METADATA,
    is_distributed,
    open_distributed,
)
from zero_tp.tools.checkpoint_import.megatron_config import config_of
from zero_tp.tools.checkpoint_import.source import SourceCheckpoint, without_tied_head
from zero_tp.tools.checkpoint_import.stored_tensors import StoredTensor, join
from zero_tp.tools.checkpoint_import.unpickling import InertObject, load_torch, tensors_in

COMMON = "common.pt"
RANK_FOLDER = re.compile(r"mp_rank_(\d\d)(?:_(\d{3}))?(?:_(\d{3}))?")
RANK_FILES = ("model_optim_rng.pt", "model_rng.pt")
IGNORABLE = (
    r"(chained_\d+\.)?optimizer\..*",  # states, of which only weights are read
    r"rng_state.*",
    r"opt_param_scheduler.*",
    r".*_extra_state.*",  # of Transformer Engine: scales of fp8 products
)
# Cut along columns; the rest of the linear layers, the embedding and the head along rows.
_COLUMNS = re.compile(r".*\.(linear_proj|linear_fc2)\.weight")
_ROWS = re.compile(
    r".*\.(linear_qkv|linear_fc1)\.(weight|bias)|embedding\.word_embeddings\.weight"
    r"|output_layer\.weight"
)
LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
EXPERT = re.compile(r"\.mlp\.experts\.(\d+)\.")


def is_megatron(folder: Path) -> bool:
    """Return whether a folder is one step of Megatron-LM."""
    # One may be missing: opening names it.
    present = [(folder / name).is_file() for name in (METADATA, "metadata.json", COMMON)]
    return sum(present) > 1 or any(
        (path / name).is_file() for path in folder.glob("mp_rank_*") for name in RANK_FILES
    )


def open_megatron(
    folder: Path, config: PretrainedConfig | None, vocabulary: int | None
) -> SourceCheckpoint:
    """Open a step of Megatron-LM.

    Raises:
        UserError: its format is `zarr` or `fsdp_dtensor`; it is damaged; its args describe a model
            that Hugging Face has no class for.
    """
    distributed = (folder / COMMON).is_file() or is_distributed(folder)
    if distributed:
        args, tensors, objects = _open_distributed(folder)
        extra = sorted(name for name in objects if "_extra_state" in name)
    else:
        args, tensors = _open_ranks(folder)
        extra = []
    config, notes = choose_config(config, lambda: config_of(args, vocabulary, folder), folder)
    _check_args(args, folder, distributed=distributed)
    states = sorted(name for name in tensors if re.fullmatch(IGNORABLE[0], name))
    left_out = [
        *([f"the optimizer's states ({len(states)} tensors)"] if states else []),
        *([f"extra states of layers ({len(extra)}, such as {extra[0]})"] if extra else []),
    ]
    spec = architecture_of(config).spec(config)
    if config.tie_word_embeddings:
        # The last stage of a pipeline has a copy.
        tensors = without_tied_head(folder, tensors, megatron_names.EMBEDDING, megatron_names.HEAD)
    return SourceCheckpoint(
        trainer="megatron",
        folder=folder,
        config=config,
        tensors=tensors,
        weights=list(megatron_names.weights(spec)),
        padded=megatron_names.PADDED,
        left_out=tuple(left_out),
        ignorable=IGNORABLE,
        notes=notes,
    )


def _check_args(args: Mapping[str, Any], folder: Path, *, distributed: bool) -> None:
    """Refuse what a config.json cannot tell and the table would read wrongly."""
    degree = args.get("tensor_model_parallel_size") or 1
    if (args.get("expert_tensor_parallel_size") or degree) != degree and not distributed:
        raise UserError(
            f"{folder}: expert_tensor_parallel_size {args['expert_tensor_parallel_size']} with TP "
            f"{degree}: experts' files of another grid are not read; save with --ckpt-format "
            "torch_dist"
        )
    version = args.get("checkpoint_version")
    if isinstance(version, (int, float)) and version < 2:
        raise UserError(
            f"{folder}: checkpoint_version {version} has other rows of Q, K and V; convert it with "
            "Megatron-LM first"
        )
    if args.get("rotary_interleaved"):
        raise UserError(
            f"{folder}: rotary_interleaved rotates neighbours, which no class of this family does"
        )


def _open_distributed(
    folder: Path,
) -> tuple[dict[str, Any], dict[str, StoredTensor], Sequence[str]]:
    path = folder / "metadata.json"
    if path.is_file():
        backend = read_json(path, "copy the checkpoint again").get("sharded_backend")
        if backend not in ("torch_dist", "torch_dcp"):
            raise UserError(
                f"{folder}: its format is {shown(backend)}; only torch_dist is read: load it with "
                "Megatron-LM and save it with --ckpt-format torch_dist"
            )
    content = open_distributed(folder)
    common = load_torch(folder / COMMON) if (folder / COMMON).is_file() else {}
    if not isinstance(common, dict):
        raise UserError(f"{folder / COMMON}: holds no dict; copy the checkpoint again")
    args = _fields(common.get("args"))
    if "checkpoint_version" in common:
        args.setdefault("checkpoint_version", common["checkpoint_version"])
    return args, megatron_names.canonical_names(content.tensors), list(content.objects)


def _fields(args: Any) -> dict[str, Any]:
    """Return the fields of an argparse.Namespace, or of a dict."""
    if isinstance(args, InertObject):
        return dict(args.fields)
    return dict(args) if isinstance(args, dict) else {}


@dataclass(frozen=True)
class Rank:
    """The files of one rank: its place and its model's chunks, one for each virtual stage."""

    tensor: int
    stage: int
    expert: int
    chunks: tuple[dict[str, StoredTensor], ...]


def _open_ranks(folder: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Open the file of every rank and join their tensors."""
    args: dict[str, Any] = {}
    ranks = list[Rank]()
    for path in sorted(folder.glob("mp_rank_*")):
        match = RANK_FOLDER.fullmatch(path.name)
        file = next((path / name for name in RANK_FILES if (path / name).is_file()), None)
        if match is None or file is None:
            raise UserError(f"{path}: no {RANK_FILES[0]} in it; copy the checkpoint again")
        content = load_torch(file)
        if not isinstance(content, dict):
            raise UserError(f"{file}: holds {type(content).__name__} and no dict of a model")
        if not ranks:
            args = _fields(content.get("args"))
            if "checkpoint_version" in content:
                args.setdefault("checkpoint_version", content["checkpoint_version"])
        numbers = [int(number) for number in match.groups()[1:] if number is not None]
        # One number alone is the stage, or without pipelines the expert rank.
        if len(numbers) == 1 and (args.get("pipeline_model_parallel_size") or 1) == 1:
            numbers = [0, *numbers]
        stage, expert = (*numbers, 0, 0)[:2]
        names = [key for key in content if re.fullmatch(r"model\d*", str(key))]
        chunks = tuple(
            dict[str, StoredTensor](
                (usual(name), tensor) for name, tensor in tensors_in(content[key], path=file)
            )
            for key in sorted(names, key=lambda key: int(key.removeprefix("model") or 0))
        )
        if not chunks:
            raise UserError(f"{file}: has no model, only {', '.join(map(str, content))}")
        ranks.append(Rank(int(match[1]), stage, expert, chunks))
    _check_complete(folder, ranks, args)
    return args, join_ranks(folder, ranks, gated=bool(args.get("swiglu")))


def usual(name: str) -> str:
    """Return the name in the table of a tensor of a rank's file."""
    return megatron_names.usual_name(name.removeprefix("module."))


def _check_complete(folder: Path, ranks: Sequence[Rank], args: Mapping[str, Any]) -> None:
    """Check that each place of the grid has one file."""
    sizes = {
        "tensor": args.get("tensor_model_parallel_size"),
        "stage": args.get("pipeline_model_parallel_size"),
        "expert": args.get("expert_model_parallel_size"),
    }
    count = 1
    for name, size in sizes.items():
        present = 1 + max(getattr(rank, name) for rank in ranks)
        size = size or present
        if present != size:
            raise UserError(
                f"{folder}: has files of {present} {name} ranks, and its args say {size}; copy the "
                "checkpoint again"
            )
        count *= size
    chunks = sorted({len(rank.chunks) for rank in ranks})
    if len(chunks) > 1:
        raise UserError(
            f"{folder}: one rank has {chunks[0]} chunks of the model, another {chunks[1]}; copy "
            "the checkpoint again"
        )
    if len(ranks) != count:
        raise UserError(
            f"{folder}: has {len(ranks)} of the {count} ranks' files; copy the checkpoint again"
        )


def join_ranks(folder: Path, ranks: Sequence[Rank], *, gated: bool) -> dict[str, StoredTensor]:
    """Return the whole tensors of a model whose ranks have files of their own.

    Layers are counted from 0 in each chunk. With 2 stages of 2 chunks of 2 layers:

        stage 0    chunk 0: layers 0 1    chunk 1: layers 4 5
        stage 1    chunk 0: layers 2 3    chunk 1: layers 6 7

    Args:
        gated: first matrices of MLPs hold gate and up, each cut over the ranks.
    """
    degree = 1 + max(rank.tensor for rank in ranks)
    stages = 1 + max(rank.stage for rank in ranks)
    expert_ranks = 1 + max(rank.expert for rank in ranks)
    by_place = {(rank.tensor, rank.stage, rank.expert): rank for rank in ranks}
    joined: dict[str, StoredTensor] = {}
    start = 0
    for chunk in range(len(ranks[0].chunks)):
        for stage in range(stages):
            layers = 0
            for expert_rank in range(expert_ranks):
                parts = [
                    by_place[tensor, stage, expert_rank].chunks[chunk] for tensor in range(degree)
                ]
                experts = _count(parts[0], EXPERT)
                for name in parts[0]:
                    whole = _whole_name(name, start, expert_rank * experts)
                    if whole not in joined:
                        joined[whole] = _join_tensor(folder, name, parts, gated=gated)
                layers = _count(parts[0], LAYER)
            start += layers
    return joined


def _count(names: Mapping[str, Any], pattern: re.Pattern[str]) -> int:
    """Return the number of layers, or of experts."""
    numbers = [int(match[1]) for name in names if (match := pattern.search(name))]
    return 1 + max(numbers, default=-1)


def _whole_name(name: str, layers: int, experts: int) -> str:
    """Return the name with the numbers that a layer and an expert have in the whole model."""
    name = LAYER.sub(lambda match: f"decoder.layers.{int(match[1]) + layers}.", name)
    return EXPERT.sub(lambda match: f".mlp.experts.{int(match[1]) + experts}.", name)


def _join_tensor(
    folder: Path, name: str, parts: Sequence[Mapping[str, StoredTensor]], *, gated: bool
) -> StoredTensor:
    missing = [rank for rank, part in enumerate(parts) if name not in part]
    if missing:
        raise UserError(
            f"{folder}: TP rank {missing[0]} has no tensor {name}, which rank 0 has; copy the "
            "checkpoint again"
        )
    tensors = [part[name] for part in parts]
    if _COLUMNS.fullmatch(name):
        return join(tensors, dim=1)
    if _ROWS.fullmatch(name):
        blocks = 2 if gated and ".linear_fc1." in name else 1
        return join(tensors, blocks=blocks)
    return tensors[0]  # norms, routers and biases of the second matrices are equal on all ranks
