"""A rule about keys of a config, and what rules judge."""

from __future__ import annotations

import dataclasses
import enum
from functools import partial
from typing import Literal

from zero_tp.base.errors import ConfigError
from zero_tp.base.settings.deepspeed import DeepSpeedSettings
from zero_tp.base.settings.recompute import RecomputePolicy
from zero_tp.base.settings.refused import refusal
from zero_tp.base.settings.schema import Parallel, ZeroTP


class EntryPoint(enum.Enum):
    """The interface that a config was passed to: a run's file, `TrainingEngine` or
    `ZeroTPTrainer`.
    """

    RUN = "run"
    ENGINE = "engine"
    TRAINER = "trainer"


@dataclasses.dataclass(frozen=True)
class Combination:
    """The settings that the rules judge together.

    Attributes:
        recompute: what backward recomputes.
        zero_tp: the block of a run's file; None at another entry point.
        layers: number of the model's layers; None without a model.
    """

    settings: DeepSpeedSettings
    parallel: Parallel
    recompute: RecomputePolicy
    zero_tp: ZeroTP | None = None
    entry_point: EntryPoint = EntryPoint.RUN
    layers: int | None = None

    @classmethod
    def of_run(cls, settings: DeepSpeedSettings, zero_tp: ZeroTP, layers: int) -> Combination:
        """Return the combination of a run's file."""
        return cls(settings, zero_tp.parallel, zero_tp.recompute_policy, zero_tp, layers=layers)

    @property
    def is_trainer(self) -> bool:
        return self.entry_point is EntryPoint.TRAINER


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule about keys that are set.

    For example

        refused(f"{ZERO}.offload_param", stage < 3, "below 3: DeepSpeed would ignore it; use 3")

    is printed, if it applies, as

        error: zero_optimization.offload_param: refused below 3: DeepSpeed would ignore it; use 3

    Attributes:
        kind: the config is refused, the keys have no effect, or they do something unusual.
        keys: dotted keys or patterns of them (`fnmatch`), separated by blanks; a refusal has one
            key.
        applies: whether the config matches the rule.
        reason: why the keys have no effect, or what they do. A refusal's is "CASE: WHY; REMEDY", as
            in "with ZeRO: it is not tested; use stage 0". The default remedy is to leave the key
            out.
    """

    kind: Literal["refused", "no effect", "note"]
    keys: str
    applies: bool
    reason: str

    @property
    def error(self) -> ConfigError:
        return refusal(self.keys, f"refused {self.reason}")


refused = partial(Rule, "refused")
no_effect = partial(Rule, "no effect")
note = partial(Rule, "note")
