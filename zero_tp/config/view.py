"""A view is a DeepSpeed config on its way to an engine, as refusals and notes read it."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any

from zero_tp.activations.policy import RecomputePolicy
from zero_tp.config.resolve import dtype_name, look_up
from zero_tp.config.schema import Parallel, ZeroTP
from zero_tp.topology import Topology


class Door(enum.Enum):
    """What a config came through: a run's file, `TrainingEngine` in Python, or `ZeroTPTrainer`."""

    RUN = "run"
    ENGINE = "engine"
    TRAINER = "trainer"


@dataclasses.dataclass(frozen=True)
class View:
    """A view is a config whose "auto" values are resolved.

    Attributes:
        config: DeepSpeed's part.
        zero_tp: the `zero_tp` block; of a config that has none, its `parallel` and `recompute` alone.
        door: what it came through.
    """

    config: dict[str, Any]
    zero_tp: ZeroTP
    door: Door = Door.RUN

    @classmethod
    def without_block(
        cls, config: dict[str, Any], topology: Topology, door: Door, recompute: RecomputePolicy | None = None
    ) -> View:
        """Return the view of a DeepSpeed config that came without a `zero_tp` block."""
        parallel = Parallel(tensor=topology.tensor, sequence=topology.sequence)
        policy = recompute or RecomputePolicy(mode="none")
        return cls(config, ZeroTP.model_construct(parallel=parallel, recompute=policy), door)  # type: ignore[call-arg]

    def get(self, path: str, default: Any = None) -> Any:
        """Return the value at a dotted path of DeepSpeed's part, or the default."""
        value = look_up(self.config, path)
        return default if value is None else value

    @property
    def stage(self) -> int:
        return int(self.get("zero_optimization.stage", 0))

    @property
    def tensor(self) -> int:
        return self.zero_tp.parallel.tensor

    @property
    def dtype(self) -> str:
        """Return "fp32", "bf16" or "fp16"."""
        return dtype_name(self.config)

    def offloaded(self, block: str) -> bool:
        """Tell whether `offload_optimizer` or `offload_param` moves anything."""
        return bool(self.get(f"zero_optimization.{block}.device", "none") != "none")


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A refusal is one combination of keys that zero_tp refuses.

    Attributes:
        key: the key that the message names.
        when: the combination in words, after "refused".
        test: whether a config has it.
        reason: what would go wrong.
        remedy: what to write instead.
    """

    key: str
    when: str
    test: Callable[[View], bool]
    reason: str
    remedy: str = "leave it out"


@dataclasses.dataclass(frozen=True)
class Note:
    """A note says why keys that were given change nothing.

    Attributes:
        keys: dotted paths, or patterns of them (`fnmatch`).
        test: whether a config is one in which they change nothing.
        reason: why.
    """

    keys: Sequence[str]
    test: Callable[[View], bool]
    reason: str
