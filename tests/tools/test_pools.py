"""The pools of ranks themselves: order of results, errors, time-outs, and nothing left from one
run to the next.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.support.launched import ROOT, environment
from tests.support.pool_rank import cached
from tests.support.pools import Pool, RankError
from tests.support.settings import deepspeed_settings
from tests.support.waits import patience, wait_until
from tests.tiers import THOROUGH


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """A pool of its own: these tests kill it."""
    pool = Pool(2)
    yield pool
    pool.kill()


def describe(scale: torch.Tensor) -> dict[str, Any]:
    total = torch.full((3,), float(dist.get_rank() + 1)) * scale
    dist.all_reduce(total)
    return {
        "rank": dist.get_rank(),
        "world": dist.get_world_size(),
        "total": total,
        "threads": torch.get_num_threads(),
    }


def fail_on(failing: int) -> None:
    if dist.get_rank() == failing:
        raise ArithmeticError("a rank's own words")
    dist.all_reduce(torch.ones(1))


def fail_everywhere() -> None:
    raise KeyError("the same on all")


def hang_on(hanging: int) -> None:
    if dist.get_rank() == hanging:
        time.sleep(1000)


def die_on(dying: int) -> None:
    print("last words")
    if dist.get_rank() == dying:
        os._exit(7)
    dist.barrier()


def leave_things_behind() -> tuple[int, int]:
    import deepspeed

    before = _groups()
    kept: Any = cached("kept", lambda: dist.new_group([0, 1]))
    dist.all_reduce(torch.ones(1), group=kept)
    dist.new_group([0])
    dist.new_group([0, 1])
    deepspeed.utils.groups.mpu = object()
    deepspeed.checkpointing.PARTITION_ACTIVATIONS = True
    os.environ["LEFT_BEHIND"] = "1"
    torch.set_default_dtype(torch.float64)
    weak_proxies.append(weakref.proxy(set()))
    return before, _groups()


weak_proxies: list[Any] = []


def find_things() -> dict[str, Any]:
    import deepspeed

    return {
        "groups": _groups(),
        "mpu": deepspeed.utils.groups.mpu,
        "partition": deepspeed.checkpointing.PARTITION_ACTIVATIONS,
        "environment": os.environ.get("LEFT_BEHIND"),
        "dtype": torch.get_default_dtype(),
        "random": torch.rand(1).item(),
    }


def _groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def train_with_deepspeed(stage: int) -> float:
    import deepspeed

    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))
    engine, *_ = deepspeed.initialize(
        model=model, config=deepspeed_settings(stage, micro_batch=2, lr=0.01)
    )
    loss = torch.zeros(())
    for _ in range(3):
        loss = engine(torch.ones(2, 8)).square().mean()
        engine.backward(loss)
        engine.step()
    return loss.item()


def spoil_the_way_back(rank: int) -> None:
    if dist.get_rank() == rank:
        os.chdir = fail_everywhere  # type: ignore[assignment]


def count_threads_and_descriptors() -> tuple[int, int]:
    process = psutil.Process()
    return process.num_threads(), process.num_fds()


def test_results_come_in_the_order_of_ranks(ranks: Any) -> None:
    for world in (2, 3, 4):
        results = ranks(world).run(describe, scale=torch.tensor(2.0))
        assert [r["rank"] for r in results] == list(range(world))
        assert all(r["world"] == world and r["threads"] == 1 for r in results)
        assert all(
            torch.equal(r["total"], torch.full((3,), world * (world + 1.0))) for r in results
        )


@pytest.mark.parametrize(
    ("function", "rank", "kind", "message"),
    [
        (die_on, 1, None, r"rank 1 of 2 died in .*:die_on with exit status 7\n(.*\n)*last words"),
        pytest.param(
            fail_on,
            0,
            "ArithmeticError",
            "in fail_on\n(.*\n)*.*: a rank's own words",
            marks=THOROUGH,
        ),
        pytest.param(
            fail_on,
            1,
            "ArithmeticError",
            "in fail_on\n(.*\n)*.*: a rank's own words",
            marks=THOROUGH,
        ),
        pytest.param(
            hang_on, 1, None, r"no answer from ranks \[1\] of 2(.*\n)*.* in hang_on", marks=THOROUGH
        ),
        pytest.param(
            spoil_the_way_back,
            1,
            "TypeError",
            "rank 1 of 2 failed in .*:spoil_the_way_back",
            marks=THOROUGH,
        ),
    ],
)
def test_a_failure_of_one_rank_is_reported_and_ends_the_pool(
    pool: Pool, function: Any, rank: int, kind: str | None, message: str
) -> None:
    pool.run(describe, torch.ones(1))
    before, start = pool.pids, time.monotonic()
    with pytest.raises(RankError, match=message) as caught:
        pool.run(function, rank, timeout=5)
    assert time.monotonic() - start < patience(60)  # a collective gives up after 120
    assert (caught.value.rank, caught.value.kind) == (rank, kind)
    assert len(pool.run(describe, torch.ones(1))) == 2
    assert not {*pool.pids} & {*before}


def test_the_same_failure_on_all_ranks_keeps_the_pool(pool: Pool) -> None:
    pool.run(describe, torch.ones(1))
    before = pool.pids
    with pytest.raises(RankError, match="the same on all") as caught:
        pool.run(fail_everywhere)
    assert caught.value.kind == "KeyError"
    pool.run(describe, torch.ones(1))
    assert pool.pids == before


def test_nothing_is_left_for_the_next_function(pool: Pool) -> None:
    pool.kill()
    first = pool.run(find_things)
    # A rank outside a group has no handle of it.
    assert pool.run(leave_things_behind) == [(1, 4), (1, 3)]
    second = pool.run(find_things)
    for before, after in zip(first, second, strict=True):
        assert after == before | {"groups": 2}  # the world and the cached one
    assert pool.run(leave_things_behind) == [(2, 4), (2, 3)]


@THOROUGH
def test_engines_of_all_stages_follow_one_another_and_leave_no_threads_or_descriptors(
    pool: Pool,
) -> None:
    losses = [pool.run(train_with_deepspeed, stage) for stage in (0, 1, 2, 3, 0)]
    for both in losses:
        assert both == pytest.approx(losses[0], rel=1e-5)
    before = pool.run(count_threads_and_descriptors)
    for stage in (1, 3, 1, 3):
        pool.run(train_with_deepspeed, stage)
    assert pool.run(count_threads_and_descriptors) == before


def test_only_top_level_functions_are_sent(pool: Pool) -> None:
    with pytest.raises(ValueError, match="top level"):
        pool.run(lambda: None)


@THOROUGH
def test_ranks_end_with_pytest(tmp_path: Path) -> None:
    script = tmp_path / "session.py"
    script.write_text(
        "import time\nfrom tests.support.pools import Pool\nfrom tests.tools.test_pools import "
        "find_things\n"
        "if __name__ == '__main__':\n"
        "    pool = Pool(2)\n    pool.run(find_things)\n    print(*pool.pids, flush=True)\n    "
        "time.sleep(1000)\n"
    )
    command = [sys.executable, str(script)]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True
    ) as session:
        assert session.stdout is not None
        pids = [int(pid) for pid in session.stdout.readline().split()]
        assert len(pids) == 2
        session.send_signal(signal.SIGKILL)
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), 10, f"ranks {pids} are left", 0.1)
