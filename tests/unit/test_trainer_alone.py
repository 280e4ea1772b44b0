"""What transformers' Trainer is told before any ranks are there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from zero_tp import devices
from zero_tp.errors import UserError
from zero_tp.topology import Topology


def test_a_script_without_a_launcher_is_one_line() -> None:
    from zero_tp.trainer.engine import see_data_parallel_ranks

    with pytest.raises(UserError, match=r"^ZeroTPTrainer: no ranks are connected; start the script with deepspeed or"):
        see_data_parallel_ranks(SimpleNamespace(), Topology(world=1))


@pytest.mark.parametrize("cudnn", [False, True])
def test_training_takes_the_back_ends_of_a_run(cudnn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from zero_tp.trainer import TensorParallel

    class Theirs:
        args = SimpleNamespace(device=torch.device("cuda", 0))

        def train(self, steps: int, *, resume: str) -> tuple[int, str, bool]:
            return steps, resume, torch.backends.cuda.cudnn_sdp_enabled()

    class Ours(TensorParallel, Theirs):
        def __init__(self) -> None:
            pass

    monkeypatch.setattr(devices, "prefers_cudnn", lambda device: cudnn)
    assert torch.backends.cuda.cudnn_sdp_enabled()
    assert Ours().train(3, resume="there") == (3, "there", cudnn)
    assert torch.backends.cuda.cudnn_sdp_enabled(), "and they are as before"
