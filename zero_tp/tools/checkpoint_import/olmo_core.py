"""Checkpoints of OLMo-core: a step's `model_and_optim`, and the config.json beside it.

Source: ai2-olmo-core 3.0.0 (`train/checkpoint.py`, `nn/transformer/`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from zero_tp.base.errors import UserError, shown
from zero_tp.base.strict_json import read_json
from zero_tp.model.architectures import architecture_of
from zero_tp.model.architectures.spec import TransformerSpec
from zero_tp.tools.checkpoint_import.agreement import choose_config
from zero_tp.tools.checkpoint_import.distributed_checkpoint import (
    is_distributed,
    open_distributed,
)
from zero_tp.tools.checkpoint_import.recorded_fields import REMEDY, RecordedFields, derive_config
from zero_tp.tools.checkpoint_import.source import (
    OUR_LAYER,
    SourceCheckpoint,
    SourceWeight,
    without_tied_head,
)

PART = "model_and_optim"
LAYER = "blocks.{layer}."
HEAD = "lm_head.w_out.weight"
BLOCKS = {"default": "sequential", "reordered_norm": "output_norm"}
"""Name of a block in the config → the layer of a spec."""
NORMS = ("rms", "fused_rms", "cute_rms")
# A setting that no family of these has → its value in those that are read.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "attention.name": (None, "default"),
    "attention.bias": (False,),
    "attention.gate": (None,),
    "attention.clip_qkv": (None,),
    "attention.scalable_softmax": (None, False),
    "attention.attention_sinks": (None, False),
    "attention.qk_norm_per_head_gains": (None, False),
    "attention.rope.scaling": (None,),
    "attention.rope.no_global_rope": (None, False),
    "attention.rope.partial_rotary_factor": (None, 1.0),
    "feed_forward.name": (None, "default"),
    "feed_forward.bias": (False,),
    "feed_forward.activation": (None, "silu"),
    "feed_forward_moe": (None,),
    "attention_residual_alpha": (None,),
    "feed_forward_residual_alpha": (None,),
    "layer_norm.name": NORMS,
    "layer_norm.bias": (False,),
}


def is_olmo_core(folder: Path) -> bool:
    """Return whether a folder is one step of OLMo-core."""
    return is_distributed(folder / PART)


def open_olmo_core(
    folder: Path, config: PretrainedConfig | None, vocabulary: int | None
) -> SourceCheckpoint:
    """Open a step of OLMo-core.

    Raises:
        UserError: it is damaged; its config describes a model that no class here computes, or
            other layers than those of the given config.
    """
    content = open_distributed(folder / PART)
    prefix = "model."
    tensors = {
        name.removeprefix(prefix): tensor
        for name, tensor in content.tensors.items()
        if name.startswith(prefix)
    }
    states = len(content.tensors) - len(tensors)
    path = folder / "config.json"
    recorded = read_json(path) if path.is_file() else {}
    model = recorded.get("model")
    if config is not None and isinstance(model, dict):
        _check_block(model, config, path)
    config, notes = choose_config(config, lambda: config_of(recorded, vocabulary, path), path)
    spec = architecture_of(config).spec(config)
    if config.tie_word_embeddings:
        tensors = without_tied_head(folder, tensors, "embeddings.weight", HEAD)
    return SourceCheckpoint(
        trainer="olmo-core",
        folder=folder,
        config=config,
        tensors=tensors,
        weights=list(weights(spec)),
        padded=("embeddings.weight", HEAD),
        left_out=(f"the optimizer's states ({states} tensors)",) if states else (),
        notes=notes,
    )


def _check_block(model: Mapping[str, Any], config: PretrainedConfig, path: Path) -> None:
    """Refuse norms at other places, whose names and shapes are the same."""
    name = RecordedFields(model, path).get("block.name")
    if name in BLOCKS and BLOCKS[name] != architecture_of(config).spec(config).layer:
        raise UserError(
            f"{path}: block.name {shown(name)} has its norms at other places than "
            f"{config.model_type}; give the --config of the model that was trained"
        )


class _Model(RecordedFields):
    """The config of a model. Older releases call `sequence_mixer` `attention`."""

    def get(self, name: str, default: Any = None) -> Any:
        value = super().get(name)
        if value is None and "block.attention" in name:
            value = super().get(name.replace("block.attention", "block.sequence_mixer"))
        return default if value is None else value


def config_of(recorded: Mapping[str, Any], vocabulary: int | None, path: Path) -> PretrainedConfig:
    """Return the Hugging Face config of a model, from a step's config.json.

    Args:
        vocabulary: of the tokenizer; by default that of the config, which may be padded.

    Raises:
        UserError: a size is missing, or no family that is derived here has such layers.
    """
    whole = RecordedFields(recorded, path)
    if not isinstance(whole["model"], dict):
        raise UserError(f"{path}: model is no config; {REMEDY}")
    model = _Model(whole["model"], path, "model.")
    model.require("name", (None, "default"))
    model.require("block.name", tuple(BLOCKS))
    for name in ("embedding_norm", "embed_scale", "block_pattern", "block_overrides"):
        model.require(name, (None,))
    for name, values in _PLAIN.items():
        model.require(f"block.{name}", values)
    model.require("lm_head.bias", (False,))
    epsilon = model["block.layer_norm.eps"]
    for name in ("lm_head.layer_norm", "block.attention.qk_norm"):
        if model.get(name) is not None:
            model.require(f"{name}.name", NORMS)
            model.require(f"{name}.eps", (epsilon,))
    heads, hidden = model.size("block.attention.n_heads"), model.size("d_model")
    length = whole.get("dataset.sequence_length") or whole["train_module.max_sequence_length"]
    rotary = {"rope_type": "default", "rope_theta": model.number("block.attention.rope.theta")}
    windows = _windows(model)
    by_type = dict.fromkeys(("full_attention", "sliding_attention"), rotary)
    fields = {
        "vocab_size": vocabulary or model["vocab_size"],
        "hidden_size": hidden,
        "num_hidden_layers": model.size("n_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": model.size("block.attention.n_kv_heads", heads),
        "head_dim": model.size("block.attention.head_dim", hidden // heads),
        "intermediate_size": model["block.feed_forward.hidden_size"],
        "max_position_embeddings": length,
        "rms_norm_eps": epsilon,
        "rope_parameters": by_type if windows else rotary,
        "tie_word_embeddings": model.get("tie_word_embeddings", False),
        **windows,
    }
    return derive_config(_family(model), path, fields)


def _family(model: _Model) -> str:
    """Return the model_type whose class computes what the config describes."""
    normed = model.get("block.attention.qk_norm") is not None
    by_head = bool(model.get("block.attention.use_head_qk_norm"))
    windows = model.get("block.attention.sliding_window") is not None
    if model["block.name"] == "reordered_norm":
        model.require("block.attention.use_head_qk_norm", (None, False))
        if not normed:
            model.require("block.attention.qk_norm", ({},))
        return "olmo3" if windows else "olmo2"
    model.require("block.attention.sliding_window", (None,))
    if normed and not by_head:
        model.require("block.attention.use_head_qk_norm", (True,))
    return "qwen3" if normed else "llama"


def _windows(model: _Model) -> dict[str, Any]:
    """Return the fields of sliding windows.

    A pattern [w, -1] of 5 layers, the first and the last with full attention: - w - w -
    """
    name = "block.attention.sliding_window"
    if model.get(name) is None:
        return {}
    pattern = model[f"{name}.pattern"]
    sizes = {size for size in pattern if size != -1}
    if len(sizes) != 1:
        model.require(f"{name}.pattern", ())
    layers = model.size("n_layers")
    full = set[int]()
    # Both are true by default, and a full first layer begins the pattern after it.
    first, last = (
        model.get(f"{name}.force_full_attention_on_{end}_layer") is not False
        for end in ("first", "last")
    )
    full |= {0} if first else set()
    full |= {layers - 1} if last else set()
    kinds = [
        "full_attention"
        if layer in full or pattern[(layer - first) % len(pattern)] == -1
        else "sliding_attention"
        for layer in range(layers)
    ]
    return {"sliding_window": sizes.pop(), "layer_types": kinds}


def weights(spec: TransformerSpec) -> Iterator[SourceWeight]:
    """Yield the table. The names of the norms are the same before and after the branches."""
    yield SourceWeight("transformer.embedding.word.weight", ("embeddings.weight",))
    after = spec.layer == "output_norm"
    for ours, theirs in (
        ("attention_output_norm" if after else "attention_norm", "attention_norm"),
        ("mlp_output_norm" if after else "mlp_norm", "feed_forward_norm"),
        ("attention.query_norm", "attention.q_norm"),
        ("attention.key_norm", "attention.k_norm"),
        ("attention.output", "attention.w_out"),
        ("mlp.down", "feed_forward.w2"),
    ):
        yield SourceWeight(f"{OUR_LAYER}{ours}.weight", (f"{LAYER}{theirs}.weight",))
    gate_up = tuple(f"{LAYER}feed_forward.{name}.weight" for name in ("w1", "w3"))
    yield SourceWeight(f"{OUR_LAYER}mlp.gate_up.weight", gate_up)
    queries, keys, values = (f"{LAYER}attention.w_{letter}.weight" for letter in "qkv")
    # One parameter only if all three are of one size.
    yield SourceWeight(f"{OUR_LAYER}attention.qkv.weight", (queries, keys, values))
    for ours, name in (("query", queries), ("key", keys), ("value", values)):
        yield SourceWeight(f"{OUR_LAYER}attention.qkv.{ours}", (name,))
    yield SourceWeight("transformer.final_norm.weight", ("lm_head.norm.weight",))
    yield SourceWeight("head.weight", (HEAD,))
