"""The activations of one layer over time: a walk through the operations of forward and backward, in bytes.

It follows the operations of zero_tp/models and zero_tp/parallel one by one, what each makes and what it lets go of, so
that its moments are those that planning/dryrun.py measures. Letters as in formulas.py; e bytes an element.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from zero_tp.planning.shape import Shape


@dataclass(frozen=True)
class Setting:
    """What the bytes of a micro-batch depend on, beside the model.

    Attributes:
        s, b, t, sequence: tokens, sequences, TP size, SP.
        e: bytes an element: 2 or 4.
        cpu: the CPU's kernels: attention with dropout takes torch's maths path in fp32, and a reduce-scatter exchanges
            whole tensors. Else an accelerator's: fused attention, also with dropout.
        modules: regions that `selective` recomputes; ("layer",) for `full`.
        partitioned: P_a: checkpoints of full recomputation are split over TP.
        to_host: P_a+cpu: they wait in host memory.
    """

    s: int
    b: int
    t: int = 1
    sequence: bool = False
    e: int = 2
    cpu: bool = False
    modules: tuple[str, ...] = ()
    partitioned: bool = False
    to_host: bool = False


class Moment(NamedTuple):
    """Bytes at one point, relative to the walk's start, and elements of weight gradients done by then."""

    kept: float
    transient: float
    gradients: float


class Walk:
    """Named storages that come and go.

    Gradients of weights are transients until their hooks have taken them, which the account of model states does.
    """

    def __init__(self) -> None:
        self.alive: dict[str, float] = {}
        self.events: list[tuple[str, float, float]] = []
        self.gradients = 0.0

    def make(self, name: str, size: float) -> None:
        assert name not in self.alive, name
        self.alive[name] = size
        self.events.append((name, size, self.gradients))

    def free(self, *names: str) -> None:
        for name in names:
            size = self.alive.pop(name, 0.0)
            self.events.append((name, -size, self.gradients))

    def rename(self, old: str, new: str) -> None:
        """Both are transients."""
        size = self.alive.pop(old)
        self.alive[new] = size

    def weight(self, elements: float, e: int) -> None:
        """A weight's gradient has been made; `taken` when its hook has run."""
        self.gradients += elements
        self.make("weight", e * elements)

    def moments(self, kept: set[str]) -> list[Moment]:
        """After each making."""
        sums, found = [0.0, 0.0], []
        for name, size, gradients in self.events:
            sums[name in kept] += size
            if size > 0:
                found.append(Moment(sums[True], sums[False], gradients))
        return found


class Course(NamedTuple):
    """One layer.

    Attributes:
        forward: its moments; it starts with its input, and at the end its output is a transient.
        backward: its moments; it starts with what is kept and the gradient of the output, a transient, and ends with
            the gradient of the input.
        kept: what the layer keeps, its input with it.
        stream: bytes of the stream on this rank, and of its gradient.
        gradients: elements of the layer's matrices on this rank.
    """

    forward: tuple[Moment, ...]
    backward: tuple[Moment, ...]
    kept: float
    stream: float
    gradients: float


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


def norm_backward(walk: Walk, shape: Shape, residual: float, e: int) -> None:
    """Makes "back.norm"; RMSNorm computes in fp32, in separate operations."""
    if shape.rms_norm:
        wide = 4 * residual / e
        for name in ("normed", "back.wide32", "product32", "difference"):
            walk.make(name, wide)
        walk.free("product32")
    walk.make("back.norm", residual)
    walk.free("normed", "back.wide32", "difference")


class _Layer:
    def __init__(self, shape: Shape, setting: Setting):
        self.shape, self.at, self.walk = shape, setting, Walk()
        s, b, t = setting.s, setting.b, setting.t
        tokens, h, d = s * b, shape.hidden, shape.head_size
        pairs = shape.kv_heads_of_rank(t)
        self.e = setting.e
        self.split = setting.sequence and t > 1
        self.rows = tokens / t if self.split else tokens
        self.whole, self.residual = self.e * tokens * h, self.e * self.rows * h  # bytes
        self.query, self.pair = tokens * shape.heads // t * d, tokens * pairs * d  # elements
        self.fused = self.query + 2 * self.pair
        self.wide = tokens * shape.mlp_size / t
        self.gate_up = self.wide * (2 if shape.gated else 1)
        self.scores = shape.heads / t * s * s * b
        self.qkv_weight = h * d * (shape.heads / t + 2 * pairs)
        self.output_weight = h * d * shape.heads / t
        self.down_weight = h * shape.mlp_size / t
        self.up_weight = self.down_weight * (2 if shape.gated else 1)
        self.core = "eager" if shape.eager else "maths" if setting.cpu and shape.attention_dropout else "fused"
        # A fused core gives its output in the order of its queries' memory, which turning a part of each head changes.
        self.copies = self.core != "fused" or 0 < shape.rotary_size < shape.head_size
        self.dropped = shape.attention_dropout and self.core != "fused"

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

    # ---- forward -----------------------------------------------------------------------------------------------------

    def forward(self, modules: tuple[str, ...], *, graphless: bool = False) -> None:
        """
        Args:
            graphless: nothing is kept for backward, whatever names stand for.
        """
        if self.shape.parallel_layer:
            self._mlp(modules, "branch", graphless=graphless)
            self._attention(modules, "sum", graphless=graphless)
            self.walk.make("output", self.residual)
            self.walk.free("branch", "sum")
        else:
            self._attention(modules, "middle", graphless=graphless)
            self._mlp(modules, "output", graphless=graphless)

    def _attention(self, modules: tuple[str, ...], name: str, *, graphless: bool) -> None:
        walk, e = self.walk, self.e
        self._norm("norm1")
        self._column("qkv", e * self.fused)
        if "norm" in modules:
            walk.free("norm1")
        self._turn(fused=self.core == "fused" or "attention_core" in modules)
        self._core(again=graphless or "attention_core" in modules)
        if "attention_core" in modules:
            walk.free(*[one for one in walk.alive if one.startswith("core.")])
            if self.core == "maths":
                walk.free("mixed")
        if graphless:
            walk.free("norm1", *[one for one in walk.alive if one.startswith("core.")])
        if self.copies:
            walk.make("copy", e * self.query)  # as the projection takes it
        keeps_qkv = self.core == "fused" or "attention_core" in modules
        keeps_mixed = self.core == "fused" and not (self.copies and "attention_core" in modules)
        self._row("mask1", name, *(() if keeps_qkv else ("qkv",)), *(() if keeps_mixed else ("mixed",)))
        if graphless:
            walk.free("copy", "qkv", "mixed", "mask1", "turned", "heads", "heads.rows")

    def _turn(self, *, fused: bool) -> None:
        """Norms of queries and keys, and rotary positions: new queries and keys beside those of the projection.

        Where one weight makes Q, K and V, the values are a part of its output, which then stays as a whole. A core that
        copies its inputs anyway takes the turned ones as they are.

        Args:
            fused: the core keeps its inputs.
        """
        shape, walk, size = self.shape, self.walk, self.e * (self.query + self.pair)
        if not shape.rotary_size:
            return
        if shape.query_key_norm:
            walk.make("heads.rows", 4 * (self.query + self.pair) / shape.head_size)
            walk.make("heads", size)
        if fused:
            if shape.query_key_norm or shape.kv_heads == shape.heads:
                walk.make("turned", size)
        elif not shape.query_key_norm:
            walk.free("qkv")
            walk.make("qkv", self.e * self.pair)  # values alone
        if fused:
            walk.free("heads")

    def _mlp(self, modules: tuple[str, ...], name: str, *, graphless: bool) -> None:
        walk, e = self.walk, self.e
        self._norm("norm2")
        self._column("up", e * self.gate_up)
        if "norm" in modules:
            walk.free("norm2")
        if self.shape.gated:
            walk.make("gate", e * self.wide)
        walk.make("activated", e * self.wide)
        self._row("mask2", name, *(("activated",) if "mlp_activation" in modules else ()))
        if graphless and self.shape.parallel_layer:
            walk.free("norm2", "norm2.rows", "up", "gate", "activated", "mask2")

    def _norm(self, name: str) -> None:
        walk = self.walk
        if self.shape.rms_norm:
            wide = 4 * self.residual / self.e
            walk.make("wide", wide if self.e < 4 else 0.0)
            walk.make("square", wide)
            walk.free("square")
            walk.make("scaled", wide)
            walk.make("rounded", self.residual if self.e < 4 else 0.0)
            walk.free("scaled")
        walk.make(name, self.residual)
        walk.make(name + ".rows", (4 if self.shape.rms_norm else 8) * self.rows)
        walk.free("wide", "rounded")

    def _column(self, name: str, size: float) -> None:
        if self.split:
            self.walk.make("gathered", self.whole)
        self.walk.make(name, size)
        self.walk.free("gathered")

    def _row(self, mask: str, name: str, *inputs: str) -> None:
        """Product, reduction, dropout, sum with the stream; then the inputs that nobody keeps go."""
        walk = self.walk
        walk.make("product", self.whole)
        if self.split:
            self._reduce_scatter("product")
        walk.free(*inputs)
        if self.shape.residual_dropout:
            walk.make("dropped", self.residual)
            walk.make(mask, self.residual / self.e)
            walk.free("piece", "product")
        walk.make(name, self.residual)
        walk.free("dropped", "piece", "product")

    def _reduce_scatter(self, name: str) -> None:
        """`name` → "piece". The CPU's receives all pieces, and in fp32 adds them up in the first one's place."""
        walk = self.walk
        if self.at.cpu:
            walk.make("received", self.whole)
        if self.at.cpu and self.e == 4:
            walk.rename("received", "piece")
        else:
            walk.make("piece", self.residual)
            walk.free("received")
        walk.free(name)

    def _core(self, *, again: bool = False) -> None:
        """Names that start with "core." are what a recomputed core does not keep."""
        walk, e = self.walk, self.e
        query, pair, scores, square = self.query, self.pair, self.scores, self.at.s**2
        if self.core == "fused":
            walk.make("mixed", e * query)
            walk.make("core.rows", 4 * query / self.shape.head_size)
            return
        if self.core == "eager":
            walk.make("core.q", e * query)
            walk.make("core.k", e * query)
            walk.make("scores", e * scores)
            walk.make("core.softmax", e * scores)
            if self.dropped:
                walk.make("core.dropped", e * scores)
                walk.make("core.mask", scores)
            walk.make("core.v", e * query)
            walk.make("mixed", e * query)
            walk.free("scores")
            return
        copies = 4 if e < 4 else 0
        walk.make("copies", copies * (query + pair))
        walk.make("core.v", 4 * pair)
        walk.make("core.q", 4 * query)
        walk.make("square", 5 * square)
        walk.make("core.k", 4 * pair)
        walk.make("scores", 4 * scores)
        walk.make("masked", 4 * scores)
        walk.free("scores")
        walk.make("core.softmax", 4 * scores)
        walk.free("masked")
        walk.make("core.mask", 4 * scores)
        walk.make("core.dropped", 4 * scores)
        if again:
            walk.free("core.mask", "core.softmax")
        walk.make("weights", e * scores if e < 4 else 0.0)
        walk.make("product32", 4 * query)
        if e < 4:
            walk.make("mixed", e * query)
            walk.free("product32", "square", "copies", "weights")
        else:
            walk.free("product32", "square", "copies", "weights")
            walk.make("mixed", e * query)

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
                walk.make("core.rows", 4 * self.query / self.shape.head_size)
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
            walk.make("back.heads", e * self.fused)
            walk.free("back.mixed", "qkv", "mixed", "core.rows")
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

    @cached_property
    def parameters(self) -> float:
        return self.qkv_weight + self.output_weight + self.up_weight + self.down_weight
