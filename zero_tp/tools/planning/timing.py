"""Estimate the time of a step, by term, from a device's rates.

Communication overlaps computation where the code overlaps it (parallel/linear.py, DeepSpeed's
`overlap_comm`). No constant was fitted to a run: tests compare the estimates with published times.

Notation: s sequence, b batch, h hidden, a heads, t TP size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from zero_tp.engine.zero import facts
from zero_tp.model.architectures.spec import CHUNK, TransformerSpec
from zero_tp.model.flops import attention_core, delta_core, head_products, projections
from zero_tp.model.norm import NORMS
from zero_tp.parallel.devices import Device
from zero_tp.tools.planning.exchange_time import ExchangeTime, ExchangeTraffic
from zero_tp.tools.planning.matrix_time import MatrixTime
from zero_tp.tools.planning.matrix_update import MatrixUpdate
from zero_tp.tools.planning.plan_settings import (
    Layer,
    LossBlocks,
    Workload,
    ZeroSettings,
    mean_over_layers,
)
from zero_tp.tools.planning.rates import Rates, matrix_flops

FLASH_SHARE = 0.6
"""Share of the matrix peak that fused attention reaches: 50 to 73 % on an A100 (arXiv
2307.08691, abstract).
"""
LAUNCH_SECONDS = 5e-6
"""What a kernel costs beside the bytes it moves: its start, and a run of 2 µs at least. Measured on
one H200: 1,916 kernels that move little took 12 ms.
"""
LAYER_LAUNCHES = 40
EAGER_LAYER_LAUNCHES = 100
LOSS_BLOCK_LAUNCHES = 13
EAGER_LOSS_BLOCK_LAUNCHES = 55
"""Kernels of a layer's forward and backward, compiled and not, and of a block of the loss, counted
in a Llama (benchmarks/step_launches.py).
"""
DELTA_PAIR_PASSES, DELTA_FEATURE_PASSES = 10, 16
DELTA_LAUNCHES, DELTA_CHUNK_LAUNCHES = 150, 27
"""Of the gated delta rule: tensors that its forward reads or writes, and kernels of its forward and
backward, beside chunks and in each. Counted in the code, and not measured on a device.
"""
UPDATE_LAUNCHES = 21
CHUNK_ELEMENTS = 2**24
"""Kernels of a parameter in DeepSpeed's step, counted; each chunk of the norm has three more."""
HOST_MEMORY_GBPS = 200.0
"""Bandwidth of a node's host memory, which an offloaded optimizer reads and writes."""


class Seconds(NamedTuple):
    """Seconds of a pass by what limits it.

    `products` are matrix products, `memory_bound` operations bound by memory bandwidth,
    `collectives` the exposed ones over TP, `exchanges` those between expert ranks.
    """

    products: float = 0.0
    memory_bound: float = 0.0
    collectives: float = 0.0
    exchanges: float = 0.0

    @property
    def total(self) -> float:
        return sum(self)


class LayerTime(NamedTuple):
    """Seconds of a layer's forward and backward.

    `recompute` is what its recomputation adds to backward, if it is recomputed.
    """

    forward: Seconds
    backward: Seconds
    recompute: Seconds

    def as_json(self) -> dict[str, float]:
        """Return the seconds of a layer that the run's policy recomputes."""
        backward = self.backward.total + self.recompute.total
        return {"forward": self.forward.total, "backward": backward, "again": self.recompute.total}


Traffic = tuple[float, float]
"""(forward, backward): the bytes that an operation reads and writes in each."""


@dataclass(frozen=True)
class StepTime:
    """The seconds of one step, by term.

    Attributes:
        products: matrix products of forward and backward, slowed down by the TP communication that
            they overlap.
        recompute: recomputation in backward.
        elementwise: norms, activations, dropout, residual sums, softmax, accumulation of gradients.
        tp_communication: exposed collectives over TP.
        expert_exchange: exposed all-to-alls between expert ranks.
        dp_communication: exposed collectives over DP, and the slowdown of the products that overlap
            the others.
        optimizer: the update.
        newton_schulz: the products by which Muon orthogonalises matrices, of the rank with the most
            in each round.
        matrix_exchange: messages between shards and the matrices' owners.
        host: copies to and from host memory.
        launches: what starting kernels adds.
        layer: of one layer and micro-batch.
    """

    products: float
    recompute: float
    elementwise: float
    tp_communication: float
    expert_exchange: float
    dp_communication: float
    optimizer: float
    newton_schulz: float
    matrix_exchange: float
    host: float
    launches: float
    layer: LayerTime

    @property
    def total(self) -> float:
        return sum(self.terms().values())

    def terms(self) -> dict[str, float]:
        return {
            "matrix products": self.products,
            "recomputation": self.recompute,
            "elementwise": self.elementwise,
            "TP communication": self.tp_communication,
            "expert exchange": self.expert_exchange,
            "DP communication": self.dp_communication,
            "optimizer": self.optimizer,
            "Newton-Schulz": self.newton_schulz,
            "matrix exchange": self.matrix_exchange,
            "host copies": self.host,
            "launches": self.launches,
        }

    def as_json(self) -> dict[str, float]:
        return {**self.terms(), "total": self.total}


@dataclass(frozen=True)
class StepTimeEstimator:
    """Compute the `StepTime` of a run on one kind of device.

    A token's experts count as one MLP with their total width. Tokens are copied to sort them by
    expert.

    Attributes:
        parameters: elements on one rank before ZeRO partitions them.
        tensors: their number.
        muon: the update of each group of matrices.
        expert_parameters: those of `parameters` that are of experts divided over expert ranks.
    """

    spec: TransformerSpec
    workload: Workload
    device: Device
    settings: ZeroSettings
    parameters: float
    tensors: int = 0
    muon: tuple[MatrixUpdate, ...] = ()
    expert_parameters: float = 0.0

    @cached_property
    def rates(self) -> Rates:
        return Rates(
            self.device, self.workload.itemsize, matrix_flops(self.device, self.workload.dtype)
        )

    @cached_property
    def sizes(self) -> Layer:
        """Return the sizes of one rank's part of a layer."""
        return Layer.of(self.spec, self.workload)

    @cached_property
    def matrix_time(self) -> MatrixTime:
        return MatrixTime(self.muon, self.rates, self.settings)

    @cached_property
    def exchange(self) -> ExchangeTime:
        """Return the time of a layer's exchange between expert ranks, a mean over layers."""
        share = len(self.spec.expert_layers) / self.spec.layers
        seconds = ExchangeTraffic(self.spec, self.workload).seconds(self.rates)
        return ExchangeTime(*(share * part for part in seconds))

    @property
    def partition(self) -> float:
        """Return the elements of this rank whose masters and states it has."""
        settings = self.settings
        if settings.stage == 0:
            return self.parameters
        everywhere = self.parameters - self.expert_parameters
        return everywhere / settings.data + self.expert_parameters / settings.expert_data

    def layer_time(self) -> LayerTime:
        """Return the time of one layer and micro-batch, a mean over layers."""
        products = [*self._attention_products(), self._mlp_product(), *self._row_products()]
        # Forward is [tokens, depth] · [depth, columns]. Backward has two products of the same
        # FLOPs, of other shapes and so with other tiles.
        outputs = sum(
            self.rates.product_seconds(self._tokens, columns, depth) for depth, columns in products
        )
        gradients = self._input_gradients(products) + self._weight_gradients(products)
        core_forward, core_backward = self._cores()
        traffic = self.memory_traffic()
        bytes_forward, bytes_backward = (
            sum(sizes) for sizes in zip(*traffic.values(), strict=True)
        )
        tp_forward, tp_backward, slowdown = self._tp_collectives()
        exchange = self.exchange
        slowdown += self.rates.slowdown(exchange.hidden)
        forward = Seconds(
            outputs + core_forward,
            bytes_forward / self.rates.memory,
            tp_forward,
            exchange.numbers + exchange.forward,
        )
        backward = Seconds(
            gradients + core_backward + slowdown,
            bytes_backward / self.rates.memory,
            tp_backward,
            exchange.backward,
        )
        policy = self.workload.policy
        recompute = Seconds()
        if policy.mode == "full":
            # `full` runs the whole layer once more, with its collectives.
            recompute = forward._replace(exchanges=exchange.forward)
        elif policy.mode == "selective":
            core = core_forward if "attention_core" in policy.chosen_modules else 0.0
            recompute = Seconds(
                core,
                sum(traffic[module][0] for module in policy.chosen_modules) / self.rates.memory,
            )
        return LayerTime(forward, backward, recompute)

    # ---- products --------------------------------------------------------------------------------

    def _attention_products(self) -> list[tuple[float, float]]:
        """Return (inputs, outputs) of the products that make queries, keys and values, a mean over
        layers.
        """
        spec = self.spec
        t = self.workload.tensor
        (inputs, outputs), *others = projections(spec, t)
        if spec.latent is not None and self.workload.sequence:
            outputs /= t  # latents of the rank's own tokens only
        if spec.gated_delta is not None:
            share = self.attention_share
            outputs = share * outputs + (1 - share) * spec.gated_delta.columns / t
        return [(inputs, outputs), *others]

    def _mlp_product(self) -> tuple[float, float]:
        """Return (inputs, outputs) of the MLP's column-parallel product."""
        # A plain MLP has one column-parallel product, a gated one two: gate and up.
        width = self.workload.active_width(self.spec) / self.workload.tensor
        return (self.spec.hidden, (self.spec.mlp_matrices - 1) * width)

    def _row_products(self) -> list[tuple[float, float]]:
        """Return (inputs, outputs) of the row-parallel products."""
        spec = self.spec
        t = self.workload.tensor
        features: float = self.attention_share * spec.heads * spec.value_size
        if spec.gated_delta is not None:
            features += (1 - self.attention_share) * spec.gated_delta.values
        return [
            (features / t, spec.hidden),
            (self.workload.active_width(spec) / t, spec.hidden),
        ]

    @property
    def attention_share(self) -> float:
        """Return the share of the layers that have attention; others have the gated delta rule."""
        return self.spec.attention_share

    @property
    def _tokens(self) -> int:
        return self.workload.length * self.workload.batch

    def _input_gradients(self, products: list[tuple[float, float]]) -> float:
        return sum(
            self.rates.product_seconds(self._tokens, inputs, outputs)
            for inputs, outputs in products
        )

    def _weight_gradients(self, products: list[tuple[float, float]]) -> float:
        return sum(
            self.rates.product_seconds(inputs, outputs, self._tokens)
            for inputs, outputs in products
        )

    def _cores(self) -> tuple[float, float]:
        """Return the seconds of a layer's attention or recurrence, a mean over layers."""
        share = self.attention_share
        pairs = zip(self._attention_core(), self._delta_core(), strict=True)
        forward, backward = (share * one + (1 - share) * other for one, other in pairs)
        return forward, backward

    def _delta_core(self) -> tuple[float, float]:
        """Return the seconds of the gated delta rule in chunks, forward and backward, in fp32.

        Between its products it reads and writes tensors of the pairs of a chunk's tokens, and of
        their features.
        """
        spec = self.spec
        delta = spec.gated_delta
        if delta is None:
            return 0.0, 0.0
        workload = self.workload
        flops = delta_core(spec, workload.batch, workload.length) / workload.tensor
        features = delta.value_heads * (delta.key_size + delta.value_size)
        elements = DELTA_PAIR_PASSES * CHUNK * delta.value_heads + DELTA_FEATURE_PASSES * features
        traffic = 4 * self._tokens * elements / workload.tensor
        forward = flops / self.rates.matrix + traffic / self.rates.memory
        return forward, 2 * forward

    def _attention_core(self) -> tuple[float, float]:
        """Return the seconds of QKᵀ and of the attention-weighted sum of V, forward and backward.

        An eager core's products read and write all scores, which takes longer than multiplying. A
        fused core keeps scores on the multiprocessor, skips tiles that a causal mask hides, and
        recomputes the scores in backward.
        """
        spec = self.spec
        rates = self.rates
        workload = self.workload
        flops = attention_core(spec, workload.batch, workload.length) / workload.tensor
        if self.workload.stores_scores(spec):
            # QKᵀ reads Q and K and writes the scores; the second product reads scores and V, and
            # writes an output as large as Q. Together twice the scores, Q and K.
            traffic = 2 * rates.itemsize * (self.sizes.scores + self.sizes.queries + self._keys)
            forward = max(flops / rates.matrix, traffic / rates.memory)
            # Each of the two products has two in backward, one for each operand.
            return forward, 2 * forward
        rate = rates.peak * min(FLASH_SHARE, rates.device.matrix_share)
        # Five products in backward instead of forward's two: the scores again, and the gradients of
        # scores, V, Q and K.
        forward = flops * (0.5 if spec.causal else 1.0) / rate
        return forward, 2.5 * forward

    # ---- memory traffic --------------------------------------------------------------------------

    @property
    def _keys(self) -> float:
        """Return the elements of the keys that this rank computes: at least one head's."""
        return (
            self._tokens * self.spec.head_size * max(1.0, self.spec.kv_heads / self.workload.tensor)
        )

    def _sums(self) -> tuple[float, float]:
        """Return the bytes that the two residual sums of a layer move, forward and backward."""
        tensor = self.workload.itemsize * self.sizes.residual
        passes = NORMS[self.spec.norm].passes_residual
        # Each reads two tensors and writes one. The MLP's norm may make the attention's sum, which
        # it need not read again. In backward each such norm reads the residual's gradient.
        forward = mean_over_layers(
            self.spec,
            lambda kind: 5 if passes and kind.splits_residual and kind.adds_in_norm else 6,
        )
        backward = mean_over_layers(
            self.spec, lambda kind: 2 if passes and kind.splits_residual else 6
        )
        return forward * tensor, backward * tensor

    def _biased_columns(self) -> float:
        """Return the elements of column-parallel products with a bias."""
        # Of latent attention only the latents have biases.
        (_, attention), *_ = self._attention_products()
        _, mlp = self._mlp_product()
        return self._tokens * (attention * self.spec.qkv_bias + mlp * self.spec.mlp_bias)

    def _heads(self) -> float:
        """Return the bytes that rotations and transposes of heads move, forward or backward."""
        spec = self.spec
        e = self.workload.itemsize
        queries, keys = 2 * e * self.sizes.queries, 2 * e * self._keys  # read and written
        attention = spec.mixed_by("attention")
        rotating = sum(spec.rotaries[number] is not None for number in attention) / len(spec.mixers)
        rotated = 2 * (queries + keys) * rotating
        eager = self.workload.stores_scores(spec)
        transposed = queries + (queries + 2 * keys if eager else 0.0)
        return self.attention_share * transposed + rotated

    def memory_traffic(self) -> dict[str, Traffic]:
        """Return the bytes by operation, without products. `recompute.modules` has the same names.

        A norm's backward reads its input and gradient twice, once for the weight's gradient.
        """
        spec = self.spec
        e = self.workload.itemsize
        sizes = self.sizes
        stream = sizes.residual
        row_biases = spec.output_bias + spec.mlp_bias
        # Two residual dropouts; each reads and writes the tensor and has a mask of one byte an
        # element. Backward reads the mask.
        dropped = 2 * (2 * e + 1) * stream if spec.dropouts.residual else 0.0
        # With TP a row-parallel bias is added after the reduction.
        bias_in_product = self.workload.tensor == 1
        eager = self.workload.stores_scores(spec)
        heads = self._heads()
        # Forward has softmax, dropout, and `baddbmm`, which copies the mask into its result and
        # adds the product to it.
        scores = self.attention_share * sizes.scores if eager else 0.0
        sorted_copies = 0.0  # of tokens before the experts, and of their outputs
        arrived = 0.0  # rows of other ranks' tokens, which are sorted by expert
        if spec.experts is not None:
            share = spec.hidden * len(spec.expert_layers) / spec.layers
            sorted_copies = self._tokens * spec.experts.per_token * share
            if self.workload.expert > 1:
                arrived = self.workload.expert_rows(spec) * share
        mask = 2 * e + 1 if spec.dropouts.attention else 0
        norms = mean_over_layers(spec, lambda kind: len(kind.attention_norms) + len(kind.mlp_norms))
        # Scale, division, tanh and multiplication each read and write the scores. So does the copy
        # that adds the column of the sinks.
        capped = (8 * (spec.score_cap is not None) + 2 * spec.sinks) * e * scores
        return {
            # Of one norm, forward reads and writes; backward reads input and gradient twice and
            # writes one gradient.
            "norm": (norms * 2 * e * stream, norms * 5 * e * stream),
            "dropout": (dropped, dropped),
            "sums": self._sums(),
            # Backward reads the gradient once more for the bias's sum, also where the product added
            # the bias.
            "row biases": (
                0.0 if bias_in_product else 2 * e * stream * row_biases,
                e * stream * row_biases,
            ),
            "column biases": (0.0, e * self._biased_columns()),  # the product adds them
            # Plain: 2 in forward, input and output; 3 in backward, with the gradient. Gated: gate,
            # up and output; then gate, up, the gradient and two results.
            "mlp_activation": (
                e * sizes.mlp * spec.mlp_matrices,
                e * sizes.mlp * (2 * spec.mlp_matrices - 1),
            ),
            "heads": (heads, heads),
            # Forward sorts tokens and sums outputs. Backward sorts tokens again and gradients,
            # weights them (2), weights and projects products (3), and sums. Arrived rows and
            # outputs are sorted too, in backward both again and gradients.
            "experts": (
                3 * e * sorted_copies + 4 * e * arrived,
                5 * e * (sorted_copies + (arrived or sorted_copies)) + 6 * e * arrived,
            ),
            "attention_core": (
                scores * (4 * e + mask) + capped,
                scores * (3 * e + mask) + capped,
            ),
        }

    # ---- collectives -----------------------------------------------------------------------------

    def _tp_collectives(self) -> tuple[float, float, float]:
        """Return the seconds of exposed TP collectives in forward and in backward.

        The third number is how much the others slow products.

        An all-reduce has two halves, a reduce-scatter and an all-gather. Forward has four halves,
        all exposed. Backward has four that overlap with products of the column-parallel layers:
        with weight gradients, and under SP with input gradients too. SP adds two exposed
        all-gathers of the output gradients of row-parallel layers. Latents are sent instead of the
        attention's input, and nothing overlaps with that.
        """
        workload = self.workload
        rates = self.rates
        # Under SP the halves are g and ḡ of arXiv 2205.05198; without SP an all-reduce is both
        # halves at once. The bytes are the same (section 4.2.2).
        half = rates.collective_seconds(
            workload.itemsize * self._tokens * self.spec.hidden, workload.tensor
        )
        latent = self.spec.latent
        # Of the halves that can overlap, and of those that cannot.
        overlapping, sent = 4 * half, 0.0
        if latent is not None:
            of_latents = workload.itemsize * self._tokens * latent.width
            sent = rates.collective_seconds(of_latents, workload.tensor)
            overlapping = 2 * half
        # What does not fit behind the products stays exposed. What does fit still takes
        # multiprocessors from them.
        overlapped = min(overlapping, self.overlapped_products())
        exposed = sent * (1 if workload.sequence else 2)
        if workload.sequence:
            exposed += 2 * half
        forward = 4 * half if latent is None else 3 * half + sent
        return forward, exposed + overlapping - overlapped, rates.slowdown(overlapped)

    def overlapped_products(self) -> float:
        """Return the seconds of products that overlap backward's collectives over TP."""
        columns = [] if self.spec.latent else self._attention_products()
        inputs, outputs = self._mlp_product()
        experts = self.spec.experts
        if experts is not None and self.workload.expert > 1:
            # Experts' products hide the exchange instead: no collective over TP runs meanwhile.
            chosen = self.workload.imbalance * experts.per_token * experts.size
            share = len(self.spec.expert_layers) / self.spec.layers
            outputs -= 2 * chosen * share / self.workload.tensor
        columns.append((inputs, outputs))
        return self._weight_gradients(columns) + (
            self._input_gradients(columns) if self.workload.sequence else 0.0
        )

    # ---- a step ----------------------------------------------------------------------------------

    def estimate(self) -> StepTime:
        """Return the seconds of one step, by term."""
        accumulation = self.settings.accumulation
        layers = self.spec.layers
        recomputed = self.workload.policy.mean_recomputed_layers(layers, accumulation)
        layer = self.layer_time()
        head = self.head_time()
        all_layers = Seconds(
            *(layers * sum(passes) for passes in zip(layer.forward, layer.backward, strict=True))
        )
        backward = layers * layer.backward.total + recomputed * layer.recompute.total
        optimizer, host = self._optimizer()
        return StepTime(
            products=accumulation * (all_layers.products + head.products),
            recompute=accumulation * recomputed * layer.recompute.total,
            elementwise=accumulation
            * (all_layers.memory_bound + self.accumulation_time() + head.memory_bound),
            tp_communication=accumulation * all_layers.collectives,
            expert_exchange=accumulation * all_layers.exchanges,
            dp_communication=self._dp_communication(
                layers * layer.forward.total + head.total, backward
            ),
            optimizer=optimizer,
            newton_schulz=self.matrix_time.newton_schulz(),
            matrix_exchange=self.matrix_time.exchange(),
            host=host,
            launches=0.0 if self.device.is_cpu else LAUNCH_SECONDS * self.launches(),
            layer=layer,
        )

    def head_time(self) -> Seconds:
        """Return the seconds of forward and backward of the output layer and the loss.

        The loss reads or writes each logit six times.
        """
        workload = self.workload
        hidden = self.spec.hidden
        product = self.rates.product_seconds
        # Only positions with labels reach the head: all of a causal model, a masked model's share.
        labels = workload.labels
        width = head_products(self.spec) / hidden / workload.tensor
        products = (
            product(labels, width, hidden)
            + product(labels, hidden, width)
            + product(hidden, width, labels)
        )
        return Seconds(products, 6 * workload.itemsize * labels * width / self.rates.memory)

    def accumulation_time(self) -> float:
        """Return the seconds that accumulating one micro-batch's gradients takes.

        Accumulation in another dtype uses a buffer even for a single micro-batch; it is zeroed once
        a step.
        """
        settings = self.settings
        e = self.workload.itemsize
        has_buffer = settings.grad_accum_itemsize != e
        if settings.accumulation == 1 and not has_buffer:
            return 0.0
        traffic = (
            2.0 * settings.grad_accum_itemsize
            + e
            + settings.grad_accum_itemsize * has_buffer / settings.accumulation
        )
        return self.parameters * traffic / self.rates.memory

    def _dp_communication(self, forward: float, backward: float) -> float:
        """Return the seconds of exposed communication over DP.

        It consists of the gathers and reductions of `ZeroSettings.volumes`.

        DeepSpeed synchronises with the device before each reduction to an owner (stage_1_and_2.py,
        `allreduce_and_copy`), so those never overlap.
        """
        settings = self.settings
        accumulation = self.settings.accumulation
        e = self.workload.itemsize
        gathers, reductions = settings.volumes
        if settings.stage == 3:
            layers = self.spec.layers  # one gather and one reduction for each
            gather = self.rates.collective_seconds(
                e * self.parameters, settings.data, stride=self.workload.tensor, calls=layers
            )
            gradient_bytes = settings.communication_itemsize * self.parameters
            reduce = self.rates.collective_seconds(
                gradient_bytes, settings.data, stride=self.workload.tensor, calls=layers
            )
            computing = accumulation * (forward + backward) if settings.overlap else 0.0
            return self._exposed(gathers * gather + reductions * reduce, computing)
        bucket = settings.reduce_bucket if settings.reduces_in_buckets else facts.ALLREDUCE_BUCKET
        # A call costs a ring's latency; a call is a bucket of gradients. One with gradients of
        # experts and of others has a call for each.
        calls = max(1, -(-self.parameters // bucket))
        tensor = self.workload.tensor
        groups = [(self.parameters - self.expert_parameters, settings.data, tensor)]
        if self.expert_parameters:
            of_experts = settings.expert_data, tensor * settings.expert
            groups.append((self.expert_parameters, *of_experts))
        gather = sum(
            self.rates.collective_seconds(e * elements, ranks, stride)
            for elements, ranks, stride in groups
        )
        reduce = sum(self._reduction(*group, calls) for group in groups)
        computing = (
            (accumulation if settings.stage == 2 else 1) * backward
            if self.reduces_in_backward
            else 0.0
        )
        return gathers * gather + self._exposed(reductions * reduce, computing)

    def _reduction(self, elements: float, ranks: int, stride: int, calls: float) -> float:
        """Return the seconds of one reduction of gradients at stages 0 to 2.

        Args:
            ranks, stride: of the group, as of `Rates.collective_seconds`.
            calls: buckets.
        """
        size = self.settings.communication_itemsize * elements
        if self.settings.reduces_to_owners and ranks > 1:
            # A partition's end also ends a bucket. NCCL reduces to one rank in a chain: each link
            # carries the whole tensor (tuning.cc: N steps), instead of (N-1)/N of it in a ring.
            calls += ranks - 1
            size *= ranks / (ranks - 1)
        return self.rates.collective_seconds(size, ranks, stride, calls)

    @property
    def reduces_in_backward(self) -> bool:
        """Return whether stages 0 to 2 reduce gradients while backward runs."""
        return (
            self.settings.overlap
            and self.settings.reduces_in_buckets
            and not self.settings.reduces_to_owners
        )

    def _exposed(self, communicating: float, computing: float) -> float:
        """Return the seconds by which communication that overlaps with computing delays a step.

        These are its exposed part and the products' slowdown.
        """
        overlapped = min(communicating, computing)
        return communicating - overlapped + self.rates.slowdown(overlapped)

    def update_traffic(self) -> float:
        """Return the bytes that the norm and the update of this rank's parameters move."""
        # An average reads itself and the masters, and writes itself.
        return self._optimizer_traffic() + 3 * self.settings.average * self.partition

    def _optimizer_traffic(self) -> float:
        settings = self.settings
        e = self.workload.itemsize
        g = settings.grad_accum_itemsize
        part = self.partition
        # Reads and writes masters and moments, and writes the rounded weights.
        # An element that Muon updates has other traffic.
        rounded = 0 if settings.weights_are_masters and settings.runs_adamw_update else e
        states = 2 * (4 + settings.moments) + rounded
        if settings.runs_adamw_update:
            return part * (g + g + states)
        clipped = 8 if settings.clips_gradients else 0
        if settings.offload_optimizer:
            # The device scans, takes norms and converts, as it sends each gradient.
            return part * (clipped + 4 + states + 4)
        # Chunks are copied to fp64, squared in place and summed.
        norm = g + 8 + 16 + 8
        # Their largest and smallest number; a flat copy of a partition.
        scan, flat = (2 * g, 2 * g) if settings.stage else (0, 0)
        converted = g + 4 if g < 4 else 0
        # The optimizer reads fp32 gradients. The masters are read again to be rounded.
        elementwise = part * (norm + scan + flat + converted + clipped + 4 + states + 4)
        muon = self.matrix_time
        return elementwise + muon.traffic() - muon.elements() * (4 + states - e)

    def launches(self) -> float:
        """Return the number of kernels of a step that an accelerator starts."""
        settings = self.settings
        layers = self.spec.layers
        recomputed = self.workload.policy.mean_recomputed_layers(layers, settings.accumulation)
        of_layer: float = LAYER_LAUNCHES if self.workload.compiled else EAGER_LAYER_LAUNCHES
        of_delta = DELTA_LAUNCHES + DELTA_CHUNK_LAUNCHES * -(-self.workload.length // CHUNK)
        of_layer += (1 - self.attention_share) * of_delta
        # A third of a layer's kernels are its forward's.
        of_block = LOSS_BLOCK_LAUNCHES if self.workload.compiled else EAGER_LOSS_BLOCK_LAUNCHES
        of_loss = LossBlocks.of(self.spec, self.workload).number * of_block
        passes = settings.accumulation * ((layers + recomputed / 3) * of_layer + of_loss)
        # A rank of stages 1 and 2 updates the parameters of its partition; stage 3 cuts each one.
        tensors = self.tensors / (settings.data if settings.stage in (1, 2) else 1)
        passes += self.matrix_time.launches()
        if settings.runs_adamw_update:
            return passes + tensors * (1 if self.workload.compiled else 4)
        chunks = 3 * self.partition / CHUNK_ELEMENTS
        return passes + tensors * UPDATE_LAUNCHES + chunks

    def _optimizer(self) -> tuple[float, float]:
        """Return the seconds of the update and of copies between host and device."""
        settings = self.settings
        e = self.workload.itemsize
        part = self.partition
        traffic = self.update_traffic()
        host_link = self.device.host_gbps * 1e9 * self.device.link_share
        copies = 0.0  # copies of activation checkpoints overlap with the layers
        if settings.offload_param:
            copies += 3 * settings.accumulation * e * part / host_link
        if not settings.offload_optimizer:
            return traffic / self.rates.memory, copies
        # Down: the gradients of this rank's part, each micro-batch. Up: the updated weights, once.
        copies += (settings.accumulation * e * part + e * part) / host_link
        # All ranks of a node update at the same time and share its memory's bandwidth.
        host_memory = (
            HOST_MEMORY_GBPS
            * 1e9
            / min(self.device.per_node, max(1, settings.data * self.workload.tensor))
        )
        return traffic / host_memory, copies
