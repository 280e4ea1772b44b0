"""Estimate the time of one layer for one micro-batch: forward, backward and recomputation.

s sequence, b batch, h hidden, a heads, t TP size. Passes are counted by the bytes that an operation reads and writes,
for forward and for backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from zero_tp.architectures.spec import TransformerSpec
from zero_tp.models.flops import forward_flops
from zero_tp.planning.rates import FLASH_SHARE, Rates
from zero_tp.planning.workload import Workload


class Seconds(NamedTuple):
    """Seconds of matrix products, of passes over memory and of collectives over TP that nothing hides."""

    products: float = 0.0
    passes: float = 0.0
    tensor: float = 0.0

    @property
    def total(self) -> float:
        return sum(self)

    def plus(self, other: Seconds, times: float = 1.0) -> Seconds:
        return Seconds(*(mine + times * theirs for mine, theirs in zip(self, other, strict=True)))


class LayerTime(NamedTuple):
    """Seconds of a layer's forward, of its backward, and of what backward recomputes if the layer is recomputed."""

    forward: Seconds
    backward: Seconds
    again: Seconds

    def as_json(self) -> dict[str, float]:
        """Return the seconds of a layer that the run's policy recomputes."""
        backward = self.backward.total + self.again.total
        return {"forward": self.forward.total, "backward": backward, "again": self.again.total}


Bytes = tuple[float, float]
"""What forward reads and writes, and backward."""


@dataclass(frozen=True)
class LayerWork:
    """One layer of one micro-batch on one rank."""

    spec: TransformerSpec
    at: Workload
    rates: Rates

    def time(self) -> LayerTime:
        products = [*self._columns(), *self._rows()]
        forward = sum(self.rates.product(self._tokens, outputs, inputs) for inputs, outputs in products)
        backward = self._input_gradients(products) + self._weight_gradients(products)
        core_forward, core_backward = self._core()
        passes = self.passes()
        waits, hides = self._tensor()
        memory = self.rates.memory
        before = Seconds(forward + core_forward, sum(each[0] for each in passes.values()) / memory, waits[0])
        after = Seconds(backward + core_backward, sum(each[1] for each in passes.values()) / memory, waits[1])
        return LayerTime(before, after.plus(hides), self._again(before, core_forward, passes))

    def _again(self, forward: Seconds, core: float, passes: dict[str, Bytes]) -> Seconds:
        policy, memory = self.at.policy, self.rates.memory
        if policy.mode == "full":
            return forward
        again = Seconds()
        if policy.mode == "selective":
            for module, name in (("attention_core", "core"), ("mlp_activation", "activation"), ("norm", "norms")):
                if module in policy.chosen_modules:
                    again = again.plus(Seconds(core if name == "core" else 0.0, passes[name][0] / memory))
        return again

    # ---- products ----------------------------------------------------------------------------------------------------

    def _columns(self) -> list[tuple[float, float]]:
        """Return (inputs, outputs) of the column-parallel products."""
        spec, t = self.spec, self.at.tensor
        pairs = max(1.0, spec.kv_heads / t)
        mlp = (spec.mlp_matrices - 1) * spec.mlp_size / t
        return [(spec.hidden, (spec.heads / t + 2 * pairs) * spec.head_size), (spec.hidden, mlp)]

    def _rows(self) -> list[tuple[float, float]]:
        spec, t = self.spec, self.at.tensor
        return [(spec.heads * spec.head_size / t, spec.hidden), (spec.mlp_size / t, spec.hidden)]

    @property
    def _tokens(self) -> int:
        return self.at.length * self.at.batch

    def _input_gradients(self, products: list[tuple[float, float]]) -> float:
        return sum(self.rates.product(self._tokens, inputs, outputs) for inputs, outputs in products)

    def _weight_gradients(self, products: list[tuple[float, float]]) -> float:
        return sum(self.rates.product(inputs, outputs, self._tokens) for inputs, outputs in products)

    def _core(self) -> tuple[float, float]:
        """Return the seconds of QKᵀ and of the sum over V, forward and backward.

        An eager core's products read or write all scores, which takes longer than multiplying; a fused one keeps them
        on the multiprocessor, leaves out the tiles that a causal mask hides, and computes them again in backward.
        """
        spec, rates = self.spec, self.rates
        flops = forward_flops(spec, self.at.batch, self.at.length).core / self.at.tensor
        if spec.attention == "eager":
            traffic = 2 * rates.element * (self.scores + self._heads + self._pairs)
            return (
                max(flops / rates.rate, traffic / rates.memory),
                max(2 * flops / rates.rate, 2 * traffic / rates.memory),
            )
        rate = rates.peak * min(FLASH_SHARE, rates.device.matrix_share)
        forward = flops * (0.5 if spec.causal else 1.0) / rate
        return forward, 2.5 * forward

    # ---- passes over memory ------------------------------------------------------------------------------------------

    @property
    def _residual(self) -> float:
        return self._tokens * self.spec.hidden / (self.at.tensor if self.at.sequence else 1)

    @property
    def scores(self) -> float:
        """Return the attention scores on this rank: as²b/t."""
        return self.spec.heads / self.at.tensor * self.at.length**2 * self.at.batch

    @property
    def _heads(self) -> float:
        return self._tokens * self.spec.head_size * self.spec.heads / self.at.tensor

    @property
    def _pairs(self) -> float:
        return self._tokens * self.spec.head_size * max(1.0, self.spec.kv_heads / self.at.tensor)

    def passes(self) -> dict[str, Bytes]:
        """Return the bytes by operation. Backward of a norm reads its input and gradient twice, for its weight too."""
        spec, e, stream = self.spec, self.at.element, self._residual
        wide = self._tokens * spec.mlp_size / self.at.tensor
        biased = zip(self._columns(), (spec.qkv_bias, spec.mlp_bias), strict=True)
        biased_columns = self._tokens * sum(outputs for (_, outputs), bias in biased if bias)
        row_biases = spec.output_bias + spec.mlp_bias
        dropped = 2 * (2 * e + 1) * stream if spec.dropouts.residual else 0.0
        alone = self.at.tensor == 1  # a row's product then adds its bias itself
        heads, pairs = 2 * e * self._heads, 2 * e * self._pairs  # read and written
        turned = 0.0 if spec.rotary is None else 2 * (heads + pairs)
        moved = heads + (heads + 2 * pairs if spec.attention == "eager" else 0.0)
        return {
            "norms": (4 * e * stream, 10 * e * stream),
            "dropout": (dropped, dropped),
            "sums": (6 * e * stream, 6 * e * stream),
            "row biases": (0.0 if alone else 2 * e * stream * row_biases, e * stream * row_biases),
            "column biases": (0.0, e * biased_columns),  # the product adds them
            "activation": (e * wide * spec.mlp_matrices, e * wide * (2 * spec.mlp_matrices - 1)),
            "heads": (moved + turned, moved + turned),
            "core": self._core_passes(),
        }

    def _core_passes(self) -> Bytes:
        spec, e = self.spec, self.at.element
        if spec.attention != "eager":
            return 0.0, 0.0
        dropped = 2 * e + 1 if spec.dropouts.attention else 0
        # Forward copies the mask into the product's result and reads it there, beside softmax and dropout.
        return self.scores * (4 * e + dropped), self.scores * (3 * e + dropped)

    # ---- collectives -------------------------------------------------------------------------------------------------

    def _tensor(self) -> tuple[Bytes, Seconds]:
        """Return (what forward waits for, and backward), and what else backward's collectives cost.

        An all-reduce is two halves. Forward has four of them. So has backward beside products of the column layers:
        without SP the weights' gradients, under SP the inputs' gradients too, while it gathers the saved shards again.
        Under SP backward also gathers the row layers' output gradients and waits for them.
        """
        at, rates = self.at, self.rates
        half = rates.collective(at.element * self._tokens * self.spec.hidden, at.tensor)
        hidden = min(4 * half, self.overlapped_products())
        waits = (4 * half, (2 * half if at.sequence else 0.0) + 4 * half - hidden)
        return waits, Seconds(products=rates.beside(hidden))

    def overlapped_products(self) -> float:
        """Return the seconds of products that run beside backward's collectives over TP."""
        columns = self._columns()
        return self._weight_gradients(columns) + (self._input_gradients(columns) if self.at.sequence else 0.0)
