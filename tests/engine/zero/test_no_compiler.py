"""The default optimizer compiles nothing, at any stage and dtype."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from tests.support.pools import Pools
from tests.support.settings import fp16_supported, gpt2_config, rows, settings_of
from tests.tiers import in_tiers
from zero_tp.base.settings.optimizer import choose_implementation
from zero_tp.parallel.topology import Topology


def first_step(stage: int, dtype: str) -> tuple[str, float]:
    """Return the optimizer's module and the loss of a step in which torch can build no
    extension.
    """
    from zero_tp.engine.engine import TrainingEngine

    settings: dict[str, Any] = settings_of(stage, dtype) | {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}
    }
    choose_implementation(settings)
    config = gpt2_config(0.1, n_layer=1, vocab_size=50, n_positions=8)
    with (
        fp16_supported(),
        patch(
            "torch.utils.cpp_extension.load", side_effect=AssertionError("something is compiled")
        ),
    ):
        engine = TrainingEngine.from_dict(config, Topology(), settings, seed=1)
        loss = engine.train_step(rows(engine))
    return type(engine.deepspeed_engine.basic_optimizer).__module__, loss


CASES = [
    *((stage, dtype) for stage in range(4) for dtype in ("fp32", "bf16", "fp16")),
    *((stage, "bf16_fp32_accumulation") for stage in (1, 2, 3)),
]


@pytest.mark.parametrize(
    ("stage", "dtype"), in_tiers(CASES, [(0, "bf16"), (3, "fp32"), (1, "bf16_fp32_accumulation")])
)
def test_a_default_adam_needs_no_compiler(ranks: Pools, stage: int, dtype: str) -> None:
    for module, loss in ranks(2).run(first_step, stage, dtype):
        assert module.startswith("torch.optim") and 2 < loss < 6
