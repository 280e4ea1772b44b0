"""The ranks of an evaluation: joined by torch alone, without DeepSpeed."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from zero_tp.errors import UserError, first_line
from zero_tp.topology import Topology

TIMEOUT = timedelta(minutes=30)


def connect(tensor_parallel: int, device: str | None, local_rank: int) -> tuple[str, Topology]:
    """Join the process group that the environment names, and make the topology's. Collective.

    Sequence parallelism is off: without gradients it saves no memory that counts.

    Args:
        device: `cuda` or `cpu`; None: `cuda` if there is one.

    Returns:
        This rank's device, and its place.
    """
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind not in ("cuda", "cpu"):
        raise UserError(f"--device {kind}: with several ranks cuda or cpu, each rank takes its own")
    if kind == "cuda":
        try:
            torch.cuda.set_device(local_rank)
        except (RuntimeError, AssertionError) as error:
            raise UserError(f"--device cuda: local rank {local_rank} has none ({first_line(error)})") from error
        kind = f"cuda:{local_rank}"
    dist.init_process_group("nccl" if kind != "cpu" else "gloo", timeout=TIMEOUT)
    return kind, Topology(tensor_parallel, timeout=TIMEOUT)
