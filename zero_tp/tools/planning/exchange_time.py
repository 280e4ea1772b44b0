"""The bytes and the time of the all-to-alls of a layer whose experts are divided over ranks.

    forward     numbers of rows, int64    rows    their outputs
    backward    rows again, gradients of outputs    weights of rows and their gradients, fp32
                gradients of rows

Backward's recomputation of a layer sends rows and outputs once more; their numbers are known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from zero_tp.model.architectures.spec import TransformerSpec
from zero_tp.tools.planning.plan_settings import Workload
from zero_tp.tools.planning.rates import Rates

HOST_READ_SECONDS = 2e-5
"""What the device waits while the host reads the numbers of rows and starts the next kernels: four
launches; assumed."""


class ExchangeTime(NamedTuple):
    """Seconds of a layer's all-to-alls and micro-batch, without those that products hide.

    Attributes:
        numbers: exchanging the numbers of rows, and reading them on the host.
        forward: after that. backward: without recomputation.
        hidden: of backward's all-to-alls that run beside products.
    """

    numbers: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    hidden: float = 0.0


@dataclass(frozen=True)
class ExchangeTraffic:
    """What one rank sends to the others of its expert group for a layer and micro-batch [bytes].

    The busiest rank counts: it receives `Workload.imbalance` times the mean.
    """

    spec: TransformerSpec
    workload: Workload

    @property
    def _share(self) -> float:
        """Return the share of the rows that leave the rank, (E-1)/E."""
        return (self.workload.expert - 1) / self.workload.expert

    @property
    def numbers(self) -> float:
        """Return the bytes of the numbers of rows, one for each expert."""
        assert self.spec.experts is not None
        return 8 * self.spec.experts.count * self._share

    @property
    def rows(self) -> float:
        """Return the bytes of one all-to-all of rows: n·k·h elements and the imbalance."""
        width = self.spec.hidden * self.workload.itemsize
        return self.workload.expert_rows(self.spec) * width * self._share

    @property
    def weights(self) -> float:
        """Return the bytes of one all-to-all of a number for each row."""
        return 4 * self.workload.expert_rows(self.spec) * self._share

    def sent(self, *, recomputed: bool = False) -> float:
        """Return the bytes of forward and backward."""
        return self.numbers + (7 if recomputed else 5) * self.rows + 2 * self.weights

    def seconds(self, rates: Rates) -> ExchangeTime:
        """Return the time, also of the products that run meanwhile (parallel/grouped_linear.py).

        The rows wait for nothing but a shared expert in forward, and for nothing in backward: they
        and the gradients of rows travel during the two products of the first weight's gradients.
        """
        workload = self.workload
        experts = self.spec.experts
        if experts is None or workload.expert == 1:
            return ExchangeTime()

        def all_to_all(size: float) -> float:
            return rates.all_to_all_seconds(size, workload.expert, stride=workload.tensor)

        tokens = workload.length * workload.batch
        hidden = self.spec.hidden
        product = rates.product_seconds
        rows = all_to_all(self.rows)
        shared = 0.0
        if experts.shared:
            width = experts.shared / workload.tensor
            shared = product(tokens, 2 * width, hidden) + product(tokens, hidden, width)
        width = 2 * experts.size / workload.tensor
        received = workload.expert_rows(self.spec)
        inputs = product(received, hidden, width)
        # Of all experts of the rank one after another, each with its rows.
        weights = product(hidden, width * experts.per_token, received / experts.per_token)
        hidden_seconds = min(rows, inputs) + min(rows, weights)
        return ExchangeTime(
            all_to_all(self.numbers) + HOST_READ_SECONDS,
            rows + max(0.0, rows - shared),
            3 * rows - hidden_seconds + 2 * all_to_all(self.weights),
            hidden_seconds,
        )
