"""The models whose memory is measured at small size and planned at full size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.papers.steps import Steps, measured_steps, planned_steps
from zero_tp.base.shipped import CONFIGS, shipped_path
from zero_tp.run.config import RunConfig
from zero_tp.tools.planning.memory import Point


@dataclass(frozen=True)
class Model:
    """A model that is measured at small size and planned as it is shipped.

    Attributes:
        key: part of file names.
        core: "eager" or "fused" attention.
        file: in ds_configs.
        positions: the model's key of the number of positions.
        small, large: overrides of the measured and of the planned run.
        devices: number of H100 of the plan.
    """

    key: str
    name: str
    kind: str
    core: str
    file: str
    positions: str
    small: tuple[str, ...]
    devices: int
    large: tuple[str, ...]

    def at(self, length: int, batch: int) -> tuple[str, ...]:
        """Return the overrides for this length and batch."""
        return (
            f"zero_tp.model.{self.positions}={length}",
            f"zero_tp.data.sequence_length={length}",
            f"train_micro_batch_size_per_gpu={batch}",
        )


class Case(NamedTuple):
    """A model at small size, measured on one CPU rank and planned, or at full size, only
    planned.
    """

    model: Model
    small: bool

    @property
    def where(self) -> str:
        return (
            f"a small {self.model.kind}"
            if self.small
            else f"{self.model.name} on {self.model.devices} H100"
        )

    @property
    def heading(self) -> str:
        return f"{self.where} on one CPU rank" if self.small else self.where

    def config(self, *changes: str) -> RunConfig:
        """Return the config of its run with overrides."""
        own, ranks = (
            ((*SMALL, *self.model.small), 1)
            if self.small
            else (self.model.large, self.model.devices)
        )
        return RunConfig.load(shipped_path(CONFIGS) / self.model.file, [*own, *changes], ranks)

    def steps(self, *changes: str) -> dict[str, Steps]:
        """Return the points of its first step and of a later one, by column."""
        config = self.config(*changes)
        measured = {"measured": measured_steps(config)} if self.small else {}
        return {**measured, "planned": planned_steps(config, cpu=self.small)}

    def later(self, *changes: str) -> dict[str, Sequence[Point]]:
        """Return the points of a later step, by column."""
        return {column: list(steps.values())[-1] for column, steps in self.steps(*changes).items()}


SMALL = (
    "zero_tp.parallel.tensor=1",
    "zero_tp.recompute=none",
    "train_batch_size=auto",
    "gradient_accumulation_steps=1",
    "train_micro_batch_size_per_gpu=4",
    "zero_tp.data.sequence_length=256",
    "optimizer.params.torch_adam=true",
)
GPT2 = Model(
    "gpt2",
    "GPT-2 of 355 M",
    "GPT-2",
    "eager",
    "gpt2_355m.json",
    "n_positions",
    (
        "zero_tp.attention=eager",
        'zero_tp.model={"model_type": "gpt2", "n_layer": 4, "n_embd": 256, "n_head": 8, '
        '"n_positions": 256, '
        '"vocab_size": 4096, "attn_pdrop": 0.1}',
    ),
    1,
    (
        "zero_tp.recompute=none",
        "zero_tp.attention=eager",
        "train_batch_size=auto",
        "gradient_accumulation_steps=1",
    ),
)
LLAMA = Model(
    "llama",
    "Llama of 8 B",
    "Llama",
    "fused",
    "llama3_8b.json",
    "max_position_embeddings",
    (
        "zero_optimization.stage=1",
        'zero_tp.model={"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 256, '
        '"intermediate_size": 768, '
        '"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 256, '
        '"vocab_size": 4096, '
        '"bos_token_id": 0, "eos_token_id": 0}',
    ),
    64,
    (
        *("zero_tp.parallel.tensor=8", "zero_optimization.stage=1"),
        *("zero_tp.recompute=none", "train_batch_size=auto", "gradient_accumulation_steps=1"),
    ),
)
CORES = (
    ("eager core", GPT2, ()),
    ("fused core", GPT2, ("zero_tp.attention=sdpa", "zero_tp.model.attn_pdrop=0.0")),
    ("fused core", LLAMA, ()),
)


def cases(measured: bool) -> list[Case]:
    """Return the models at full size, each preceded by its small size if it is measured."""
    return [
        Case(model, small)
        for model in (GPT2, LLAMA)
        for small in (True, False)
        if measured or not small
    ]
