"""A fake world of which this process is one rank; the time and the requests of its work are
counted by part.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import partitioned_param_coordinator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import Tensor
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - it registers the backend

from zero_tp.engine.zero.ops import disable_shared_memory_collectives

COUNTED: dict[str, tuple[Any, tuple[str, ...]]] = {
    "objects": (dist, ("all_gather_object", "broadcast_object_list")),
    "groups": (dist, ("new_group",)),
    "collectives": (
        dist,
        tuple(
            name
            for name in dir(dist)
            if re.fullmatch(
                "(all_|reduce_)[a-z_]*(single|reduce|into_tensor|tensor)|broadcast|barrier", name
            )
        ),
    ),
    "waits": (Tensor, ("item", "tolist")),
}


@dataclass
class Part:
    """The time and the requests of a part of the work.

    Attributes:
        seconds, processor: wall and CPU seconds.
        store: requests to the job's store, by kind.
        objects, groups: object collectives, and new process groups.
        waits: the host's waits for a device.
        opened: files opened in the folders of the run and the corpus, by name.
    """

    seconds: float = 0.0
    processor: float = 0.0
    store: dict[str, int] = field(default_factory=dict)
    objects: int = 0
    groups: int = 0
    collectives: int = 0
    waits: int = 0
    opened: dict[str, int] = field(default_factory=dict)


class CountedStore(dist.Store):
    """A store that counts its requests and passes them on to another one."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self.asked = store
        self.store = Counter[str]()
        self.counted = True

    def _ask(self, name: str, *arguments: Any) -> Any:
        self.store[name] += 1
        return getattr(self.asked, name)(*arguments)

    def set(self, key: str, value: Any) -> None:
        self._ask("set", key, value)

    def get(self, key: str) -> bytes:
        return bytes(self._ask("get", key))

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key, amount))

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", keys))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return bytes(self._ask("compare_set", key, expected, desired))

    def deleteKey(self, key: str) -> bool:  # as torch calls it
        return bool(self._ask("delete_key", key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [bytes(value) for value in self._ask("multi_get", keys)]

    def has_extended_api(self) -> bool:
        return True

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self._ask("wait", keys, *timeout)


class Clocks:
    """Measure the parts of one rank's work: `with clocks.part(NAME): …`."""

    def __init__(self, folder: Path, store: CountedStore) -> None:
        self.parts: dict[str, Part] = {}
        self._folder = str(folder)
        self._store = store
        self._now = Part()
        self._main = threading.get_ident()
        sys.addaudithook(self._opened)
        for what, (owner, names) in COUNTED.items():
            self._count(what, owner, names)

    def _count(self, what: str, owner: Any, names: tuple[str, ...]) -> None:
        for name in names:
            called: Callable[..., Any] = getattr(owner, name)

            def counting(
                *arguments: Any,
                called: Callable[..., Any] = called,
                name: str = name,
                **options: Any,
            ) -> Any:
                if name == "broadcast":  # nobody sends, and uninitialised memory may hold NaN
                    tensor = arguments[0] if arguments else options["tensor"]
                    # zero.Init sends a weight's bytes.
                    if tensor.is_floating_point() or tensor.dtype == torch.uint8:
                        tensor.zero_()
                if threading.get_ident() == self._main:
                    setattr(self._now, what, getattr(self._now, what) + 1)
                return called(*arguments, **options)

            setattr(owner, name, counting)

    def _opened(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).startswith(self._folder):
            name = re.sub(r"states_\w+|[0-9a-f]{16}|step_\d+", "…", Path(str(arguments[0])).name)
            self._now.opened[name] = self._now.opened.get(name, 0) + 1

    @contextlib.contextmanager
    def part(self, name: str, times: int = 1) -> Iterator[None]:
        """Measure the block, which repeats its work `times` times."""
        self._now = Part()
        self._store.store = Counter()
        start_time = time.perf_counter()
        spent = time.process_time()
        try:
            yield
        finally:
            self._now.seconds = (time.perf_counter() - start_time) / times
            self._now.processor = (time.process_time() - spent) / times
            self._now.store = dict(self._store.store)
            self.parts[name], self._now = self._now, Part()


def exchanged(
    called: Callable[..., Any], _: Path, output: Tensor, given: Tensor, *sizes: Any, **options: Any
) -> Any:
    """Stand in for an all-to-all with parts of different sizes, which fake groups lack."""
    if sizes:
        output.zero_()
        return None
    return called(output, given, **options)


def from_the_first(_: Callable[..., Any], run: Path, words: list[Any]) -> None:
    """Stand in for the first rank's broadcast: each rank has already computed the objects."""


STAND_INS: dict[str, Callable[..., Any]] = {
    "all_to_all_single": exchanged,
    "broadcast_object_list": from_the_first,
}


@contextlib.contextmanager
def fake_world(ranks: int, rank: int, folder: Path) -> Iterator[tuple[Clocks, CountedStore]]:
    """Make this process a rank of a fake world in the block; yield its clocks and the job's store.

    Args:
        folder: contains the run's directory, `run`, and all files whose opening is counted.
    """
    (folder / "run").mkdir()
    store = CountedStore(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {"RANK": str(rank), "LOCAL_RANK": "0"}))
        dist.init_process_group("fake", store=store, rank=rank, world_size=ranks)
        stack.callback(dist.destroy_process_group)
        disable_shared_memory_collectives()
        deepspeed.init_distributed("fake", verbose=False)
        for name, stand_in in STAND_INS.items():
            called = getattr(dist, name)
            stack.enter_context(
                mock.patch.object(dist, name, partial(stand_in, called, folder / "run"))
            )
        # Results of fake groups equal no rank's and may be non-finite.
        check = "assert_ints_same_as_other_ranks"
        stack.enter_context(
            mock.patch.object(partitioned_param_coordinator, check, lambda numbers: None)
        )
        stack.enter_context(
            mock.patch.object(DeepSpeedZeroOptimizer_Stage3, "has_overflow", lambda *_: False)
        )
        yield Clocks(folder, store), store
