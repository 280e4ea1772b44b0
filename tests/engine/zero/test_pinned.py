"""The tensors that a real engine page-locks are those that the planner rounds up to powers of
two.
"""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.papers.engines import drawn, engine_of, run_model_size, small_config
from tests.support.pools import Pools
from tests.tiers import in_tiers
from zero_tp.tools.planning.plan_settings import ZeroSettings, page_locked
from zero_tp.tools.planning.zero import ZeroMemory

RANKS = 2
OPTIMIZER = 'zero_optimization.offload_optimizer={"device":"cpu"}'
PARAMETERS = 'zero_optimization.offload_param={"device":"cpu"}'
PAGEABLE = 'zero_optimization.offload_optimizer={"device":"cpu","pin_memory":false}'
TWICE, FP32 = "gradient_accumulation_steps=2", "bf16.enabled=false"
WIDE = "data_types.grad_accum_dtype=fp32"
CASES = [
    (1, (OPTIMIZER,)),
    (1, (OPTIMIZER, TWICE, "zero_optimization.overlap_comm=true")),
    (2, (OPTIMIZER, TWICE)),
    (2, (OPTIMIZER, TWICE, "zero_optimization.overlap_comm=true")),
    (2, (OPTIMIZER, FP32)),
    (2, (OPTIMIZER, TWICE, WIDE)),
    (2, (PAGEABLE,)),
    (3, (OPTIMIZER,)),
    (3, (OPTIMIZER, PARAMETERS, TWICE, "zero_optimization.sub_group_size=20000")),
    (3, (PARAMETERS, FP32)),
]


def config_of(stage: int, changes: tuple[str, ...]) -> Any:
    sizes = ("zero_tp.model.n_layer=2", "zero_tp.model.n_embd=64")
    return small_config(RANKS, *sizes, f"zero_optimization.stage={stage}", *changes)


def page_locked_by(config: Any) -> list[int]:
    """The bytes of each tensor that is page-locked after two steps; a CPU's own accelerator
    page-locks none.
    """
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    alive: list[tuple[weakref.ref[Any], int]] = []

    def pin_memory(
        _: Any, tensor: Tensor, make_copy: bool = True, match_shape: bool = True
    ) -> Tensor:
        locked = tensor.clone() if make_copy else torch.empty_like(tensor)
        alive.append((weakref.ref(locked.untyped_storage()), locked.nbytes))
        return locked

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CPU_Accelerator, "pin_memory", pin_memory)
        engine, batches = engine_of(config), drawn(config)
        for _ in range(2):
            engine.train_step(batches)
        gc.collect()
        return sorted(size for storage, size in alive if storage() is not None)


@pytest.mark.parametrize(("stage", "changes"), in_tiers(CASES, [CASES[2]]))
def test_an_engine_page_locks_what_the_planner_rounds_up(
    ranks: Pools, stage: int, changes: tuple[str, ...]
) -> None:
    config = config_of(stage, changes)
    settings = ZeroSettings.of(config, cpu=False)
    memory = ZeroMemory(run_model_size(config).parameters, settings)
    found, _ = ranks(RANKS).run(page_locked_by, config)
    assert found == sorted(memory.pinned)
    assert bool(found) == (PAGEABLE not in changes)
    on_cpu = ZeroMemory(memory.parameters, ZeroSettings.of(config, cpu=True))
    assert memory.states.host - on_cpu.states.host == sum(map(page_locked, found)) - sum(found)


def test_torch_page_locks_powers_of_two() -> None:
    header = Path(torch.__file__).parent / "include/ATen/core/CachingHostAllocator.h"
    assert "return c10::llvm::PowerOf2Ceil(size);" in header.read_text(), (
        "torch allocates page-locked memory otherwise"
    )
    assert [page_locked(size) for size in (1, 3, 4, 5, 2**30, 2**30 + 1)] == [
        1,
        4,
        4,
        8,
        2**30,
        2**31,
    ]
