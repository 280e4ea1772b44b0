"""Describe a hang: each rank's status, its Python frame, and which ranks wait for which."""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import zero_tp
from zero_tp.parallel.topology import name_ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_LIBRARY = Path(zero_tp.__file__).resolve().parent
_WAITING = (f"torch{os.sep}distributed", f"deepspeed{os.sep}comm")


@dataclass(frozen=True)
class RankStatus:
    """Status of a rank, as it is written to the job's store.

    Attributes:
        count: number of marks. All ranks set the same marks in the same order, so the rank with the
            fewest is behind.
        phase, step, doing: start, step, save or evaluation; its step; the work inside it.
        seconds: since the last mark.
        message_number: of the messages that this rank has written.
        frame: the main thread's function, once half of the phase's limit has passed.
        waiting: whether that function waits for other ranks; None until then.
    """

    count: int = 0
    phase: str = "start"
    step: int = 0
    doing: str = ""
    host: str = ""
    seconds: float = 0.0
    message_number: int = 0
    frame: str = ""
    waiting: bool | None = None

    def describe(self) -> str:
        step = f" {self.step}" if self.step else ""
        doing = f", {self.doing}" if self.doing else ""
        where = f"{self.phase}{step}{doing}"
        return (
            f"({self.host}) in {where} for {self.seconds:.0f} "
            f"s{f', at {self.frame}' if self.frame else ''}"
        )


def describe_hang(
    statuses: Mapping[int, RankStatus],
    silent_ranks: set[int],
    world: int,
    own: RankStatus,
    limit: float,
) -> str:
    """Return a line for each rank, and a last line that says which ranks wait for which.

    Args:
        silent_ranks: ranks that have stopped writing.
        own: status of this rank, whose limit has passed.
        limit: in seconds.
    """
    lines = [
        f"rank {rank} "
        f"{statuses[rank].describe()}{', no heartbeat since then' if rank in silent_ranks else ''}"
        for rank in sorted(statuses)
    ]
    # Counts and not steps: all ranks set the same marks in the same order, so counts compare also
    # inside a step.
    least = min(status.count for status in statuses.values())
    fewest_marks = [rank for rank in sorted(statuses) if statuses[rank].count == least]
    # A silent rank is the reason wherever it was last. Else, of the ranks at the earliest mark,
    # those that do not wait for others. Else all of them.
    behind = (
        sorted(silent_ranks)
        or [rank for rank in fewest_marks if statuses[rank].waiting is False]
        or fewest_marks
    )
    waiting = sorted(set(range(world)) - set(behind))
    if world == 1:
        who = ""
    elif len(statuses) == 1:
        who = ": no other rank has reported its state"
    elif waiting:
        who = (
            f": {name_ranks(waiting)} wait{'s' if len(waiting) == 1 else ''} for "
            f"{name_ranks(behind)}"
        )
    else:
        who = ": no rank is behind another"
    where = f"{own.phase}{f' {own.step}' if own.step else ''}"
    limits = f"{limit / 60:.3g} minutes (the limit: zero_tp.training.timeout_minutes)"
    return "\n".join([*lines, f"error: no progress in {where} for {limits}{who}"])


def describe_frame(thread: int) -> tuple[str, bool]:
    """Return the function that a thread runs, and whether it waits for other ranks.

    The text also names its caller in this library, and the ranks that exchange rows for experts:
    `wait, called by forward (…) in the expert group of ranks 0 and 1`.
    """
    collects = gc.isenabled()
    # Python 3.11 hangs in a collection that begins while frames are listed (CPython's issue 106883)
    gc.disable()
    frame = sys._current_frames().get(thread)
    if collects:
        gc.enable()
    if frame is None:
        return "the end of its thread", False
    name = frame.f_code.co_name
    file = frame.f_code.co_filename
    # A collective in Python is in torch.distributed or deepspeed.comm; an asynchronous one is
    # waited for in `wait`.
    waiting = name == "wait" or any(part in file for part in _WAITING)
    suffix = ""
    group = _find_expert_group(frame)
    if group is not None:
        # The host waits for the sizes of an exchange, and so for the ranks that it exchanges with.
        waiting |= name == "synchronize"
        ranks = sys.modules["torch.distributed"].get_process_group_ranks(group)
        suffix = f" in the expert group of {name_ranks(ranks)}" if waiting else ""
    # The innermost frame is often in torch, which says little. The caller in this library says what
    # the rank is doing.
    for caller, line in traceback.walk_stack(frame):
        path = Path(caller.f_code.co_filename)
        if path.is_relative_to(_LIBRARY):
            place = f"({path.relative_to(_LIBRARY.parent)}:{line})"
            called_by = "" if caller is frame else f", called by {caller.f_code.co_name}"
            return f"{name}{called_by} {place}{suffix}", waiting
    return f"{name} ({Path(file).name}){suffix}", waiting


def _find_expert_group(frame: FrameType) -> ProcessGroup | None:
    """Return the group of the exchange with experts that a frame is a part of."""
    for caller, _ in traceback.walk_stack(frame):
        # `PendingRows` and `AllToAllExperts` of parallel/expert_exchange.py.
        group: ProcessGroup | None = getattr(caller.f_locals.get("self"), "exchange_group", None)
        path = Path(caller.f_code.co_filename)
        is_outside = path.is_relative_to(_LIBRARY) and path.parent != _LIBRARY / "parallel"
        if is_outside or group is not None:
            return None if is_outside else group
    return None


def dump_flight_recorder(rank: int) -> list[str]:
    """Write NCCL's flight recorder; return a line that names the file.

    The path is torch's own, where `torchfrtrace` looks.
    """
    distributed = sys.modules.get("torch.distributed")
    if (
        distributed is None
        or not distributed.is_initialized()
        or "nccl" not in distributed.get_backend()
    ):
        return []
    # By hand, because torch writes it only after its own timeout, which comes later
    # (`WATCHDOG_MARGIN_SECONDS`). By then this report has ended the job.
    from torch._C._distributed_c10d import _dump_nccl_trace  # type: ignore[attr-defined]

    path = Path(
        f"{os.environ.get('TORCH_NCCL_DEBUG_INFO_TEMP_FILE', '/tmp/nccl_trace_rank_')}{rank}"
    )
    try:
        path.write_bytes(_dump_nccl_trace())
    except OSError as error:
        return [f"the flight recorder could not be written to {path} ({error.strerror})"]
    return [f"the flight recorder of rank {rank} is in {path}"]
