"""Estimate a step's time from a device's rates, by term.

A layer's products, passes and collectives are in layer_time.py, with the rates. What overlaps is what the code
overlaps (parallel/linear.py, DeepSpeed's `overlap_comm`). Nothing of it was fitted to a run: the published times are
its test.
"""

from __future__ import annotations

from dataclasses import dataclass

from zero_tp.models.flops import head_products
from zero_tp.planning.layer_time import LayerTime, LayerWork, Seconds
from zero_tp.planning.plan_settings import ZeroSettings
from zero_tp.planning.zero import ALLREDUCE_BUCKET

HOST_MEMORY_GBPS = 200.0
"""Of a whole node, for an optimizer on the host."""


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
class Timing(LayerWork):
    """Everything that the time of a step is estimated from.

    Attributes:
        parameters: elements on one rank before ZeRO partitions them (Ψ/t).
    """

    zero: ZeroSettings
    parameters: float

    def estimate(self) -> StepTime:
        """Return the seconds of one step, by term.

        Raises:
            UserError: the device can't compute in this dtype.
        """
        micro, layers = self.zero.accumulation, self.spec.layers
        # Backward runs this share of the layers again, a mean over micro-batches.
        share = self.workload.policy.mean_recomputed_layers(layers, micro) / layers
        layer = self.layer_time()
        work, again = Seconds().plus(layer.forward, layers).plus(layer.backward, layers), layers * share
        work = work.plus(Seconds(passes=self.accumulation_time()))
        head = self.head()
        backward = layers * (layer.backward.total + share * layer.again.total)
        optimizer, host = self._optimizer()
        return StepTime(
            products=micro * (work.products + head.products),
            recompute=micro * again * layer.again.total,
            elementwise=micro * (work.passes + head.passes),
            tensor=micro * work.tensor,
            data=self._data(layers * layer.forward.total + head.total, backward),
            optimizer=optimizer,
            host=host,
            layer=layer,
        )

    def head(self) -> Seconds:
        """Return forward and backward of the output layer and its loss, which goes over each logit six times."""
        workload, spec = self.workload, self.spec
        labels, width = workload.labels, head_products(spec) / spec.hidden / workload.tensor
        product = self.rates.product
        products = product(labels, width, spec.hidden) + product(labels, spec.hidden, width)
        return Seconds(
            products + product(spec.hidden, width, labels), 6 * workload.element * labels * width / self.rates.memory
        )

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
