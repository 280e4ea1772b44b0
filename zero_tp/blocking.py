"""Cache blocking: on CPUs, elementwise work that takes several operations goes over pieces that a core's cache holds.

Whole tensors of a step do not fit it, so that each operation alone would read and write memory.
"""

from __future__ import annotations

from torch import Tensor

CACHE_ELEMENTS = 2**18
"""Elements of one piece: 1 MiB in fp32."""


def cache_rows(matrix: Tensor, elsewhere: int | None = None) -> list[slice]:
    """Return the rows of each piece of `matrix` [n, m].

    Args:
        elsewhere: elements of a piece on other devices; by default all.
    """
    rows, columns = matrix.shape
    most = CACHE_ELEMENTS if matrix.device.type == "cpu" else elsewhere
    step = max(1, rows if most is None else most // max(1, columns))
    return [slice(start, start + step) for start in range(0, rows, step)]
