"""The two random streams of dropout.

Tensor-parallel ranks must drop the same elements in replicated regions (residual dropout without
SP) and different ones in split regions (attention; everything under SP): arXiv 1909.08053, section
3. With TP 2 × DP 2 and run seed S, the seeds are hashes (`Topology.seed`) of:

    rank           SHARED          PER_RANK
    DP 0, TP 0     S/0/shared      S/0/0
    DP 0, TP 1     S/0/shared      S/0/1
    DP 1, TP 0     S/1/shared      S/1/0
    DP 1, TP 1     S/1/shared      S/1/1
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zero_tp.parallel.topology import Topology

SHARED = "shared"
PER_RANK = "per_rank"


@contextmanager
def _copied_state(generator: torch.Generator) -> Iterator[None]:
    """Let the CPU's default generator draw from `generator`, by copying states."""
    # The CPU's generators cannot share a state as CUDA's can; a copied state has 5,056 bytes.
    default = torch.default_generator
    before = default.get_state()
    default.set_state(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(default.get_state())
        default.set_state(before)


@contextmanager
def _shared_state(generator: torch.Generator) -> Iterator[None]:
    """Let the CUDA device's default generator draw from `generator`, by pointing it at the same
    state.
    """
    # After the block, the draws have advanced the shared state itself, so nothing is copied back.
    default = torch.cuda.default_generators[generator.device.index]
    before = default.graphsafe_get_state()
    default.graphsafe_set_state(generator)
    try:
        yield
    finally:
        default.graphsafe_set_state(before)


class RandomStreams:
    """Two generators of one device, one of which is active inside `use`.

    torch's dropout and attention draw from the device's default generator only, so a stream's state
    is swapped into it and back.
    """

    def __init__(self, topology: Topology, seed: int, device: torch.device | str = "cpu"):
        self.device = torch.device(device)
        self._activate = _copied_state
        if self.device.type == "cuda":
            index = torch.cuda.current_device()  # also fills torch.cuda.default_generators
            self.device = torch.device(
                "cuda", index if self.device.index is None else self.device.index
            )
            self._activate = _shared_state
        self.reseed(topology, seed)

    @property
    def generator_device(self) -> torch.device:
        return self._generators[SHARED].device

    def reseed(self, topology: Topology, seed: int) -> None:
        """Restart both streams."""
        self._generators = {
            name: torch.Generator(self.device).manual_seed(
                topology.seed(seed, per_rank=name == PER_RANK)
            )
            for name in (SHARED, PER_RANK)
        }

    def use(self, name: str) -> AbstractContextManager[None]:
        """Let torch draw from the stream `name` (SHARED or PER_RANK); afterwards restore the
        default generator.
        """
        return self._activate(self._generators[name])

    def snapshot(self) -> dict[str, torch.Generator]:
        """Return copies of the streams, for `replaying`."""
        # Copies, because the streams go on drawing until backward replays a forward.
        return {name: generator.clone_state() for name, generator in self._generators.items()}

    @contextmanager
    def replaying(self, snapshot: dict[str, torch.Generator]) -> Iterator[None]:
        """Repeat the draws that followed the snapshot; then restore the streams."""
        # The snapshot is copied once more, so that it can be replayed again. The streams themselves
        # do not move, as backward is not a new draw of the run.
        current = self._generators
        self._generators = {name: state.clone_state() for name, state in snapshot.items()}
        try:
            yield
        finally:
            self._generators = current

    def state_dict(self) -> dict[str, Any]:
        return {name: generator.get_state() for name, generator in self._generators.items()}

    def are_compatible(self, states: dict[str, Any]) -> bool:
        """Return whether the states belong to generators of this kind of device."""
        return all(states[name].shape == state.shape for name, state in self.state_dict().items())

    def load_state_dict(self, states: dict[str, Any]) -> None:
        for name, generator in self._generators.items():
            generator.set_state(states[name])


class Dropout(nn.Module):
    """Dropout with probability p from one of the streams. [*] → [*].

    `torch.native_dropout` keeps a mask of one byte an element; `F.dropout`'s mask has the tensor's
    dtype.
    """

    def __init__(self, p: float, streams: RandomStreams, stream: str):
        super().__init__()
        self.p = p
        self.streams = streams
        self.stream = stream

    def forward(self, tensor: Tensor) -> Tensor:
        # Nothing is drawn either, so that evaluation does not move the streams of training.
        if self.p == 0.0 or not self.training:
            return tensor
        with self.streams.use(self.stream):
            return torch.native_dropout(tensor, self.p, True)[0]
