"""The two views of a rank's memory: what the papers count, and what this project with DeepSpeed allocates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from zero_tp.planning import formulas
from zero_tp.planning.outside import Instant, micro_batch
from zero_tp.planning.shape import Shape
from zero_tp.planning.walk import Setting
from zero_tp.planning.zero import Held, ZeroMemory

CATEGORIES = ("parameters", "gathered", "gradients", "optimizer", "buffers", "activations", "transients")


@dataclass(frozen=True)
class Point:
    """One moment of a step [bytes].

    Attributes:
        phase: "forward", "backward", "reduce" or "step".
        position: a place on the time axis: 0 to 1 forward, 1 to 2 backward, 2 to 3 the rest.
        bytes: by category of CATEGORIES.
        host: in host memory.
    """

    phase: str
    position: float
    bytes: dict[str, float]
    host: float

    @property
    def total(self) -> float:
        return sum(self.bytes.values())


@dataclass(frozen=True)
class TrueView:
    """What one rank allocates.

    Args:
        settings: of each layer.
    """

    shape: Shape
    settings: tuple[Setting, ...]
    zero: ZeroMemory

    def points(self, *, ends_only: bool = False) -> list[Point]:
        """A step with its last micro-batch, in order; without accumulation that is all of it."""
        instants = micro_batch(self.shape, self.settings, ends_only=ends_only, also=self.zero.changes_at)
        last_micro = self.zero.at.accumulation - 1
        forward = sum(instant.name == "forward" for instant in instants)
        found = []
        for number, instant in enumerate(instants):
            position = number / forward if number < forward else 1 + (number - forward) / (len(instants) - forward)
            found.append(self._point(instant, position, last_micro))
        found.append(self._bare("reduce", 2.0, self.zero.end_of_backward()))
        found.append(self._bare("step", 2.5, self.zero.step()))
        found.append(self._bare("step", 3.0, self.zero.states))
        return found

    @cached_property
    def peak(self) -> Point:
        """The moment at which the device holds the most."""
        return max(self.points(ends_only=True), key=lambda point: point.total)

    @cached_property
    def host(self) -> float:
        """The most in host memory, of one rank [bytes]."""
        return max(self.zero.states.host, self.zero.step().host)

    def _point(self, instant: Instant, position: float, micro: int) -> Point:
        held = self.zero.during(instant.name, instant.gradients, instant.place, micro, instant.transients)
        return Point(
            instant.name,
            position,
            {**held_bytes(held), "activations": instant.activations, "transients": instant.transients},
            held.host,
        )

    def _bare(self, phase: str, position: float, held: Held) -> Point:
        return Point(phase, position, {**held_bytes(held), "activations": 0.0, "transients": 0.0}, held.host)


def held_bytes(held: Held) -> dict[str, float]:
    """ZeRO's part of CATEGORIES."""
    return {name: float(getattr(held, name)) for name in CATEGORIES[:5]}


@dataclass(frozen=True)
class PaperView:
    """What the papers count for one rank [bytes].

    Args:
        parameters: of the whole model; states are split over TP and pipeline stages evenly.
        pipeline, interleaving: p and m; runs themselves have none.
    """

    shape: Shape
    setting: Setting
    mode: str
    parameters: int
    stage: int
    data: int
    pipeline: int = 1
    interleaving: int = 1
    modules: Sequence[str] = field(default=("attention_core",))

    def layer(self) -> formulas.Layer:
        at = self.setting
        return formulas.Layer(at.s, at.b, self.shape.hidden, self.shape.heads, at.t, at.sequence)

    def layer_bytes(self) -> float:
        layer = self.layer()
        core = formulas.eager_core if self.shape.eager else formulas.sdpa_fused_core
        if self.mode == "full":
            return formulas.kept_full(layer, partitioned=self.setting.partitioned)
        if self.mode == "selective":
            return formulas.kept_selective(layer, core, self.modules)
        return formulas.kept(layer, core)

    def bytes(self) -> dict[str, float]:
        """By category: parameters, gradients, optimizer, activations, activations outside the layers."""
        own = self.parameters / (self.setting.t * self.pipeline)
        split = {
            0: (1, 1, 1),
            1: (1, 1, self.data),
            2: (1, self.data, self.data),
            3: (self.data, self.data, self.data),
        }[self.stage]
        at, shape = self.setting, self.shape
        activations = shape.layers * self.layer_bytes() * formulas.pipeline_factor(self.pipeline, self.interleaving)
        outside = formulas.kept_outside_layers(
            at.s, at.b, shape.hidden, shape.vocabulary, shape.layers, at.t, pipeline=self.pipeline, sequence=at.sequence
        )
        return {
            "parameters": 2 * own / split[0],
            "gradients": 2 * own / split[1],
            "optimizer": formulas.OPTIMIZER_BYTES * own / split[2],
            "activations": activations,
            "outside layers": outside,
        }


def layer_settings(
    windows: Sequence[int | None],
    base: Setting,
    policy: Any,
    recomputed: Sequence[int],
    activation_checkpointing: dict[str, Any],
) -> tuple[Setting, ...]:
    """Each layer's setting under a recompute policy.

    Args:
        windows: of each layer.
        base: of a layer that recomputes nothing.
        policy: `zero_tp.recompute` in its long form.
        recomputed: numbers of the layers that it recomputes.
        activation_checkpointing: DeepSpeed's block.
    """
    if policy.mode == "none" or policy.keep_micro_batches:
        return of_each_layer(windows, base)
    modules = ("layer",) if policy.mode == "full" else tuple(policy.chosen_modules)
    full = policy.mode == "full"
    again = replace(
        base,
        modules=modules,
        partitioned=full and bool(activation_checkpointing.get("partition_activations")) and not base.sequence
        and base.t > 1,
        to_host=full and bool(activation_checkpointing.get("cpu_checkpointing")) and not base.cpu,
    )  # fmt: skip
    chosen = set(recomputed)
    pairs = zip(of_each_layer(windows, base), of_each_layer(windows, again), strict=True)
    return tuple(pair[number in chosen] for number, pair in enumerate(pairs))


def of_each_layer(windows: Sequence[int | None], setting: Setting) -> tuple[Setting, ...]:
    """The setting with each layer's window."""
    kinds = {window: replace(setting, window=window) for window in set(windows)}
    return tuple(kinds[window] for window in windows)
