"""A mixture of experts: a router chooses k of E gated MLPs for each token (arXiv 2101.03961,
2401.04088).

Over TP every expert's first weight is split by columns, its second by rows. So the communication is
that of a dense MLP for any E: f and f̄, or g and ḡ under SP, which also gathers the routers'
logits. Every rank has the choices of all tokens and computes its columns of the chosen experts.
With expert parallelism it sends its tokens' rows to the ranks that have these experts
(parallel/expert_exchange.py).

s sequence, b batch, n = s·b tokens, h hidden, k experts per token, t TP size. f, f̄, g, ḡ: the
operators of arXiv 1909.08053 and 2205.05198.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zero_tp.model.architectures.spec import TransformerSpec
from zero_tp.model.context import ForwardContext
from zero_tp.model.mlp import ClampedGatedActivation, GatedActivation, GatedMLP
from zero_tp.parallel.collectives import (
    Group,
    copy_to_tensor_region,
    gather_from_sequence_region,
    reduce_from_tensor_region,
    reduce_scatter_to_sequence_region,
)
from zero_tp.parallel.expert_exchange import AllToAllExperts, ExpertExchange, LocalExperts
from zero_tp.parallel.grouped_linear import (
    ColumnParallelGroupedLinear,
    Route,
    Routing,
    RowParallelGroupedLinear,
    dispatch_tokens,
)
from zero_tp.parallel.layout import Replicated, Sharded, layout_of
from zero_tp.parallel.parameter import ConstantInit, ExactBuffers, Normal, ParameterMaker


class _LinearFP32(torch.autograd.Function):
    """A linear layer in fp32, which keeps its input as it is. [n, h], [E, h] → fp32 [n, E].

    autograd would keep the input's fp32 copy for the weight's gradient.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tensor, weight)
        return tensor.float() @ weight.float().t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        tensor, weight = ctx.saved_tensors
        needs_input, needs_weight = ctx.needs_input_grad
        return (
            (gradient @ weight.float()).to(tensor.dtype) if needs_input else None,
            (gradient.t() @ tensor.float()).to(weight.dtype) if needs_weight else None,
        )


class Router(nn.Module, ABC):
    """Choose each token's experts by the logits of a linear layer. ROUTERS has the ways.

    Its weight is replicated. A rank has only its part of the experts' outputs, and under SP only
    its tokens, so the gradient is partial.
    """

    rounds_weights: ClassVar[bool] = False
    """Whether the weights are rounded to the dtype of the activations."""

    def __init__(self, make: ParameterMaker, spec: TransformerSpec):
        super().__init__()
        assert spec.experts is not None
        self.experts = spec.experts
        # Without TP nothing is summed, and `layout.audit` refuses a partial gradient there.
        layout = Replicated("partial" if make.topology.tensor > 1 else "identical")
        self.weight = make.parameter(
            "weight", (spec.experts.count, spec.hidden), layout, Normal(spec.init_std)
        )

    def forward(
        self,
        tensor: Tensor,
        context: ForwardContext,
        *,
        group: Group,
        chosen: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the weights and indices of each token's experts.

        [s, b, h] → fp32 [n, k], int64 [n, k].

        Under SP each rank computes the logits of its shard [s/t, b, h], so all ranks choose by the
        same bits. Forward all-gathers them, [s/t, b, E] → [s, b, E]; backward reduce-scatters their
        gradient.

        Args:
            chosen: the indices, if backward recomputes a forward that has chosen.
        """
        # Under SP one rank computes a token's logits and all ranks choose by its bits: ranks that
        # chose differently would add up parts of different experts. The gather sends E numbers a
        # token, not h.
        logits = self.logits(tensor.flatten(0, 1))
        if context.sequence:
            logits = gather_from_sequence_region(logits, group)
        scores = self.scores(logits)
        for router_loss in context.router_losses:
            router_loss.observe(logits, scores)
        if chosen is None:
            chosen = self.choose(logits, scores)
        # By the scores, to which the load-balancing loss adds its gradient.
        weights = self.weigh(scores.gather(1, chosen))
        if self.rounds_weights:
            weights = weights.to(tensor.dtype).float()
        return weights, chosen

    def logits(self, tensor: Tensor) -> Tensor:
        return F.linear(tensor, self.weight)

    @abstractmethod
    def scores(self, logits: Tensor) -> Tensor:
        """Return each expert's score in fp32, for every dtype as in transformers' routers."""

    @abstractmethod
    def choose(self, logits: Tensor, scores: Tensor) -> Tensor:
        """Return the indices of the k experts that a token's logits or scores choose.

        [n, E], fp32 [n, E] → int64 [n, k].
        """

    @abstractmethod
    def weigh(self, chosen_scores: Tensor) -> Tensor:
        """Return the weights of the chosen experts by their scores. Fp32 [n, k] → fp32 [n, k]."""


class SoftmaxRouter(Router):
    """The k most probable experts, weighted by their probabilities."""

    def scores(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1, dtype=torch.float32)

    def choose(self, logits: Tensor, scores: Tensor) -> Tensor:
        return scores.topk(self.experts.per_token, dim=-1).indices

    def weigh(self, chosen_scores: Tensor) -> Tensor:
        if not self.experts.normalised:
            return chosen_scores
        return chosen_scores / chosen_scores.sum(-1, keepdim=True)


class TopKSoftmaxRouter(SoftmaxRouter):
    """The k greatest logits, weighted by the probabilities among these alone: Granite's router."""

    rounds_weights = True

    def logits(self, tensor: Tensor) -> Tensor:
        return super().logits(tensor).float()

    def choose(self, logits: Tensor, scores: Tensor) -> Tensor:
        return logits.topk(self.experts.per_token, dim=-1).indices

    def weigh(self, chosen_scores: Tensor) -> Tensor:
        return chosen_scores / chosen_scores.sum(-1, keepdim=True)


class BiasedTopKRouter(TopKSoftmaxRouter):
    """The k greatest logits of a linear layer with a bias: gpt-oss's router."""

    def __init__(self, make: ParameterMaker, spec: TransformerSpec):
        super().__init__(make, spec)
        self.bias = make.parameter(
            "bias", (self.experts.count,), layout_of(self.weight), Normal(spec.init_std)
        )

    def logits(self, tensor: Tensor) -> Tensor:
        return F.linear(tensor, self.weight, self.bias)


class CorrectedRouter(ExactBuffers, Router):
    """A router whose choice alone adds a bias to the scores (arXiv 2408.15664).

    No gradient reaches the bias, and no optimizer has it: `engine/bias_update.py` moves it by how
    often its expert was chosen. As in transformers' classes it and the logits are fp32 in every
    dtype, because bf16 has steps of 2^-8 near 1, and an update is 0.001.

    Attributes:
        correction_bias: a part of the weights, fp32 [E] or [1, E].
        choices: the number of tokens that chose each expert since the last update, int64 [E].
    """

    correction_bias: Tensor
    choices: Tensor
    bias_dimensions: ClassVar[int] = 1
    """Of the bias in transformers' class; all but the last have one element."""

    def __init__(self, make: ParameterMaker, spec: TransformerSpec):
        super().__init__(make, spec)
        count = self.experts.count
        shape = (1,) * (self.bias_dimensions - 1) + (count,)
        self.register_buffer(
            "correction_bias", make.buffer("correction_bias", shape, ConstantInit(0.0))
        )
        choices = torch.zeros(count, dtype=torch.int64, device=make.device)
        self.register_buffer("choices", choices, persistent=False)

    def forward(
        self,
        tensor: Tensor,
        context: ForwardContext,
        *,
        group: Group,
        chosen: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        weights, chosen = super().forward(tensor, context, group=group, chosen=chosen)
        if context.choice_count is not None:
            context.choice_count.add(chosen, self.choices)
        return weights, chosen

    def logits(self, tensor: Tensor) -> Tensor:
        output: Tensor = _LinearFP32.apply(tensor, self.weight)
        return output

    def choose(self, logits: Tensor, scores: Tensor) -> Tensor:
        # For the choice alone: the weights are those of the scores, without the bias.
        corrected = self.eligible(scores.detach() + self.correction_bias)
        return corrected.topk(self.experts.per_token, dim=-1, sorted=False).indices

    def eligible(self, corrected: Tensor) -> Tensor:
        """Return the corrected scores [n, E], -inf for experts that may not be chosen."""
        return corrected


class SigmoidRouter(CorrectedRouter):
    """DeepSeek-V3's router: scores by a sigmoid, experts of the best groups only (arXiv
    2412.19437, section 2.1.2).

    Of E experts in G groups, a group's score is the sum of its two best. With G 3, 1 group a token:

        corrected    .9 .1 | .6 .5 | .8 .2        groups    1.0  1.1  1.0
        eligible     -  -  | .6 .5 | -  -         the best expert of all is not chosen
    """

    def scores(self, logits: Tensor) -> Tensor:
        return logits.sigmoid()

    def eligible(self, corrected: Tensor) -> Tensor:
        groups = self.experts.groups
        chosen_groups = self.experts.groups_per_token
        if chosen_groups == groups:
            return corrected
        by_group = corrected.unflatten(-1, (groups, -1))
        best = by_group.topk(2, dim=-1).values.sum(-1).topk(chosen_groups, dim=-1, sorted=False)
        is_chosen = torch.zeros_like(by_group[..., 0], dtype=torch.bool).scatter_(
            1, best.indices, True
        )
        return by_group.masked_fill(~is_chosen.unsqueeze(-1), float("-inf")).flatten(1)

    def weigh(self, chosen_scores: Tensor) -> Tensor:
        weights = chosen_scores
        if self.experts.normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.experts.scale


class BiasedSoftmaxRouter(CorrectedRouter):
    """ERNIE 4.5's router: probabilities, and a bias for the choice.

    Its weights always sum to 1 before they are rounded to the activations' dtype, unless their sum
    is below `smallest_sum`.
    """

    bias_dimensions = 2
    rounds_weights = True

    def scores(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1, dtype=torch.float32)

    def weigh(self, chosen_scores: Tensor) -> Tensor:
        total = chosen_scores.sum(-1, keepdim=True)
        return chosen_scores / total.clamp(min=self.experts.smallest_sum)


ROUTERS: dict[str, type[Router]] = {
    "softmax": SoftmaxRouter,
    "top_k_softmax": TopKSoftmaxRouter,
    "biased_top_k": BiasedTopKRouter,
    "sigmoid": SigmoidRouter,
    "biased_softmax": BiasedSoftmaxRouter,
}
"""Name of a router in a spec → its class."""


class SharedExpert(GatedMLP):
    """A gated MLP for every token, times σ(x wᵀ). [s, b, h] → [s, b, h], shards under SP.

    It communicates like a dense MLP, in addition to the routed experts.
    """

    def __init__(self, make: ParameterMaker, spec: TransformerSpec, size: int):
        super().__init__(make, spec, size)
        # A router's weights multiply a rank's part of the experts' outputs, but this gate
        # multiplies the sum over TP. So without SP every rank computes the gate's whole gradient.
        layout = Replicated("partial" if make.topology.sequence else "identical")
        self.gate = make.parameter("gate", (1, spec.hidden), layout, Normal(spec.init_std))

    def forward(self, tensor: Tensor, *, context: ForwardContext) -> Tensor:
        return F.linear(tensor, self.gate).sigmoid() * super().forward(tensor, context=context)


class Experts(nn.Module):
    """A layer's experts, of which a router chooses k for each token, and the shared expert.

    The output is Σ weight · (activation(x Wᵍ) · x Wᵘ) Wᵈ over the k experts, plus the shared one's.
    [s, b, h] → [s, b, h], shards under SP. No token is dropped, however many choose the same
    expert.
    """

    def __init__(self, make: ParameterMaker, spec: TransformerSpec):
        super().__init__()
        assert spec.experts is not None
        count = spec.experts.count
        size = spec.experts.size
        init = Normal(spec.init_std)
        residual_init = Normal(spec.residual_std)
        topology = self.topology = make.topology
        # The planner, or a faster exchange, may replace it.
        self.exchange: Callable[[Tensor, Group], ExpertExchange] = (
            AllToAllExperts if topology.expert > 1 else LocalExperts
        )
        self.router = ROUTERS[spec.experts.router](make.child("router"), spec)
        # Gate and up are two parts, each split by itself, so that a rank's gate columns meet their
        # own up columns. With TP 2 and experts of width 4 a rank holds of every expert:
        #                         rank 0         rank 1
        #     gate_up [E, 8, h]   g0 g1 u0 u1    g2 g3 u2 u3     its outputs
        #     down    [E, h, 4]   0 1            2 3             its inputs
        columns = Sharded(1, (size, size), experts=topology.expert)
        rows = Sharded(2, (size,), experts=topology.expert)
        bias = spec.experts.bias
        self.gate_up = ColumnParallelGroupedLinear(
            make.child("gate_up"), count, spec.hidden, 2 * size, columns, init, bias=bias
        )
        self.activation: nn.Module = (
            GatedActivation(spec.activation)
            if spec.experts.swiglu is None
            else ClampedGatedActivation(*spec.experts.swiglu)
        )
        self.down = RowParallelGroupedLinear(
            make.child("down"), count, size, spec.hidden, rows, residual_init, bias=bias
        )
        self.shared: GatedMLP | None = None
        if spec.experts.shared:
            shared = SharedExpert if spec.experts.shared_gate else GatedMLP
            self.shared = shared(make.child("shared"), spec, spec.experts.shared)

    def forward(self, tensor: Tensor, *, context: ForwardContext) -> Tensor:
        """Return the weighted sum of the k experts that the router chose for each token, and the
        shared expert's output.

        Three tokens, k 2 of 3 experts. Copies of tokens are sorted by expert (`Routing`):

            token    0     1     2         rows     0 1 | 2 3 | 4 5     ends 2, 4, 6
            experts  2 0   0 1   2 1       expert   0 0 | 1 1 | 2 2
                                           token    0 1 | 1 2 | 0 2

        Token 0 is the weighted sum of rows 4 and 0, token 1 of 1 and 2, token 2 of 5 and 3.
        """
        group = self.topology.tensor_group
        sequence = context.sequence
        whole = tensor
        # f stands before the router too: a rank's gradients of the routing weights are partial
        # sums, so the router's gradient of the input has to be summed with that of the experts.
        # Under SP the backward of g sums the logits' gradients, and `gate_up` gathers by itself.
        if not sequence:
            tensor = copy_to_tensor_region(tensor, group)
        weights, route = self._route(tensor, context)
        routing, experts = route.routing, route.experts
        dispatched = None
        if experts.is_remote:
            dispatched = dispatch_tokens(tensor, routing, experts, group, sequence=sequence)
        # While the rows are on their way.
        shared = None if self.shared is None else self.shared(whole, context=context)
        intermediate = self.gate_up(
            tensor, routing, experts, sequence=sequence, dispatched=dispatched
        )
        # The rows of all tokens become [s, b, h] by their b: under SP `tensor` has only s/t.
        routed = self.down(self.activation(intermediate), weights, routing, experts).unflatten(
            0, (-1, tensor.shape[1])
        )
        reduce = reduce_scatter_to_sequence_region if sequence else reduce_from_tensor_region
        routed = reduce(routed, group)
        return routed if shared is None else routed + shared

    def _route(self, tensor: Tensor, context: ForwardContext) -> tuple[Tensor, Route]:
        """Return the weights of each token's experts, fp32 [n, k], and the way of its rows.

        What backward recomputes takes the way of the first forward: without that, other bits of a
        logit could send a row elsewhere, while the sizes that the ranks have exchanged stay.
        """
        route = context.routes.get(self)
        chosen = None if route is None else route.chosen
        weights, chosen = self.router(
            tensor, context, group=self.topology.tensor_group, chosen=chosen
        )
        if route is None:
            routing = Routing.from_groups(chosen, self.router.experts.count)
            experts = self.exchange(routing.ends, self.topology.expert_group)
            route = Route(chosen, routing, experts)
            if experts.is_remote:
                context.routes[self] = route
        return weights, route
