"""Bytes of activations that one rank keeps of one transformer layer (arXiv 2205.05198, section 4 and table 2).

What a layer keeps, for 16-bit activations, masks of one byte, an MLP of 4h and dropout everywhere:

| bytes | what | split over t |
| --- | --- | --- |
| 4sbh | inputs of the two norms | under SP |
| 4sbh | outputs of the two norms: inputs of QKV and of the MLP's first product | under SP |
| 2sbh | masks of the two residual dropouts | under SP |
| 6sbh | Q, K, V | always |
| 5as²b | softmax output 2, its dropout mask 1, dropout output 2 | always |
| 2sbh | input of the output projection | always |
| 16sbh | input and output of the MLP's activation | always |

The first three lines are the paper's 10, the others its 24 + 5as/h. Left out, as in the paper: the norms' statistics
(8sb at most), the states of random generators, a mask that all layers share, the layer's output (the next one's input).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Layer:
    """One transformer layer on one rank.

    Attributes:
        s, b, h, a: sequence, batch of one micro-batch, hidden, attention heads.
        t: TP size.
        sequence: SP is on.
    """

    s: int
    b: int
    h: int
    a: int
    t: int = 1
    sequence: bool = False

    @property
    def sbh(self) -> int:
        return self.s * self.b * self.h

    @property
    def residual(self) -> float:
        """Elements of the residual stream on this rank: sbh, under SP sbh/t."""
        return self.sbh / self.t if self.sequence else self.sbh

    @property
    def scores(self) -> float:
        """Attention scores on this rank: as²b/t."""
        return self.a * self.s**2 * self.b / self.t


# ---- the attention core: what it keeps beside Q, K and V in 16 bits ------------------------------------------------


def eager_core(layer: Layer) -> float:
    """5as²b/t: softmax output 2, dropout mask 1, dropout output 2 (equation 1's 5as/h)."""
    return 5 * layer.scores


def sdpa_fused_core(layer: Layer) -> float:
    """4asb/t: the logarithm of each softmax's sum, fp32. Torch's flash attention.

    It keeps its output too, but that is the input of the output projection, one storage, counted there.
    """
    return 4 * layer.a * layer.s * layer.b / layer.t


def sdpa_maths_core(layer: Layer) -> float:
    """12as²b/t + 6sbh/t: torch's maths path, which it takes on the CPU where attention has dropout.

    It computes in fp32: softmax output 4, dropout mask 4, dropout output 4 bytes a score; and Q, K, V are kept in fp32
    in place of 16 bits, 12sbh/t instead of 6.
    """
    return 12 * layer.scores + 6 * layer.sbh / layer.t


# ---- a layer, by what is recomputed ---------------------------------------------------------------------------------

Core = Callable[[Layer], float]


def kept(layer: Layer, core: Core = eager_core) -> float:
    """Nothing recomputed: sbh(10 + 24/t + 5as/(ht)) with the eager core, under SP sbh/t·(34 + 5as/h).

    Equations 1 (t = 1), 2 and 4; table 2, rows "no parallelism", "tensor parallel" and "tensor + sequence parallel".
    """
    return 10 * layer.residual + 24 * layer.sbh / layer.t + core(layer)


def kept_selective(layer: Layer, core: Core = eager_core, modules: Collection[str] = ("attention_core",)) -> float:
    """`selective` recomputation: sbh(10 + 24/t), under SP 34sbh/t; table 2, the two "selective" rows (section 5).

    Args:
        modules: `zero_tp.recompute.modules`. `attention_core` takes away all that the core keeps beside its inputs,
            Q, K and V in 16 bits; `mlp_activation` 8sbh/t, the activation's output; `norm` 4sbh, under SP 4sbh/t, the
            outputs of the two norms.
    """
    saved = {
        "attention_core": core(layer),
        "mlp_activation": 8 * layer.sbh / layer.t,
        "norm": 4 * layer.residual,
    }
    return kept(layer, core) - sum(saved[module] for module in modules)


def kept_full(layer: Layer, *, partitioned: bool = False) -> float:
    """`full` recomputation: the layer's input, 2sbh, under SP 2sbh/t; table 2, row "full".

    Args:
        partitioned: P_a (arXiv 1910.02054, section 6.1): each TP rank keeps a t-th of it, 2sbh/t.
    """
    return 2 * layer.sbh / layer.t if partitioned else 2 * layer.residual
