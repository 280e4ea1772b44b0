"""The papers' printed formulas of sizes and FLOPs that plans do not use; the others are in
tools/planning/formulas.py.

Letters: s sequence, b micro-batch, h hidden, L layers, v vocabulary, B global batch, Ψ parameters.
"""

from __future__ import annotations


def gpt_parameters(layers: int, h: int, v: int, positions: int = 0) -> int:
    """Return h·v + L(12h² + 13h) + 2h, and h for each learned position: GPT-2's layers, tied
    embeddings.
    """
    return h * v + layers * (12 * h**2 + 13 * h) + 2 * h + positions * h


def fused_buffer_bytes(parameters: float) -> float:
    """Return 4Ψ: one fp32 buffer of all gradients, which C_B avoids (1910.02054, section 3.2)."""
    return 4 * parameters


def gpt2_activation_bytes(s: int, b: int, h: int, layers: int) -> float:
    """Return 2 · 12·h·b·s·L bytes of activations without recomputation: the estimate of
    1910.02054, section 3.2.
    """
    return 2.0 * 12 * h * b * s * layers


# ---- FLOPs of one iteration (arXiv 2205.05198, appendix A) ---------------------------------------

MODEL = 1 / 6
SELECTIVE = 1 / 3
DERIVED = 2 / 9
"""The attention cores' term of an iteration's FLOPs, as a factor of s/h: of the model (equation 7);
with selective recomputation as printed (equation 8), which reproduces the published HFU; and as
derived in the paper, 4Bs²h more per layer.
"""


def iteration_flops(b: int, s: int, layers: int, h: int, v: int, cores: float = MODEL) -> float:
    """Return the FLOPs of one iteration of a GPT-2-like model: 72·B·L·s·h²·(1 + cores·s/h +
    v/(12hL)).
    """
    return 72.0 * b * layers * s * h**2 * (1 + cores * s / h + v / (12 * h * layers))
