"""The loss's sums of 16-bit blocks on a CUDA device: `pytest -m cuda tests/cuda`."""

from __future__ import annotations

import pytest
import torch

from tests.support.loss_memory import blocks
from zero_tp.parallel.loss import _add_product_

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_add_in_fp32(dtype: torch.dtype) -> None:
    pairs, exact, sizes = blocks(dtype, 3)
    total = torch.zeros(24, 16, device="cuda")
    for first, second in pairs:
        _add_product_(total, first.cuda(), second.cuda())
    assert ((total.cpu() - torch.stack(exact).sum(0)).abs() <= 2 * 99 * 2**-24 * sizes).all()
