"""What several architecture tables share: activations, rotary positions, and the fields that every config has."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from zero_tp.errors import UserError
from zero_tp.models.spec import Rotary

# gelu_new is the tanh approximation; torch's fused one saves one tensor where transformers' saves four.
_gelu_tanh = partial(F.gelu, approximate="tanh")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
}

GENERATION = ("use_cache", "bos_token_id", "eos_token_id")
"""Declared by every config here: generation reads them, training does not."""

OF_A_HEAD = "of a head that is not trained"

TOKENS = dict.fromkeys(GENERATION, "generation reads it")

OF_EVERY_CONFIG = {
    "model_type": "it chose the table",
    "architectures": "the class that an export opens as is that of model_type",
    "transformers_version": "who wrote the file",
    "_name_or_path": "where the file came from",
    "name_or_path": "where the file came from",
    "dtype": "of the stored weights; the run's JSON decides",
    "torch_dtype": "the old name of dtype",
    "return_dict": "how outputs are wrapped",
    "output_hidden_states": "what is returned besides",
    "output_attentions": "what is returned besides",
    "chunk_size_feed_forward": "no decoder reads it",
    "id2label": OF_A_HEAD,
    "label2id": OF_A_HEAD,
    "num_labels": OF_A_HEAD,
    "problem_type": OF_A_HEAD,
    "task_specific_params": "generation reads it",
    "is_decoder": "the model is a causal decoder whatever it says",
    "finetuning_task": "a note of who wrote the file",
    "prefix": "generation reads it",
    "tokenizer_class": "the tokenizer's own file decides",
    "sep_token_id": "the tokenizer's own file decides",
    "decoder_start_token_id": "of encoder-decoders",
    "torchscript": "of an export that is gone",
    "use_bfloat16": "of TensorFlow models",
    "tf_legacy_loss": "of TensorFlow models",
    "cross_attention_hidden_size": "of encoder-decoders",
    "tie_encoder_decoder": "of encoder-decoders",
    "transformers.js_config": "of another library",
}
"""Fields that `config.json` may have whatever the model_type, and why they change nothing."""

FIXED_IN_EVERY_CONFIG: dict[str, tuple[Any, str]] = {
    "is_encoder_decoder": (False, "the model is a decoder alone"),
    "add_cross_attention": (False, "the model is a decoder alone"),
    "pruned_heads": ({}, "every head is computed"),
}

ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}
"""Each rope_type that is computed and the keys of `rope_parameters` that it reads."""

ROPE_UNDECLARED = {"rope_theta": float, "rope_scaling": dict[str, Any] | None}
"""Older names of what `rope_parameters` holds."""


def activation(name: str, field: str) -> Callable[[Tensor], Tensor]:
    """
    Raises:
        UserError: no such function is computed here.
    """
    if name not in ACTIVATIONS:
        raise UserError(f"zero_tp.model.{field}: {name!r} is not supported; one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def whole_head_size(config: PretrainedConfig) -> int:
    """h/a, of an architecture whose heads are as wide as the stream.

    Raises:
        UserError: it is not whole.
    """
    hidden, heads = config.hidden_size, config.num_attention_heads
    if hidden % heads:
        name = config.attribute_map.get("hidden_size", "hidden_size")
        raise UserError(
            f"zero_tp.model.{name}: hidden size {hidden} ≠ heads {heads} × head size {hidden / heads:.4g}; "
            "give a hidden size that is a multiple of the heads"
        )
    return int(hidden // heads)


def dropout_of(config: PretrainedConfig, field: str) -> float:
    return float(getattr(config, field) or 0.0)


def attention_of(config: PretrainedConfig) -> Any:
    return "eager" if config._attn_implementation == "eager" else "sdpa"


def rotary(config: PretrainedConfig, head_size: int, *, partly: bool = False) -> Rotary:
    """Rotary positions from the config's `rope_parameters`, computed by transformers' own functions.

    Args:
        partly: the architecture may turn a part of each head (`partial_rotary_factor`).

    Raises:
        UserError: a type or a key of it that is not computed.
    """
    parameters = dict(config.rope_parameters)
    kind, key = parameters.get("rope_type", "default"), "zero_tp.model.rope_parameters"
    if kind not in ROPE_KEYS:
        raise UserError(f"{key}.rope_type: {kind!r} is not supported; one of {', '.join(ROPE_KEYS)}")
    share = float(parameters.get("partial_rotary_factor", 1.0))
    if share != 1.0 and not partly:
        raise UserError(f"{key}.partial_rotary_factor: {share} is refused: {config.model_type} turns whole heads")
    read = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *ROPE_KEYS[kind]}
    for name in parameters:
        if name not in read:
            raise UserError(f"{key}.{name}: rope_type {kind!r} does not read it; remove it")
    for name in ROPE_KEYS[kind]:
        needed = name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        if needed and not _positive(parameters.get(name)):
            raise UserError(f"{key}.{name}: {parameters.get(name)!r} is not a positive number, which {kind!r} needs")
    if not _positive(parameters.get("rope_theta")):
        raise UserError(f"{key}.rope_theta: {parameters.get('rope_theta')!r} is not a positive number")
    turning = int(head_size * share)
    if not 0 < turning <= head_size:
        raise UserError(f"{key}.partial_rotary_factor: {share} of a head of {head_size} features turns {turning}")
    if kind == "dynamic" and turning <= 2:
        raise UserError(f"{key}.rope_type: 'dynamic' is not defined for heads of which {turning} features turn")
    if turning % 2 and turning == head_size:
        raise UserError(f"{key}: heads of {head_size} features cannot turn in pairs; give an even head size")

    def frequencies(length: int) -> tuple[Tensor, float]:
        if kind == "default":
            base = parameters["rope_theta"]
            return 1.0 / (base ** (torch.arange(0, turning, 2, dtype=torch.float) / turning)), 1.0
        found, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)
        return found, float(scale)

    return Rotary(frequencies, 2 * ((turning + 1) // 2), by_length=kind == "dynamic")


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
