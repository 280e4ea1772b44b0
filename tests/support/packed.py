"""What torch's `varlen_attn` computes, on any device: for tests where its kernels do not run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import varlen

from zero_tp.model import attention
from zero_tp.parallel import devices


def pieces_apart(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    window_size: tuple[int, int],
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """SDPA on each piece by itself. [b·s, heads, d] → [b·s, heads, d].

    A token at i sees those from i - left to i + right, both included, as flash attention's README
    defines its windows, and transformers uses them (a sliding window of w is (w - 1, …)); a
    negative size has no bound.
    """
    starts = cu_seq_q.tolist()
    assert cu_seq_q.dtype == torch.int32 and torch.equal(cu_seq_q, cu_seq_k)
    assert starts[0] == 0 and starts[-1] == len(query) == len(key) == len(value)
    assert max_q == max_k >= max(end - start for start, end in pairwise(starts))
    left, right = (size if size >= 0 else len(query) for size in window_size)
    mixed = []
    for start, end in pairwise(starts):
        q, k, v = (each[start:end].transpose(0, 1)[None] for each in (query, key, value))
        at = torch.arange(end - start)
        back = at[:, None] - at[None, :]
        seen = (back <= left) & (back >= -right)
        mixed.append(
            F.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=enable_gqa)[
                0
            ].transpose(0, 1)
        )
    return torch.cat(mixed)


@contextmanager
def packed_kernels() -> Iterator[mock.Mock]:
    """Lets every device and dtype take documents and windows without a mask, by `pieces_apart`;
    gives its calls.
    """
    dtypes = (torch.float32, torch.float64, torch.bfloat16)
    with (
        mock.patch.object(devices, "runs_flash", lambda _: True),
        mock.patch.object(attention, "VARLEN_DTYPES", dtypes),
        mock.patch.object(varlen, "varlen_attn", mock.Mock(side_effect=pieces_apart)) as called,
    ):
        yield called
