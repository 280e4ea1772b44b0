"""A simulated accelerator that computes: its streams run what they are given as late as they may, or as early.

It stands on zero_tp/planning/accelerator.py, whose tensors are fake. Here each of their storages has memory on the
host, full of NaN until something is written, and every operation waits in the queue of its stream. A queue goes on when
another stream waits for one of its events, or when somebody reads. So work that nothing orders comes at the wrong end:
too late (copies "late": their streams stand still until they have to move, computation runs at once) or too early
(copies "early": they run at once, and computation stands still), and finds NaN or what another has left. The same holds
for collectives (tests/support/nccl.py).

Memory that is freed goes back to the stream that it was made on, whose next work writes into it: here NaN; unless
`record_stream` has lent it to another stream. A copy from or to memory that is not page-locked holds up the host.
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
from zero_tp.huggingface import ZeroTPForCausalLM
from zero_tp.planning.accelerator import accelerator
from zero_tp.planning.dryrun import Unfilled

Work = Callable[[], None]
BATCH, HIDDEN, VOCABULARY = 2, 24, 50


class Stream:
    """A queue of work. With `at_once` it runs what it is given, and all that this waits for, as soon as it comes."""

    def __init__(self, *, at_once: bool) -> None:
        self.at_once = at_once
        self._queue: deque[Work] = deque()
        self._given = 0

    def give(self, work: Work) -> None:
        self._queue.append(work)
        self._given += 1
        if self.at_once:
            self.run(self._given)

    def run(self, until: int) -> None:
        """Run the first `until` pieces of all that was ever given."""
        while self._queue and self._given - len(self._queue) < until:
            self._queue.popleft()()

    def synchronize(self) -> None:
        self.run(self._given)

    def record_event(self) -> Event:
        return Event(self, self._given)

    def wait_event(self, event: Work) -> None:
        self.give(event)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())


@dataclass(frozen=True)
class Event:
    """A point in a stream's queue. Another stream runs the queue up to it as work, the host with `synchronize`."""

    stream: Stream
    until: int

    def __call__(self) -> None:
        self.stream.run(self.until)

    synchronize = __call__


@dataclass
class Memory:
    """Of one storage.

    Attributes:
        stream: where it was made; None for the host's.
        lent: what `record_stream` was told.
        pinned: page-locked.
    """

    content: Tensor
    stream: Stream | None
    lent: set[Stream] = field(default_factory=set)
    pinned: bool = False

    def spoil(self) -> None:
        with _disable_current_modes():
            self.content.fill_(255)  # NaN in every floating dtype


class Computing(TorchDispatchMode):
    """Does in real memory what goes on among fake tensors.

    Attributes:
        copies: "late" or "early".
        moved: copies between the device and page-locked memory that have run.
        default_stream: the stream of computation.
        most_reserved: bytes of the device that were in use, or freed and still lent to a stream, at the same time: what
            torch's caching allocator takes, which learns from the host alone that a stream has come so far.
    """

    def __init__(self, device: torch.device, copies: str) -> None:
        super().__init__()
        assert copies in ("late", "early")
        self.device, self.copies, self.moved = device, copies, 0
        self.default_stream = self._current = Stream(at_once=copies == "late")
        self.most_reserved = self._reserved = 0
        self._memories: dict[int, Memory] = {}
        self._storages: dict[int, Any] = {}
        self.collectives = Collectives(self)

    # ---- what torch.get_device_module gives --------------------------------------------------------------------------

    def new_stream(self, *_: Any) -> Stream:
        return Stream(at_once=self.copies == "early")

    def current_stream(self, *_: Any) -> Stream:
        return self._current

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    # ---- values ------------------------------------------------------------------------------------------------------

    def alive(self) -> tuple[int, int]:
        """Bytes of the device's storages, and of the host's."""
        host = sum(len(memory.content) for memory in self._memories.values() if memory.stream is None)
        return sum(len(memory.content) for memory in self._memories.values()) - host, host

    def memory(self, tensor: Tensor) -> Memory:
        return self._memories[tensor.untyped_storage()._cdata]

    def write(self, tensor: Tensor, values: Tensor) -> None:
        """Give a fake tensor its values."""
        self.default_stream.synchronize()
        with _disable_current_modes(), torch.no_grad():
            self.real(tensor).copy_(values)

    def read(self, tensor: Tensor) -> Tensor:
        """The values of a fake tensor, once the default stream has come so far."""
        self.default_stream.synchronize()
        with _disable_current_modes():
            copy: Tensor = self.real(tensor).clone()
        return copy

    def read_on_host(self, tensor: Tensor) -> Any:
        """The values of a fake tensor of the host, as they are now."""
        with _disable_current_modes():
            return self.real(tensor).tolist()

    def real(self, leaf: Any) -> Any:
        """For a fake tensor a real one in its memory; for the device the CPU; for others themselves."""
        if isinstance(leaf, torch.device):
            return torch.device("cpu")
        if not isinstance(leaf, FakeTensor):
            return leaf
        place = self.memory(leaf).content.untyped_storage()
        with _disable_current_modes():
            view: Any = torch.empty(0, dtype=leaf.dtype)
            return view.set_(place, leaf.storage_offset(), leaf.shape, leaf.stride())

    # ---- operations --------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = args, kwargs or {}
        if function is torch.ops.prim.device.default:
            return args[0].fake_device  # most of all calls, and slow below
        if function.namespace == "c10d":
            return self.collectives.issue(function, *given)
        result = function(*given[0], **given[1])
        made = [isinstance(each, FakeTensor) and self._comes(each) for each in tree_leaves(result)]
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
        self._current.give(work)
        name = function._schema.name
        asynchronous = given[1].get("non_blocking") or (name == "aten::copy_" and True in args[2:])
        if moves and not (asynchronous and pinned):
            self._current.synchronize()
        return result

    def _comes(self, tensor: FakeTensor) -> bool:
        """Whether its storage is new, which then has memory from now on."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._memories:
            return False
        stream = None if tensor.fake_device.type == "cpu" else self._current
        with _disable_current_modes():
            memory = self._memories[address] = Memory(torch.empty(storage.nbytes(), dtype=torch.uint8), stream)
        memory.spoil()

        def goes(_: Any) -> None:
            del self._memories[address], self._storages[address]
            owner = memory.stream
            if owner is None:
                return  # page-locked memory waits for copies by itself (torch's CachingHostAllocator)
            using = memory.lent - {owner}

            def done(stream: Stream) -> None:
                using.discard(stream)
                if not using:
                    self._reserved -= len(memory.content)
                    owner.give(memory.spoil)

            for stream in tuple(using):
                stream.give(partial(done, stream))
            if not memory.lent - {owner}:
                done(owner)

        if stream is not None:
            stream.give(memory.spoil)  # work that it has been given before may still use the memory
            self._reserved += len(memory.content)
            self.most_reserved = max(self.most_reserved, self._reserved)
        self._storages[address] = weakref.ref(storage, goes)
        return True


class _Pinning(TorchFunctionMode):
    """Notes which memory is asked for page-locked, before `accelerator` makes it ordinary."""

    def __init__(self, computing: Computing) -> None:
        super().__init__()
        self.computing = computing

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if (kwargs or {}).get("pin_memory"):
            self.computing.memory(result).pinned = True
        return result


@contextmanager
def computing_accelerator(copies: str) -> Iterator[Computing]:
    """Inside, tensors are fake, those of the Computing's device and the host's, and it has their values."""
    with ExitStack() as stack:
        device = stack.enter_context(accelerator())
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))  # as in the dry run
        stack.enter_context(FakeTensorMode())
        computing = Computing(device, copies)

        def record_stream(tensor: Tensor, stream: Stream) -> None:
            computing.memory(tensor).lent.add(stream)

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


# ---- small models ---------------------------------------------------------------------------------------------------


def config_of(model_type: str, layers: int, length: int, kv_heads: int) -> Any:
    sizes: dict[str, Any] = {"hidden_size": HIDDEN, "num_attention_heads": 4, "num_hidden_layers": layers}
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
    there = ZeroTPForCausalLM(model.config, model.topology, source=Unfilled(), device=computing.device).train()
    for its, ours in zip(there.parameters(), model.parameters(), strict=True):
        computing.write(its, ours)
    return there
