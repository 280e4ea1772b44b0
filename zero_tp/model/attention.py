"""Self-attention, causal or bidirectional, split by heads (arXiv 1909.08053, section 3).

s sequence, b batch, h hidden, a heads, d head size, t TP size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zero_tp.model import flex_attention
from zero_tp.model.architectures.spec import TransformerSpec
from zero_tp.model.context import AttentionMask, ForwardContext, Mask, PackedSequences, VarlenMask
from zero_tp.model.latent_qkv import LatentQKV
from zero_tp.model.norm import NORMS
from zero_tp.model.position import apply_rotary
from zero_tp.model.qkv import FusedQKV, GroupedQKV, heads_by_rank
from zero_tp.model.rms_norm import RMSNorm
from zero_tp.model.split_rms_norm import SplitRMSNorm
from zero_tp.parallel import devices
from zero_tp.parallel.elementwise import ElementwiseModule
from zero_tp.parallel.layout import Sharded
from zero_tp.parallel.linear import RowParallelLinear
from zero_tp.parallel.parameter import Normal, ParameterMaker
from zero_tp.parallel.random import PER_RANK, Dropout, RandomStreams


def repeat_kv_heads(key: Tensor, value: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Repeat keys and values for the queries of their groups. [b, k, s, d] → [b, heads, s, d]."""
    times = heads // key.shape[1]
    if times == 1:
        return key, value
    # A group's queries are neighbours: k0 k1 become k0 k0 k1 k1. `repeat` would give k0 k1 k0 k1.
    return key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)


class AttentionCore(nn.Module):
    """softmax(scale · QKᵀ)V with dropout on the softmax; scale is 1/√d or the spec's.

    Q [b, a/t, s, d]; K and V with as many heads, or a divisor of them → [b, a/t, s, d]. Dropout
    draws from the per-rank stream, because heads differ over TP.
    """

    def __init__(self, spec: TransformerSpec, streams: RandomStreams):
        super().__init__()
        self.p = spec.dropouts.attention
        self.scale = spec.attention_scale
        self.streams = streams
        self.causal = spec.causal

    @classmethod
    def build_mask(cls, mask: AttentionMask, spec: TransformerSpec, like: Tensor) -> Mask:
        """Return the additive mask of the scores, [b or 1, 1, s or 1, keys]: 0, or `hidden_score`
        for hidden keys.

        Layers with the same window share it. `SDPACore` may return a `VarlenMask`, or None,
        instead, and `FlexCore` a `BlockMask`.

        Args:
            like: has the dtype and device of the activations; its second dimension is b.
        """
        visible = mask.visible(like.device)
        zeros = torch.zeros(visible.shape, dtype=like.dtype, device=like.device)
        return zeros.masked_fill_(~visible, cls.hidden_score(like.dtype))

    @staticmethod
    def hidden_score(dtype: torch.dtype) -> float:
        """Return the score of a hidden key, as transformers has it. With -∞ a token that sees no
        key outputs 0.
        """
        return -torch.inf


VARLEN_DTYPES = (torch.bfloat16, torch.float16)
VARLEN_HEAD_SIZE = 192
"""The largest head size whose backward torch's flash kernels support on all their devices."""


def fill_widths(*heads: Tensor) -> tuple[Tensor, ...]:
    """Return heads [b, a, s, d] of one width: zeros follow the features of the narrower ones.

    They add nothing to the scores, and columns of zeros to the output.
    """
    width = max(tensor.shape[-1] for tensor in heads)
    return tuple(
        F.pad(tensor, (0, width - tensor.shape[-1])) if tensor.shape[-1] < width else tensor
        for tensor in heads
    )


def can_use_varlen(
    mask: AttentionMask, spec: TransformerSpec, dtype: torch.dtype, device: torch.device
) -> bool:
    """Return whether `varlen_attn` can compute these documents and windows, without a mask."""
    return (
        # `varlen_attn` has no dropout. `cu_seqlens` stands for queries and keys, so a cache must
        # not have added keys.
        mask.padding_mask is None
        and (mask.first_key, mask.keys) == (mask.first_query, mask.queries)
        and devices.runs_flash(device)
        and dtype in VARLEN_DTYPES
        and spec.dropouts.attention == 0
        and max(spec.head_size, spec.value_size) % 8 == 0
        and max(spec.head_size, spec.value_size) <= VARLEN_HEAD_SIZE
    )


class SDPACore(AttentionCore):
    """Call torch's `scaled_dot_product_attention` or, for documents and windows, `varlen_attn`.

    Masks are additive, because SDPA would convert a boolean mask in every layer and keep each copy
    for backward.
    """

    @classmethod
    def build_mask(cls, mask: AttentionMask, spec: TransformerSpec, like: Tensor) -> Mask:
        if mask.is_plain:
            return None
        if not can_use_varlen(mask, spec, like.dtype, like.device):
            return super().build_mask(mask, spec, like)
        # Without documents each row is one sequence, so a window alone needs no mask tensor either.
        packed = mask.packed or PackedSequences.one_per_row(
            like.shape[1], mask.queries, like.device
        )
        return VarlenMask(packed, -1 if mask.window is None else mask.window - 1)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | VarlenMask | None
    ) -> Tensor:
        size = value.shape[-1]
        # torch's flash kernels need one width; CUDA's others, which take no documents, do not.
        is_flash = isinstance(mask, VarlenMask) or query.device.type == "cpu"
        if size == query.shape[-1] or not is_flash:
            return self._attend(query, key, value, mask)
        query, key, value = fill_widths(query, key, value)
        return self._attend(query, key, value, mask)[..., :size]

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | VarlenMask | None
    ) -> Tensor:
        if isinstance(mask, VarlenMask):
            return varlen_attention(query, key, value, mask, self.scale)
        # torch aligns `is_causal` at the first query and the first key: a single query after cached
        # tokens would see the first key only.
        # A single query sees every key.
        causal = self.causal and mask is None and query.shape[2] > 1
        dropout_p = self.p if self.training else 0.0
        if mask is not None and query.device.type != "cpu":
            # With a mask, CUDA's fused kernels do not support grouped queries.
            key, value = repeat_kv_heads(key, value, query.shape[1])
        grouped = key.shape[1] != query.shape[1]
        # Streams are swapped into torch's generator only for a call that draws from it.
        with (
            self.streams.use(PER_RANK) if dropout_p else nullcontext(),
            disable_cudnn_for_mask(mask),
        ):
            return F.scaled_dot_product_attention(
                query, key, value, mask, dropout_p, causal, scale=self.scale, enable_gqa=grouped
            )


@contextmanager
def disable_cudnn_for_mask(mask: Tensor | None) -> Iterator[None]:
    """Disable SDPA's cuDNN kernel for the calls within, if there is a mask.

    cuDNN has no plan for some masks that heads or rows share (Lightning-AI/lightning-thunder issue
    1799). torch selects cuDNN without checking for a plan, so the call would raise.
    """
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(cudnn and mask is None)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(cudnn)


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: VarlenMask, scale: float | None = None
) -> Tensor:
    """Return softmax(scale · QKᵀ)V of each document by torch's flash kernels. Shapes as in
    AttentionCore; scale is by default 1/√d.

    The kernels take concatenated rows, [b·s, heads, d], which copies Q, K and V if b > 1.
    """
    from torch.nn.attention.varlen import varlen_attn  # importing it takes 2 s

    def join_rows(heads: Tensor) -> Tensor:
        return heads.transpose(1, 2).flatten(0, 1)

    packed = mask.packed
    attended = varlen_attn(
        join_rows(query),
        join_rows(key),
        join_rows(value),
        packed.cu_seqlens,
        packed.cu_seqlens,
        packed.max_seqlen,
        packed.max_seqlen,
        window_size=(mask.window, 0),  # `window` keys before the query's own, none after
        scale=scale,
        enable_gqa=key.shape[1] != query.shape[1],
    )
    assert isinstance(attended, Tensor)
    return attended.unflatten(0, (packed.batch, packed.length)).transpose(1, 2)


class EagerCore(AttentionCore):
    """Compute scores, softmax, dropout and attention over V in separate operations.

    Backward keeps what arXiv 2205.05198 counts: Q, K, V, the softmax's output, a dropout mask of
    one byte per element and the dropout's output. The product that makes the scores also applies
    scale and mask, so they keep nothing. The softmax computes in fp32 and rounds once.
    """

    def __init__(self, spec: TransformerSpec, streams: RandomStreams):
        super().__init__(spec, streams)
        self.score_scale: float = self.scale or spec.head_size**-0.5
        self.dropout = Dropout(self.p, streams, PER_RANK)

    @staticmethod
    def hidden_score(dtype: torch.dtype) -> float:
        """Return the dtype's least number, as transformers does: a token that sees no key
        outputs the mean value.
        """
        return torch.finfo(dtype).min

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        key, value = repeat_kv_heads(key, value, query.shape[1])
        return self.dropout(self.masked_scores(query, key, mask).softmax(-1)) @ value

    def masked_scores(self, query: Tensor, key: Tensor, mask: Tensor) -> Tensor:
        """Return the scores with the mask, [b, a/t, s, keys]; as many KV heads as heads."""
        batch, heads, length, _ = query.shape
        # Copies the mask only if rows are padded differently.
        additive_mask = mask.expand(batch, heads, length, key.shape[2]).flatten(0, 1)
        scores = torch.baddbmm(
            additive_mask,
            query.flatten(0, 1),
            key.flatten(0, 1).transpose(1, 2),
            alpha=self.score_scale,
        )
        return scores.unflatten(0, (batch, heads))


class SoftCapCore(EagerCore):
    """EagerCore whose scores are capped: cap · tanh(score / cap) (Gemma 2, arXiv 2408.00118,
    section 2).

    Backward also keeps the tanh's output.
    """

    def __init__(self, spec: TransformerSpec, streams: RandomStreams):
        super().__init__(spec, streams)
        assert spec.score_cap is not None
        self.cap = spec.score_cap

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        key, value = repeat_kv_heads(key, value, query.shape[1])
        scores = query @ key.transpose(2, 3) * self.score_scale
        capped = torch.tanh(scores / self.cap) * self.cap
        return self.dropout((capped + mask).softmax(-1)) @ value


class SinkCore(EagerCore):
    """EagerCore with a key more for each head, which has a learnt score, the sink, and no value
    (arXiv 2309.17453, section 3.3; 2508.10925, section 2.2).

    Each query gives it a part of its softmax, and the others sum to less than 1. Backward keeps a
    column more of the softmax's output.
    """

    def forward(  # type: ignore[override]
        self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, mask: Tensor
    ) -> Tensor:
        key, value = repeat_kv_heads(key, value, query.shape[1])
        scores = self.masked_scores(query, key, mask)
        columns = sinks.view(-1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, columns), -1).softmax(-1)[..., :-1]
        return self.dropout(weights) @ value


class _FlexMask(AttentionCore):
    """A core by torch's `flex_attention` where that computes the forward, else eager."""

    @classmethod
    def build_mask(cls, mask: AttentionMask, spec: TransformerSpec, like: Tensor) -> Mask:
        if flex_attention.can_use_flex(mask, spec, like.shape[1], like.device):
            return flex_attention.build_block_mask(mask, like.device)
        return super().build_mask(mask, spec, like)


class FlexCore(_FlexMask, SoftCapCore):
    """SoftCapCore, or the same by `flex_attention`."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
        if isinstance(mask, Tensor):
            return super().forward(query, key, value, mask)
        return flex_attention.capped_attention(query, key, value, mask, self.cap, self.score_scale)


class FlexSinkCore(_FlexMask, SinkCore):
    """SinkCore, or the same by `flex_attention`."""

    def forward(  # type: ignore[override]
        self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, mask: Mask
    ) -> Tensor:
        if isinstance(mask, Tensor):
            return super().forward(query, key, value, sinks, mask)
        return flex_attention.sink_attention(query, key, value, sinks, mask, self.score_scale)


CORES: dict[str, type[AttentionCore]] = {
    "sdpa": SDPACore,
    "eager": EagerCore,
    "soft_cap": SoftCapCore,
    "sinks": SinkCore,
    "flex_attention": FlexCore,
    "flex_sinks": FlexSinkCore,
}


def projection_of(spec: TransformerSpec) -> type[FusedQKV | GroupedQKV | LatentQKV]:
    """Return the class that projects to a model's queries, keys and values."""
    if spec.latent is not None:
        return LatentQKV
    # The parts of a fused weight are all split. With fewer KV heads K and V may have to be
    # replicated, which rows of a split weight cannot be.
    return FusedQKV if spec.fuses_qkv else GroupedQKV


class Attention(ElementwiseModule):
    """QKV split by columns, the core by heads, the output projection by rows.

    [s, b, h] → [s, b, h], sequence shards under SP.

    Args:
        number: the layer's.
    """

    def __init__(
        self, make: ParameterMaker, spec: TransformerSpec, streams: RandomStreams, number: int
    ):
        super().__init__()
        self.number = number
        self.window = spec.windows[number]
        self.rotary = spec.rotaries[number]
        self.clip = spec.clip
        self.rotates_first = spec.rotates_before_norm
        self.output_gate = spec.output_gate
        self.qkv = projection_of(spec)(make.child("qkv"), spec)
        self.core = CORES[spec.attention](spec, streams)
        self.sinks: nn.Parameter | None = None
        if spec.sinks:
            split = Sharded(0, (spec.heads,))
            self.sinks = make.parameter("sinks", (spec.heads,), split, Normal(spec.init_std))
        self.output = RowParallelLinear(
            make.child("output"),
            spec.heads * spec.value_size,
            spec.hidden,
            bias=spec.output_bias,
            init=Normal(spec.attention_output_std or spec.residual_std),
        )
        self.query_norm: nn.Module = nn.Identity()
        self.key_norm: nn.Module = nn.Identity()
        # OLMoE's norm needs the mean square of all heads' features, of which a rank has some.
        if spec.query_key_norm == "whole":
            like = NORMS[spec.norm]
            assert issubclass(like, RMSNorm)
            for name, heads in (("query_norm", spec.heads), ("key_norm", spec.kv_heads)):
                by_rank = heads_by_rank(spec.heads, heads, make.topology.tensor)
                setattr(
                    self,
                    name,
                    SplitRMSNorm(
                        make.child(name), by_rank, spec.head_size, spec.norm_epsilon, like
                    ),
                )
        elif spec.query_key_norm == "heads":
            # A norm of each head needs no other rank. With or without SP a rank norms its own heads
            # only, so the gradient of its weight [d] is partial under any TP.
            norm = NORMS[spec.norm]
            sharded = make.topology.tensor > 1
            self.query_norm = norm(
                make.child("query_norm"), spec.head_size, spec.norm_epsilon, sharded_input=sharded
            )
            self.key_norm = norm(
                make.child("key_norm"), spec.head_size, spec.norm_epsilon, sharded_input=sharded
            )

    def forward(self, tensor: Tensor, *, context: ForwardContext) -> Tensor:
        rotation = None if self.rotary is None else context.rotations[self.rotary]
        # If no norm or clip comes before it, `qkv` rotates in place in its product; else below.
        rotates_product = self.clip is None and (
            self.rotates_first or isinstance(self.query_norm, nn.Identity)
        )
        # A column-parallel product: qkv.py, then parallel/linear.py.
        query, key, value = self.qkv(
            tensor,
            sequence=context.sequence,
            rotation=rotation if rotates_product else None,
            ops=self.elementwise,
        )
        gate = None
        if self.output_gate:
            query, gate = query.chunk(2, -1)
        # Norm, clip, rotation: the order of transformers' OLMoE.
        query = self.query_norm(query)
        key = self.key_norm(key)
        if self.clip is not None:
            query, key, value = (part.clamp(-self.clip, self.clip) for part in (query, key, value))
        if rotation is not None and not rotates_product:
            query, key = apply_rotary(query, key, rotation, self.elementwise)
        # Keys are cached after the rotation, so each is rotated once, and before they are repeated
        # for their queries, so the cache has each of this rank's KV heads once.
        if context.cache is not None:
            key, value = context.cache.update(key, value, self.number)
        key = self.qkv.repeat_for_queries(key)
        value = self.qkv.repeat_for_queries(value)
        # A copy, because a recomputed core keeps it: an alias would keep all that ZeRO-3 has
        # gathered with it.
        sinks = () if self.sinks is None else (self.sinks.clone(),)
        # Layers with the same window share one mask, which is built once a forward.
        # [b, a/t, s, d]
        attended = self.core(query, key, value, *sinks, mask=context.masks[self.window])
        attended = attended.permute(2, 0, 1, 3).flatten(2)
        if gate is not None:
            attended = attended * torch.sigmoid(gate.permute(2, 0, 1, 3).flatten(2))
        return self.output(attended, sequence=context.sequence)
