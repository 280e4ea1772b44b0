"""Every way to train accumulates 16-bit products in fp32."""

from __future__ import annotations

from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch

from zero_tp.base.settings.deepspeed import DeepSpeedSettings, Zero
from zero_tp.engine.zero.zero_stages import STAGES, engine_of_stage
from zero_tp.parallel.topology import Topology

FLAGS = tuple(f"allow_{dtype}_reduced_precision_reduction" for dtype in ("bf16", "fp16"))


class Stop(Exception):
    """DeepSpeed's engine would be built now."""


@pytest.mark.parametrize("stage", STAGES)
def test_partial_sums_are_not_rounded(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`TrainingEngine` and the Trainer both initialise DeepSpeed here. Split-K stays allowed."""
    matmul = torch.backends.cuda.matmul
    monkeypatch.setattr(deepspeed, "initialize", mock.Mock(side_effect=Stop))
    before = {name: getattr(matmul, name) for name in FLAGS}
    try:
        for name in FLAGS:
            setattr(matmul, name, True)  # torch's default
        model: Any = torch.nn.Linear(1, 1)
        with pytest.raises(Stop):
            settings = DeepSpeedSettings(zero_optimization=Zero(stage=stage))
            engine_of_stage(settings, Topology(world=1)).initialize(model, [])
        assert [getattr(matmul, name + end) for name in FLAGS for end in ("", "_split_k")] == [
            False,
            True,
        ] * 2
    finally:
        for name, value in before.items():
            setattr(matmul, name, value)
