"""An account of storages that come and go: what a walk through the operations of a model adds up, in bytes.

The walks follow the operations of zero_tp/models and zero_tp/parallel one by one, what each makes and what it lets go
of, so that their moments are those that planning/dryrun.py measures. Letters as in formulas.py.
"""

from __future__ import annotations

from dataclasses import dataclass
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
        window: how many tokens a token of this layer sees, itself among them; None: all before it.
        documents: of the document a token is in (`data.document_attention` "reset").
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
    window: int | None = None
    documents: bool = False

    @property
    def mask_rows(self) -> int:
        """Sequences whose masks differ: none where attention is causal and nothing more."""
        if self.documents:
            return self.b
        return int(self.window is not None and self.s > self.window)


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


def norm_backward(walk: Walk, shape: Shape, residual: float, e: int) -> None:
    """Makes "back.norm"; RMSNorm computes in fp32, in separate operations."""
    if shape.rms_norm:
        wide = 4 * residual / e
        for name in ("normed", "back.wide32", "product32", "difference"):
            walk.make(name, wide)
        walk.free("product32")
    walk.make("back.norm", residual)
    walk.free("normed", "back.wide32", "difference")
