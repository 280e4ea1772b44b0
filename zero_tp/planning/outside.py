"""A whole micro-batch over time: embedding, layers, final norm, loss, and back, in bytes.

The layers come from planning/walk.py; what is outside them follows the operations of models/transformer.py and
parallel/loss.py in the same way. Letters as in formulas.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from zero_tp.planning.layer import greatest_course, layer_course
from zero_tp.planning.layer_forward import core_of
from zero_tp.planning.shape import Shape
from zero_tp.planning.walk import Moment, Setting, Walk, norm_backward

CHUNK_ELEMENTS = 2**23
"""Of parallel/loss.py, which imports torch; a test compares."""


@dataclass(frozen=True)
class Instant:
    """What exists at one point of a micro-batch beside model states [bytes].

    Attributes:
        name: "forward" or "backward". place: the layer's number, -1 before the first and L after the last.
        activations: what backward will want. transients: everything else.
        gradients: elements of matrices whose gradients are done.
    """

    name: str
    place: int
    activations: float
    transients: float
    gradients: float


def micro_batch(
    shape: Shape, settings: Sequence[Setting], *, ends_only: bool = False, also: Collection[int] = ()
) -> list[Instant]:
    """Every instant of one micro-batch, in order.

    Args:
        settings: of each layer; they differ in what is recomputed only.
        ends_only: of a stretch of layers of one kind give the first and the last only, and of these the moments that
            may be the greatest. From one layer to the next all bytes change by the same amounts.
        also: layers to give besides, where something that is not counted here changes.
    """
    return list(_instants(shape, settings, ends_only, also))


def _instants(shape: Shape, settings: Sequence[Setting], ends_only: bool, also: Collection[int]) -> Iterator[Instant]:
    last, ends = len(settings), _Ends(shape, settings)
    course_of = greatest_course if ends_only else layer_course
    kinds = {setting: course_of(shape, setting) for setting in set(settings)}
    courses = [kinds[setting] for setting in settings]

    def shown(number: int) -> bool:
        beside = courses[max(number - 1, 0)], courses[min(number + 1, last - 1)]
        return (
            not ends_only
            or number in (0, last - 1)
            or number in also
            or any(one is not courses[number] for one in beside)
        )

    base = ends.kept + ends.kept_mask
    for moment in ends.enter():
        yield Instant("forward", -1, moment.kept, moment.transient, 0.0)
    for number, course in enumerate(courses):
        if shown(number):
            for moment in course.forward:
                yield Instant("forward", number, base + moment.kept, moment.transient + ends.mask, 0.0)
        base += course.kept
    forward, backward = ends.turn()
    for moment in forward:
        yield Instant("forward", last, base + moment.kept, moment.transient, 0.0)
    for moment in backward:
        yield Instant("backward", last, base + moment.kept, moment.transient, 0.0)
    # The gradient that the loss gives a tied embedding waits for that of the look-up.
    done, waiting = (0.0, ends.e * ends.word) if shape.tied else (ends.word, 0.0)
    for number in reversed(range(last)):
        course = courses[number]
        base -= course.kept
        if shown(number):
            for moment in course.backward:
                transient, gradients = moment.transient + waiting, moment.gradients + done
                yield Instant("backward", number, base + moment.kept, transient, gradients)
        done += course.gradients
    for moment in ends.leave(waiting):
        yield Instant("backward", -1, moment.kept, moment.transient, moment.gradients + done)


class _Ends:
    """What is before the first layer and after the last."""

    def __init__(self, shape: Shape, settings: Sequence[Setting]):
        at = settings[0]
        self.shape, self.at, self.e = shape, at, at.e
        tokens, self.split = at.s * at.b, at.sequence and at.t > 1
        rows = tokens / at.t if self.split else tokens
        self.rows = rows
        self.stream, self.whole = at.e * rows * shape.hidden, at.e * tokens * shape.hidden
        self.vocabulary = shape.vocabulary_of_rank(at.t)
        self.word = shape.hidden * self.vocabulary
        places = at.b if at.documents else 1  # rows of positions
        positions = (at.s / at.t if self.split else at.s) * places
        self.position = at.e * positions * shape.hidden if shape.learned_positions else 0.0
        self.table = at.e * shape.positions * shape.hidden if shape.learned_positions else 0.0
        self.ids = 8.0 * tokens * (3 if at.t > 1 else 1) + (tokens if at.t > 1 else 0)
        turning = 2 * at.e * at.s * places * shape.rotary_size  # cosines and sines, for all layers
        self.kept = self.ids + turning + (self.rows * shape.hidden if shape.embedding_dropout else 0.0)
        # One for all layers of a window. A region that runs again keeps it until then, and a fused kernel for backward.
        masks = {setting.window: max(setting.mask_rows, int(shape.eager)) for setting in settings}
        mask = float(at.e * at.s**2 * sum(masks.values()))
        again = any({"layer", "attention_core"} & set(setting.modules) for setting in settings)
        self.mask, self.kept_mask = (0.0, mask) if again or core_of(shape, at) == "fused" else (mask, 0.0)

    def enter(self) -> list[Moment]:
        """Tokens and the mask of the embedding's dropout are kept; the stream is a transient."""
        walk, split = Walk(), self.at.t > 1
        walk.make("ids", self.ids)
        walk.make("words", self.whole)
        if split:
            walk.make("masked", self.whole)
            walk.free("words")
            walk.make("words", self.whole)
            if self.split:
                walk.make("piece", self.whole if self.at.cpu and self.e == 4 else self.stream)
                walk.free("words")
            walk.free("masked")
        walk.make("positions", self.position)
        walk.make("sum", self.stream)
        walk.free("positions")
        if self.shape.embedding_dropout:
            walk.make("dropped", self.stream)
            walk.make("mask", self.kept - self.ids)
        return walk.moments({"ids", "mask"})

    def turn(self) -> tuple[list[Moment], list[Moment]]:
        """Final norm, output layer and loss, forward and backward.

        The loss takes its gradients in forward, a chunk of tokens at a time; the chunk before is let go of only when
        the next one's have taken its place.
        """
        walk, e, at = Walk(), self.e, self.at
        walk.make("input", self.stream)
        walk.make("mask", self.mask)
        walk.make("normed", self.stream)
        walk.make("rows", (4 if self.shape.rms_norm else 8) * self.rows)
        walk.free("mask")
        if self.split:
            walk.make("gathered", self.whole)
        walk.make("gradient", self.whole)
        walk.make("weight", 4 * self.word)
        chunk = max(1, min(at.s, CHUNK_ELEMENTS // max(1, at.b * self.vocabulary)))
        logits = at.b * self.vocabulary * chunk
        for number in range(2 if chunk < at.s else 1):
            before, now = f"{number - 1}", f"{number}"
            if e < 4:
                walk.make("logits", e * logits)
            walk.make("fp32" + now, 4 * logits)
            walk.free("logits", "fp32" + before)
            if e < 4:
                walk.make("rounded" + now, e * logits)
                walk.free("rounded" + before)
                walk.make("product", e * self.word)
                walk.free("product")
        if self.split:
            # In fp32 the CPU's reduce-scatter adds the pieces up in the first one's place.
            if at.cpu and e < 4:
                walk.make("received", self.whole)
            walk.make("piece", self.whole if at.cpu and e == 4 else self.stream)
            walk.free("gradient", "received")
        walk.free("gathered", "fp32" + now, "rounded" + now, "normed")
        kept, first = set(walk.alive), sum(size > 0 for _, size, _ in walk.events)
        walk.make("stream", self.stream)
        walk.make("scaled", e * self.word)
        walk.free("gradient", "piece", "weight")
        norm_backward(walk, self.shape, self.stream, e)
        walk.free("stream", "input", "rows")
        if not self.shape.tied:
            walk.free("scaled")
        moments = walk.moments(kept)
        return moments[:first], moments[first:]

    def leave(self, waiting: float) -> list[Moment]:
        walk, dropout = Walk(), self.shape.embedding_dropout
        walk.make("ids", self.kept)
        walk.make("gradient", self.stream)
        walk.make("waiting", waiting)
        if dropout:
            walk.make("undropped", self.stream)
            walk.free("gradient")
        if self.shape.learned_positions:
            walk.make("positions", self.position)
            walk.make("table", self.table)
            walk.free("positions")
            if self.split:
                walk.make("summed", self.table)
            walk.gradients += self.shape.positions * self.shape.hidden
            walk.free("table", "summed")
        if self.split:
            walk.make("gathered", self.whole)
            walk.free("undropped", "gradient")
        if self.at.t > 1:
            walk.make("masked", self.whole)
            walk.free("gathered", "undropped", "gradient")
        walk.make("words", self.e * self.word)
        walk.free("masked", "undropped", "gradient")
        if waiting:
            walk.make("sum", self.e * self.word)
        walk.gradients += self.word
        walk.free("words", "waiting", "sum")
        return walk.moments({"ids"})
