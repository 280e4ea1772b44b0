"""A checkpoint that `zero-tp convert to-run` made of another trainer's.

It is a run's checkpoint with masters and, of DeepSpeed, moments. What another trainer does not
record is not fixed yet: the first start takes data, seed, batch and schedule from its file. The
run's own checkpoints then record them, and later starts compare them as always.
"""

from __future__ import annotations

from pydantic import Field

from zero_tp.base.validation import ConfigModel


class ImportedGroup(ConfigModel):
    """A group of the other trainer's optimizer; `lr` is the rate of its last step."""

    lr: float
    weight_decay: float
    parameters: list[str]


class ImportedOptimizer(ConfigModel):
    """The Adam that the moments belong to.

    Attributes:
        decoupled: AdamW's decay; None: the source does not tell.
        has_schedule: the source has a schedule, so `lr` is no constant.
    """

    betas: tuple[float, float]
    eps: float
    decoupled: bool | None
    has_schedule: bool
    groups: list[ImportedGroup]


class Imported(ConfigModel):
    """Where a checkpoint was converted from.

    Attributes:
        trainer, checkpoint: its format and its folder.
        optimizer: None: only weights were kept.
    """

    trainer: str
    checkpoint: str
    optimizer: ImportedOptimizer | None = Field(None)
