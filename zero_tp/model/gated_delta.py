"""Linear attention by the gated delta rule (Gated DeltaNet, arXiv 2412.06464), split by heads.

A head has a state S [d_k, d_v] instead of keys and values of all earlier tokens. Token t decays it
by α_t = exp(g_t), and replaces the share β_t of what its key reads from it by its value (equation
10):

    S_t = α_t S_{t-1} + k_t β_t (v_t - α_t S_{t-1}ᵀ k_t)ᵀ,        o_t = S_tᵀ q_t

s sequence, b batch, h hidden, a key heads, r value heads of a key head, d_k and d_v features of a
key and of a value, C tokens of a chunk, n chunks, t TP size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache

from zero_tp.model.architectures.spec import CHUNK, GatedDeltaSpec, TransformerSpec
from zero_tp.model.context import ForwardContext
from zero_tp.model.rms_norm import RMSNorm
from zero_tp.parallel.layout import Sharded
from zero_tp.parallel.linear import RowParallelLinear, column_parallel_linear
from zero_tp.parallel.parameter import ConstantInit, MappedUniform, Normal, ParameterMaker
from zero_tp.parallel.random import RandomStreams

UNIT_EPSILON = 1e-6
"""Of the squared length by which queries and keys are divided."""


def describe_linear_attention(device: torch.device) -> str:
    """Return the line on a run's linear attention."""
    line = f"linear attention: the gated delta rule in chunks of {CHUNK} tokens, by torch"
    if device.type != "cuda":
        return line
    return f"{line}; fla's kernels are not used, because no GPU has compared them yet"


class DeltaProjection(nn.Module):
    """Queries, keys, values and output gates (z), and the logits of β and of the decay, by heads.

    Whole parameters are Q | K | V | Z and β | α, and TP splits each block by itself.
    """

    def __init__(self, make: ParameterMaker, spec: TransformerSpec, delta: GatedDeltaSpec):
        super().__init__()
        self.topology = make.topology
        init = Normal(spec.init_std)
        parts = (delta.keys, delta.keys, delta.values, delta.values)
        gates = (delta.value_heads,) * 2
        self.qkvz = make.parameter("qkvz", (sum(parts), spec.hidden), Sharded(0, parts), init)
        self.gates = make.parameter("gates", (sum(gates), spec.hidden), Sharded(0, gates), init)

    def forward(self, tensor: Tensor, *, sequence: bool) -> tuple[Tensor, Tensor]:
        """Project [s, b, h], a sequence shard when `sequence`: one f, or one g, for both."""
        weights = (self.qkvz, self.gates)
        products = column_parallel_linear(
            tensor, weights, (None, None), self.topology, sequence=sequence
        )
        return products[0], products[1]


def _convolve(
    tokens: Tensor, weight: Tensor, activation: Callable[[Tensor], Tensor], ids: Tensor | None
) -> Tensor:
    """Return the activation of each channel's weighted sum over the last tokens.

    Args:
        tokens: [s, b, c].
        weight: [c, 1, kernel]; its last column is the present token's.
        ids: number of each token's sequence, [s, b, 1]; earlier ones of another count nothing.
    """
    length = len(tokens)
    earlier = weight.shape[-1] - 1
    # The sum is rounded once, as in torch's convolution, which is slower (512 tokens of 4 rows,
    # 1,024 channels, fp32: 116 ms, so 106; bf16: 166 and 103).
    padded = F.pad(tokens.float(), (0, 0, 0, 0, earlier, 0))
    taps = weight[:, 0].float().unbind(-1)
    total = padded[earlier:] * taps[earlier]
    for first, tap in enumerate(taps[:-1]):
        shifted = padded[first : first + length]
        if ids is not None:
            before = F.pad(ids, (0, 0, 0, 0, earlier, 0), value=-1)[first : first + length]
            shifted = shifted * (before == ids)
        total = torch.addcmul(total, shifted, tap)
    return activation(total.to(tokens.dtype))


class _Convolution(torch.autograd.Function):
    """Convolve; backward computes it again from the tokens."""

    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        weight: Tensor,
        activation: Callable[[Tensor], Tensor],
        ids: Tensor | None,
    ) -> Tensor:
        # autograd would keep the padded tokens in fp32, and the sum.
        ctx.save_for_backward(tokens, weight, ids)
        ctx.activation = activation
        return _convolve(tokens, weight, activation, ids)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        tokens, weight, ids = ctx.saved_tensors
        inputs = (tokens.detach().requires_grad_(), weight.detach().requires_grad_())
        with torch.enable_grad():
            output = _convolve(inputs[0], inputs[1], ctx.activation, ids)
        return (*torch.autograd.grad(output, inputs, gradient), None, None)


class ShortConvolution(nn.Module):
    """A causal convolution of each channel of Q | K | V by itself, and an activation.

    [s, b, c/t] → [s, b, c/t].
    """

    def __init__(
        self,
        make: ParameterMaker,
        parts: tuple[int, ...],
        kernel: int,
        init: Normal,
        activation: Callable[[Tensor], Tensor],
    ):
        super().__init__()
        self.kernel = kernel
        self.activation = activation
        self.weight = make.parameter("weight", (sum(parts), 1, kernel), Sharded(0, parts), init)

    def forward(
        self, tokens: Tensor, *, ids: Tensor | None, cache: Cache | None, number: int
    ) -> Tensor:
        """Convolve tokens [s, b, c/t] after those of the cache.

        Args:
            ids: number of each token's sequence, [s, b, 1].
            number: the layer's.
        """
        length = len(tokens)
        if cache is not None:
            # The last tokens of the forward before, and these. [b, c/t, *]
            states = cache.update_conv_state(
                tokens.permute(1, 2, 0), number, conv_kernel_size=self.kernel
            )
            tokens = states.permute(2, 0, 1)
        output: Tensor = _Convolution.apply(tokens, self.weight, self.activation, ids)
        return output[-length:]


class GatedDeltaRule(nn.Module):
    """The recurrence over a row's tokens, computed in chunks. It has no parameters."""

    def __init__(self, delta: GatedDeltaSpec):
        super().__init__()
        self.key_size = delta.key_size
        self.value_size = delta.value_size
        self.values_per_key = delta.value_heads // delta.key_heads

    def forward(
        self,
        mixed: Tensor,
        decay: Tensor,
        beta: Tensor,
        *,
        ids: Tensor | None = None,
        cache: Cache | None = None,
        number: int = 0,
        state: Tensor | None = None,
    ) -> Tensor:
        """Return what each token reads from the state. → [s, b, a·r/t, d_v]

        Args:
            mixed: Q | K | V of this rank's heads, [s, b, (2·a·d_k + a·r·d_v)/t].
            decay: g, fp32 [s, b, a·r/t].
            beta: [s, b, a·r/t].
            ids: number of each token's sequence, [s, b, 1]; each begins with an empty state.
            cache: gets the last state.
            number: the layer's.
            state: at the first token, fp32 [b, a·r/t, d_k, d_v].
        """
        heads = decay.shape[-1] // self.values_per_key
        width = heads * self.key_size
        query, key, value = mixed.split((width, width, mixed.shape[-1] - 2 * width), -1)

        def by_head(features: Tensor, size: int) -> Tensor:
            # [s, b, heads · size] → fp32 [b, a, heads of a, s, size]
            joined = features.float().unflatten(-1, (heads, -1, size))
            return joined.permute(1, 2, 3, 0, 4)

        query, key = (_unit_length(by_head(part, self.key_size)) for part in (query, key))
        query = query * self.key_size**-0.5
        value = by_head(value, self.value_size)
        decay, beta = (by_head(part, 1).squeeze(-1) for part in (decay, beta))
        if state is not None:
            state = state.float().unflatten(1, (heads, -1))
        if len(mixed) == 1 and state is not None:
            read, state = _step(query, key, value, decay, beta, state)
        else:
            read, state = chunked(query, key, value, decay, beta, state, ids)
        if cache is not None:
            cache.update_recurrent_state(state.flatten(1, 2), number)
        return read.permute(3, 0, 1, 2, 4).flatten(2, 3).to(mixed.dtype)


def _unit_length(heads: Tensor) -> Tensor:
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + UNIT_EPSILON)


def _step(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what one token reads, and the state after it. Arguments as of `chunked`, s 1."""
    state = state * decay.exp().unsqueeze(-1)
    error = (value - key @ state) * beta.unsqueeze(-1)
    state = state + key.transpose(-1, -2) @ error
    return query @ state, state


def chunked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return what each token reads, [b, a, r, s, d_v], and the last state, [b, a, r, d_k, d_v].

    The chunkwise form of section 3.3. In a chunk, γ_i is the sum of g up to token i, and each
    token's correction u solves a triangular system, because it reads the corrections before it:

        u_i = β_i (v_i - exp(γ_i) S k_i - Σ_{j<i} exp(γ_i - γ_j) (k_i · k_j) u_j)
        o_i = exp(γ_i) S q_i + Σ_{j≤i} exp(γ_i - γ_j) (q_i · k_j) u_j
        S   ← exp(γ_C) S + Σ_j exp(γ_C - γ_j) k_j u_jᵀ

    Of packed sequences A and B, A goes on from the chunk before, and B goes on in the next:

        token      A A A B B        A's tokens alone read S, B's alone write to the next S,
                                    and S itself does not go on

    Args:
        query, key: fp32 [b, a, 1, s, d_k], of unit length; the query's is scaled.
        value: fp32 [b, a, r, s, d_v].
        decay, beta: fp32 [b, a, r, s].
        state: at the first token; by default zeros.
        ids: [s, b, 1], see `GatedDeltaRule`.
    """
    length = value.shape[-2]
    padding = -length % CHUNK

    def in_chunks(tensor: Tensor, dim: int) -> Tensor:
        # Padded tokens have no key and no β: they write nothing.
        after = (0, 0) * (-1 - dim) + (0, padding)
        return F.pad(tensor, after).unflatten(dim, (-1, CHUNK))

    query, key, value = (in_chunks(part, -2) for part in (query, key, value))
    decay, beta = (in_chunks(part, -1) for part in (decay, beta))
    decay = decay.cumsum(-1)  # γ, [b, a, r, n, C]
    visible = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=key.device).tril()
    carried = decay.exp()  # what is left of S at each token
    written = (decay[..., -1:] - decay).exp()  # of its correction at the chunk's end
    state_factor = carried[..., -1:]  # of S at the chunk's end
    if ids is not None:
        own = in_chunks(ids[..., 0].t()[:, None, None], -1)  # [b, 1, 1, n, C]
        last = own[..., -1:]
        before = F.pad(last[..., :-1, :], (0, 0, 1, 0), value=-1)
        visible = visible & (own.unsqueeze(-1) == own.unsqueeze(-2))
        carried = carried * (own == before)
        written = written * (own == last)
        state_factor = state_factor * (last == before)
    # Masked before exp, which would overflow for later tokens.
    pairs = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(~visible, -math.inf).exp()
    keys = key.transpose(-1, -2)
    system = (key @ keys) * pairs * beta.unsqueeze(-1)
    scores = (query @ keys) * pairs
    sides = torch.cat((value, key * carried.unsqueeze(-1)), -1) * beta.unsqueeze(-1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    values, read_keys = solved.split((value.shape[-1], key.shape[-1]), -1)
    query = query * carried.unsqueeze(-1)
    writing = (key * written.unsqueeze(-1)).transpose(-1, -2)
    state_factor = state_factor.unsqueeze(-1)
    if state is None:
        state = value.new_zeros(*value.shape[:3], key.shape[-1], value.shape[-1])
    reads = []
    for chunk in range(value.shape[3]):
        correction = values[:, :, :, chunk] - read_keys[:, :, :, chunk] @ state
        read = query[:, :, :, chunk] @ state + scores[:, :, :, chunk] @ correction
        state = state * state_factor[:, :, :, chunk] + writing[:, :, :, chunk] @ correction
        reads.append(read)
    return torch.cat(reads, -2)[..., :length, :], state


def _inverse_softplus_of_exp(logarithm: Tensor, floor: float) -> Tensor:
    """Return x with softplus(x) = max(exp(logarithm), floor)."""
    step = logarithm.exp().clamp(min=floor)
    return step + torch.log(-torch.expm1(-step))


class _GatedOutput(torch.autograd.Function):
    """Compute x · silu(z) in fp32; backward keeps x and z."""

    @staticmethod
    def forward(ctx: Any, normed: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(normed, gate)
        return (normed * F.silu(gate.float())).to(normed.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        normed, gate = ctx.saved_tensors
        activated, pull = torch.func.vjp(F.silu, gate.float())[:2]
        (gate_gradient,) = pull(gradient.float() * normed.float())
        return (gradient * activated).to(normed.dtype), gate_gradient.to(gate.dtype)


class GatedDeltaNet(nn.Module):
    """Projections split by columns, convolution and recurrence by heads, the output by rows.

    [s, b, h] → [s, b, h], sequence shards under SP. Communication is that of attention.

    Args:
        number: the layer's.
    """

    def __init__(
        self, make: ParameterMaker, spec: TransformerSpec, streams: RandomStreams, number: int
    ):
        super().__init__()
        delta = spec.gated_delta
        assert delta is not None
        self.number = number
        self.rotary = None
        self.largest_beta = delta.largest_beta
        tensor = make.topology.tensor
        self.widths = ((2 * delta.keys + delta.values) // tensor, delta.values // tensor)
        self.projection = DeltaProjection(make.child("projection"), spec, delta)
        self.convolution = ShortConvolution(
            make.child("convolution"),
            (delta.keys, delta.keys, delta.values),
            delta.kernel,
            Normal(spec.init_std),
            spec.activation,
        )
        by_head = Sharded(0, (delta.value_heads,))
        self.A_log = make.parameter(
            "A_log", (delta.value_heads,), by_head, MappedUniform(*delta.initial_decay, torch.log)
        )
        step: ConstantInit | MappedUniform = ConstantInit(1.0)
        if delta.initial_step is not None:
            low, high, floor = delta.initial_step
            inverse = partial(_inverse_softplus_of_exp, floor=floor)
            step = MappedUniform(math.log(low), math.log(high), inverse)
        self.dt_bias = make.parameter("dt_bias", (delta.value_heads,), by_head, step)
        self.core = GatedDeltaRule(delta)
        # A rank norms its own heads, so the gradient of the weight [d_v] is partial under any TP.
        self.norm = RMSNorm(
            make.child("norm"), delta.value_size, delta.norm_epsilon, sharded_input=tensor > 1
        )
        self.output = RowParallelLinear(
            make.child("output"),
            delta.values,
            spec.hidden,
            bias=False,
            init=Normal(spec.residual_std),
        )

    def forward(self, tensor: Tensor, *, context: ForwardContext) -> Tensor:
        product, gates = self.projection(tensor, sequence=context.sequence)
        if context.unpadded is not None:
            # Without biases, a token of zeros projects to zeros, and writes nothing.
            product, gates = (part * context.unpadded.to(part.dtype) for part in (product, gates))
        mixed, output_gate = product.split(self.widths, -1)
        beta_logits, steps = gates.chunk(2, -1)
        beta = beta_logits.sigmoid()
        if self.largest_beta != 1.0:
            beta = beta * self.largest_beta
        decay = -self.A_log.float().exp() * F.softplus(steps.float() + self.dt_bias)
        for part in (decay, beta):
            # As where backward computes the core again: other strides would give other bits.
            if part.requires_grad:
                part.register_hook(Tensor.contiguous)
        ids = None if context.sequence_ids is None else context.sequence_ids.t().unsqueeze(-1)
        # Before the convolution's state is updated: the cache knows by that whether it has both.
        cache = context.cache
        state = None if cache is None else cache.get_recurrent_state(self.number)
        places = {"ids": ids, "cache": cache, "number": self.number}
        mixed = self.convolution(mixed, **places)
        read = self.core(mixed, decay, beta, **places, state=state)
        normed = self.norm(read)
        gated: Tensor = _GatedOutput.apply(normed, output_gate.unflatten(-1, normed.shape[-2:]))
        return self.output(gated.flatten(2), sequence=context.sequence)
