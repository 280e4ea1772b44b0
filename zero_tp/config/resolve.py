"""What a run's file leaves open is resolved: `--set KEY=VALUE`, "auto" and the batch sizes.

"auto" is Hugging Face's word for a value that the run decides; DeepSpeed itself doesn't know it. The sums of a run:
world = tensor × data, global batch = micro × accumulation × data.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from zero_tp.errors import ConfigError, shown
from zero_tp.strict_json import InvalidJson, parse_json

LARGEST = 2**53
BATCH_FIELDS = {
    "train_batch_size": "total",
    "train_micro_batch_size_per_gpu": "micro",
    "gradient_accumulation_steps": "accumulation",
}
"""DeepSpeed's keys, and what they are called here."""


def apply_overrides(config: dict[str, Any], overrides: Sequence[str]) -> None:
    """Write each `KEY=VALUE` into `config`, later ones last. VALUE is JSON, or else a string.

    Raises:
        ConfigError: no `=`, an empty part in KEY, or KEY passes through something that is not an object.
    """
    for override in overrides:
        key, equals, text = override.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            raise ConfigError("--set", f"{shown(override)} is not KEY=VALUE", "as in --set zero_tp.parallel.tensor=4")
        target = config
        for depth, part in enumerate(parts[:-1], start=1):
            target = target.setdefault(part, {})
            if not isinstance(target, dict):
                inside = ".".join(parts[:depth])
                raise ConfigError(key, f"{inside} is {shown(target)}, not an object", f"set {inside} itself")
        target[parts[-1]] = _value(text)


def check_numbers(value: Any, path: str = "") -> None:
    """Raise a ConfigError naming the first number in `value` that is larger than any that a run can use.

    Numbers of JSON are exact up to 2^53 in every program, and what computes with them in fp32 or counts in 64 bits has
    room for a product of two.
    """
    if isinstance(value, (int, float)) and not -LARGEST <= value <= LARGEST:
        raise ConfigError(path, f"{shown(value)} is beyond 2^53 (9.0e15), as no number of a run is", "write it smaller")
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        check_numbers(part, f"{path}.{key}" if path else str(key))


def _value(text: str) -> Any:
    try:
        return parse_json(text)
    except InvalidJson:
        return text


@dataclasses.dataclass(frozen=True)
class Given:
    """What is given is what "auto" is worked out from: the config, the run's steps, and the model's hidden size."""

    config: dict[str, Any]
    steps: int
    hidden_size: int


def look_up(config: Any, path: str) -> Any:
    """Return the value at a dotted path, or None where the path leads nowhere."""
    for part in path.split("."):
        if not isinstance(config, dict) or part not in config:
            return None
        config = config[part]
    return config


def leaves(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value of nested objects with its dotted path; an object without keys is a value too."""
    if isinstance(config, dict) and config:
        for key, inner in config.items():
            yield from leaves(inner, f"{path}.{key}" if path else key)
    else:
        yield path, config


def dtype_name(config: dict[str, Any]) -> str:
    """Return "fp32", "bf16" or "fp16", as DeepSpeed's blocks say."""
    return next((name for name in ("bf16", "fp16") if look_up(config, f"{name}.enabled") is True), "fp32")


def copies_gradients(config: dict[str, Any]) -> bool:
    """Tell whether DeepSpeed's config asks for copies of gradients: contiguous, or added up in another dtype."""
    added_up = config.get("data_types", {}).get("grad_accum_dtype")
    contiguous = config.get("zero_optimization", {}).get("contiguous_gradients")
    return contiguous is True or added_up not in (None, dtype_name(config))


AUTO: dict[str, tuple[str, Callable[[Given], Any]]] = {
    "gradient_clipping": ("1.0", lambda given: 1.0),
    "fp16.enabled": ("false", lambda given: False),
    "bf16.enabled": ("true unless fp16 is enabled", lambda given: look_up(given.config, "fp16.enabled") is not True),
    "optimizer.params.betas": ("[0.9, 0.999]", lambda given: [0.9, 0.999]),
    "optimizer.params.eps": ("1e-8", lambda given: 1e-8),
    "optimizer.params.weight_decay": ("0.0", lambda given: 0.0),
    "scheduler.params.total_num_steps": ("`zero_tp.training.steps` of the first start", lambda given: given.steps),
    "scheduler.params.warmup_num_steps": (
        "1 % of `total_num_steps`, at least 1, as of the first start",
        lambda given: max(
            1, int(_number(look_up(given.config, "scheduler.params.total_num_steps"), given.steps)) // 100
        ),
    ),
    "scheduler.params.warmup_min_lr": ("0.0", lambda given: 0.0),
    "scheduler.params.warmup_max_lr": (
        "`optimizer.params.lr`",
        lambda given: look_up(given.config, "optimizer.params.lr"),
    ),
    "zero_optimization.reduce_bucket_size": ("hidden²", lambda given: given.hidden_size**2),
    "zero_optimization.stage3_prefetch_bucket_size": ("0.9 × hidden²", lambda given: given.hidden_size**2 * 9 // 10),
    "zero_optimization.stage3_param_persistence_threshold": ("10 × hidden", lambda given: 10 * given.hidden_size),
}
"""Keys that may be "auto" beside the three batch sizes: what it means, and how it is worked out, in this order."""

FROZEN = ("scheduler.params.total_num_steps", "scheduler.params.warmup_num_steps")
"""Decided at the run's first start, so that a longer run doesn't bend the schedule that it is in."""


def resolve_auto(config: dict[str, Any], steps: int, hidden_size: int, frozen: dict[str, Any] | None = None) -> None:
    """Replace each "auto" of AUTO in `config`; an "auto" batch size is dropped, to be worked out from the others.

    Args:
        config: the file's object; changed in place.
        steps: `zero_tp.training.steps`.
        hidden_size: of the model.
        frozen: the resolved config of the run's first start, if this is a later one.
    """
    for key in BATCH_FIELDS:
        if config.get(key) == "auto":
            del config[key]
    given = Given(config, steps, hidden_size)
    for path, (_, value) in AUTO.items():
        *blocks, name = path.split(".")
        block = look_up(config, ".".join(blocks)) if blocks else config
        if isinstance(block, dict) and block.get(name) == "auto":
            earlier = look_up(frozen, path) if path in FROZEN else None
            block[name] = value(given) if earlier is None else earlier


def _number(value: Any, otherwise: int) -> float:
    return value if isinstance(value, (int, float)) else otherwise


@dataclasses.dataclass(frozen=True)
class BatchSizes:
    """Batch sizes count the samples of one optimizer step. What depends on a world size that isn't known is None."""

    data_parallel: int | None
    micro: int | None
    accumulation: int | None
    total: int | None


def resolve_batch(config: dict[str, Any], data: int | None) -> BatchSizes:
    """Return the three batch sizes from those that the file gives; an accumulation that nothing determines is 1.

    Args:
        config: the file's object, types checked.
        data: number of data-parallel replicas, or None when it isn't known.

    Raises:
        ConfigError: neither a global nor a micro batch is given, or no whole numbers satisfy the sum.
    """
    total, micro, accumulation = (None if (size := config.get(key)) is None else int(size) for key in BATCH_FIELDS)
    if total is None:
        if micro is None:
            key = "train_micro_batch_size_per_gpu"
            raise ConfigError(key, "required, but not given", "give it, or train_batch_size")
        accumulation = accumulation or 1
        return BatchSizes(data, micro, accumulation, None if data is None else micro * accumulation * data)
    if micro is not None and accumulation is not None:
        if data is None:
            _whole(total, {"micro": micro, "accumulation": accumulation}, "data")
        elif micro * accumulation * data != total:
            product = micro * accumulation * data
            sums = f"{total} ≠ micro {micro} × accumulation {accumulation} × data {data} (= {product})"
            raise ConfigError("train_batch_size", sums, f'write {product}, or "auto" for one of the three')
    elif micro is not None:
        quotient = _whole(total, {"micro": micro, "data": data}, "accumulation")
        accumulation = None if data is None else quotient
    else:
        accumulation = accumulation or 1
        quotient = _whole(total, {"accumulation": accumulation, "data": data}, "micro")
        micro = None if data is None else quotient
    return BatchSizes(data, micro, accumulation, total)


def _whole(total: int, factors: dict[str, int | None], missing: str) -> int:
    """Return total / the known factors, which has to be whole."""
    known = {name: size for name, size in factors.items() if size is not None}
    product = math.prod(known.values())
    if total % product:
        listed = " × ".join(f"{name} {size}" for name, size in known.items())
        sums = f"{total} ≠ {listed} × {missing} {total / product:.4g}"
        raise ConfigError("train_batch_size", sums, f"use a multiple of {product}")
    return total // product
