"""Dropout draws from two random streams.

Tensor-parallel ranks repeat some regions (residual dropout without SP) and must drop the same elements there; they
split others (attention; everything under SP) and must drop different ones (arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zero_tp.topology import Topology

SHARED, PER_RANK = "shared", "per_rank"


@contextmanager
def _copied_state(generator: torch.Generator) -> Iterator[None]:
    """Let the CPU's default generator draw what `generator` would, by copies of states."""
    default = torch.default_generator
    outside = default.get_state()
    default.set_state(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(default.get_state())
        default.set_state(outside)


@contextmanager
def _shared_state(generator: torch.Generator) -> Iterator[None]:
    """Let the CUDA device's default generator draw from the state of `generator`, which no copy is made of."""
    default = torch.cuda.default_generators[generator.device.index]
    outside = default.graphsafe_get_state()
    default.graphsafe_set_state(generator)
    try:
        yield
    finally:
        default.graphsafe_set_state(outside)


class RandomStreams:
    """The streams are two generators of one device, of which one is active inside `use`.

    torch's dropout and attention draw from the device's default generator only, so the state of a stream is swapped
    into it and back.
    """

    def __init__(self, topology: Topology, seed: int, device: torch.device | str = "cpu"):
        self.device = torch.device(device)
        self._active = _copied_state
        if self.device.type == "cuda":
            torch.cuda.init()  # fills torch.cuda.default_generators
            self._active = _shared_state
        self.reseed(topology, seed)

    def reseed(self, topology: Topology, seed: int) -> None:
        """Start both streams anew."""
        self._generators = {
            name: torch.Generator(self.device).manual_seed(topology.seed(seed, per_rank=name == PER_RANK))
            for name in (SHARED, PER_RANK)
        }

    @contextmanager
    def use(self, name: str) -> Iterator[None]:
        """Draw from the stream `name` (SHARED or PER_RANK) inside; the default generator is as before after it."""
        with self._active(self._generators[name]):
            yield

    def snapshot(self) -> dict[str, torch.Generator]:
        """Return copies of the streams as they are now, for `replaying`."""
        return {name: generator.clone_state() for name, generator in self._generators.items()}

    @contextmanager
    def replaying(self, snapshot: dict[str, torch.Generator]) -> Iterator[None]:
        """Draw again what was drawn after the snapshot; the streams are as before after it."""
        now, self._generators = self._generators, {name: one.clone_state() for name, one in snapshot.items()}
        try:
            yield
        finally:
            self._generators = now

    def state_dict(self) -> dict[str, Any]:
        return {name: generator.get_state() for name, generator in self._generators.items()}

    def fit(self, states: dict[str, Any]) -> bool:
        """Tell whether the states are those of a generator of this kind of device."""
        return all(states[name].shape == state.shape for name, state in self.state_dict().items())

    def load_state_dict(self, states: dict[str, Any]) -> None:
        for name, generator in self._generators.items():
            generator.set_state(states[name])


class Dropout(nn.Module):
    """Dropout with probability p that draws from one of the streams. [*] → [*].

    `torch.native_dropout` keeps a mask of one byte an element, `F.dropout` one in the tensor's dtype.
    """

    def __init__(self, p: float, streams: RandomStreams, stream: str):
        super().__init__()
        self.p, self.streams, self.stream = p, streams, stream

    def forward(self, tensor: Tensor) -> Tensor:
        if self.p == 0.0 or not self.training:
            return tensor
        with self.streams.use(self.stream):
            return torch.native_dropout(tensor, self.p, True)[0]
