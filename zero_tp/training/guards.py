"""A run checks itself: gradients that have to be summed are summed, and replicas stay equal.

Where these fail silently elsewhere, norm weights drift apart over TP and the run trains another model.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero_tp.errors import UserError
from zero_tp.parallel.gradients import GradientHooks
from zero_tp.parallel.layout import Replicated, layout_of
from zero_tp.topology import Topology
from zero_tp.zero.states import partition_of

# On an accelerator, kernels that add in no fixed order may round one rank's gradient otherwise than another's. This is
# what they may add up to between two checks, relative to the parameter's largest element: about one last bit of a
# 16-bit weight, and for fp32 what Adam makes of rounding in a thousand steps of 1e-7. A gradient that is not summed
# moves a norm's weights apart by a multiple of the learning rate each step, which passes either within a few steps.
ACCELERATOR_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def check_hooks(hooks: GradientHooks) -> None:
    """Check, after the first backward, that every gradient which has to be summed was.

    Raises:
        RuntimeError: names a parameter whose partial gradient was not summed over TP.
    """
    silent = [name for name, fired in hooks.fired.items() if not fired]
    if silent:
        raise RuntimeError(
            f"the gradient of {silent[0]} was not summed over tensor parallel ranks: its hook did not fire"
        )


@torch.no_grad()
def check_replicas(model: nn.Module, topology: Topology, step: int = 0) -> None:
    """Check that replicated parameters are equal over TP: bit for bit on the CPU, else within ACCELERATOR_TOLERANCE.

    One small all-reduce a parameter. Under ZeRO-3 each DP rank compares its own partition, which TP ranks cut alike.

    Raises:
        UserError: on every rank of a TP group that differs, naming the first such parameter.
    """
    if topology.tensor == 1:
        return
    for name, parameter in model.named_parameters():
        if not isinstance(layout_of(parameter), Replicated):
            continue
        apart, allowed = _spread(partition_of(parameter), topology)
        if not apart <= allowed:  # nan is not
            when = f"after step {step}" if step else "at the start"
            raise UserError(
                f"{when} parameter {name} differs between tensor parallel ranks by {apart:.3g} (allowed: "
                f"{allowed:.3g}): the replicas have drifted apart and are no longer one model; go on from a checkpoint "
                "before that, and report this"
            )


def _spread(held: Tensor, topology: Topology) -> tuple[float, float]:
    """Return (largest difference of an element over the TP group, the one allowed)."""
    local = held.float().flatten()
    if local.numel() == 0:
        return 0.0, 0.0
    ends = torch.stack((local, -local))
    dist.all_reduce(ends, dist.ReduceOp.MAX, group=topology.tensor_group)
    high, low = ends[0], -ends[1]
    tolerance = 0.0 if held.device.type == "cpu" else ACCELERATOR_TOLERANCE[held.dtype]
    return (high - low).max().item(), tolerance * ends.max().item()
