"""What many micro-batches of bf16 gradients add up to, as docs/config.md says of
`grad_accum_dtype`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.compare import grid
from tests.support.pools import Pools
from tests.support.settings import deepspeed_settings, gpt2_config
from tests.tiers import THOROUGH
from zero_tp.engine.engine import TrainingEngine


def norm_of_equal_batches(stage: int, is_wide: bool, count: int) -> float:
    """The norm of the mean gradient of `count` equal micro-batches."""
    changes: dict[str, Any] = {"data_types": {"grad_accum_dtype": "fp32"}} if is_wide else {}
    settings = deepspeed_settings(stage, micro_batch=1, accumulation=count, dtype="bf16", **changes)
    engine = TrainingEngine.from_dict(gpt2_config(), grid(1, False), settings, seed=1)
    tokens = torch.arange(9)[None]
    engine.train_step([(tokens[:, :-1], tokens[:, 1:])] * count)
    return engine.gradient_norm


@THOROUGH
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_lose_their_last_bits_unless_they_are_added_in_fp32(
    ranks: Pools, stage: int
) -> None:
    count = 256

    def error(is_wide: bool) -> float:
        one, many = (
            ranks(2).run(norm_of_equal_batches, stage, is_wide, each)[0] for each in (1, count)
        )
        return abs(many / one - 1)

    assert error(True) < 1e-3 < 5e-3 < error(False)
