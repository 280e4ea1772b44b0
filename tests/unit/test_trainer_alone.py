"""What transformers' Trainer is told before any ranks are there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from zero_tp.errors import UserError
from zero_tp.topology import Topology


def test_a_script_without_a_launcher_is_one_line() -> None:
    from zero_tp.trainer.engine import see_data_parallel_ranks

    with pytest.raises(UserError, match=r"^ZeroTPTrainer: no ranks are connected; start the script with deepspeed or"):
        see_data_parallel_ranks(SimpleNamespace(), Topology(world=1))
