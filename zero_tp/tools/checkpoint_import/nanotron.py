"""Checkpoints of nanotron: a file for each tensor and TP rank, which tells its place in the whole.

Source: huggingface/nanotron at 2411b02 (`src/nanotron/serialize/`, `src/nanotron/models/llama.py`
and `qwen.py`, `src/nanotron/config/models_config.py`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from transformers import PretrainedConfig

from zero_tp.base.errors import UserError, first_line
from zero_tp.base.strict_json import read_json
from zero_tp.model.architectures import architecture_of
from zero_tp.model.architectures.spec import TransformerSpec
from zero_tp.parallel.spans import Span, Spans
from zero_tp.tools.checkpoint_import.agreement import choose_config
from zero_tp.tools.checkpoint_import.recorded_fields import RecordedFields, derive_config
from zero_tp.tools.checkpoint_import.row_maps import fused, in_order, paired, within
from zero_tp.tools.checkpoint_import.safetensors_file import SafetensorsFile, open_safetensors
from zero_tp.tools.checkpoint_import.source import OUR_LAYER, SourceCheckpoint, SourceWeight
from zero_tp.tools.checkpoint_import.stored_tensors import JoinedTensor, Piece, StoredTensor

CONFIG_FILE = "model_config.json"
FAMILIES = ("llama", "qwen2", "smollm3")
LAYER = "model.decoder.{layer}.pp_block."
EMBEDDING = "model.token_position_embeddings.pp_block.token_embedding.weight"
HEAD = "model.lm_head.pp_block.weight"
FILE = re.compile(
    r"model_(\w+?)(?:_pp-rank-(\d+)-of-(\d+)_tp-rank-(\d+)-of-(\d+))?(_exp-rank-.*)?\.safetensors"
)
# A field that no family of these has → its values in those that are read.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "rope_scaling": (None,),
    "rope_seq_len_interpolation_factor": (None,),
    "sliding_window_size": (None,),
    "flex_attention_mask": (None, "document"),
    "moe_config": (None,),
}


def is_nanotron(folder: Path) -> bool:
    """Return whether a folder is one step of nanotron."""
    return (folder / CONFIG_FILE).is_file() and (folder / "model" / "model").is_dir()


def open_nanotron(
    folder: Path, config: PretrainedConfig | None, vocabulary: int | None
) -> SourceCheckpoint:
    """Open a step of nanotron.

    Raises:
        UserError: a file is missing or damaged; its config describes a model that Hugging Face has
            no class for, or whose weights are not read.
    """
    path = folder / CONFIG_FILE
    recorded = read_json(path, "give the folder of a step of nanotron")
    if "rope_interleaved" not in recorded:
        # Releases without it rotated neighbours, and some files that lack it were made since.
        raise UserError(
            f"{path}: has no rope_interleaved; add it: true if neighbouring features rotate "
            "together, else false"
        )
    tensors = _tensors(folder)
    config, notes = choose_config(config, lambda: config_of(recorded, vocabulary, path), path)
    if config.model_type not in FAMILIES:
        raise UserError(
            f"--config: {config.model_type} is not read from nanotron; give a config of "
            f"{', '.join(FAMILIES)}"
        )
    _check_scale(folder)
    spec = architecture_of(config).spec(config)
    states = (
        len(list((folder / "optimizer").rglob("*.*"))) if (folder / "optimizer").is_dir() else 0
    )
    neighbours = bool(recorded["rope_interleaved"])
    return SourceCheckpoint(
        trainer="nanotron",
        folder=folder,
        config=config,
        tensors=tensors,
        weights=list(weights(spec, neighbours=neighbours)),
        padded=(EMBEDDING, HEAD),
        left_out=(f"the optimizer's states ({states} files)",) if states else (),
        notes=notes,
    )


def _check_scale(folder: Path) -> None:
    """Refuse µP, whose attention scores have another scale; only config.yaml tells."""
    path = folder / "config.yaml"
    if not path.is_file():
        return
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise UserError(
            f"{path}: cannot be read ({first_line(error)}); copy the checkpoint again"
        ) from error
    for name in ("model", "init_method"):
        settings = settings.get(name) if isinstance(settings, dict) else None
    if isinstance(settings, dict) and settings.get("use_mup"):
        raise UserError(
            f"{path}: use_mup scales attention scores by 1/d, which no class of these families does"
        )


def config_of(recorded: Mapping[str, Any], vocabulary: int | None, path: Path) -> PretrainedConfig:
    """Return the config of a model, from `model_config.json`.

    Args:
        vocabulary: of the tokenizer; by default the recorded one, which may be padded.

    Raises:
        UserError: a field is missing, or no family that is derived here has such layers.
    """

    fields = RecordedFields(recorded, path)
    for name, values in _PLAIN.items():
        fields.require(name, values, values[0])
    heads, layers = fields.size("num_attention_heads"), fields.size("num_hidden_layers")
    rotary = {"rope_type": "default", "rope_theta": fields.number("rope_theta")}
    known = {
        "vocab_size": vocabulary or fields["vocab_size"],
        "hidden_size": fields["hidden_size"],
        "intermediate_size": fields["intermediate_size"],
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get("num_key_value_heads", heads),
        "max_position_embeddings": fields["max_position_embeddings"],
        "rms_norm_eps": fields["rms_norm_eps"],
        "rope_parameters": rotary,
        "tie_word_embeddings": fields.get("tie_word_embeddings", False),
    }
    model_type = _family(recorded, path)
    if model_type == "smollm3":
        every = fields.size("no_rope_layer")
        known["no_rope_layers"] = [int((layer + 1) % every != 0) for layer in range(layers)]
        known["no_rope_layer_interval"] = every
    return derive_config(model_type, path, known)


def _family(recorded: Mapping[str, Any], path: Path) -> str:
    """Return the model_type whose class computes what the config describes."""
    is_qwen = bool(recorded.get("is_qwen2_config"))
    if not is_qwen and not recorded.get("is_llama_config"):
        raise UserError(
            f"{path}: is neither is_llama_config nor is_qwen2_config, which alone are read"
        )
    # The trainer's Llama has the field and no biases.
    biased = is_qwen and bool(recorded.get("attention_bias"))
    if recorded.get("no_rope_layer"):
        if biased:
            raise UserError(
                f"{path}: no_rope_layer with attention_bias: no family is derived from them"
            )
        return "smollm3"
    return "qwen2" if biased else "llama"


def _tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the whole tensors by the names of the trainer's modules."""
    root = folder / "model"
    files: dict[str, dict[int, Path]] = {}
    degrees: dict[str, int] = {}
    for path in sorted(root.rglob("*.safetensors")):
        match = FILE.fullmatch(path.name)
        if match is None:
            raise UserError(f"{path}: is not a file of nanotron's; remove it")
        if match[6] or "experts" in path.parts:
            raise UserError(f"{path}: experts are not read from this trainer")
        name = ".".join((*path.relative_to(root).parts[:-1], match[1]))
        if int(match[4] or 0) in files.setdefault(name, {}):
            raise UserError(f"{path}: a second file of the same rank; remove one of them")
        files[name][int(match[4] or 0)] = path
        degrees[name] = int(match[5] or 1)
    if not files:
        raise UserError(f"{root}: has no tensors; copy the checkpoint again")
    for name, ranks in files.items():
        missing = [rank for rank in range(degrees[name]) if rank not in ranks]
        if missing:
            raise UserError(
                f"{root}: {name} has no file of TP rank {missing[0]} of {degrees[name]}; copy the "
                "checkpoint again"
            )
    return {
        name: _whole(ranks[0].parent, [open_safetensors(path) for path in ranks.values()])
        for name, ranks in files.items()
    }


def _whole(folder: Path, files: list[SafetensorsFile]) -> StoredTensor:
    """Return the tensor that some files hold; their metadata tell which slices of the whole.

    Gate and up of 4 rows each, rank 1 of 2:

        unsharded_shape              (8, 6)
        local_global_slices_pairs    0,2,None|…#2,4,None|…;2,4,None|…#6,8,None|…
    """
    try:
        if len(files) == 1 and "unsharded_shape" not in files[0].metadata:
            return files[0].tensors["data"]
        # Sizes may be written as np.int64(48).
        sizes = re.findall(r"\b\d+\b", files[0].metadata["unsharded_shape"])
        shape = tuple(map(int, sizes))
        pieces = []
        for file in files:
            tensor = file.tensors["data"]
            for pair in file.metadata["local_global_slices_pairs"].split(";"):
                pieces.append(_piece(pair, tensor, shape))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{folder}: no tensor of nanotron ({type(error).__name__}: {error}); copy the "
            "checkpoint again"
        ) from error
    stored_size = sum(math.prod(_length(spans) for spans in piece.spans) for piece in pieces)
    if stored_size != math.prod(shape):
        raise UserError(f"{folder}: its files are not the whole of {shape}; copy them again")
    return JoinedTensor(shape, files[0].tensors["data"].dtype, tuple(pieces))


def _length(spans: Spans) -> int:
    return sum(span.length for span in spans)


def _piece(pair: str, tensor: StoredTensor, shape: tuple[int, ...]) -> Piece:
    """Return a block: `local|…#global|…`, each slice `start,stop,step`."""
    local, whole = (side.split("|") for side in pair.split("#"))
    along = []
    for own, theirs, own_size, size in zip(local, whole, tensor.shape, shape, strict=True):
        first, stop = _bounds(own, own_size)
        start, end = _bounds(theirs, size)
        if stop - first != end - start:
            raise ValueError(f"slices {pair}")
        along.append(Spans((Span(start, first, end - start),), size, own_size))
    return Piece(tuple(along), tensor)


def _bounds(text: str, size: int) -> tuple[int, int]:
    parts = [None if part == "None" else int(part) for part in text.split(",")]
    start, stop, step = slice(*parts).indices(size)
    if step != 1 or stop < start:
        raise ValueError(f"slice {text}")
    return start, stop


def weights(spec: TransformerSpec, *, neighbours: bool) -> Iterator[SourceWeight]:
    """Yield the table.

    Args:
        neighbours: rotary features are pairs (0, 1), (2, 3), …
    """
    yield SourceWeight("transformer.embedding.word.weight", (EMBEDDING,))
    for ours, theirs in (
        ("attention_norm", "input_layernorm"),
        ("mlp_norm", "post_attention_layernorm"),
        ("attention.output", "attn.o_proj"),
        ("mlp.gate_up", "mlp.gate_up_proj"),
        ("mlp.down", "mlp.down_proj"),
    ):
        yield SourceWeight(f"{OUR_LAYER}{ours}.weight", (f"{LAYER}{theirs}.weight",))
    heads = (spec.heads, spec.kv_heads, spec.kv_heads)
    sizes = [count * spec.head_size for count in heads]
    orders = [paired(count, spec.head_size) if neighbours else in_order() for count in heads[:2]]
    orders.append(in_order())
    for part, suffix in (("weight", ""), ("bias", "_bias")):
        names = (f"{LAYER}attn.qkv_proj.{part}",)
        yield SourceWeight(f"{OUR_LAYER}attention.qkv.{part}", names, fused(*orders))
        for number, ours in enumerate(("query", "key", "value")):
            rows = within(orders[number], sum(sizes[:number]), sum(sizes))
            yield SourceWeight(f"{OUR_LAYER}attention.qkv.{ours}{suffix}", names, rows)
    yield SourceWeight("transformer.final_norm.weight", ("model.final_layer_norm.pp_block.weight",))
    yield SourceWeight("head.weight", (HEAD,))
