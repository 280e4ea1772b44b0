"""The papers' sizes, estimates and FLOPs of their models, as they are printed; plans use others (planning/formulas.py).

Letters: s sequence, b micro-batch, h hidden, L layers, v vocabulary, B global batch, Ψ parameters.
"""

from __future__ import annotations


def gpt_parameters(layers: int, h: int, v: int, positions: int = 0) -> int:
    """Return h·v + L(12h² + 13h) + 2h, and h for each learned position: GPT-2's layers, tied embeddings."""
    return h * v + layers * (12 * h**2 + 13 * h) + 2 * h + positions * h


def bert_parameters(layers: int, h: int, v: int, positions: int = 512) -> int:
    """Count Megatron's BERT: pre-norm body, two token types, pooler, MLM transform and sentence head (1909.08053, 5.3).

    To `gpt_parameters` come 2h token types, pooler h² + h, transform h² + h with its norm 2h and v biases, and the
    sentence head 2h + 2.
    """
    heads = (h**2 + h) + (h**2 + h + 2 * h + v) + (2 * h + 2)
    return gpt_parameters(layers, h, v, positions) + 2 * h + heads


def fused_buffer_bytes(parameters: float) -> float:
    """Return 4Ψ: one fp32 buffer of all gradients, which C_B does away with (1910.02054, section 3.2)."""
    return 4 * parameters


def gpt2_activation_bytes(s: int, b: int, h: int, layers: int) -> float:
    """Return the bytes of 12·h·b·s·L elements of 2: the estimate of 1910.02054, section 3.2, without recomputation."""
    return 2.0 * 12 * h * b * s * layers


# ---- FLOPs of one iteration (arXiv 2205.05198, appendix A) -----------------------------------------------------------


def model_flops(global_batch: int, sequence_length: int, layers: int, hidden: int, vocabulary: int) -> float:
    """Return the FLOPs that one iteration of a GPT-2-like model needs by its mathematics, forward and backward.

    72·B·L·s·h²·(1 + s/(6h) + v/(12hL)), equation 7. Recomputation doesn't count, so it depends on no setting of
    parallelism or memory.
    """
    b, s, n, h, v = global_batch, sequence_length, layers, hidden, vocabulary
    return 72.0 * b * n * s * h**2 * (1 + s / (6 * h) + v / (12 * h * n))


def hardware_flops_selective(
    global_batch: int, sequence_length: int, layers: int, hidden: int, vocabulary: int
) -> float:
    """Return the FLOPs of one iteration with selective recomputation, as printed: 72·B·L·s·h²·(1 + s/(3h) + v/(12hL)).

    Equation 8, which is what reproduces the published hardware FLOPs utilisation.
    """
    b, s, n, h, v = global_batch, sequence_length, layers, hidden, vocabulary
    return 72.0 * b * n * s * h**2 * (1 + s / (3 * h) + v / (12 * h * n))


def hardware_flops_selective_derived(
    global_batch: int, sequence_length: int, layers: int, hidden: int, vocabulary: int
) -> float:
    """Return the same from the paper's own derivation, 4Bs²h more a layer: 2s/(9h) in place of s/(3h)."""
    b, s, n, h, v = global_batch, sequence_length, layers, hidden, vocabulary
    return 72.0 * b * n * s * h**2 * (1 + 2 * s / (9 * h) + v / (12 * h * n))


def hardware_flops_full(global_batch: int, sequence_length: int, layers: int, hidden: int, vocabulary: int) -> float:
    """Return the FLOPs under full recomputation, one more forward of layers: 96·B·L·s·h²·(1 + s/(6h)), and logits."""
    b, s, n, h, v = global_batch, sequence_length, layers, hidden, vocabulary
    return 72.0 * b * n * s * h**2 * (4 / 3 * (1 + s / (6 * h)) + v / (12 * h * n))
