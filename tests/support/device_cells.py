"""The runs of one rank on a device that are compared with the plain model's, and their names."""

from __future__ import annotations

from tests.support.families import EXPERTS, FAMILIES
from tests.support.matrix import FACTORS, Cell

ONE_RANK = ("TP 1", "no SP")
STAGES = [f"ZeRO-{stage}" for stage in range(4)]
CELLS: list[tuple[Cell, str, bool]] = [
    *(
        ((*ONE_RANK, stage, "none", "no offload", "× 3", dtype), "gpt2", False)
        for stage in STAGES
        for dtype in FACTORS["dtype"]
        if stage in ("ZeRO-1", "ZeRO-2") or dtype != "bf16, fp32 accumulation"
    ),
    *(
        ((*ONE_RANK, "ZeRO-1", recompute, "no offload", "× 3", "bf16"), "gpt2", False)
        for recompute in FACTORS["recompute"]
        if recompute != "none" and "P_a" not in recompute
    ),
    ((*ONE_RANK, "ZeRO-1", "none", "optimizer offloaded", "× 3", "fp32"), "gpt2", False),
    ((*ONE_RANK, "ZeRO-2", "full, cpu", "optimizer offloaded", "× 3", "bf16"), "gpt2", False),
    ((*ONE_RANK, "ZeRO-3", "full", "all offloaded", "× 3", "bf16"), "gpt2", False),
    ((*ONE_RANK, "ZeRO-3", "full, contiguous", "all offloaded", "× 1", "fp32"), "gpt2", False),
    *(
        ((*ONE_RANK, "ZeRO-1", "none", "no offload", "× 1", "fp32"), family, False)
        for family in (*FAMILIES, *EXPERTS)
    ),
    *(
        ((*ONE_RANK, "ZeRO-2", "selective", "no offload", "× 3", "fp32"), family, True)
        for family in FAMILIES
    ),
    ((*ONE_RANK, "ZeRO-2", "selective", "no offload", "× 3", "bf16"), "gpt2", True),
    ((*ONE_RANK, "ZeRO-3", "none", "no offload", "× 1", "bf16"), next(iter(EXPERTS)), True),
]


def name_of(cell: Cell, family: str, compiled: bool) -> str:
    return " ".join((family, *cell[2:], *["compiled"] * compiled))
