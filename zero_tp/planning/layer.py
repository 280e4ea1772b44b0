"""The activations of one layer over time: forward (layer_forward.py), then backward, in bytes on one rank."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from zero_tp.planning.layer_forward import LayerForward
from zero_tp.planning.shape import Shape
from zero_tp.planning.walk import Course, Moment, Setting, norm_backward


@lru_cache(maxsize=100_000)
def layer_course(shape: Shape, setting: Setting) -> Course:
    return _Layer(shape, setting).course()


@lru_cache(maxsize=100_000)
def greatest_course(shape: Shape, setting: Setting) -> Course:
    """The same with those moments only at which the device may hold the most, whatever the model states add."""
    course = layer_course(shape, setting)
    return course._replace(forward=_greatest(course.forward), backward=_greatest(course.backward))


def _greatest(moments: tuple[Moment, ...]) -> tuple[Moment, ...]:
    """Without those that another one exceeds or equals in bytes, in what is kept, and in gradients done."""
    best: list[tuple[float, float, float, Moment]] = []
    for moment in moments:
        size = (moment.kept + moment.transient, moment.kept, moment.gradients)
        if any(size[0] <= one[0] and size[1] <= one[1] and size[2] <= one[2] for one in best):
            continue
        best = [one for one in best if not (one[0] <= size[0] and one[1] <= size[1] and one[2] <= size[2])]
        best.append((*size, moment))
    return tuple(one[3] for one in best)


class _Layer(LayerForward):
    def course(self) -> Course:
        walk, at = self.walk, self.at
        whole_layer = "layer" in at.modules
        walk.make("input", self.residual)
        self.forward(at.modules, graphless=whole_layer)
        if whole_layer:
            walk.free(*[name for name in walk.alive if name not in ("input", "output")])
        walk.free("output")  # from here on it is the next one's input
        away = whole_layer and (at.partitioned or at.to_host)
        if away:
            walk.make("checkpoint", 0.0 if at.to_host else self.residual / at.t)
            walk.free("input")
        kept, held = set(walk.alive), sum(walk.alive.values())
        first = len(walk.events)
        walk.make("gradient", self.residual)
        if away:
            walk.make("fetched", self.residual)
            walk.free("checkpoint")
        if whole_layer:
            again = _Layer(self.shape, replace(at, modules=()))
            again.walk = walk
            again.forward(())
            again.backward(())
            walk.free("output", "fetched")
        else:
            self.backward(at.modules)
        moments = walk.moments(kept)
        split = sum(size > 0 for _, size, _ in walk.events[:first])
        return Course(tuple(moments[:split]), tuple(moments[split:]), held, self.residual, walk.gradients)

    # ---- backward ----------------------------------------------------------------------------------------------------

    def backward(self, modules: tuple[str, ...]) -> None:
        if self.shape.parallel_layer:
            self._attention_backward(modules, "branches")
            self._mlp_backward(modules, "input")
        else:
            self._mlp_backward(modules, "middle")
            self._attention_backward(modules, "input")

    def _mlp_backward(self, modules: tuple[str, ...], saved: str) -> None:
        walk, e = self.walk, self.e
        self._undrop("mask2")
        if "mlp_activation" in modules:
            walk.make("activated", e * self.wide)
        self._row_backward("back.activated", e * self.wide, self.down_weight)
        walk.free("activated")
        if self.shape.gated:
            walk.make("back.gate", e * self.wide)
            walk.make("back.up", e * self.wide)
            walk.free("back.activated", "gate")
            walk.make("back.silu", e * self.wide)
            walk.free("back.gate", "up")
            walk.make("back.wide", e * self.gate_up)
            walk.free("back.up", "back.silu")
        else:
            walk.make("back.wide", e * self.wide)
            walk.free("back.activated", "up")
        self._column_backward("back.wide", self.up_weight, "norm2", remade="norm" in modules)
        self._norm_backward("norm2", saved)

    def _attention_backward(self, modules: tuple[str, ...], saved: str) -> None:
        walk, e = self.walk, self.e
        self._undrop("mask1")
        self._row_backward("back.mixed", e * self.query, self.output_weight)
        walk.free("copy")
        if "attention_core" in modules:
            if "mixed" in walk.alive:
                self._beside_mixed()
            else:
                self._core()
        if "attention_core" in modules:
            # The nested backward's caller holds its output and the gradient of it.
            held = [name for name in ("back.mixed", "mixed") if name in walk.alive]
            for name in held:
                walk.rename(name, "held " + name)
            self._core_backward()
            walk.free(*["held " + name for name in held])
        else:
            self._core_backward()
        walk.free("turned", "heads", "heads.rows")
        self._column_backward("back.qkv", self.qkv_weight, "norm1", remade="norm" in modules)
        self._norm_backward("norm1", saved)

    def _undrop(self, mask: str) -> None:
        if self.shape.residual_dropout:
            self.walk.make("undropped", self.residual)
            self.walk.free(mask)

    def _row_backward(self, name: str, size: float, weight: float) -> None:
        walk = self.walk
        if self.split:
            walk.make("gathered", self.whole)
        walk.make(name, size)
        walk.weight(weight, self.e)
        walk.free("gathered", "undropped", "weight")

    def _column_backward(self, name: str, weight: float, norm: str, *, remade: bool) -> None:
        walk = self.walk
        if self.split:
            walk.make("gathered", self.whole)
        walk.make("input gradient", self.whole)
        if remade:
            walk.make(norm, self.residual)
        walk.make("reduced", self.whole if self.at.cpu else self.residual) if self.split else None
        walk.weight(weight, self.e)
        if self.split and self.at.cpu and self.e < 4:
            walk.make("piece", self.residual)
        elif self.split:
            walk.rename("reduced", "piece")
        walk.free(*(("reduced", "input gradient", "gathered") if self.split else ()), name, norm, "weight")

    def _norm_backward(self, norm: str, saved: str) -> None:
        walk, residual = self.walk, self.residual
        norm_backward(walk, self.shape, residual, self.e)
        walk.free("input gradient", "piece", norm + ".rows", saved)
        walk.make("sum", residual)
        walk.free("gradient", "back.norm")
        walk.rename("sum", "gradient")

    def _core_backward(self) -> None:
        walk, e = self.walk, self.e
        query, pair, scores = self.query, self.pair, self.scores
        if self.core == "fused":
            if self.repeats:
                walk.make("back.repeated", 2 * e * query)
            walk.make("back.heads", e * self.fused)
            walk.free("back.mixed", "qkv", "mixed", "core.rows", "core.k", "core.v", "back.repeated")
        elif self.core == "eager":
            walk.make("back.v", e * query)
            walk.make("back.dropped", e * scores)
            walk.free("back.mixed", "core.v", "core.dropped", "mixed")
            if self.dropped:
                walk.make("back.softmax", e * scores)
                walk.free("back.dropped", "core.mask")
            walk.make("back.scores", e * scores)
            walk.free("back.softmax", "back.dropped", "core.softmax")
            walk.make("back.q", e * query)
            walk.make("back.k", e * query)
            walk.make("unscaled", e * query)
            walk.free("unscaled", "back.scores", "core.q", "core.k", "qkv")
        else:
            walk.make("back.mixed32", 4 * query if e < 4 else 0.0)
            walk.free("mixed")
            if e < 4:
                walk.free("back.mixed")
            walk.make("back.v32", 4 * query)
            walk.make("back.dropped", 4 * scores)
            walk.free("back.mixed32", "core.v", "core.dropped")
            walk.make("back.softmax", 4 * scores)
            walk.free("back.dropped", "core.mask")
            walk.make("back.scores", 4 * scores)
            walk.free("back.softmax", "core.softmax")
            walk.make("back.k32", 4 * pair)
            walk.make("back.q32", 4 * query)
            walk.free("back.scores", "core.q", "core.k", "qkv")
            walk.make("rounding", e * self.fused)
            walk.free("rounding")
            walk.make("back.heads", e * self.fused)
            walk.free("back.k32", "back.q32", "back.v32", "back.mixed")
        if self.core == "eager":
            walk.make("stacked", e * self.fused)
            walk.free("back.q", "back.k", "back.v")
        else:
            walk.make("stacked", e * self.fused)
            walk.free("back.heads")
        walk.make("back.qkv", e * self.fused)
        walk.free("stacked")
