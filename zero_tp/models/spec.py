"""TransformerSpec: what one transformer is made of, free of any Hugging Face name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from zero_tp.errors import UserError


@dataclass(frozen=True)
class Dropouts:
    """Probabilities: after the embedding, at the end of each residual branch, on the attention weights."""

    embedding: float = 0.0
    residual: float = 0.0
    attention: float = 0.0


@dataclass(frozen=True)
class TransformerSpec:
    """The choices that make one decoder. Classes are picked by name from the tables of norm.py, position.py, mlp.py.

    Attributes:
        hidden, layers, heads, head_size, mlp_size, vocabulary, positions: sizes (h, L, a, h/a, 4h, v, longest
            sequence).
        norm, position, mlp: names in the tables NORMS, POSITIONS, MLPS.
        activation: the MLP's elementwise function.
        bias: whether linear layers have biases.
        tied: whether the output layer is the word embedding.
        init_std: σ of N(0, σ); residual outputs get σ/√(2L) (arXiv 1909.08053, section 4).
    """

    hidden: int
    layers: int
    heads: int
    head_size: int
    mlp_size: int
    vocabulary: int
    positions: int
    norm: str
    norm_epsilon: float
    position: str
    mlp: str
    activation: Callable[[Tensor], Tensor]
    bias: bool
    tied: bool
    init_std: float
    dropouts: Dropouts
    attention: Literal["sdpa", "eager"] = "sdpa"

    def check(self, tensor: int) -> None:
        """
        Raises:
            UserError: a size that TP has to split does not divide.
        """
        for what, size in (("attention heads", self.heads), ("MLP features", self.mlp_size)):
            if size % tensor:
                raise UserError(
                    f"zero_tp.parallel.tensor: {size} {what} do not divide by tensor {tensor}; "
                    f"choose a tensor size that divides {size}"
                )

    @property
    def residual_std(self) -> float:
        return self.init_std / (2 * self.layers) ** 0.5
