"""Rotary positions are made from a Hugging Face config, with transformers' own frequencies."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from zero_tp.architectures.spec import Rotary
from zero_tp.constants import MODEL_KEY
from zero_tp.errors import ConfigError

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

POSITIVE = ("rope_theta", "attention_factor", *ROPE_KEYS["llama3"])
"""Those that no model has at 0 or below."""

ROPE_UNDECLARED: dict[str, Any] = {
    "rope_theta": float,
    "rope_scaling": dict[str, Any] | None,
    "partial_rotary_factor": float,
}
"""Older names of what `rope_parameters` holds."""

ROPE = ("rope_parameters", *ROPE_UNDECLARED)

_OLD_ROPE_NAMES = {
    "rope_theta": "rope_theta",
    "rotary_emb_base": "rope_theta",
    "partial_rotary_factor": "partial_rotary_factor",
    "rotary_pct": "partial_rotary_factor",
}


def rotary(config: PretrainedConfig, head_size: int, *, partly: bool = False) -> Rotary:
    """Return the rotary positions of the config's `rope_parameters`, computed by transformers' own functions.

    Args:
        partly: the architecture may turn a part of each head (`partial_rotary_factor`).

    Dynamic scaling looks at the length of this forward alone; transformers' module keeps the frequencies of the longest
    sequence that it has seen, until one below `max_position_embeddings` comes.

    Raises:
        ConfigError: a type, a key or a value of it that is not computed.
    """
    parameters = dict(config.rope_parameters)
    kind = parameters.get("rope_type", "default")
    if not isinstance(kind, str) or kind not in ROPE_KEYS:
        raise _refused("rope_type", f"{kind!r} is not supported", f"one of {', '.join(ROPE_KEYS)}")
    if parameters.get("type", kind) != kind:
        raise _refused("type", f"{parameters['type']!r} is another than rope_type, {kind!r}", "keep one of them")
    share = parameters.get("partial_rotary_factor", 1.0)
    if not _positive(share) or share > 1:
        raise _refused("partial_rotary_factor", f"{share!r} is not a share above 0 and up to 1")
    if share != 1.0 and not partly:
        raise _refused("partial_rotary_factor", f"{share} is refused: {config.model_type} turns whole heads")
    read = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *ROPE_KEYS[kind]}
    for name in parameters:
        if name not in read:
            raise _refused(name, f"rope_type {kind!r} does not read it", "remove it")
    for name in ROPE_KEYS[kind]:
        value = parameters.get(name)
        needed = name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        if needed and not _positive(value):
            raise _refused(name, f"{value!r} is not a positive number, which {kind!r} needs")
        if name == "truncate" and not isinstance(value, bool | None):
            raise _refused(name, f"{value!r} is neither true nor false")
        if not needed and name != "truncate" and value is not None and not _positive(value):
            raise _refused(name, f"{value!r} is not a positive number", "leave it out for the usual one")
    if not _positive(parameters.get("rope_theta")):
        raise _refused("rope_theta", f"{parameters.get('rope_theta')!r} is not a positive number")
    turning = int(head_size * share)
    if not 0 < turning <= head_size:
        raise _refused("partial_rotary_factor", f"{share} of a head of {head_size} features turns {turning}")
    if kind == "dynamic" and turning <= 2:
        raise _refused("rope_type", f"'dynamic' is not defined for heads of which {turning} features turn")
    if turning % 2 and turning == head_size:
        raise _refused("", f"heads of {head_size} features cannot turn in pairs", "give an even head size")

    @functools.lru_cache(8)
    def computed(longer: int | None, device: torch.device) -> tuple[Tensor, float]:
        """Compute on the host, whose rounding is the same everywhere; a device keeps its copy."""
        if kind == "default":
            base = parameters["rope_theta"]
            return (1.0 / (base ** (torch.arange(0, turning, 2, dtype=torch.float) / turning))).to(device), 1.0
        # A tensor, as transformers gives it: the same rounding.
        seq_len = None if longer is None else torch.tensor(longer)
        found, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=seq_len)
        return found.to(device), float(scale)

    def frequencies(length: int, device: torch.device) -> tuple[Tensor, float]:
        return computed(length if length > config.max_position_embeddings else None, device)

    try:
        # Not kept: models are made inside `deepspeed.zero.Init`, which rounds new tensors to the model's dtype.
        computed.__wrapped__(None, torch.device("cpu"))
    except (ArithmeticError, ValueError, RuntimeError) as error:
        raise _refused("", f"{kind!r} has no frequencies with these values ({error})") from error
    return Rotary(frequencies, 2 * ((turning + 1) // 2), by_length=kind == "dynamic")


def check_rope_values(parameters: Mapping[str, Any]) -> None:
    """Check what is wrong in `rope_parameters` of any model; a kind of layers may have a mapping of its own in them.

    Raises:
        ConfigError: a type that is no name, a number that is not positive.
    """
    if not isinstance(parameters.get("rope_type", ""), str):
        raise _refused("rope_type", f"{parameters['rope_type']!r} is not a name", f"one of {', '.join(ROPE_KEYS)}")
    for name, value in parameters.items():
        if isinstance(value, Mapping):
            check_rope_values(value)
        elif name in POSITIVE and value is not None and not _positive(value):
            raise _refused(name, f"{value!r} is not a positive number")


def check_rope_names(config: PretrainedConfig, written: Mapping[str, Any]) -> None:
    """Check that each of the names under which a file gives rotary parameters has arrived in `rope_parameters`.

    Raises:
        ConfigError: transformers took another one, or none.
    """
    for name, value in written.items():
        given = {_OLD_ROPE_NAMES[name]: value} if name in _OLD_ROPE_NAMES else value if name in ROPE else None
        for part, wanted in (given or {}).items():
            found = config.rope_parameters.get(part)
            if found != wanted:
                shown = name if name in _OLD_ROPE_NAMES else f"{name}.{part}"
                problem = f"{wanted!r}, but {type(config).__name__} takes {part} {found!r}"
                raise ConfigError(f"{MODEL_KEY}.{shown}", problem, f"give it as rope_parameters.{part} alone")


def _refused(name: str, problem: str, remedy: str = "") -> ConfigError:
    return ConfigError(f"{MODEL_KEY}.rope_parameters" + (f".{name}" if name else ""), problem, remedy)


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
