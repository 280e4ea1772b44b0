"""Newton-Schulz's iteration, by which Muon turns a matrix of momentum into an update.

Of a matrix with singular values s it keeps the singular vectors and moves each s near 1, in five
steps of two kinds of products (Jordan et al. 2024, arXiv 2502.16982, section 2.1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

AdjustLearningRate = Literal["original", "match_rms_adamw"]


@dataclass(frozen=True)
class NewtonSchulz:
    """The iteration's settings, by the names of `torch.optim.Muon`.

    Attributes:
        steps: number of iterations.
        coefficients: a, b and c of X ← a·X + (b·A + c·A²)·X with A = X·Xᵀ.
        eps: the least norm by which a matrix is divided.
        dtype: of the products: bf16 in 16-bit runs, as in torch.
    """

    steps: int
    coefficients: tuple[float, float, float]
    eps: float
    dtype: torch.dtype

    def orthogonalize(self, matrix: Tensor) -> Tensor:
        """Return the orthogonalised matrix, in `dtype`. [m, n] → [m, n]"""
        a, b, c = self.coefficients
        # The Gram matrix is of the shorter side.
        is_tall = matrix.shape[0] > matrix.shape[1]
        x = matrix.to(self.dtype)
        x = x.T if is_tall else x
        # Its largest singular value is at most its norm. Not in place: momentum may be what is
        # orthogonalised.
        x = x / x.norm().clamp(min=self.eps)
        for _ in range(self.steps):
            gram = x @ x.T
            polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
            x = torch.addmm(x, polynomial, x, beta=a)
        return x.T if is_tall else x

    def flops(self, rows: int, columns: int) -> int:
        """Return the floating-point operations for a matrix."""
        return self.steps * iteration_flops(rows, columns)


def iteration_flops(rows: int, columns: int) -> int:
    """Return the floating-point operations of one iteration on a matrix."""
    short, long = sorted((rows, columns))
    return 2 * (2 * short * short * long) + 2 * short**3


def products_dtype(is_fp32: bool) -> torch.dtype:
    """Return the dtype of the products: bf16 as in torch, but for runs in fp32."""
    return torch.float32 if is_fp32 else torch.bfloat16


def rate_factor(adjust: AdjustLearningRate | None, rows: int, columns: int) -> float:
    """Return the factor of the learning rate for a matrix as it is stored.

    "original", the default, is √max(1, rows / columns) (Jordan); "match_rms_adamw" gives the update
    AdamW's usual root mean square, 0.2·√max(rows, columns) (arXiv 2502.16982, section 2.2).
    """
    if adjust == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))
