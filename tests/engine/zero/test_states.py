"""Restored optimizer states have the device and type that torch's step gives them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from zero_tp.engine.zero.fragments import Fragment
from zero_tp.engine.zero.states import OptimizerStates
from zero_tp.parallel.spans import Span


def restored(device: str, **settings: Any) -> dict[str, Any]:
    """Return the state of one flat master on `device` after a resume at step 3."""
    flat = torch.nn.Parameter(torch.zeros(8, device=device))
    optimizer = torch.optim.AdamW([flat], **settings)
    states = OptimizerStates([Fragment("weight", Span(0, 0, 8), flat)], optimizer)
    for kind in ("exp_avg", "exp_avg_sq"):
        states.get(states.fragments[0], kind)
    states.set_steps(3)
    return dict(optimizer.state[flat])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({"fused": True}, "meta"), ({"capturable": True}, "meta"), ({"foreach": True}, "cpu")],
)
def test_update_count_is_on_the_device_that_the_kernel_reads(
    settings: dict[str, bool], expected: str
) -> None:
    """`meta` stands for CUDA: a fake CUDA tensor would accept a count on the host, the fused
    kernel does not.
    """
    state = restored("meta", **settings)
    assert {name: value.device.type for name, value in state.items()} == {
        "step": expected,
        "exp_avg": "meta",
        "exp_avg_sq": "meta",
    }


@pytest.mark.parametrize("fused", [True, False])
def test_update_count_is_as_torch_makes_it(fused: bool) -> None:
    flat = torch.nn.Parameter(torch.zeros(8))
    optimizer = torch.optim.AdamW([flat], fused=fused)
    for _ in range(3):
        flat.grad = torch.ones(8)
        optimizer.step()
    made: Tensor = optimizer.state[flat]["step"]
    ours: Tensor = restored("cpu", fused=fused)["step"]
    assert (made.dtype, made.shape, made.device, made.item()) == (
        ours.dtype,
        ours.shape,
        ours.device,
        ours.item(),
    )
