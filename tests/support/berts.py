"""Megatron's BERTs, counted by hand."""

from __future__ import annotations

from benchmarks.papers.formulas import gpt_parameters


def bert_parameters(layers: int, h: int, v: int, positions: int = 512) -> int:
    """Pre-norm body, two token types, pooler, MLM transform and sentence head (arXiv 1909.08053, section 5.3).

    To `gpt_parameters` come 2h token types, pooler h² + h, transform h² + h with its norm 2h and v biases, and the
    sentence head 2h + 2.
    """
    heads = (h**2 + h) + (h**2 + h + 2 * h + v) + (2 * h + 2)
    return gpt_parameters(layers, h, v, positions) + 2 * h + heads
