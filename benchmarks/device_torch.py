"""Names that torch 2.11 lacks: benchmarks of a device also run where only that release is."""

from __future__ import annotations

import torch.distributed as dist

RENAMED = {
    "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
}


def add_new_names() -> None:
    """Give functions of `torch.distributed` their names of torch 2.13, where it has older ones."""
    for name, older in RENAMED.items():
        if not hasattr(dist, name):
            setattr(dist, name, getattr(dist, older))
