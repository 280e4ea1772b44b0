"""Estimate a step's time from a device's rates, by term.

Each product, pass over memory or collective is work over a reached rate: the device's peak times the share of it that
others have measured (zero_tp/devices.py). What else a piece of work loses follows from its shape. What overlaps is what
the code overlaps (parallel/linear.py, DeepSpeed's `overlap_comm`). Nothing of it was fitted to a run: the published
times are its test.

s sequence, b batch, h hidden, a heads, t TP size. Passes are counted by the bytes that an operation reads and writes,
for forward and for backward.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from zero_tp.architectures.spec import TransformerSpec
from zero_tp.devices import Device
from zero_tp.errors import UserError
from zero_tp.models.flops import forward_flops, head_products
from zero_tp.planning.formulas import Layer
from zero_tp.planning.plan_settings import Workload, ZeroSettings
from zero_tp.planning.zero import ALLREDUCE_BUCKET

TILE = (256, 128)
"""Rows and columns of the result that one multiprocessor makes at once: cuBLAS's most efficient tile (NVIDIA, Matrix
Multiplication Background User's Guide, section 2.3)."""
FLASH_SHARE = 0.6
"""Of the matrix peak in fused attention: 50 to 73 % on an A100 (FlashAttention-2, arXiv 2307.08691, abstract)."""
START, NEAR_HOP, FAR_HOP = 8.4e-6, 3.4e-6, 14e-6
"""Seconds of a ring before its first byte, for each hop over NVLink, and for each over a network (NCCL 2.18,
src/graph/tuning.cc: `baseLat` and `hwLat` of Ring/Simple)."""
HOST_MEMORY_GBPS = 200.0
"""Of a whole node, for an optimizer on the host."""


def matrix_flops(device: Device, dtype: str) -> float:
    """Return the peak of a device's matrix units in a run's dtype [FLOP/s].

    Raises:
        UserError: the device can't compute in this dtype.
    """
    teraflops = device.tflops(dtype)
    if teraflops is None:
        others = [name for name in ("bf16", "fp16", "fp32") if device.tflops(name)]
        raise UserError(
            f"--device: {device.name} has no {dtype} matrix units; plan for {' or '.join(others)} "
            f"(--set bf16.enabled=false), or another device"
        )
    return teraflops * 1e12


@dataclass(frozen=True)
class Rates:
    """The rates of one device in one dtype.

    Attributes:
        element: bytes of an element.
        peak: FLOP/s of the matrix units. rate: of them what the best products reach. memory: reached bytes/s.
    """

    device: Device
    element: int
    peak: float

    @property
    def rate(self) -> float:
        return self.peak * self.device.matrix_share

    @property
    def memory(self) -> float:
        return self.device.memory_gbps * 1e9 * self.device.memory_share

    def product(self, rows: float, columns: float, depth: float) -> float:
        """Return the seconds of [rows, depth] × [depth, columns].

        The result's tiles go to the multiprocessors in waves, of which the last takes as long as a full one; writing
        the result comes on top, since a multiprocessor holds one tile at a time and multiplies no other meanwhile.
        """
        units = self.device.units
        most = math.inf
        for high, wide in (TILE, TILE[::-1]) if units > 1 else ((1, 1),):
            tiles = math.ceil(rows / high) * math.ceil(columns / wide)
            most = min(most, math.ceil(tiles / units) * units * 2.0 * high * wide * depth)
        return most / self.rate + self.element * rows * columns / self.memory

    def collective(self, size: float, ranks: int, stride: int = 1, pieces: float = 1) -> float:
        """Return the seconds of a ring all-gather or reduce-scatter.

        A ring over nodes enters and leaves each of them once, however many of its ranks are there. Neighbours at a
        stride form that many rings side by side, which share the node's links.

        Args:
            size: bytes of the whole tensor.
            stride: between neighbours of the group, in ranks; a node has consecutive ranks.
            pieces: collectives, one after another, in which it goes.
        """
        if ranks == 1:
            return 0.0
        device = self.device
        rings = min(stride, device.per_node)
        together = max(1, device.per_node // stride)  # ranks of the group in one node
        nodes = -(-ranks // together)
        speed = device.intra_gbps * device.link_share
        if nodes > 1:
            speed = min(speed, device.inter_gbps * device.inter_share * device.per_node / rings)
        far = nodes - 1
        latency = START + far * FAR_HOP + (ranks - 1 - far) * NEAR_HOP
        return pieces * latency + size * (ranks - 1) / ranks / (speed * 1e9)

    def slowdown(self, seconds: float) -> float:
        """Return what products lose to a collective that overlaps them: its channels' multiprocessors."""
        return seconds * self.device.channels / self.device.units


class Seconds(NamedTuple):
    """Seconds of matrix products, of passes over memory and of collectives over TP that nothing hides."""

    products: float = 0.0
    passes: float = 0.0
    tensor: float = 0.0

    @property
    def total(self) -> float:
        return sum(self)


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
class StepTime:
    """The seconds of one step, by term.

    Attributes:
        products: matrix products of forward and backward.
        recompute: everything that backward recomputes.
        elementwise: norms, activations, dropout, residual sums, softmax, accumulation of gradients.
        tensor, data: communication over TP and DP that nothing hides, and what overlapped products lose to it.
        optimizer: the update.
        host: copies to and from host memory.
        layer: of one layer and micro-batch.
    """

    products: float
    recompute: float
    elementwise: float
    tensor: float
    data: float
    optimizer: float
    host: float
    layer: LayerTime

    @property
    def total(self) -> float:
        return sum(self.terms().values())

    def terms(self) -> dict[str, float]:
        return {
            "matrix products": self.products,
            "recomputation": self.recompute,
            "elementwise": self.elementwise,
            "TP communication": self.tensor,
            "DP communication": self.data,
            "optimizer": self.optimizer,
            "host copies": self.host,
        }

    def as_json(self) -> dict[str, float]:
        return {**self.terms(), "total": self.total}


@dataclass(frozen=True)
class Timing:
    """Everything that the time of a step is estimated from.

    Experts are estimated as one MLP as wide as those that compute a token, and the copies of tokens sorted for them.

    Attributes:
        parameters: elements on one rank before ZeRO partitions them (Ψ/t).
    """

    spec: TransformerSpec
    workload: Workload
    device: Device
    zero: ZeroSettings
    parameters: float

    @cached_property
    def rates(self) -> Rates:
        return Rates(self.device, self.workload.element, matrix_flops(self.device, self.workload.dtype))

    @cached_property
    def layer(self) -> Layer:
        return Layer.of(self.spec, self.workload)

    def layer_time(self) -> LayerTime:
        """Return the time of one layer and micro-batch, a mean over layers."""
        products = [*self._columns(), *self._rows()]
        multiplied = sum(self.rates.product(self._tokens, outputs, inputs) for inputs, outputs in products)
        gradients = self._input_gradients(products) + self._weight_gradients(products)
        core_forward, core_backward = self._core()
        passes = self.passes()
        read_forward, read_backward = (sum(sizes) / self.rates.memory for sizes in zip(*passes.values(), strict=True))
        waits_forward, waits_backward, slowdown = self._tensor()
        forward = Seconds(multiplied + core_forward, read_forward, waits_forward)
        backward = Seconds(gradients + core_backward + slowdown, read_backward, waits_backward)
        policy, again = self.workload.policy, Seconds()
        if policy.mode == "full":
            again = forward
        elif policy.mode == "selective":
            core = core_forward if "attention_core" in policy.chosen_modules else 0.0
            again = Seconds(core, sum(passes[module][0] for module in policy.chosen_modules) / self.rates.memory)
        return LayerTime(forward, backward, again)

    # ---- products ----------------------------------------------------------------------------------------------------

    def _columns(self) -> list[tuple[float, float]]:
        """Return (inputs, outputs) of the column-parallel products."""
        spec, t = self.spec, self.workload.tensor
        pairs = max(1.0, spec.kv_heads / t)
        mlp = (spec.mlp_matrices - 1) * spec.active_width / t
        return [(spec.hidden, (spec.heads / t + 2 * pairs) * spec.head_size), (spec.hidden, mlp)]

    def _rows(self) -> list[tuple[float, float]]:
        spec, t = self.spec, self.workload.tensor
        return [(spec.heads * spec.head_size / t, spec.hidden), (spec.active_width / t, spec.hidden)]

    @property
    def _tokens(self) -> int:
        return self.workload.length * self.workload.batch

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
        flops = forward_flops(spec, self.workload.batch, self.workload.length).core / self.workload.tensor
        if spec.attention == "eager":
            traffic = 2 * rates.element * (self.layer.scores + self.layer.heads + self._pairs)
            forward = max(flops / rates.rate, traffic / rates.memory)
            return forward, 2 * forward
        rate = rates.peak * min(FLASH_SHARE, rates.device.matrix_share)
        forward = flops * (0.5 if spec.causal else 1.0) / rate
        return forward, 2.5 * forward

    # ---- passes over memory ------------------------------------------------------------------------------------------

    @property
    def _pairs(self) -> float:
        return self._tokens * self.spec.head_size * max(1.0, self.spec.kv_heads / self.workload.tensor)

    def passes(self) -> dict[str, Bytes]:
        """Return the bytes by operation; those that can be recomputed have the names of `recompute.modules`.

        Backward of a norm reads its input and gradient twice, for its weight too.
        """
        spec, e, layer, stream = self.spec, self.workload.element, self.layer, self.layer.residual
        biased = zip(self._columns(), (spec.qkv_bias, spec.mlp_bias), strict=True)
        biased_columns = self._tokens * sum(outputs for (_, outputs), bias in biased if bias)
        row_biases = spec.output_bias + spec.mlp_bias
        dropped = 2 * (2 * e + 1) * stream if spec.dropouts.residual else 0.0
        alone = self.workload.tensor == 1  # a row's product then adds its bias itself
        heads, pairs = 2 * e * layer.heads, 2 * e * self._pairs  # read and written
        turned = 0.0 if spec.rotary is None else 2 * (heads + pairs)
        eager = spec.attention == "eager"
        moved = heads + (heads + 2 * pairs if eager else 0.0)
        # Forward copies the mask into the product's result and reads it there, besides softmax and dropout.
        scores = layer.scores if eager else 0.0
        sorted_copies = 0.0  # of tokens on their way to experts, and of what comes back
        if spec.experts is not None:
            sorted_copies = self._tokens * spec.hidden * spec.experts.per_token * len(spec.expert_layers) / spec.layers
        mask = 2 * e + 1 if spec.dropouts.attention else 0
        return {
            "norm": (4 * e * stream, 10 * e * stream),
            "dropout": (dropped, dropped),
            "sums": (6 * e * stream, 6 * e * stream),
            "row biases": (0.0 if alone else 2 * e * stream * row_biases, e * stream * row_biases),
            "column biases": (0.0, e * biased_columns),  # the product adds them
            "mlp_activation": (e * layer.wide * spec.mlp_matrices, e * layer.wide * (2 * spec.mlp_matrices - 1)),
            "heads": (moved + turned, moved + turned),
            "experts": (4 * e * sorted_copies, 4 * e * sorted_copies),
            "attention_core": (scores * (4 * e + mask), scores * (3 * e + mask)),
        }

    # ---- collectives -------------------------------------------------------------------------------------------------

    def _tensor(self) -> tuple[float, float, float]:
        """Return the seconds that forward waits for collectives, that backward waits, and that products lose to them.

        An all-reduce is two halves. Forward has four of them. So has backward, and they overlap with products of the
        column layers: the weights' gradients, and under SP, which gathers the saved shards again, the inputs' too.
        Under SP backward also gathers the row layers' output gradients and waits for them.
        """
        workload, rates = self.workload, self.rates
        half = rates.collective(workload.element * self._tokens * self.spec.hidden, workload.tensor)
        hidden = min(4 * half, self.overlapped_products())
        return 4 * half, (2 * half if workload.sequence else 0.0) + 4 * half - hidden, rates.slowdown(hidden)

    def overlapped_products(self) -> float:
        """Return the seconds of products that overlap backward's collectives over TP."""
        columns = self._columns()
        return self._weight_gradients(columns) + (self._input_gradients(columns) if self.workload.sequence else 0.0)

    # ---- a step ------------------------------------------------------------------------------------------------------

    def estimate(self) -> StepTime:
        """Return the seconds of one step, by term.

        Raises:
            UserError: the device can't compute in this dtype.
        """
        micro, layers = self.zero.accumulation, self.spec.layers
        recomputed = self.workload.policy.mean_recomputed_layers(layers, micro)
        layer, head = self.layer_time(), self.head()
        products, passes, waits = (layers * (one + two) for one, two in zip(layer.forward, layer.backward, strict=True))
        backward = layers * layer.backward.total + recomputed * layer.again.total
        optimizer, host = self._optimizer()
        return StepTime(
            products=micro * (products + head.products),
            recompute=micro * recomputed * layer.again.total,
            elementwise=micro * (passes + self.accumulation_time() + head.passes),
            tensor=micro * waits,
            data=self._data(layers * layer.forward.total + head.total, backward),
            optimizer=optimizer,
            host=host,
            layer=layer,
        )

    def head(self) -> Seconds:
        """Return forward and backward of the output layer and its loss, which goes over each logit six times."""
        workload, hidden, product = self.workload, self.spec.hidden, self.rates.product
        labels, width = workload.labels, head_products(self.spec) / hidden / workload.tensor
        products = product(labels, width, hidden) + product(labels, hidden, width) + product(hidden, width, labels)
        return Seconds(products, 6 * workload.element * labels * width / self.rates.memory)

    def accumulation_time(self) -> float:
        """Return the seconds, of one micro-batch, in which the gradients of its products are added to those before.

        Where they are added up in another dtype there is a buffer for them, also for one micro-batch, which is zeroed
        once a step.
        """
        zero, e = self.zero, self.workload.element
        buffer = zero.accumulated != e
        if zero.accumulation == 1 and not buffer:
            return 0.0
        traffic = 2.0 * zero.accumulated + e + zero.accumulated * buffer / zero.accumulation
        return self.parameters * traffic / self.rates.memory

    def _data(self, forward: float, backward: float) -> float:
        """Return what DP's communication costs: the gathers and reductions of `ZeroSettings.volumes`.

        DeepSpeed waits for the device before each reduction to an owner (stage_1_and_2.py, `allreduce_and_copy`), so
        `overlap_comm` hides none of them.
        """
        zero, micro, e = self.zero, self.zero.accumulation, self.workload.element
        gathers, reductions = zero.volumes
        calls = self.spec.layers  # each layer's collectives begin somewhere
        if zero.stage == 3:
            gather = self.rates.collective(e * self.parameters, zero.data, self.workload.tensor, calls)
            reduce = self.rates.collective(zero.reduced * self.parameters, zero.data, self.workload.tensor, calls)
            return self._exposed(gathers * gather + reductions * reduce, micro * (forward + backward))
        bucket = zero.reduce_bucket if zero.in_buckets else ALLREDUCE_BUCKET
        pieces, sent = max(1, -(-self.parameters // bucket)), zero.reduced * self.parameters
        if zero.to_owners:
            # Each ends at a bucket's or an owner's end. A chain's links carry all bytes (NCCL's tuning.cc: N steps).
            pieces, sent = pieces + zero.data - 1, sent * zero.data / (zero.data - 1)
        gather = self.rates.collective(e * self.parameters, zero.data, self.workload.tensor)
        reduce = self.rates.collective(sent, zero.data, self.workload.tensor, pieces)
        overlapped = (micro if zero.stage == 2 else 1) * backward if self.reduces_in_backward else 0.0
        return gathers * gather + self._exposed(reductions * reduce, overlapped)

    @property
    def reduces_in_backward(self) -> bool:
        """Return whether stages 0 to 2 reduce gradients while backward runs."""
        return self.zero.overlap and self.zero.in_buckets and not self.zero.to_owners

    def _exposed(self, communicating: float, computing: float) -> float:
        """Return what communication costs that overlaps with computing."""
        hidden = min(communicating, computing)
        return communicating - hidden + self.rates.slowdown(hidden)

    def _optimizer(self) -> tuple[float, float]:
        """Return (update, host copies).

        Masters and moments are read and written, gradients read; 16-bit weights are copied from the masters; gradients
        become fp32, their norm is taken and they are clipped.
        """
        zero, e, memory = self.zero, self.workload.element, self.rates.memory
        part = self.parameters / (zero.data if zero.stage else 1)
        update = 2 * (4 + zero.moments) + 4 + (4 + e if e < 4 else 0)
        wider = zero.accumulated + 4 if zero.accumulated < 4 else 0
        traffic = part * (update + wider + (8 if zero.clips else 0)) + 4 * self.parameters
        to_host = self.device.host_gbps * 1e9 * self.device.link_share
        copies = 0.0  # those of checkpoints overlap with the layers
        if zero.offload_param:
            copies += 3 * zero.accumulation * e * part / to_host
        if not zero.offload_optimizer:
            return traffic / memory, copies
        copies += (zero.accumulation * e * part + e * part) / to_host
        share = HOST_MEMORY_GBPS * 1e9 / min(self.device.per_node, max(1, zero.data * self.workload.tensor))
        return traffic / share, copies
