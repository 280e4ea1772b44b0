"""Estimate a step's time from a device's rates, by term.

Every term is work over a reached rate: matrix products, elementwise passes over memory, collectives over TP and DP, the
optimizer, copies to and from the host. What overlaps is what the code overlaps (parallel/linear.py, DeepSpeed's
`overlap_comm`). Nothing of it was fitted to a run; the published times on A100 lie within 15 % of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from zero_tp.devices import Device
from zero_tp.models.flops import forward_flops
from zero_tp.models.spec import TransformerSpec
from zero_tp.planning.formulas import pipeline_bubble
from zero_tp.planning.workload import Workload
from zero_tp.planning.zero import ZeroSettings

LATENCY = 1e-5
"""Seconds that a collective takes whatever its size."""
HOST_MEMORY_GBPS = 200.0
"""Of a whole node, for an optimizer on the host."""
BACKWARD_PASSES = 1.75
"""Memory traffic of elementwise operations in backward over that in forward."""


@dataclass(frozen=True)
class StepTime:
    """A StepTime has the seconds of one step, by term.

    Attributes:
        products: matrix products of forward and backward. recompute: what is computed again. elementwise: norms,
            activations, dropout, residual sums, softmax. tensor, data: exposed communication over TP and DP.
            optimizer: the update. host: copies to and from host memory. bubble: pipelines' idle time.
    """

    products: float
    recompute: float
    elementwise: float
    tensor: float
    data: float
    optimizer: float
    host: float
    bubble: float

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
            "pipeline bubble": self.bubble,
        }

    def as_json(self) -> dict[str, float]:
        return {**self.terms(), "total": self.total}


@dataclass(frozen=True)
class Timing:
    """A Timing has what the time of a step is estimated from.

    Attributes:
        parameters: elements on one rank of all stages together (Ψ/t).
        pipeline, interleaving: p and m.
    """

    spec: TransformerSpec
    at: Workload
    zero: ZeroSettings
    parameters: int
    device: Device
    pipeline: int = 1
    interleaving: int = 1

    def estimate(self) -> StepTime:
        """Return the seconds of one step, by term.

        Raises:
            ValueError: the device has no rate in this dtype.
        """
        peak = self.device.tflops(self.at.dtype)
        if peak is None:
            raise ValueError(f"{self.device.name} has no matrix rate in {self.at.dtype}")
        rate = peak * 1e12 * self.device.matrix_share
        at, spec, stages = self.at, self.spec, self.pipeline
        micro = self.zero.accumulation
        layer, core, logits = (flops / at.tensor for flops in forward_flops(spec, at.batch, at.length, at.labelled))
        core *= 0.5 if spec.causal and spec.attention == "sdpa" else 1.0  # a fused kernel leaves out what is hidden
        layers = spec.layers / stages
        last = logits if stages == 1 else logits / stages  # the last stage does it while others wait for less
        products = micro * 3 * (layers * (layer + core) + last) / rate
        passes = self._elementwise_bytes() / self._memory
        whole, cores = self._recomputed()
        again = micro * (whole * (layer + core) + cores * core) / stages / rate
        elementwise = micro * passes * (layers * (1 + BACKWARD_PASSES) + whole / stages)
        elementwise += micro * cores / stages * self._core_bytes() / self._memory
        collective, hidden_behind = self._tensor(), layer * (2 / 3) / rate  # weight and input gradients of two columns
        exposed = collective[0] * (1 + whole / spec.layers) + max(0.0, collective[1] - hidden_behind)
        tensor = micro * layers * exposed
        data = self._data(products + again)
        bubble = pipeline_bubble(stages, micro, self.interleaving) * (products + again + elementwise + tensor)
        optimizer, host = self._optimizer()
        return StepTime(products, again, elementwise, tensor, data, optimizer, host, bubble)

    @property
    def _memory(self) -> float:
        return self.device.memory_gbps * 1e9 * self.device.memory_share

    def _recomputed(self) -> tuple[float, float]:
        """Return (whole layers, attention cores alone) that backward runs again, a mean over a step's micro-batches."""
        policy, micro = self.at.policy, self.zero.accumulation
        layers = len(policy.recomputed_layers(self.spec.layers)) * max(0, micro - policy.keep_micro_batches) / micro
        cores = policy.mode == "selective" and "attention_core" in policy.chosen_modules
        return layers * (policy.mode == "full"), layers * cores

    def _core_bytes(self) -> float:
        at, spec, e = self.at, self.spec, self.at.element
        scores = spec.heads / at.tensor * at.length**2 * at.batch
        if spec.attention == "eager":
            return scores * (4 * e + (2 * e + 1 if spec.dropouts.attention else 0))
        return e * at.length * at.batch * spec.head_size * (2 * spec.heads + 2 * spec.kv_heads) / at.tensor

    def _elementwise_bytes(self) -> float:
        """Return the bytes that the operations of one layer's forward beside the products read and write."""
        at, spec, e = self.at, self.spec, self.at.element
        tokens = at.length * at.batch
        residual = tokens * spec.hidden / (at.tensor if at.sequence else 1)
        wide = tokens * spec.mlp_size / at.tensor
        norms = 2 * 2 * e * residual
        dropped = 2 * ((2 * e + 1) if spec.dropouts.residual else 0) * residual
        sums = 2 * 3 * e * residual
        activation = e * wide * spec.mlp_matrices
        heads = e * tokens * spec.head_size * (spec.heads + spec.kv_heads) / at.tensor
        turning = 0 if spec.rotary is None else 4 * heads
        return norms + dropped + sums + activation + turning + 2 * heads + self._core_bytes()

    def _collective(self, elements: float, ranks: int, *, near: bool) -> float:
        """Return the seconds of one ring all-gather or reduce-scatter whose whole tensor has `elements`."""
        if ranks == 1:
            return 0.0
        speed = (self.device.intra_gbps if near else self.device.inter_gbps) * 1e9 * self.device.link_share
        return LATENCY + self.at.element * elements * (ranks - 1) / ranks / speed

    def _tensor(self) -> tuple[float, float]:
        """Return (what waits, what overlaps) of one layer: forward's four halves of all-reduces and backward's.

        Under SP backward also gathers the two saved shards again, and all but the gathers of the row layers' output
        gradients overlap with products.
        """
        at = self.at
        tokens = at.length * at.batch
        half = self._collective(tokens * self.spec.hidden, at.tensor, near=at.tensor <= self.device.per_node)
        if at.sequence:
            return 4 * half + 2 * half, 4 * half
        return 4 * half, 4 * half

    def _data(self, computing: float) -> float:
        zero = self.zero
        near = self.at.tensor * zero.data * self.pipeline <= self.device.per_node
        own = self.parameters / self.pipeline
        half = self._collective(own, zero.data, near=near)
        micro = zero.accumulation
        if zero.stage == 3:
            gathers, reductions = 2 * micro, micro
        elif zero.stage == 2:
            gathers, reductions = 1, micro
        else:
            gathers, reductions = 1, 1
        calls = 0.0
        if zero.stage == 3 and zero.data > 1:
            hidden = computing
            calls = LATENCY * self.spec.layers * 3 * micro  # each layer's collectives begin somewhere
        elif zero.overlap:
            hidden = computing * (2 / 3 if zero.stage == 2 else 2 / 3 / micro)
        else:
            hidden = 0.0
        waiting = half if zero.stage < 3 else 0.0  # the updated parameters' all-gather
        communicating = half * (gathers + reductions) - waiting
        return calls + waiting * gathers + max(0.0, communicating - hidden)

    def _optimizer(self) -> tuple[float, float]:
        """Return (update, host copies). Masters and moments are read and written, gradients read, weights written."""
        zero, e = self.zero, self.at.element
        own = self.parameters / self.pipeline
        part = own / (zero.data if zero.stage else 1)
        traffic = part * (2 * (4 + zero.moments) + 4 + e) + 4 * own  # and the norm's pass over the gradients
        to_host = self.device.host_gbps * 1e9 * self.device.link_share
        copies = 0.0  # those of checkpoints run beside the layers
        if zero.offload_param:
            copies += 3 * zero.accumulation * e * part / to_host
        if not zero.offload_optimizer:
            return traffic / self._memory, copies
        copies += (zero.accumulation * e * part + e * part) / to_host
        share = HOST_MEMORY_GBPS * 1e9 / min(self.device.per_node, max(1, zero.data * self.at.tensor))
        return traffic / share, copies
