"""A micro-batch is run twice where accelerators add in a fixed order, and only there."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed import accelerator
from torch import Tensor, nn

from zero_tp.base.errors import UserError
from zero_tp.engine.guards import check_reproducible
from zero_tp.run.process import connect
from zero_tp.run.process.environment import RankEnvironment


class NoStreams:
    """Random streams of a model without dropout."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {}


def mode() -> tuple[bool, ...]:
    """Whether deterministic algorithms are on, only warned of, and which back ends attention may
    take.
    """
    cuda = torch.backends.cuda
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        torch._C._get_overrideable_sdp_enabled(),
    )


STRICT = (True, False, True, True, True, False, False)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("before", [(False, False), (True, True), (True, False)])
def test_a_repeated_run_is_deterministic(before: tuple[bool, bool], fails: bool) -> None:
    """In forward and in backward; afterwards everything is as before, whatever happened."""
    model, seen = nn.Linear(3, 1), []

    def run() -> Tensor:
        seen.append(mode())
        if fails:
            raise RuntimeError("the run")
        output: Tensor = model(torch.ones(2, 3)).sum()
        output.register_hook(lambda _: seen.append(mode()))
        return output

    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    try:
        outside = mode()
        if fails:
            with pytest.raises(RuntimeError, match="the run"):
                check_reproducible(run, model, NoStreams(), 1)
        else:
            check_reproducible(run, model, NoStreams(), 1)
        assert mode() == outside and outside[:2] == before
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [STRICT] * (1 if fails else 4)


@pytest.mark.parametrize("value", [None, ":16:8", ":4096:8", ":4096:2:16:8"])
def test_cublas_gives_the_same_again(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "CUBLAS_WORKSPACE_CONFIG"
    monkeypatch.setenv(name, value or "")
    if value is None:
        monkeypatch.delenv(name)
    if value == ":4096:2:16:8":
        with pytest.raises(
            UserError,
            match=f"^{name} is ':4096:2:16:8', with which zero_tp.training.guard_gradients",
        ):
            connect.use_deterministic_cublas()
    else:
        connect.use_deterministic_cublas()
        assert os.environ[name] == (value or ":4096:8")


@pytest.mark.parametrize(("kind", "guarded"), [("cuda", True), ("cuda", False), ("cpu", True)])
def test_a_run_sets_the_workspace_before_cuda_begins(
    kind: str, guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first question to the device, whether it has the run's dtype, comes after it."""
    name, values = "CUBLAS_WORKSPACE_CONFIG", []

    def asks_device() -> bool:
        values.append(os.environ.get(name))
        raise UserError("no further")

    device = SimpleNamespace(
        device_name=lambda: kind, is_fp16_supported=asks_device, is_bf16_supported=asks_device
    )
    monkeypatch.setattr(accelerator, "get_accelerator", lambda: device)
    monkeypatch.setenv(name, "")  # and is as before when the test ends
    monkeypatch.delenv(name)
    config: Any = SimpleNamespace(
        zero_tp=SimpleNamespace(training=SimpleNamespace(guard_gradients=guarded)),
        deepspeed_config=lambda: {"bf16": {"enabled": True}},
        dtype="bf16",
    )
    with pytest.raises(UserError, match="no further"):
        connect.connect_deepspeed(config, RankEnvironment.of_this_process())
    assert values == [":4096:8" if kind == "cuda" and guarded else None]
