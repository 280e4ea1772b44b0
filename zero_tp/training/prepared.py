"""A run is prepared, by what has read its config and data, and then has a start, from which the loop trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from transformers import PretrainedConfig

from zero_tp.checkpoint.manifest import Manifest, Parent
from zero_tp.config import RunConfig
from zero_tp.parallel.parameter import WeightSource
from zero_tp.topology import Topology
from zero_tp.training.engine import TrainingEngine
from zero_tp.training.tools import Forecast, Tools


class FirstWeights(WeightSource, Protocol):
    """These are the weights of a Hugging Face directory (zero_tp/weights/load.py)."""

    drawn: list[str]

    def told(self) -> str:
        """Say which heads are `drawn` from the seed, because the files have none."""


class StepBatches(AbstractContextManager[Any], Protocol):
    """Step batches are what one rank trains on, read ahead inside a block (zero_tp/data/read_ahead.py)."""

    def take(self, step: int) -> list[Any]:
        """Return the batches of `step`, counted from 1: one a micro-batch."""


class ValidationSamples(Protocol):
    """Validation samples are in a fixed order (zero_tp/data/samples.py)."""

    def batches(self, limit: int | None, micro_batch: int, data_rank: int, data_size: int) -> Iterator[Any]:
        """Yield one rank's share, as many batches on every rank."""


class Prepared(Protocol):
    """A prepared run has read what it is started with (zero_tp/training/run.py)."""

    config: RunConfig
    directory: Path
    tokenizer: Path | None
    model_config: PretrainedConfig

    @property
    def recorded_tokenizer(self) -> str | None:
        """Return how a checkpoint names the tokenizer."""

    def read_ahead(self, topology: Topology, last: int) -> StepBatches:
        """Return what this rank trains on up to the step `last`."""

    @property
    def validation(self) -> ValidationSamples | None:
        """Return what its validation loss is of, if there is one."""

    @property
    def corpora(self) -> dict[str, dict[str, Any]]:
        """Return what the training corpora are, by prefix."""

    @property
    def validation_corpora(self) -> dict[str, dict[str, Any]]:
        """Return what the validation corpora are, by prefix."""

    def read(self) -> dict[str, str]:
        """Return what was read, by what it is, as ranks compare it."""

    def check_resumed(self, checkpoint: Path, manifest: Manifest) -> None:
        """Check that what a run reads besides its file has not changed since it was started."""

    def pretrained(self) -> FirstWeights | None:
        """Return the source of the first weights, None for the seed."""


@dataclass(frozen=True)
class Start:
    """A start is ready to train.

    Attributes:
        run, tools: what it was started with.
        step: the last one that is done; 0 for a new run.
        parent: the checkpoint of another run that this one has begun with.
        forecast: what is left of the run will take this; on the first rank, if asked for.
    """

    run: Prepared
    tools: Tools
    engine: TrainingEngine
    step: int
    parent: Parent | None
    forecast: Forecast | None
