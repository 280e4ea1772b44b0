"""The report of a hang names the ranks that the others wait for."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from tests.support.compare import grid
from tests.support.pools import Pools
from tests.support.waits import patience
from tests.tiers import THOROUGH, in_tiers
from zero_tp.parallel.expert_exchange import AllToAllExperts
from zero_tp.run.process.hang_report import (
    RankStatus,
    describe_frame,
    describe_hang,
    dump_flight_recorder,
)

HERE = RankStatus(
    count=90,
    phase="step",
    step=17,
    doing="backward",
    host="a",
    seconds=300.0,
    frame="all_reduce",
    waiting=True,
)
BEHIND = replace(HERE, count=89, doing="forward", frame="read", waiting=False, host="b")


@pytest.mark.parametrize(
    ("statuses", "silent", "who"),
    [
        # The rank with the fewest marks is waited for.
        ([HERE, BEHIND, HERE], set(), "ranks 0 and 2 wait for rank 1"),
        # Of ranks at the same mark, the one that does not wait.
        ([HERE, replace(HERE, waiting=False, frame="sleep")], set(), "rank 0 waits for rank 1"),
        ([HERE, replace(HERE, waiting=None, frame="")], set(), "no rank is behind another"),
        ([HERE, HERE], set(), "no rank is behind another"),
        ([HERE], set(), ""),
        # Silent ranks, whatever their last marks are.
        (
            [HERE, HERE, BEHIND, replace(HERE, count=91)],
            {2, 3},
            "ranks 0 and 1 wait for ranks 2 and 3",
        ),
    ],
)
def test_ranks_wait_for_those_that_are_behind_or_silent(
    statuses: list[RankStatus], silent: set[int], who: str
) -> None:
    *lines, last = describe_hang(
        dict(enumerate(statuses)), silent, len(statuses), HERE, 300
    ).splitlines()
    limit = "5 minutes (the limit: zero_tp.training.timeout_minutes)"
    assert last == f"error: no progress in step 17 for {limit}{f': {who}' if who else ''}"
    are_silent = [line.endswith(", no heartbeat since then") for line in lines]
    assert are_silent == [rank in silent for rank in range(len(statuses))]
    for rank, (line, status) in enumerate(zip(lines, statuses, strict=True)):
        where = (
            f"in step 17, {status.doing} for 300 s{f', at {status.frame}' if status.frame else ''}"
        )
        assert line.startswith(f"rank {rank} ({status.host}) {where}")


def test_the_flight_recorder_dumps_where_torch_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert dump_flight_recorder(3) == []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    assert dump_flight_recorder(3) == []
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(_distributed_c10d, "_dump_nccl_trace", lambda: b"trace", raising=False)
    monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(tmp_path / "trace_"))
    assert dump_flight_recorder(3) == [f"the flight recorder of rank 3 is in {tmp_path}/trace_3"]
    assert (tmp_path / "trace_3").read_bytes() == b"trace"
    monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(tmp_path / "none" / "trace_"))
    assert dump_flight_recorder(3)[0].endswith("(No such file or directory)")


class Event:
    """One of a device that waits for the sizes of the other rank."""

    def synchronize(self) -> None:
        time.sleep(patience(0.8))


def frame_in_an_exchange(work: str) -> tuple[str, bool]:
    """Two expert groups of two ranks, of which the second rank comes late: what a watchdog sees of
    this rank meanwhile.
    """
    topology = grid(1, False, 2)
    seen: list[tuple[str, bool]] = []

    def look(thread: int) -> None:
        time.sleep(patience(0.4))
        seen.append(describe_frame(thread))

    watching = threading.Thread(target=look, args=[threading.get_ident()])
    ends = torch.tensor([1, 2, 3, 4], dtype=torch.int32)
    experts = None if work == "sizes" else AllToAllExperts(ends, topology.expert_group)
    watching.start()
    if topology.expert_rank == 1:
        time.sleep(patience(0.8))
    experts = experts or AllToAllExperts(ends, topology.expert_group)
    if work == "copy" and topology.expert_rank == 0:
        experts._splits._copy_done = Event()
    experts.start_dispatch(torch.ones(4, 3)).wait()
    watching.join()
    return seen[0]


@THOROUGH
@pytest.mark.parametrize("work", in_tiers(["sizes", "rows", "copy"], ["rows"]))
def test_a_rank_that_waits_for_experts_names_their_group(ranks: Pools, work: str) -> None:
    found = ranks(4).run(frame_in_an_exchange, work, timeout=60)
    for rank, (text, waiting) in enumerate(found):
        assert waiting == (rank % 2 == 0), text
        group = f" in the expert group of ranks {rank} and {rank + 1}"
        assert text.endswith(group) if waiting else "group" not in text
