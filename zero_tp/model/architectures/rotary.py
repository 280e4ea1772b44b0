"""Make rotary positions from a Hugging Face config, with transformers' own frequencies."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from zero_tp.base.constants import MODEL_KEY
from zero_tp.base.errors import ConfigError, shown
from zero_tp.base.validation import with_keys
from zero_tp.model.architectures.spec import Rotary

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
"""The supported values of rope_type → the keys of `rope_parameters` that each reads."""

REQUIRED = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
"""Keys without a default: every type that reads one requires it."""

POSITIVE = ("rope_theta", "attention_factor", *ROPE_KEYS["llama3"])
"""Keys whose values must be positive."""

ROPE_UNDECLARED: dict[str, Any] = {
    "rope_theta": float,
    "rope_scaling": dict[str, Any] | None,
    "partial_rotary_factor": float,
}
"""Older fields for the contents of `rope_parameters`."""

ROPE = ("rope_parameters", *ROPE_UNDECLARED)

_LOCAL_BASE = "rope_local_base_freq"
"""Gemma 3's older name of the sliding layers' rope_theta."""

_LEGACY_ROPE_NAMES = {
    _LOCAL_BASE: _LOCAL_BASE,
    "rope_theta": "rope_theta",
    "rotary_emb_base": "rope_theta",
    "partial_rotary_factor": "partial_rotary_factor",
    "rotary_pct": "partial_rotary_factor",
}


def rotaries(
    config: PretrainedConfig, head_size: int, *, by_type: bool = False, **options: Any
) -> tuple[Rotary | None, ...]:
    """Return each layer's rotary positions; layers of one type share theirs.

    Args:
        by_type: the class reads `rope_parameters` as {type of layer: parameters}.
        options: see `rotary`.
    """
    if not by_type:
        return (rotary(config, head_size, **options),) * config.num_hidden_layers
    parameters = config.rope_parameters
    for name, value in parameters.items():
        if name not in config.layer_types and not isinstance(value, Mapping):
            problem = f"{shown(value)} is refused: {config.model_type} has parameters for each type"
            raise _rope_error(name, problem, f"give it in rope_parameters.{config.layer_types[0]}")
    of_types = {
        kind: _rotary_of_type(config, head_size, kind, options) for kind in set(config.layer_types)
    }
    return tuple(of_types[kind] for kind in config.layer_types)


def _rotary_of_type(
    config: PretrainedConfig, head_size: int, kind: str, options: Mapping[str, Any]
) -> Rotary:
    key = f"{MODEL_KEY}.rope_parameters"
    try:
        return rotary(config, head_size, layer_type=kind, **options)
    except ConfigError as error:
        raise with_keys(error, lambda name: name.replace(key, f"{key}.{kind}", 1)) from None


def rotary(
    config: PretrainedConfig,
    head_size: int,
    *,
    layer_type: str | None = None,
    partial_rotary: bool = False,
    backwards: bool = False,
    unread: tuple[str, ...] = (),
    **attributes: Any,
) -> Rotary:
    """Return the rotary positions of a config, with the frequencies of transformers' functions.

    Args:
        layer_type: reads the parameters of this type of layer.
        partial_rotary: the architecture supports `partial_rotary_factor`.
        backwards: turn by the negative angles.
        unread: keys that change nothing.
        attributes: others of Rotary.
    """
    of_all = config.rope_parameters
    parameters = dict(of_all if layer_type is None else of_all[layer_type])
    parameters = {name: value for name, value in parameters.items() if name not in unread}
    kind = _rope_type(parameters)
    _check_values(parameters, kind)
    rotary_dim = _rotary_dim(config, parameters, head_size, partial_rotary)
    if kind == "dynamic" and rotary_dim <= 2:
        problem = f'"dynamic" needs more than 2 rotated features in a head, not {rotary_dim}'
        raise _rope_error("rope_type", problem, "use larger heads, or another rope_type")

    @functools.lru_cache(8)
    def cached_frequencies(length: int | None, device: torch.device) -> tuple[Tensor, float]:
        """Compute on the host, whose rounding is the same everywhere; a device keeps its copy."""
        if kind == "default":
            base = parameters["rope_theta"]
            # The operations of transformers' default, in its order, so that the bits are equal.
            return (
                1.0 / (base ** (torch.arange(0, rotary_dim, 2, dtype=torch.float) / rotary_dim))
            ).to(device), 1.0
        # transformers passes a tensor, which rounds differently from an int.
        seq_len = None if length is None else torch.tensor(length)
        inverse, scale = ROPE_INIT_FUNCTIONS[kind](
            config, torch.device("cpu"), seq_len=seq_len, layer_type=layer_type
        )
        return inverse.to(device), float(scale)

    def frequencies(length: int, device: torch.device) -> tuple[Tensor, float]:
        scaled_by_length = kind == "dynamic" and length > config.max_position_embeddings
        inverse, scale = cached_frequencies(length if scaled_by_length else None, device)
        return (-inverse if backwards else inverse), scale

    try:
        # Uncached: models are built inside `deepspeed.zero.Init`, which rounds new tensors to the
        # model's dtype.
        cached_frequencies.__wrapped__(None, torch.device("cpu"))
    except (ArithmeticError, ValueError, RuntimeError) as error:
        raise _rope_error(
            "", f"{shown(kind)} has no frequencies with these values ({error})", "change them"
        ) from error
    size = 2 * ((rotary_dim + 1) // 2)  # features rotate in pairs
    return Rotary(frequencies, size, by_length=kind == "dynamic", **attributes)


def _rope_type(parameters: Mapping[str, Any]) -> str:
    kind = parameters.get("rope_type", "default")
    if not isinstance(kind, str) or kind not in ROPE_KEYS:
        raise _rope_error(
            "rope_type", f"{shown(kind)} is not supported", f"one of {', '.join(ROPE_KEYS)}"
        )
    other = parameters.get("type", kind)
    if other != kind:
        raise _rope_error(
            "type", f"{shown(other)} and rope_type {shown(kind)} disagree", "keep one of them"
        )
    return kind


def _check_values(parameters: Mapping[str, Any], kind: str) -> None:
    """Check that `rope_parameters` has the keys that its type reads, and no others."""
    read = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *ROPE_KEYS[kind]}
    for name in parameters:
        if name not in read:
            raise _rope_error(name, f"rope_type {shown(kind)} does not read it", "remove it")
    for name in ROPE_KEYS[kind]:
        value = parameters.get(name)
        if name in REQUIRED:
            _check_positive(name, value, f"give one, which {shown(kind)} needs")
        elif name == "truncate":
            if not isinstance(value, bool | None):
                raise _rope_error(
                    name,
                    f"{shown(value)} is neither true nor false",
                    "leave it out for the default",
                )
        elif value is not None:
            _check_positive(name, value, "leave it out for the default")
    _check_positive("rope_theta", parameters.get("rope_theta"), "give one, such as 10000.0")


def _rotary_dim(
    config: PretrainedConfig, parameters: Mapping[str, Any], head_size: int, partial_rotary: bool
) -> int:
    """Return the number of features of a head that rotate."""
    share = parameters.get("partial_rotary_factor", 1.0)
    if not _is_positive(share) or share > 1:
        raise _rope_error(
            "partial_rotary_factor",
            f"{shown(share)} is not a number above 0 and up to 1",
            "give one",
        )
    if share != 1.0 and not partial_rotary:
        problem = f"{share} is refused: {config.model_type} rotates whole heads"
        raise _rope_error("partial_rotary_factor", problem, "leave it out")
    rotary_dim = int(head_size * share)
    if not 0 < rotary_dim <= head_size:
        problem = f"{share} of a head of {head_size} features rotates {rotary_dim}"
        raise _rope_error("partial_rotary_factor", problem, "give a larger one")
    if rotary_dim % 2 and rotary_dim == head_size:
        raise _rope_error(
            "",
            f"heads of {head_size} features cannot be rotated in pairs",
            "give an even head size",
        )
    return rotary_dim


def check_rope_values(parameters: Mapping[str, Any]) -> None:
    """Check the numbers of any model's `rope_parameters`, which may be nested by type of layer."""
    kind = parameters.get("rope_type", "")
    if not isinstance(kind, str):
        raise _rope_error(
            "rope_type", f"{shown(kind)} is not a name", f"one of {', '.join(ROPE_KEYS)}"
        )
    for name, value in parameters.items():
        if isinstance(value, Mapping):
            check_rope_values(value)
        elif name in POSITIVE and value is not None:
            _check_positive(name, value, "give one")


def check_rope_names(config: PretrainedConfig, written: Mapping[str, Any]) -> None:
    """Check that the config class kept every rotary parameter of a file.

    Files have them under old names (`rope_theta`, `rotary_pct`) or in `rope_parameters`.
    """
    for name, value in written.items():
        is_old = name in _LEGACY_ROPE_NAMES
        values = {_LEGACY_ROPE_NAMES[name]: value} if is_old else value if name in ROPE else None
        for part, expected in (values or {}).items():
            actual, place = _value_of(config.rope_parameters, part)
            if isinstance(expected, Mapping) and isinstance(actual, Mapping):
                actual = {key: actual.get(key) for key in expected}  # the class adds defaults
            if actual != expected:
                key = name if is_old else f"{name}.{part}"
                problem = (
                    f"{shown(expected)}, but {type(config).__name__} takes {part} {shown(actual)}"
                )
                remedy = f"give it as rope_parameters.{place} alone"
                raise ConfigError(f"{MODEL_KEY}.{key}", problem, remedy)


def _value_of(parameters: Mapping[str, Any], part: str) -> tuple[Any, str]:
    """Return a value of `rope_parameters` and its place there.

    Of parameters by the type of layer it is that of full attention, where the classes put a value
    of a file that has one for all.
    """
    kind, name = ("full_attention", part)
    if part == _LOCAL_BASE:
        kind, name = ("sliding_attention", "rope_theta")
    if part not in parameters and isinstance(parameters.get(kind), Mapping):
        return parameters[kind].get(name), f"{kind}.{name}"
    return parameters.get(part), part


def _rope_error(name: str, problem: str, remedy: str) -> ConfigError:
    return ConfigError(
        f"{MODEL_KEY}.rope_parameters" + (f".{name}" if name else ""), problem, remedy
    )


def _check_positive(name: str, value: Any, remedy: str) -> None:
    if not _is_positive(value):
        raise _rope_error(name, f"{shown(value)} is not a positive number", remedy)


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
