"""The dry run takes the project's own model forward and backward as one rank of the real run, without any data.

Tensors are fake ones, which have shapes but no memory, and the collectives' groups are fake too: they return at once.
Every storage is followed from its making to its end, which gives the bytes of real tensors. Model states and ZeRO's
buffers are not in it: DeepSpeed's engine does not run on fake tensors; they come from planning/zero.py.

Layers that are alike in what they see and recompute, with neighbours that are alike, take the same bytes. So a model of
few layers runs, and all L layers are their sum.

What is planned for a CPU runs on fake "cpu" tensors, not on the meta device, which decomposes attention and counts its
scores. What is planned for an accelerator runs on tensors of a simulated one, so that the code takes the branches that
it takes there; a stand-in with a fused kernel's shapes replaces attention.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from transformers import PretrainedConfig

from zero_tp.activations.memory import ActivationMemory
from zero_tp.activations.policy import RecomputePolicy
from zero_tp.constants import DTYPES
from zero_tp.data.batch import Batch
from zero_tp.models.architectures import architecture_of
from zero_tp.models.wrapper import ZeroTPForCausalLM
from zero_tp.parallel import loss as cross_entropy
from zero_tp.planning.tracking import Allocation, Allocations
from zero_tp.topology import Topology


@dataclass(frozen=True)
class Workload:
    """A workload says what the bytes and seconds of a micro-batch depend on, beside the model.

    Attributes:
        length, batch: s and b.
        dtype: "fp32", "bf16" or "fp16".
        cpu: the ranks are CPU processes; else they have accelerators.
        checkpointing: DeepSpeed's `activation_checkpointing` block.
        documents: a token sees its own document alone (`data.document_attention` "reset").
    """

    length: int
    batch: int
    tensor: int = 1
    sequence: bool = False
    dtype: str = "bf16"
    cpu: bool = False
    policy: RecomputePolicy = field(default_factory=lambda: RecomputePolicy(mode="none"))
    checkpointing: Mapping[str, Any] = field(default_factory=dict)
    documents: bool = False

    @property
    def element(self) -> int:
        """Return the bytes of an element."""
        return int(getattr(torch, DTYPES[self.dtype]).itemsize)

    @property
    def partitioned(self) -> bool:
        """Return whether checkpoints are split over TP (P_a); under SP they are split already."""
        return bool(self.checkpointing.get("partition_activations")) and self.tensor > 1 and not self.sequence

    @property
    def to_host(self) -> bool:
        """Return whether an accelerator's checkpoints wait in host memory (P_a+cpu)."""
        return bool(self.checkpointing.get("cpu_checkpointing")) and not self.cpu

    def kinds(self, windows: Sequence[int | None]) -> list[Kind]:
        """Return the kind of each layer, at the micro-batch that keeps the most.

        A micro-batch that keeps all its activations raises the peak to that of no recomputation.
        """
        again = set() if self.policy.keep_micro_batches else set(self.policy.recomputed_layers(len(windows)))
        return [Kind(window, number in again) for number, window in enumerate(windows)]


class Kind(NamedTuple):
    """A kind tells the layers of a model apart: by the window of their attention, and whether they recompute."""

    window: int | None
    recomputes: bool


class Moment(NamedTuple):
    """A moment says what exists at one point of a pass, beside parameters, finished gradients and model states.

    Attributes:
        phase: "forward" or "backward". place: the layer's number, -1 before the first and L after the last.
        activations: bytes that backward will want. transients: all others.
        gradients: elements of parameters whose gradients are done.
    """

    phase: str
    place: int
    activations: float
    transients: float
    gradients: float


# ---- one micro-batch -------------------------------------------------------------------------------------------------


def dry_run(config: PretrainedConfig, workload: Workload, *, whole: bool = False) -> list[Moment]:
    """Return every moment of one micro-batch at which something is made, forward and backward, in order.

    Args:
        config: of the model.
        whole: run all layers, instead of those of each kind that differ.
    """
    device = torch.device("cpu") if workload.cpu else accelerator()
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng([]))
        # Backward in this thread: a device that has come since the process's first backward has no thread of its own.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(FakeTensorMode())
        stack.enter_context(mock.patch.object(cross_entropy, "range", chunks_that_differ, create=True))
        if not workload.cpu:
            stack.enter_context(_Unpinned())
            stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", _attention))
            stack.enter_context(mock.patch.object(Tensor, "record_stream", lambda *_: None))
        spec = architecture_of(config).spec(config)
        kinds = workload.kinds(spec.windows)
        order = list(range(len(kinds)))
        measured = kinds
        if not whole:
            measured = shortened(kinds)
            places = {context: number for number, context in enumerate(contexts(measured))}
            order = [places[context] for context in contexts(kinds)]
        rotary = spec.rotary and replace(spec.rotary, by_length=False)  # fake positions have no greatest one
        windows = tuple(kind.window for kind in measured)
        model = ZeroTPForCausalLM(
            config,
            topology_of(workload.tensor, workload.sequence),
            source=_Unfilled(),
            dtype=getattr(torch, DTYPES[workload.dtype]),
            device=device,
            spec=replace(spec, layers=len(measured), windows=windows, rotary=rotary),
        )
        model.train()
        numbers = tuple(number for number, kind in enumerate(measured) if kind.recomputes)
        # One buffer for all checkpoints takes what they take one by one.
        settings = {**workload.checkpointing, "contiguous_memory_optimization": False}
        policy = _Numbered(**workload.policy.model_dump(), numbers=numbers)
        ActivationMemory(model, policy, settings, device)
        tokens = torch.zeros(workload.batch, workload.length, dtype=torch.long, device=device)
        parts = measure(model, Batch(tokens, tokens, *([tokens, tokens] if workload.documents else [])))
    return parts.joined(order)


@functools.cache
def accelerator() -> torch.device:
    """Return the device of the tensors that stand for an accelerator's: a simulated one, or CUDA where it is there."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    _setup_privateuseone_for_python_backend("sim")
    runtime = torch.get_device_module("sim")
    runtime.Stream = runtime.current_stream = _Stream
    runtime.stream = nullcontext
    runtime.get_rng_state = runtime.set_rng_state = lambda *_: None  # what `torch.random.fork_rng` asks every device
    return torch.device("sim")


def chunks_that_differ(start: int, stop: int, step: int) -> Sequence[int]:
    """Return the starts of the loss's first, second and last chunk.

    Each later chunk finds what the second found, another whole chunk's tensors, and takes the same bytes.
    """
    starts = range(start, stop, step)
    return [*starts[:2], *starts[2:][-1:]]


class _Unfilled:
    """This source leaves new parameters as they are."""

    def fill(self, *_: Any) -> None:
        pass


class _Numbered(RecomputePolicy):
    """This policy recomputes the layers that have these numbers."""

    numbers: tuple[int, ...]

    def recomputed_layers(self, layers: int) -> Any:
        return self.numbers


def topology_of(tensor: int, sequence: bool) -> Topology:
    """Return the topology of rank 0 in a TP group whose other ranks do not exist. It needs no process group."""
    topology = Topology(tensor, sequence, world=tensor)
    if tensor > 1:
        backend = torch._C._distributed_c10d.FakeProcessGroup._create_internal(0, tensor)
        group = dist.ProcessGroup(FakeStore(), 0, tensor)
        kind = dist.ProcessGroup.BackendType.CUSTOM
        group._set_default_backend(kind)
        for device_type in ("cpu", "cuda", "privateuseone"):
            group._register_backend(torch.device(device_type), kind, backend)
        topology.tensor_group = group
    return topology


# ---- layers by their kind --------------------------------------------------------------------------------------------


class Context(NamedTuple):
    """A context says what the bytes of a layer depend on.

    Attributes:
        before, kind, after: its kind, between those of its neighbours.
        window_begins: it is the first with its window, in backward the last to let go of that window's mask.
        recomputing_begins, recomputing_ends: it is the first, the last that recomputes: checkpoints come back from host
            memory one ahead.
    """

    before: Kind | None
    kind: Kind
    after: Kind | None
    window_begins: bool
    recomputing_begins: bool
    recomputing_ends: bool


def contexts(kinds: Sequence[Kind]) -> list[Context]:
    """Return the context of each layer."""
    around: list[Kind | None] = [None, *kinds, None]
    windows = [kind.window for kind in kinds]
    again = [number for number, kind in enumerate(kinds) if kind.recomputes]
    return [
        Context(
            around[number],
            kind,
            around[number + 2],
            windows.index(kind.window) == number,
            number in again[:1],
            number in again[-1:],
        )
        for number, kind in enumerate(kinds)
    ]


def shortened(kinds: Sequence[Kind]) -> list[Kind]:
    """Return fewer layers that have every context of the given ones and no other: of equal layers, three."""
    found, wanted = list(kinds), set(contexts(kinds))

    def cut() -> list[Kind] | None:
        for length in range(len(found) - 1, 0, -1):
            for start in range(len(found) - length + 1):
                shorter = found[:start] + found[start + length :]
                if set(contexts(shorter)) == wanted:
                    return shorter
        return None

    while (shorter := cut()) is not None:
        found = shorter
    return found


# ---- measuring -------------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """A part is a stretch of a pass: its moments, and the changes over all of it, relative to its start."""

    moments: list[Moment]
    activations: int
    transients: int
    gradients: int


@dataclass(frozen=True)
class Parts:
    """A pass is cut at its layers: before them, forward, the loss, backward (in forward's order), after them."""

    enter: Part
    forward: list[Part]
    turn: Part
    backward: list[Part]
    leave: Part

    def joined(self, order: Sequence[int]) -> list[Moment]:
        """Return the moments of a model whose layers are like those that have these numbers."""
        last = len(order)
        stretches = [(-1, self.enter), *((place, self.forward[number]) for place, number in enumerate(order))]
        stretches += [(last, self.turn), *((place, self.backward[order[place]]) for place in reversed(range(last)))]
        found: list[Moment] = []
        activations = transients = gradients = 0.0
        for place, part in [*stretches, (-1, self.leave)]:
            for one in part.moments:
                found.append(
                    Moment(
                        one.phase,
                        place,
                        activations + one.activations,
                        transients + one.transients,
                        gradients + one.gradients,
                    )
                )
            activations += part.activations
            transients += part.transients
            gradients += part.gradients
        return found


def measure(model: ZeroTPForCausalLM, batch: Batch) -> Parts:
    """Run one micro-batch forward and backward, and return its parts; each gradient goes as soon as it is done."""
    done: list[tuple[int, int]] = []
    handles: list[Any] = []
    layers = [*model.transformer.layers, model.transformer.final_norm]
    started: dict[int, int] = {}  # forward of each layer
    returned: dict[int, int] = {}  # the gradient of its input is there
    with Allocations(next(model.parameters()).device.type) as allocations:
        allocations.mark(model.parameters(), "parameters")
        allocations.mark(model.buffers(), "parameters")

        def let_go(parameter: nn.Parameter) -> None:
            parameter.grad = None
            done.append((allocations.clock, parameter.numel()))

        def begins(number: int, stream: Tensor) -> None:
            if number in started:  # recomputed
                return
            started[number] = allocations.clock
            stream.register_hook(lambda _: returned.setdefault(number, allocations.clock) and None)

        for parameter in model.parameters():
            handles.append(parameter.register_post_accumulate_grad_hook(let_go))
        for number, layer in enumerate(layers):
            handles.append(layer.register_forward_pre_hook(lambda _, inputs, number=number: begins(number, inputs[0])))
        begin = allocations.clock
        loss = model(
            batch.input_ids,
            shift_labels=batch.labels,
            position_ids=batch.position_ids,
            document_ids=batch.document_ids,
        ).loss
        turned = allocations.clock
        loss.backward()
        del loss
    for handle in handles:
        handle.remove()
    numbers = range(len(layers))
    ends = [started[number] for number in numbers] + [returned[number] for number in reversed(numbers)]
    parts = _cut(allocations, [begin, *ends, allocations.clock], turned, done)
    count = len(layers) - 1
    return Parts(parts[0], parts[1 : count + 1], parts[count + 1], parts[count + 2 : -1][::-1], parts[-1])


def _cut(allocations: Allocations, ends: Sequence[int], turned: int, done: Sequence[tuple[int, int]]) -> list[Part]:
    """Return the parts between the clocks `ends`. What is made before `turned` and gone after it is an activation."""

    def is_kept(one: Allocation) -> bool:
        return one.made <= turned and (one.gone is None or one.gone > turned)

    count = len(ends) - 1
    sizes = [[0, 0, 0] for _ in range(count)]  # transients, activations, gradients
    moments: list[list[Moment]] = [[] for _ in range(count)]

    def part_at(clock: int) -> int:
        return min(count - 1, bisect.bisect_left(ends, clock) - 1)

    events: list[tuple[int, int, Allocation | int]] = [
        (clock, sign, one) for clock, one, sign in allocations.timeline() if one.category is None and clock > ends[0]
    ]
    events += [(clock, 2, elements) for clock, elements in done]
    for clock, sign, one in sorted(events, key=lambda event: event[:2]):
        number = part_at(clock)
        size = sizes[number]
        if isinstance(one, int):
            size[2] += one
            continue
        size[is_kept(one)] += sign * one.bytes
        if sign > 0:
            phase = "forward" if clock <= turned else "backward"
            moments[number].append(Moment(phase, 0, size[1], size[0], size[2]))
    return [Part(found, size[1], size[0], size[2]) for found, size in zip(moments, sizes, strict=True)]


# ---- what the simulated device does not have ------------------------------------------------------------------------


class _Unpinned(TorchFunctionMode):
    """This mode makes ordinary memory where an accelerator asks for page-locked memory."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return function(*args, **kwargs)


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *_: Any, **options: Any) -> Any:
    """Return tensors with the shapes of a fused kernel's, in place of `scaled_dot_product_attention`.

    It would take torch's maths path on the simulated device. Fused kernels keep Q, K, V, the mask, their output and
    the logarithm of each softmax's sum (torch's flash attention); of dropout they keep a seed.
    """
    return _Fused.apply(query, key, value, mask)


class _Stream:
    """This is a stream, and an event on it, of a device on which nothing takes time."""

    def __init__(self, *_: Any) -> None:
        pass

    def record_event(self) -> _Stream:
        return self

    def wait_stream(self, _: Any) -> None:
        pass

    wait_event = wait_stream


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        output = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, mask, output, query.new_empty(query.shape[:3], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return (*(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3]), None)
