"""Patches two loops of DeepSpeed 0.19.8's ZeRO-3: gathers and reductions become matrices with one row per rank.

DeepSpeed loops in Python over each rank's part of each parameter, at each gather and reduction: a million views a step
at 4,096 ranks for a model of 8 B. These functions give the same bits with a few copies per parameter.

Measured 2026-11-27 on a fake world of 512 ranks (the case `tp1-zero3` of `benchmarks.scale`), three runs in turns: a
step takes 0.7 to 1.0 s of a busy CPU core instead of 2.0 to 2.4 s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.comm import coalesced_collectives
from deepspeed.runtime.zero import stage3
from deepspeed.runtime.zero.partition_parameters import AllGatherCoalescedHandle, ZeroParamStatus
from torch import Tensor

VERSION = "0.19.8"
"""The DeepSpeed version whose functions are patched."""
_original_wait = AllGatherCoalescedHandle.wait
_original_reduce_scatter = coalesced_collectives.reduce_scatter_coalesced


def patch_zero3_loops() -> list[str]:
    """Patch DeepSpeed's ZeRO-3 in this process.

    Returns:
        A log line if this is another version of DeepSpeed, which keeps its own loops.
    """
    if deepspeed.__version__ != VERSION:
        return [
            f"ZeRO-3: DeepSpeed {deepspeed.__version__} loops over each rank's part, which takes long at "
            f"hundreds of ranks; the faster loops of zero_tp are for {VERSION}"
        ]
    AllGatherCoalescedHandle.wait = wait
    stage3.reduce_scatter_coalesced = reduce_scatter_coalesced
    return []


def wait(handle: Any, handle_dependency: bool = True) -> None:
    """Wait for a gather of several parameters and set their values, like `AllGatherCoalescedHandle.wait`.

    Args:
        handle_dependency: tell the allocator that the current stream reads the gathered buffer; otherwise keep the
            buffer alive in DeepSpeed's `data_buffer`.
    """
    if handle.complete or handle.quantization or handle.use_secondary_tensor:
        _original_wait(handle, handle_dependency)
        return
    handle.allgather_handle.wait()
    first, offset = handle.partitions[0], 0
    rows = first.as_strided((handle.world_size, len(first)), (len(first), 1))
    for param in handle.params:
        assert param.ds_status == ZeroParamStatus.INFLIGHT, param.ds_summary()
        size = param.ds_tensor.ds_numel
        gathered = (
            rows[:, offset : offset + size].clone(memory_format=torch.contiguous_format).view(-1)[: param.ds_numel]
        )
        param.data = gathered.view(param.ds_shape).to(param.ds_tensor.dtype)
        param.ds_status = ZeroParamStatus.AVAILABLE
        offset += size
    if not get_accelerator().is_synchronized_device():
        if handle_dependency:
            rows.record_stream(get_accelerator().current_stream())
        else:
            AllGatherCoalescedHandle.data_buffer.append([rows])
    handle.complete = True


@torch.no_grad()
def reduce_scatter_coalesced(tensors: Sequence[Tensor], group: Any = None) -> list[Tensor]:
    """Return this rank's part of the mean of each tensor over the group, like DeepSpeed's function of this name.

    A part has ceil(elements / ranks) elements, fewer at the end.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if len({tensor.dtype for tensor in tensors}) != 1:
        own_parts: list[Tensor] = _original_reduce_scatter(tensors, group)
        return own_parts
    sizes = [-(-tensor.numel() // ranks) for tensor in tensors]
    if len(tensors) == 1 and tensors[0].numel() % ranks == 0:
        rows = tensors[0].view(ranks, sizes[0])
    else:
        rows, offset = tensors[0].new_empty(ranks, sum(sizes)), 0
        for tensor, size in zip(tensors, sizes, strict=True):
            full, rest = divmod(tensor.numel(), size or 1)
            flat = tensor.view(-1)
            rows[:full, offset : offset + size] = flat[: full * size].view(full, size)
            rows[full : full + 1, offset : offset + rest] = flat[full * size :]
            offset += size
    rows.div_(ranks)
    own = rows[rank]
    coalesced_collectives._torch_reduce_scatter_fn(rows.view(-1), own, group=group)
    parts = zip(own.split(sizes), tensors, sizes, strict=True)
    return [part[: max(0, tensor.numel() - rank * size)] for part, tensor, size in parts]
