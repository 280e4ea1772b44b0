"""A checker that finds what a GPU may run in another order: two accesses to the same bytes that
nothing orders.

It uses the happens-before relation, as torch.cuda._sanitizer does on CUDA:

- Each operation belongs to the current stream, each collective to a stream of its group, as under
  NCCL.
- If two streams access the same bytes and one of them writes, an event, a wait or a synchronisation
  must order them.
- Freed memory returns to the stream that allocated it. A new tensor on that stream may reuse it, so
  other streams that used it must be ordered before, or `record_stream` must name them.

The checker cannot tell host memory from device memory: it does not check what the host reads of an
offloaded copy.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup, Work
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.simulated_steps import READS, SHAPES

Clock = Counter["RecordingStream"]
"""How many operations of each stream are known to be done."""

READ = "read a value"
LIBRARIES = ("deepspeed", "zero_tp", "tests")
WRAPPERS = (
    *(__name__, "tests.support.asynchronous_accelerator"),
    *("deepspeed.utils.nvtx", "deepspeed.comm.comm", "deepspeed.comm.torch"),
)


class RecordingStream:
    """A stream that records which operations come before its next one: its own, and those it has
    waited for.
    """

    def __init__(self, checker: StreamChecker, name: str = "", **_: Any) -> None:
        self.checker, self.name = checker, name or f"side stream {len(checker.streams)}"
        self.clock: Clock = checker.host.copy()
        checker.streams.append(self)

    def wait_stream(self, other: RecordingStream) -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: RecordingEvent) -> None:
        self.clock |= event.clock

    def record_event(self, event: RecordingEvent | None = None) -> RecordingEvent:
        event = event or RecordingEvent(self.checker)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.checker.host_waits("synchronize a stream", self.clock)

    def query(self) -> bool:
        return self.clock <= self.checker.host


class RecordingEvent:
    """An event that records what its stream had to do. It counts as done only once the host has
    waited for it.
    """

    def __init__(self, checker: StreamChecker, **_: Any) -> None:
        self.checker = checker
        self.clock: Clock = Counter()

    def record(self, stream: RecordingStream | None = None) -> None:
        self.clock = (stream or self.checker.current).clock.copy()

    def wait(self, stream: RecordingStream | None = None) -> None:
        (stream or self.checker.current).wait_event(self)

    def synchronize(self) -> None:
        self.checker.host_waits("synchronize an event", self.clock)

    def query(self) -> bool:
        return self.clock <= self.checker.host


@dataclass(frozen=True)
class Access:
    """A read or write of bytes start … end of a storage by the `number`-th operation of a
    stream.
    """

    stream: RecordingStream
    number: int
    start: int
    end: int
    writes: bool
    what: str

    def comes_before(self, clock: Clock) -> bool:
        return clock[self.stream] >= self.number


@dataclass
class Memory:
    """One storage: the stream that allocated it, and the streams that `record_stream` named."""

    owner: RecordingStream
    accesses: list[Access] = field(default_factory=list)
    recorded: set[RecordingStream] = field(default_factory=set)


class StreamChecker(TorchDispatchMode):
    """Finds accesses that nothing orders, and counts how often the host waits.

    Attributes:
        faults: descriptions of two accesses that nothing orders.
        waits: how often the host has waited, by (kind of wait, library/file.py:function).
        streams: all streams, the default one first. current: the stream of the next operation.
        host: what the host knows to be done.
        ignored_wait: library/file.py:function whose waits for collectives are ignored, as if they
            were missing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.faults: dict[str, None] = {}
        self.waits: Counter[tuple[str, str]] = Counter()
        self.host: Clock = Counter()
        self.streams: list[RecordingStream] = []
        self.default = self.current = RecordingStream(self, "the default stream")
        self._groups: dict[str, RecordingStream] = {}
        self._memories: dict[int, Memory] = {}
        self._storages: dict[int, Any] = {}
        self._free: dict[RecordingStream, list[Access]] = {}
        self._works: dict[int, tuple[Work, RecordingEvent, str, Any]] = {}
        self.ignored_wait = ""

    @contextmanager
    def use(self, stream: RecordingStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def host_waits(self, what: str, clock: Clock) -> None:
        self.waits[what, _caller()[0]] += 1
        self.host |= clock

    def device_synchronizes(self) -> None:
        for stream in self.streams:
            self.host |= stream.clock
        self.waits["synchronize the device", _caller()[0]] += 1

    def unjoined(self) -> list[str]:
        """Return the streams and collectives that neither the default stream nor the host has
        waited for.
        """
        clock = self.default.clock | self.host
        behind = [each.name for each in self.streams if clock[each] < each.clock[each]]
        return behind + [f"{what} is not waited for" for _, _, what, _ in self._works.values()]

    # ---- operations ------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        space, name = function._schema.name.split("::")
        if space == "c10d":
            self._communicate(name, function._schema, args, result)
            return result
        if name in READS | SHAPES:
            self.host_waits(READ, self.current.clock)
        new = [
            tensor
            for returned, value in zip(
                function._schema.returns, _values(function._schema, result), strict=True
            )
            for tensor in tree_leaves(value)
            if returned.alias_info is None
        ]
        copies_shape = name.startswith("new_") or name.endswith("_like")
        read, written = [], [] if "empty" in name else new
        named = {
            argument.name: value
            for argument, value in zip(function._schema.arguments, args, strict=False)
        }
        for argument in function._schema.arguments:
            tensors = tree_leaves((named | kwargs).get(argument.name))
            if argument.alias_info is None:
                read += [] if copies_shape else tensors
            elif argument.alias_info.is_write:
                written += tensors
        self._run(self.current, name, read, written, new)
        return result

    def _run(
        self,
        stream: RecordingStream,
        name: str,
        read: list[Any],
        written: list[Any],
        new: list[Any],
    ) -> None:
        stream.clock |= self.host
        stream.clock[stream] += 1
        for tensor in new:
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self._memories:
                self._reuse(stream, name)
        for writes, tensors in ((False, read), (True, written)):
            for tensor in tensors:
                if isinstance(tensor, Tensor) and tensor.layout == torch.strided and tensor.numel():
                    self._access(stream, name, tensor, writes)
        for tensor in new:
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                self.memory(tensor, stream)

    def _access(self, stream: RecordingStream, name: str, tensor: Tensor, writes: bool) -> None:
        size, first = tensor.element_size(), int(tensor.storage_offset())
        last = first + sum(
            (length - 1) * stride
            for length, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        access = Access(
            stream,
            stream.clock[stream],
            first * size,
            (last + 1) * size,
            writes,
            f"{name} in {':'.join(_caller())}",
        )
        memory = self.memory(tensor, stream)
        kept = []
        for other in memory.accesses:
            overlap = other.start < access.end and access.start < other.end
            if overlap and (writes or other.writes) and not other.comes_before(stream.clock):
                self._fault(access, other)
            covered = access.start <= other.start and other.end <= access.end
            if not (covered and (writes or (other.stream is stream and not other.writes))):
                kept.append(other)
        memory.accesses = [*kept, access]

    def _fault(self, access: Access, other: Access, done: str = "") -> None:
        verb = done or ("writes" if access.writes else "reads")
        before = "wrote" if other.writes else "read"
        message = (
            f"{access.what} on {access.stream.name} {verb} what {other.what} on "
            f"{other.stream.name} {before}"
        )
        self.faults[f"{message}: nothing orders them"] = None

    def memory(self, tensor: Tensor, owner: RecordingStream) -> Memory:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self._memories:
            self._memories[address] = Memory(owner)
            self._storages[address] = weakref.ref(storage, partial(self._freed, address))
        return self._memories[address]

    def _freed(self, address: int, _: Any) -> None:
        memory = self._memories.pop(address)
        del self._storages[address]
        for access in memory.accesses:
            # The allocator keeps the memory until each recorded stream has finished its work of
            # this moment.
            if access.stream is not memory.owner and not any(
                access.comes_before(each.clock) for each in memory.recorded
            ):
                self._free.setdefault(memory.owner, []).append(access)

    def _reuse(self, stream: RecordingStream, name: str) -> None:
        """Check that a new tensor may get any memory freed on its stream."""
        for other in self._free.pop(stream, []):
            if not other.comes_before(stream.clock):
                access = Access(stream, 0, 0, 0, True, f"{name} in {':'.join(_caller())}")
                self._fault(access, other, "may get the freed memory of")

    # ---- collectives -----------------------------------------------------------------------------

    def _communicate(self, name: str, schema: Any, args: Any, result: Any) -> None:
        """Record a collective: it starts after the caller's stream, which continues without
        waiting for it.
        """
        names = [argument.name for argument in schema.arguments]
        group = ProcessGroup.unbox(args[names.index("process_group")]).group_name
        if group not in self._groups:
            self._groups[group] = RecordingStream(self, f"the stream of group {group}")
        stream = self._groups[group]
        stream.clock |= self.current.clock
        # c10d's schemas have no alias annotations: arguments named input… are read, all others
        # written.
        read = tree_leaves(
            [value for key, value in zip(names, args, strict=False) if key.startswith("input")]
        )
        written = tree_leaves(
            [value for key, value in zip(names, args, strict=False) if not key.startswith("input")]
        )
        self._run(stream, name, read, written, [])
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.ScriptObject):
                work = Work.unbox(leaf)
                # The tensors stay alive until the wait, as in torch.
                self._works[id(work)] = (
                    work,
                    stream.record_event(),
                    f"{name} in {':'.join(_caller())}",
                    (read, written),
                )

    def waited(self, work: Work) -> None:
        if id(work) in self._works and _caller()[0] != self.ignored_wait:
            self.current.wait_event(self._works.pop(id(work))[1])


def _values(schema: Any, result: Any) -> Any:
    return result if len(schema.returns) > 1 else (result,) * len(schema.returns)


def _caller() -> tuple[str, str]:
    """Return (library/file.py:function, line) of the innermost caller in one of the libraries."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.partition(".")[0] in LIBRARIES and name not in WRAPPERS:
            return f"{name.replace('.', '/')}.py:{frame.f_code.co_name}", str(frame.f_lineno)
        frame = frame.f_back
    return "?", "0"
