"""Self-attention, causal or in both directions, is split by heads (arXiv 1909.08053, section 3).

s sequence, b batch, h hidden, a heads, d head size, t TP size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from zero_tp import devices
from zero_tp.architectures.spec import TransformerSpec
from zero_tp.models import flash
from zero_tp.models.context import AttentionMask, ForwardContext, Packed, Pieces
from zero_tp.models.norm import NORMS
from zero_tp.models.position import rotate
from zero_tp.models.projection import projection
from zero_tp.parallel.elementwise import ElementwiseModule
from zero_tp.parallel.linear import RowParallelLinear
from zero_tp.parallel.parameter import Normal, ParameterMaker
from zero_tp.parallel.random import PER_RANK, Dropout, RandomStreams


def for_each_head(key: Tensor, value: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Repeat keys and values for the queries that they serve in turn. [b, k, s, d] → [b, heads, s, d]."""
    times = heads // key.shape[1]
    if times == 1:
        return key, value
    return key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)


class AttentionCore(nn.Module):
    """The core computes softmax(QKᵀ/√d)V with dropout on the softmax.

    Q [b, a/t, s, d], K and V of as many heads or of a divisor of them, each serving as many queries in turn →
    [b, a/t, s, d].

    Dropout draws from the per-rank stream: heads differ over TP.
    """

    def __init__(self, spec: TransformerSpec, streams: RandomStreams):
        super().__init__()
        self.p, self.streams, self.causal = spec.dropouts.attention, streams, spec.causal

    @staticmethod
    def mask(mask: AttentionMask, spec: TransformerSpec, like: Tensor) -> Tensor | Packed | None:
        """Return what is added to the scores, [b or 1, 1, s or 1, keys]: 0, or -∞ where nothing is seen; or what else
        tells the core who sees whom. Layers that see alike share it.

        Args:
            like: of the dtype and on the device of the activations; its second dimension is b.
        """
        seen = mask.seen(like.device)
        return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(~seen, -torch.inf)


VARLEN_DTYPES = (torch.bfloat16, torch.float16)
VARLEN_HEAD_SIZE = 192
"""The largest whose backward torch's flash kernels have on every device that they run on."""


def why_masked(mask: AttentionMask, spec: TransformerSpec, dtype: torch.dtype, device: torch.device) -> str:
    """Return why `varlen_attn` can't compute what is not plain, so that it takes a mask; "" where it can."""
    reasons = {
        "padding takes one": mask.padding is not None,
        "cached keys take one": (mask.first_key, mask.keys) != (mask.first_query, mask.queries),
        "varlen_attn needs CUDA of capability 8.0": not devices.runs_varlen(device),
        "varlen_attn computes in 16 bits": dtype not in VARLEN_DTYPES,
        "varlen_attn has no dropout": spec.dropouts.attention > 0,
        f"varlen_attn takes head sizes up to {VARLEN_HEAD_SIZE} that 8 divides": spec.head_size % 8 > 0
        or spec.head_size > VARLEN_HEAD_SIZE,
    }
    return next((why for why, holds in reasons.items() if holds), "")


class SDPACore(AttentionCore):
    """This core calls `scaled_dot_product_attention`, which needs no mask where nothing is padded, and for documents
    and windows `varlen_attn`, where that can compute them (see `why_masked`).

    It would take a boolean mask too, but turn it into one like ours in every layer, and keep that for backward. Where
    nothing is masked, a CPU has a kernel of matrix products (zero_tp/models/flash.py).
    """

    @staticmethod
    def mask(mask: AttentionMask, spec: TransformerSpec, like: Tensor) -> Tensor | Packed | None:
        if mask.is_plain:
            return None
        if why_masked(mask, spec, like.dtype, like.device):
            return AttentionCore.mask(mask, spec, like)
        pieces = mask.pieces or Pieces.of_rows(like.shape[1], mask.queries, like.device)
        return Packed(pieces, -1 if mask.window is None else mask.window - 1)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | Packed | None) -> Tensor:
        if isinstance(mask, Packed):
            return packed_attention(query, key, value, mask)
        causal = self.causal and mask is None and query.shape[2] > 1  # a single query sees every key
        dropped = self.p if self.training else 0.0
        if mask is not None and query.device.type != "cpu":
            key, value = for_each_head(key, value, query.shape[1])  # beside a mask CUDA's fused kernels take no groups
        if mask is None and not dropped and flash.is_faster(query.dtype, query.device, query.shape[2], key.shape[2]):
            return flash.flash_attention(query, key, value, causal)
        grouped = key.shape[1] != query.shape[1]
        with self.streams.use(PER_RANK) if dropped else nullcontext(), allowed_kernels(mask):
            return F.scaled_dot_product_attention(query, key, value, mask, dropped, causal, enable_gqa=grouped)


@contextmanager
def allowed_kernels(mask: Tensor | None) -> Iterator[None]:
    """Keep SDPA off cuDNN's kernel beside a mask; without one, torch chooses alone.

    cuDNN has no plan for some masks that heads or rows share (Lightning-AI/lightning-thunder issue 1799). torch chooses
    without asking it, so the call raises.
    """
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(cudnn and mask is None)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(cudnn)


def packed_attention(query: Tensor, key: Tensor, value: Tensor, packed: Packed) -> Tensor:
    """Return softmax(QKᵀ/√d)V of each piece by itself, by torch's flash kernels. Shapes as in AttentionCore.

    Rows lie end to end for them, [b·s, heads, d], which copies Q, K and V where b > 1.
    """
    from torch.nn.attention.varlen import varlen_attn  # 2 s, which only those who use it wait for

    def joined(heads: Tensor) -> Tensor:
        return heads.transpose(1, 2).flatten(0, 1)

    pieces = packed.pieces
    mixed = varlen_attn(
        joined(query),
        joined(key),
        joined(value),
        pieces.starts,
        pieces.starts,
        pieces.longest,
        pieces.longest,
        window_size=(packed.window, 0),  # keys from so many before to none after, both included
        enable_gqa=key.shape[1] != query.shape[1],
    )
    assert isinstance(mixed, Tensor)
    return mixed.unflatten(0, (pieces.rows, pieces.length)).transpose(1, 2)


class EagerCore(AttentionCore):
    """This core computes in separate operations: scores, softmax, dropout, attention over V.

    Backward keeps what the papers count and no more: Q, K, V, the softmax's output, a dropout mask of one byte an
    element and the dropout's output. Scale and mask are part of the product that makes the scores, so they keep
    nothing; the softmax computes in fp32 inside and rounds once, its output keeps the dtype of Q.
    """

    def __init__(self, spec: TransformerSpec, streams: RandomStreams):
        super().__init__(spec, streams)
        self.scale = spec.head_size**-0.5
        self.dropout = Dropout(self.p, streams, PER_RANK)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        batch, heads, length, _ = query.shape
        key, value = for_each_head(key, value, heads)
        # No copy unless rows are padded differently.
        added = mask.expand(batch, heads, length, key.shape[2]).flatten(0, 1)
        scores = torch.baddbmm(added, query.flatten(0, 1), key.flatten(0, 1).transpose(1, 2), alpha=self.scale)
        return self.dropout(scores.unflatten(0, (batch, heads)).softmax(-1)) @ value


CORES: dict[str, type[AttentionCore]] = {"sdpa": SDPACore, "eager": EagerCore}


# ---- what a run says of it at its start ------------------------------------------------------------------------------

BACK_ENDS = {
    SDPBackend.CUDNN_ATTENTION: "cuDNN's kernel",
    SDPBackend.FLASH_ATTENTION: "the flash kernel",
    SDPBackend.EFFICIENT_ATTENTION: "the memory-efficient kernel",
    SDPBackend.OVERRIDEABLE: "the device's own kernel",
    SDPBackend.MATH: "the maths path, which keeps the scores",
}


def described(
    spec: TransformerSpec,
    tensor: int,
    rows: int,
    length: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    documents: bool = False,
    padded: bool = False,
) -> str:
    """Say what computes the attention of a training micro-batch of b `rows`, what masks it takes, and why.

    Args:
        tensor: t.
        documents: the rows have several.
        padded: the rows have padding.
    """
    pieces = Pieces.of_rows(rows, length, torch.device("meta")) if documents else None
    padding = torch.empty(rows, length, device="meta") if padded else None
    ways = Counter(
        _way(
            spec,
            tensor,
            rows,
            AttentionMask(length, length, padding=padding, pieces=pieces, window=window, causal=spec.causal),
            dtype,
            device,
        )
        for window in spec.windows
    )
    if len(ways) == 1:
        return next(iter(ways))
    return "; ".join(f"in {layers} of {spec.layers} layers {way}" for way, layers in ways.items())


def _way(
    spec: TransformerSpec, tensor: int, rows: int, mask: AttentionMask, dtype: torch.dtype, device: torch.device
) -> str:
    apart = ["padding"] if mask.padding is not None else []
    if mask.pieces is not None:
        apart.append("documents")
    if mask.window is not None and mask.queries > mask.window:
        apart.append(f"a window of {mask.window}")
    seen = " and ".join(apart) or ("causality" if mask.causal else "nothing")
    taken = f"a mask of {mask.elements * dtype.itemsize / 2**20:,.1f} MiB for {seen}"
    if spec.attention == "eager":
        return f"eager, {taken}"
    if mask.is_plain:
        if not spec.dropouts.attention and flash.is_faster(dtype, device, mask.queries, mask.keys):
            return "flash attention by matrix products"
        return f"SDPA, {_back_end(spec, tensor, rows, mask, dtype, device)}"
    if why := why_masked(mask, spec, dtype, device):
        return f"SDPA, {_back_end(spec, tensor, rows, mask, dtype, device)}, {taken} ({why})"
    return f"varlen_attn, the flash kernel for {seen}, without a mask"


def _back_end(
    spec: TransformerSpec, tensor: int, rows: int, mask: AttentionMask, dtype: torch.dtype, device: torch.device
) -> str:
    """Ask torch which back end SDPA takes for such tensors, as the core gives them to it."""
    heads, each = spec.heads // tensor, spec.heads // spec.kv_heads
    groups = max(1, heads // each) if heads % each == 0 or heads < each else heads
    added = None
    if not mask.is_plain:
        groups = groups if device.type == "cpu" else heads
        queries = mask.queries if mask.causal else 1
        added = torch.empty((), dtype=dtype, device=device).expand(rows, 1, queries, mask.keys)
    query, key = (
        torch.empty(rows, each, mask.queries, spec.head_size, dtype=dtype, device=device, requires_grad=True)
        for each in (heads, groups)
    )
    with allowed_kernels(added):
        chosen = torch._fused_sdp_choice(
            query,
            key,
            key,
            added,
            spec.dropouts.attention,
            added is None and mask.causal,
            enable_gqa=groups != heads,
        )
    return BACK_ENDS[SDPBackend(chosen)]


class Attention(ElementwiseModule):
    """Attention is split: QKV by columns, the core by heads, the output projection by rows.

    [s, b, h] → [s, b, h], sequence shards under SP.

    Args:
        number: the layer's.
    """

    def __init__(self, make: ParameterMaker, spec: TransformerSpec, streams: RandomStreams, number: int):
        super().__init__()
        self.number, self.window = number, spec.windows[number]
        self.qkv = projection(make.child("qkv"), spec)
        self.core = CORES[spec.attention](spec, streams)
        self.output = RowParallelLinear(
            make.child("output"),
            spec.heads * spec.head_size,
            spec.hidden,
            bias=spec.output_bias,
            init=Normal(spec.residual_std),
        )
        self.query_norm: nn.Module = nn.Identity()
        self.key_norm: nn.Module = nn.Identity()
        if spec.query_key_norm:
            norm, own_heads = NORMS[spec.norm], make.topology.tensor > 1
            self.query_norm = norm(make.child("query_norm"), spec.head_size, spec.norm_epsilon, part=own_heads)
            self.key_norm = norm(make.child("key_norm"), spec.head_size, spec.norm_epsilon, part=own_heads)

    def forward(self, tensor: Tensor, *, context: ForwardContext) -> Tensor:
        query, key, value = self.qkv(tensor, sequence=context.sequence)
        query, key = self.query_norm(query), self.key_norm(key)
        if context.rotation is not None:
            query, key = (rotate(each, context.rotation, self.elementwise) for each in (query, key))
        if context.cache is not None:
            key, value = context.cache.update(key, value, self.number)
        key, value = self.qkv.for_each_query(key), self.qkv.for_each_query(value)
        mixed = self.core(query, key, value, mask=context.masks[self.window])  # [b, a/t, s, d]
        return self.output(mixed.permute(2, 0, 1, 3).flatten(2), sequence=context.sequence)
