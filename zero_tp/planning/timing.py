"""Estimate a step's time from a device's rates, by term.

A layer's products, passes and collectives are in layer_time.py, the rates in rates.py. What overlaps is what the code
overlaps (parallel/linear.py, DeepSpeed's `overlap_comm`). Nothing of it was fitted to a run: the published times are
its test.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from zero_tp.devices import Device
from zero_tp.models.flops import head_products
from zero_tp.models.spec import TransformerSpec
from zero_tp.planning.formulas import pipeline_bubble
from zero_tp.planning.layer_time import OURS, LayerTime, LayerWork, Program, Seconds
from zero_tp.planning.rates import Rates
from zero_tp.planning.workload import Workload
from zero_tp.planning.zero import ALLREDUCE_BUCKET
from zero_tp.planning.zero_settings import ZeroSettings

HOST_MEMORY_GBPS = 200.0
"""Of a whole node, for an optimizer on the host."""


@dataclass(frozen=True)
class StepTime:
    """A StepTime has the seconds of one step, by term.

    Attributes:
        products: matrix products of forward and backward. recompute: what is computed again. elementwise: norms,
            activations, dropout, residual sums, softmax, gradients added up. tensor, data: communication over TP and
            DP that nothing hides, and what products lose while it runs beside them. optimizer: the update. host: copies
            to and from host memory. stages: transfers between pipelines' stages. bubble: their idle time.
        layer: of one layer and micro-batch.
    """

    products: float
    recompute: float
    elementwise: float
    tensor: float
    data: float
    optimizer: float
    host: float
    stages: float
    bubble: float
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
            "pipeline transfers": self.stages,
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
        program: whose code it is.
    """

    spec: TransformerSpec
    at: Workload
    zero: ZeroSettings
    parameters: int
    device: Device
    pipeline: int = 1
    interleaving: int = 1
    program: Program = OURS

    @cached_property
    def rates(self) -> Rates:
        """Return the device's rates.

        Raises:
            ValueError: the device has no rate in this dtype.
        """
        peak = self.device.tflops(self.at.dtype)
        if peak is None:
            raise ValueError(f"{self.device.name} has no matrix rate in {self.at.dtype}")
        return Rates(self.device, self.at.element, peak * 1e12)

    def estimate(self) -> StepTime:
        """Return the seconds of one step, by term.

        The last stage has the head beside its layers, so the others wait for it in every micro-batch.

        Raises:
            ValueError: the device has no rate in this dtype.
        """
        micro, share = self.zero.accumulation, self._recomputed()
        layers = self.spec.layers / self.pipeline
        layer = LayerWork(self.spec, self.at, self.rates, self.program).time()
        stage, again = Seconds().plus(layer.forward, layers).plus(layer.backward, layers), layers * share
        stage = stage.plus(Seconds(passes=self._added()))
        head = self._head()
        transfers = self._transfers()
        working = stage.total + again * layer.again.total + transfers
        bubble = pipeline_bubble(self.pipeline, micro, self.interleaving) * micro * working
        backward = layers * (layer.backward.total + share * layer.again.total)
        optimizer, host = self._optimizer()
        return StepTime(
            products=micro * (stage.products + head.products),
            recompute=micro * again * layer.again.total,
            elementwise=micro * (stage.passes + head.passes),
            tensor=micro * stage.tensor,
            data=self._data(layers * layer.forward.total + head.total, backward),
            optimizer=optimizer,
            host=host,
            stages=micro * transfers,
            bubble=bubble,
            layer=layer,
        )

    def _recomputed(self) -> float:
        """Return the share of a step's layers that backward runs again, a mean over its micro-batches."""
        return self.at.policy.layers_again(self.spec.layers, self.zero.accumulation) / self.spec.layers

    @property
    def _own(self) -> float:
        return self.parameters / self.pipeline

    def _head(self) -> Seconds:
        """Return forward and backward of the output layer and its loss, which goes over each logit six times."""
        at, spec = self.at, self.spec
        labels, width = at.labels, head_products(spec) / spec.hidden / at.tensor
        product = self.rates.product
        products = product(labels, width, spec.hidden) + product(labels, spec.hidden, width)
        return Seconds(
            products + product(spec.hidden, width, labels), 6 * at.element * labels * width / self.rates.memory
        )

    def _added(self) -> float:
        """Return the seconds, of one micro-batch, in which the gradients of its products are added to those before.

        Where they are added up in another dtype there is a buffer for them, also for one micro-batch, which is zeroed
        once a step.
        """
        zero, e = self.zero, self.at.element
        buffer = zero.accumulated != e
        if zero.accumulation == 1 and not buffer:
            return 0.0
        traffic = 2.0 * zero.accumulated + (-e if self.program.adds_in_product else e)
        traffic += zero.accumulated * buffer / zero.accumulation
        return self._own * traffic / self.rates.memory

    def _transfers(self) -> float:
        """Return the seconds of one micro-batch's activations and gradients between stages, each TP rank its part."""
        if self.pipeline == 1:
            return 0.0
        at, device = self.at, self.device
        near = at.tensor * self.zero.data * self.pipeline <= device.per_node
        speed = device.intra_gbps * device.link_share if near else device.inter_gbps * device.inter_share
        part = at.element * at.length * at.batch * self.spec.hidden / at.tensor
        return 2 * self.interleaving * part / (speed * 1e9)

    def _data(self, forward: float, backward: float) -> float:
        """Return what DP's communication costs. Stages 0 to 2 all-reduce gradients, or 1 and 2 reduce them to their
        owners (`to_owners`); these gather the updated parameters."""
        zero, micro, e = self.zero, self.zero.accumulation, self.at.element
        ring = self.rates.collective
        bucket = zero.reduce_bucket if zero.in_buckets else ALLREDUCE_BUCKET
        pieces = max(1, -(-self._own // bucket))
        if zero.stage == 3:
            calls = self.spec.layers / self.pipeline  # each layer's collectives begin somewhere
            gather = ring(e * self._own, zero.data, self.at.tensor, calls)
            reduce = ring(zero.reduced * self._own, zero.data, self.at.tensor, calls)
            return self._beside(micro * (2 * gather + reduce), micro * (forward + backward))
        reduce = ring(zero.reduced * self._own, zero.data, self.at.tensor, pieces) * (1 if zero.to_owners else 2)
        if zero.stage == 0:
            return self._beside(reduce, backward if self.program.hides_data else 0.0)
        times = micro if zero.stage == 2 else 1
        gather = ring(e * self._own, zero.data, self.at.tensor)
        return gather + self._beside(times * reduce, times * backward if zero.overlap and zero.in_buckets else 0.0)

    def _beside(self, communicating: float, computing: float) -> float:
        hidden = min(communicating, computing)
        return communicating - hidden + self.rates.beside(hidden)

    def _optimizer(self) -> tuple[float, float]:
        """Return (update, host copies).

        Masters and moments are read and written, gradients read; 16-bit weights are copied from the masters; gradients
        become fp32, their norm is taken and they are clipped.
        """
        zero, e, memory = self.zero, self.at.element, self.rates.memory
        part = self._own / (zero.data if zero.stage else 1)
        update = 2 * (4 + zero.moments) + 4 + (4 + e if e < 4 else 0)
        wider = zero.accumulated + 4 if zero.accumulated < 4 else 0
        traffic = part * (update + wider + (8 if zero.clips else 0)) + 4 * self._own
        to_host = self.device.host_gbps * 1e9 * self.device.link_share
        copies = 0.0  # those of checkpoints run beside the layers
        if zero.offload_param:
            copies += 3 * zero.accumulation * e * part / to_host
        if not zero.offload_optimizer:
            return traffic / memory, copies
        copies += (zero.accumulation * e * part + e * part) / to_host
        share = HOST_MEMORY_GBPS * 1e9 / min(self.device.per_node, max(1, zero.data * self.at.tensor))
        return traffic / share, copies
