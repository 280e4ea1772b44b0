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


class RandomStreams:
    """The streams are two generator states of one device, of which one is active inside `use`.

    torch's dropout and attention draw from the device's default generator only, so a stream is a state that is swapped
    into it and back.
    """

    def __init__(self, topology: Topology, seed: int, device: torch.device | str = "cpu"):
        self.device = torch.device(device)
        self.reseed(topology, seed)

    def reseed(self, topology: Topology, seed: int) -> None:
        """Start both streams anew."""
        self._states = {
            name: self._seeded(topology.seed(seed, per_rank=name == PER_RANK)) for name in (SHARED, PER_RANK)
        }

    def _seeded(self, seed: int) -> Tensor:
        return torch.Generator(device=self.device).manual_seed(seed).get_state()

    def _get(self) -> Tensor:
        return torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else torch.get_rng_state()

    def _set(self, state: Tensor) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state, self.device)
        else:
            torch.set_rng_state(state)

    @contextmanager
    def use(self, name: str) -> Iterator[None]:
        """Draw from the stream `name` (SHARED or PER_RANK) inside; the default generator is as before after it."""
        outside = self._get()
        self._set(self._states[name])
        try:
            yield
        finally:
            self._states[name] = self._get()
            self._set(outside)

    def snapshot(self) -> dict[str, Tensor]:
        """Return the states now, for `replaying`. A use replaces them and never changes them, so nothing is copied."""
        return dict(self._states)

    @contextmanager
    def replaying(self, snapshot: dict[str, Tensor]) -> Iterator[None]:
        """Draw again what was drawn after the snapshot; the streams are as before after it."""
        now, self._states = self._states, dict(snapshot)
        try:
            yield
        finally:
            self._states = now

    def state_dict(self) -> dict[str, Any]:
        return {name: state.clone() for name, state in self._states.items()}

    def load_state_dict(self, states: dict[str, Any]) -> None:
        self._states = {name: states[name].clone() for name in (SHARED, PER_RANK)}


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
