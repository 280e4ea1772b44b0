"""A run checks itself: gradients are summed, what ranks hold alike is equal, a computation gives the same again, and
neither loss nor gradients leave their bounds unseen.

Where these fail silently elsewhere, weights drift apart and the run trains another model.
"""

from __future__ import annotations

import hashlib
import socket
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero_tp.config.schema import Spike
from zero_tp.errors import UserError
from zero_tp.parallel.agreement import from_all, octets
from zero_tp.parallel.collectives import all_gather
from zero_tp.parallel.gradients import GradientHooks
from zero_tp.parallel.layout import Replicated, layout_of
from zero_tp.topology import Topology, name_ranks
from zero_tp.zero.engine import ZeroEngine
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


# --- what is held or computed twice -----------------------------------------------------------------------------------


@torch.no_grad()
def check_duplicates(zero: ZeroEngine, step: int) -> None:
    """Check, just before the update of `step`, that DP ranks hold the same bits of what they hold alike.

    That is the weights under ZeRO-0, -1 and -2 (after the update each rank gets them anew), masters and states too
    under ZeRO-0, and the weights that stay gathered under ZeRO-3. One all-reduce over DP of 16 bytes a tensor and one
    over the world of a number; where they differ, an all-gather over the world of 8 bytes a tensor.

    Raises:
        UserError: on every rank of the job, naming a tensor and the ranks that hold what most do not; all of its DP
            group where there is no majority.
    """
    topology = zero.topology
    if topology.data == 1:
        return
    held = [(name, digest(tensor)) for name, tensor in zero.duplicates()]
    numbers = [number for _, number in held]
    if not held or _alike(numbers, topology, zero.model):
        return
    for index, digests in enumerate(_gathered(numbers, zero.model)):
        for members in topology.data_members():
            odd = _odd_ones({rank: digests[rank] for rank in members})
            if odd:
                who = "differs between" if len(odd) == len(members) else "is not what the others hold on"
                raise UserError(
                    f"before the update of step {step} parameter {held[index][0]} {who} {name_ranks(odd)}, and "
                    "data-parallel ranks hold it alike: memory or a message was corrupted; go on from a checkpoint "
                    "before that, and look at the hardware of these ranks"
                )


def check_repeated(run: Callable[[], Tensor], model: nn.Module, streams: Any, step: int) -> None:
    """Check that a micro-batch gives each parameter's gradient twice, bit for bit, before it is reduced over DP.

    Neither run changes gradients, weights or random streams.

    Args:
        run: computes the micro-batch's loss, with a graph.

    Raises:
        UserError: on every rank of the job, naming the ranks whose gradients differ, and the first parameter.
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    before, found = streams.state_dict(), []
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # accelerators: sums in a fixed order where there are some
    try:
        for _ in range(2):
            streams.load_state_dict(before)
            gradients = torch.autograd.grad(run(), [parameter for _, parameter in named], allow_unused=True)
            found.append([0 if gradient is None else digest(gradient) for gradient in gradients])
    finally:
        streams.load_state_dict(before)
        torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])
    pairs = enumerate(zip(*found, strict=True))
    first = next((index for index, (one, other) in pairs if one != other), -1)
    of_ranks = _gathered([first], model)[0]
    odd = [rank for rank, index in enumerate(of_ranks) if index >= 0]
    if odd:
        raise UserError(
            f"before step {step} the gradient of {named[of_ranks[odd[0]]][0]} differs between two runs of one "
            f"micro-batch on {name_ranks(odd)}, and others may: a fault of its hardware, or a kernel that adds in no "
            "fixed order; go on elsewhere, or set zero_tp.training.guard_gradients to false"
        )


def digest(tensor: Tensor) -> int:
    """Return 63 bits of a tensor's SHA-256."""
    return int.from_bytes(hashlib.sha256(octets(tensor)).digest()[:8], "little") >> 1


def _alike(numbers: Sequence[int], topology: Topology, model: nn.Module) -> bool:
    """Return on every rank of the job whether the ranks of each DP group have the same positive numbers."""
    own = torch.tensor(numbers, dtype=torch.int64, device=next(model.parameters()).device)
    ends = torch.stack((own, -own))
    dist.all_reduce(ends, dist.ReduceOp.MAX, group=topology.data_group)
    apart = (ends[0] != -ends[1]).any().to(torch.int32)
    dist.all_reduce(apart, dist.ReduceOp.MAX)
    return not apart.item()


def _gathered(numbers: Sequence[int], model: nn.Module) -> list[list[int]]:
    """Return each number as all ranks of the job have it, in the order of ranks. One all-gather."""
    device = next(model.parameters()).device
    own = torch.tensor(numbers, dtype=torch.int64, device=device).unsqueeze(0)
    group = dist.group.WORLD if dist.is_initialized() else None
    return [[int(number) for number in row] for row in all_gather(own, group).T.tolist()]


def _odd_ones(digests: dict[int, int]) -> list[int]:
    """Return the ranks that differ from more than half of all; all ranks where nothing is held by as many."""
    if len(set(digests.values())) == 1:
        return []
    usual, count = Counter(digests.values()).most_common(1)[0]
    return [rank for rank, held in digests.items() if 2 * count <= len(digests) or held != usual]


# --- spikes -----------------------------------------------------------------------------------------------------------


class SpikeBound:
    """A bound on loss and gradient norm follows the last steps, as OLMo-core's skip-step optimizer has it.

    A step is a spike when its loss or norm is more than so many standard deviations above the mean of the steps in the
    window. The window takes spikes in too, so that a new level is soon no spike; it judges when it is half full.

    Attributes:
        told: what the last spike was, in words.
    """

    def __init__(self, settings: Spike, recent: list[list[float]]):
        """Take `recent`, [loss, norm] of the last steps, which is kept up to date: it goes with a checkpoint."""
        self.settings, self.recent, self.told = settings, recent, ""

    def exceeded(self, loss: float, norm: float) -> bool:
        """Tell whether a step of this finite loss and norm is a spike, and remember it."""
        limits = (self.settings.loss, self.settings.grad_norm)
        self.told = ""
        if len(self.recent) >= max(2, self.settings.window // 2):
            for name, value, limit, before in zip(
                ("loss", "gradient norm"), (loss, norm), limits, zip(*self.recent, strict=True), strict=True
            ):
                mean, deviation = statistics.fmean(before), statistics.stdev(before)
                if limit is not None and value - mean > limit * deviation:
                    self.told = (
                        f"its {name} {value:.4g} is above {mean + limit * deviation:.4g}, "
                        f"{limit:g} standard deviations over the mean of the {len(before)} steps before"
                    )
                    break
        self.recent.append([loss, norm])
        del self.recent[: -self.settings.window]
        return bool(self.told)


# --- where a number that is not finite comes from ---------------------------------------------------------------------


class NonfiniteTrace:
    """A trace finds the first output of a layer, or gradient, that is not finite on any rank. It looks at all of them.

    It changes no number. Looking waits for the device at every layer.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.begin()
        for name, module in model.named_modules():
            if name:
                module.register_forward_hook(self._looking(name))
        for name, parameter in model.named_parameters():
            parameter.register_hook(self._gradient(f"the gradient of {name}"))

    def begin(self) -> None:
        """Begin a step."""
        self.looked, self.found = 0, ""

    def _look(self, tensor: Tensor, what: str) -> None:
        self.looked += 1
        if not self.found and tensor.is_floating_point() and not bool(tensor.detach().isfinite().all()):
            kind = "nan" if bool(tensor.detach().isnan().any()) else "inf"
            self.found = f"{self.looked} {what} ({kind})"

    def _looking(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(module: nn.Module, _: Any, output: Any) -> None:
            for tensor in _tensors(output):
                self._look(tensor, f"the output of {name}")
                if tensor.requires_grad:
                    tensor.register_hook(self._gradient(f"the gradient of the output of {name}"))

        return look

    def _gradient(self, what: str) -> Callable[[Tensor], None]:
        def look(gradient: Tensor) -> None:
            self._look(gradient, what)

        return look

    def told(self) -> str:
        """Return the first finding of the step over all ranks, in words. Collective over all ranks."""
        found = from_all((self.found, socket.gethostname()))
        there = [(*text.partition(" ")[::2], rank, host) for rank, (text, host) in enumerate(found) if text]
        if not there:
            return "every output and every local gradient is finite: a sum over ranks is not"
        _, what, rank, host = min(there, key=lambda each: int(each[0]))
        return f"the first that is not finite is {what} on rank {rank} ({host})"


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, (tuple, list)):
        for value in output:
            yield from _tensors(value)
