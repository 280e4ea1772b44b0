"""The sums of a run: world = tensor × data, global batch = micro × accumulation × data."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from zero_tp.errors import ConfigError

BATCH_FIELDS = {
    "train_batch_size": "total",
    "train_micro_batch_size_per_gpu": "micro",
    "gradient_accumulation_steps": "accumulation",
}
"""DeepSpeed's keys, and what they are called here."""


@dataclasses.dataclass(frozen=True)
class BatchSizes:
    """Samples of one optimizer step. What depends on a world size that isn't known is None."""

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
