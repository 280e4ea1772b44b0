"""A walk through one layer's forward on one rank: what each operation makes and lets go of, in bytes.

It follows models/transformer.py, attention.py, mlp.py and norm.py; e bytes an element.
"""

from __future__ import annotations

from zero_tp.planning.shape import Shape
from zero_tp.planning.walk import Setting, Walk


def core_of(shape: Shape, setting: Setting) -> str:
    """How attention runs: "eager", torch's "maths" path or a "fused" kernel."""
    return "eager" if shape.eager else "maths" if setting.cpu and shape.attention_dropout else "fused"


class LayerForward:
    """Sizes, and the operations of forward."""

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
        self.core = core_of(shape, setting)
        # Beside a mask an accelerator's fused kernels take no groups: models/attention.py repeats keys and values.
        grouped = shape.kv_heads != shape.heads
        self.repeats = self.core == "fused" and setting.mask_rows > 0 and not setting.cpu and grouped
        # A fused core gives its output in the order of its queries' memory, which turning a part of each head changes.
        self.copies = self.core != "fused" or 0 < shape.rotary_size < shape.head_size
        self.dropped = shape.attention_dropout and self.core != "fused"

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

    def _beside_mixed(self) -> None:
        """What a fused core keeps beside its output."""
        if self.repeats:
            self.walk.make("core.k", self.e * self.query)
            self.walk.make("core.v", self.e * self.query)
        self.walk.make("core.rows", 4 * self.query / self.shape.head_size)

    def _core(self, *, again: bool = False) -> None:
        """Names that start with "core." are what a recomputed core does not keep."""
        walk, e = self.walk, self.e
        query, pair, scores, square = self.query, self.pair, self.scores, self.at.s**2
        if self.core == "fused":
            walk.make("mixed", e * query)
            self._beside_mixed()
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
