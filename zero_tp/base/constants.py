"""Numbers that several packages share."""

from __future__ import annotations

MIB = 2**20
GIB = 2**30
"""Bytes of one MiB and of one GiB."""


def in_gib(size: float) -> str:
    """Format bytes as a number of GiB: two decimals, or three digits below 1."""
    return f"{size / GIB:.2f}" if size >= GIB else f"{size / GIB:.3g}"


IGNORE_INDEX = -100
"""A label that is not scored, as in torch's cross entropy and in Hugging Face's models."""

MODEL_KEY = "zero_tp.model"
PARAM_GROUPS_KEY = "zero_tp.param_groups"
RAMP_KEY = "zero_tp.training.batch_size_rampup"
STAGES_KEY = "zero_tp.training.stages"
"""Dotted key of the config's `model` block, for errors about its fields."""

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""DeepSpeed's name of each dtype of a model → its name in torch and in Hugging Face's configs."""
