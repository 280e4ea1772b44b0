"""torch's flight recorder counts the collectives of each process group, under NCCL and gloo."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from torch._C import _distributed_c10d


def collective_progress(names: Sequence[str]) -> str:
    """Return how many collectives of each group were enqueued and completed: `TP 42/41, DP 7/7`; "" before the first.

    The recorder is on unless `TORCH_FR_BUFFER_SIZE` is 0. Reading its counters takes 50 µs and waits for no device.

    Args:
        names: of this process's groups in the order of their creation, by which the recorder numbers them.
    """
    groups: dict[str, Any] = {}
    # A build with NCCL records NCCL's collectives apart from those of the other backends.
    for dump in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        if hasattr(_distributed_c10d, dump):
            groups |= json.loads(getattr(_distributed_c10d, dump)(False)).get("pg_status", {})
    known = dict(enumerate(names))
    return ", ".join(
        f"{known.get(int(number), f'group {number}')} "
        f"{status['last_enqueued_collective']}/{status['last_completed_collective']}"
        for number, status in sorted(groups.items(), key=lambda group: int(group[0]))
    )
