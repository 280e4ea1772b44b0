"""ZeRO-3 with optimizer and parameters on NVMe trains as with them on the CPU, bit for bit:
`pytest -m nvme`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.pools import Pools
from tests.support.settings import deepspeed_settings, gpt2_config
from zero_tp.parallel.topology import Topology


def train(
    offload: dict[str, dict[str, Any]], dtype: str
) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """(loss, gradient norm) of each step, and this rank's fp32 masters."""
    from zero_tp.engine.engine import TrainingEngine
    from zero_tp.engine.zero.states import MASTER

    # DeepSpeed keeps what is smaller than its I/O alignment in memory: these matrices are swapped.
    config = gpt2_config(0.1, n_embd=256, vocab_size=1001, n_positions=16)
    topology = Topology(2, True)
    settings = deepspeed_settings(
        3,
        micro_batch=2,
        accumulation=2,
        dtype=dtype,
        optimizer={"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}},
        zero_optimization={"stage": 3, **offload},
    )
    engine = TrainingEngine.from_dict(config, topology, settings, seed=3)
    generator = torch.Generator().manual_seed(1)
    steps = []
    for _ in range(3):
        windows = (
            torch.randint(0, 1001, (8, 17), generator=generator)
            .chunk(2)[topology.data_rank]
            .chunk(2)
        )
        loss = engine.train_step([(window[:, :-1], window[:, 1:]) for window in windows])
        steps.append((loss, engine.gradient_norm))
    states = engine.zero.states()
    return steps, {each.name: states.get(each, MASTER).clone() for each in states.fragments}


@pytest.mark.nvme
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "blocks", [["offload_optimizer"], ["offload_param"], ["offload_optimizer", "offload_param"]]
)
def test_nvme_trains_as_the_cpu_does(
    ranks: Pools, tmp_path: Path, blocks: list[str], dtype: str
) -> None:
    on_cpu = {"offload_optimizer": {"device": "cpu"}}
    on_nvme: dict[str, dict[str, Any]] = on_cpu | {
        block: {"device": "nvme", "nvme_path": str(tmp_path)} for block in blocks
    }
    if "offload_param" in on_nvme:
        on_nvme["offload_param"]["buffer_size"] = (
            1_000_000  # five such buffers a rank; by default 2 GB in fp32
        )
    expected = ranks(4).run(train, on_cpu, dtype)
    # The first time DeepSpeed compiles its I/O.
    found = ranks(4).run(train, on_nvme, dtype, timeout=300)
    assert any(tmp_path.rglob("*")), "nothing was swapped"
    for (steps, masters), (right_steps, right_masters) in zip(found, expected, strict=True):
        assert steps == right_steps
        assert masters.keys() == right_masters.keys()
        for name, master in right_masters.items():
            assert torch.equal(masters[name], master), name
