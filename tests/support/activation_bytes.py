"""Bytes of activations that torch's kernels keep."""

from __future__ import annotations

from zero_tp.tools.planning.plan_settings import Layer


def sdpa_maths_core(layer: Layer) -> float:
    """Return 12as²b/t + 6sbh/t: torch's maths path, which it takes on the CPU where attention has
    dropout.

    It computes in fp32: softmax output 4, dropout mask 4, dropout output 4 bytes a score; and Q, K,
    V are kept in fp32 in place of 16 bits, 12sbh/t instead of 6.
    """
    return 12 * layer.scores + 6 * layer.sbh / layer.t
