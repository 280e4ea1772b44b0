"""A simulated accelerator that computes: work that nothing orders runs as late as possible, or as
early.

It builds on zero_tp/tools/planning/simulated_accelerator.py, whose tensors are fake. Here each
storage has memory on the host, filled with NaN until something writes it, and every operation waits
in the queue of its stream. A queue runs when another stream waits for one of its events, or when
the host reads. With copies "late" computation runs at once, and the other streams only run when
somebody waits for them. With copies "early" it is the reverse. So work without an order reads NaN
or what a later tensor has left. The same holds for collectives (tests/support/nccl.py).

Freed memory returns to the stream that allocated it, whose next work overwrites it with NaN, unless
`record_stream` named another stream. The host waits for a copy from or to memory that is not
page-locked.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from transformers import AutoConfig

from tests.support.nccl import Collectives
from zero_tp.model.huggingface import ZeroTPForCausalLM
from zero_tp.tools.planning.dryrun import UninitializedSource
from zero_tp.tools.planning.simulated_accelerator import simulated_accelerator

Work = Callable[[], None]
BATCH, HIDDEN, VOCABULARY = 2, 24, 50


class Stream:
    """A queue of work. An `eager` one runs each piece at once, with all that the piece waits
    for.
    """

    def __init__(self, *, eager: bool) -> None:
        self.eager = eager
        self._queue: deque[Work] = deque()
        self._enqueued = 0

    def enqueue(self, work: Work) -> None:
        self._queue.append(work)
        self._enqueued += 1
        if self.eager:
            self.run(self._enqueued)

    def run(self, until: int) -> None:
        """Run the first `until` pieces of all that were ever enqueued."""
        while self._queue and self._enqueued - len(self._queue) < until:
            self._queue.popleft()()

    def synchronize(self) -> None:
        self.run(self._enqueued)

    def record_event(self) -> Event:
        return Event(self, self._enqueued)

    def wait_event(self, event: Work) -> None:
        self.enqueue(event)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())


@dataclass(frozen=True)
class Event:
    """A point in a stream's queue. Waiting for it runs the queue up to there."""

    stream: Stream
    until: int

    def __call__(self) -> None:
        self.stream.run(self.until)

    synchronize = __call__


@dataclass
class Memory:
    """One storage.

    Attributes:
        stream: allocated it; None for the host's.
        recorded: the streams that `record_stream` named.
        pinned: page-locked.
    """

    content: Tensor
    stream: Stream | None
    recorded: set[Stream] = field(default_factory=set)
    pinned: bool = False

    def poison(self) -> None:
        with _disable_current_modes():
            self.content.fill_(255)  # NaN in every floating dtype


class Computing(TorchDispatchMode):
    """Computes in real memory what the fake tensors only describe.

    Attributes:
        copies: "late" or "early".
        moved: copies between the device and page-locked memory that have run.
        default_stream: the stream of computation.
        most_reserved: the most bytes of the device at one time that were in use, or freed and still
            recorded for a stream. torch's caching allocator takes as much: it learns only from the
            host that a stream is done.
    """

    def __init__(self, device: torch.device, copies: str) -> None:
        super().__init__()
        assert copies in ("late", "early")
        self.device, self.copies, self.moved = device, copies, 0
        self.default_stream = self._current = Stream(eager=copies == "late")
        self.most_reserved = self._reserved = 0
        self._memories: dict[int, Memory] = {}
        self._storages: dict[int, Any] = {}
        self.collectives = Collectives(self)

    # ---- the functions of torch.get_device_module ------------------------------------------------

    def new_stream(self, *_: Any) -> Stream:
        return Stream(eager=self.copies == "early")

    def current_stream(self, *_: Any) -> Stream:
        return self._current

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    # ---- values ----------------------------------------------------------------------------------

    def alive(self) -> tuple[int, int]:
        """Bytes of the device's storages, and of the host's."""
        host = sum(
            len(memory.content) for memory in self._memories.values() if memory.stream is None
        )
        return sum(len(memory.content) for memory in self._memories.values()) - host, host

    def memory(self, tensor: Tensor) -> Memory:
        return self._memories[tensor.untyped_storage()._cdata]

    def write(self, tensor: Tensor, values: Tensor) -> None:
        """Give a fake tensor its values."""
        self.default_stream.synchronize()
        with _disable_current_modes(), torch.no_grad():
            self.real(tensor).copy_(values)

    def read(self, tensor: Tensor) -> Tensor:
        """The values of a fake tensor, after all work of the default stream."""
        self.default_stream.synchronize()
        with _disable_current_modes():
            copy: Tensor = self.real(tensor).clone()
        return copy

    def read_on_host(self, tensor: Tensor) -> Any:
        """The values of a fake tensor of the host, as they are now."""
        with _disable_current_modes():
            return self.real(tensor).tolist()

    def real(self, leaf: Any) -> Any:
        """For a fake tensor a real one in its memory; for the device the CPU; for others
        themselves.
        """
        if isinstance(leaf, torch.device):
            return torch.device("cpu")
        if not isinstance(leaf, FakeTensor):
            return leaf
        place = self.memory(leaf).content.untyped_storage()
        with _disable_current_modes():
            view: Any = torch.empty(0, dtype=leaf.dtype)
            return view.set_(place, leaf.storage_offset(), leaf.shape, leaf.stride())

    # ---- operations ------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = args, kwargs or {}
        if function is torch.ops.prim.device.default:
            return args[0].fake_device  # most of all calls, and slow below
        if function.namespace == "c10d":
            return self.collectives.issue(function, *given)
        result = function(*given[0], **given[1])
        made = [
            isinstance(each, FakeTensor) and self._allocate(each) for each in tree_leaves(result)
        ]
        if "empty" in function._schema.name or not (any(made) or function._schema.is_mutable):
            return result  # nothing is written: the others are views
        real_args, real_kwargs = tree_map(self.real, given)
        targets = [self.real(each) for each in itertools.compress(tree_leaves(result), made)]
        tensors = [each for each in tree_leaves((given, result)) if isinstance(each, FakeTensor)]
        on_host = [each for each in tensors if each.fake_device.type == "cpu"]
        moves = 0 < len(on_host) < len(tensors)
        pinned = all(self.memory(each).pinned for each in on_host)

        def work() -> None:
            self.moved += moves and pinned
            with _disable_current_modes(), torch.no_grad():
                values = tree_leaves(function(*real_args, **real_kwargs))
                for target, value in zip(targets, itertools.compress(values, made), strict=True):
                    target.copy_(value)

        if len(on_host) == len(tensors):
            work()
            return result
        self._current.enqueue(work)
        name = function._schema.name
        asynchronous = given[1].get("non_blocking") or (name == "aten::copy_" and True in args[2:])
        if moves and not (asynchronous and pinned):
            self._current.synchronize()
        return result

    def _allocate(self, tensor: FakeTensor) -> bool:
        """Whether its storage is new; then give it memory."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._memories:
            return False
        stream = None if tensor.fake_device.type == "cpu" else self._current
        with _disable_current_modes():
            memory = self._memories[address] = Memory(
                torch.empty(storage.nbytes(), dtype=torch.uint8), stream
            )
        memory.poison()

        def freed(_: Any) -> None:
            del self._memories[address], self._storages[address]
            owner = memory.stream
            if owner is None:
                # page-locked memory waits for copies by itself (torch's CachingHostAllocator)
                return
            using = memory.recorded - {owner}

            def done(stream: Stream) -> None:
                using.discard(stream)
                if not using:
                    self._reserved -= len(memory.content)
                    owner.enqueue(memory.poison)

            for stream in tuple(using):
                stream.enqueue(partial(done, stream))
            if not memory.recorded - {owner}:
                done(owner)

        if stream is not None:
            stream.enqueue(memory.poison)  # earlier work of the stream may still use the memory
            self._reserved += len(memory.content)
            self.most_reserved = max(self.most_reserved, self._reserved)
        self._storages[address] = weakref.ref(storage, freed)
        return True


class _Pinning(TorchFunctionMode):
    """Notes which memory is asked for page-locked, before `accelerator` makes it ordinary."""

    def __init__(self, computing: Computing) -> None:
        super().__init__()
        self.computing = computing

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if (kwargs or {}).get("pin_memory"):
            self.computing.memory(result).pinned = True
        return result


@contextmanager
def computing_accelerator(copies: str) -> Iterator[Computing]:
    """Make all tensors fake inside the block, and yield what has their values."""
    with ExitStack() as stack:
        device = stack.enter_context(simulated_accelerator())
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))  # as in the dry run
        stack.enter_context(FakeTensorMode())
        computing = Computing(device, copies)

        def record_stream(tensor: Tensor, stream: Stream) -> None:
            computing.memory(tensor).recorded.add(stream)

        runtime = torch.get_device_module(device)
        for place, name, stand_in in (
            (runtime, "Stream", computing.new_stream),
            (runtime, "current_stream", computing.current_stream),
            (runtime, "stream", computing.on),
            (Tensor, "record_stream", record_stream),
        ):
            stack.enter_context(mock.patch.object(place, name, stand_in))
        stack.enter_context(_Pinning(computing))
        stack.enter_context(computing)
        yield computing


# ---- small models --------------------------------------------------------------------------------


def config_of(model_type: str, layers: int, length: int, kv_heads: int) -> Any:
    sizes: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "num_hidden_layers": layers,
    }
    sizes |= {"vocab_size": VOCABULARY, "max_position_embeddings": length}
    sizes |= {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    if model_type == "gpt2":
        sizes |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    else:
        sizes |= {"intermediate_size": 32, "num_key_value_heads": kv_heads}
    config = AutoConfig.for_model(model_type, **sizes)
    config._attn_implementation = "eager"  # the simulated accelerator's fused kernel has no values
    return config


def tensor_there(tensor: Tensor, computing: Computing) -> Tensor:
    """Copy a tensor to the accelerator."""
    there = torch.empty(tensor.shape, dtype=tensor.dtype, device=computing.device)
    computing.write(there, tensor)
    return there


def model_there(model: ZeroTPForCausalLM, computing: Computing) -> ZeroTPForCausalLM:
    """Copy a model to the accelerator, for training."""
    there = ZeroTPForCausalLM(
        model.config,
        model.topology,
        source=UninitializedSource(),
        device=computing.device,
        random_device="cpu" if computing.device.type == "sim" else None,
    ).train()
    for its, ours in zip(there.parameters(), model.parameters(), strict=True):
        computing.write(its, ours)
    return there
