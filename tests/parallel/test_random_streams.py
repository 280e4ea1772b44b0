"""On CUDA a random stream is drawn from without a copy of a state, and gives what copies of states give.

No CUDA generator exists here. The stand-in has its interface, and a CPU generator for the state that it points to.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from zero_tp.checkpoint.manifest import states_file
from zero_tp.checkpoint.reader import RANDOM
from zero_tp.checkpoint.resume import _restore_streams
from zero_tp.parallel.random import PER_RANK, SHARED, RandomStreams
from zero_tp.topology import Topology

CPUGenerator = torch.Generator


class CUDAGenerator:
    """torch 2.13's `torch.Generator` of a CUDA device: a pointer to a state (ATen/cuda/CUDAGeneratorImpl.h).

    Attributes:
        copies: of states, by all generators.
    """

    device = torch.device("cuda", 0)
    copies = 0

    def __init__(self, device: torch.device = device, state: torch.Generator | None = None) -> None:
        assert device.type == "cuda"
        self.state = state or CPUGenerator()

    def manual_seed(self, seed: int) -> CUDAGenerator:
        self.state.manual_seed(seed)
        return self

    def get_state(self) -> Tensor:
        CUDAGenerator.copies += 1
        return self.state.get_state()

    def set_state(self, state: Tensor) -> None:
        CUDAGenerator.copies += 1
        self.state.set_state(state)

    def clone_state(self) -> CUDAGenerator:
        CUDAGenerator.copies += 1
        return CUDAGenerator(state=self.state.clone_state())

    def graphsafe_get_state(self) -> CUDAGenerator:
        return CUDAGenerator(state=self.state)

    def graphsafe_set_state(self, other: CUDAGenerator) -> None:
        self.state = other.state


def drawn(streams: RandomStreams, draw: Callable[[], Tensor]) -> list[Tensor]:
    """What is drawn in a training run: inside and outside of streams, again in backward, again after a resume."""
    found = [draw()]

    def use(*names: str) -> None:
        for name in names:
            with streams.use(name):
                found.append(draw())

    use(SHARED, PER_RANK, SHARED)
    found.append(draw())
    first = streams.snapshot()
    use(SHARED, PER_RANK)
    second = streams.snapshot()
    use(PER_RANK, SHARED)
    for snapshot in (second, first, second):
        with streams.replaying(snapshot):
            use(SHARED, PER_RANK)
        found.append(draw())
    use(SHARED)
    saved = streams.state_dict()
    use(PER_RANK, SHARED)
    with pytest.raises(ArithmeticError), streams.use(SHARED):
        found.append(draw())
        raise ArithmeticError
    found.append(draw())
    streams.load_state_dict(saved)
    use(PER_RANK, SHARED)
    streams.reseed(Topology(), 6)
    use(SHARED, PER_RANK)
    return found


def test_a_stream_is_drawn_from_without_a_copy() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        expected = drawn(RandomStreams(Topology(), 5), lambda: torch.rand(3))
    default = CUDAGenerator().manual_seed(1)
    with (
        mock.patch.object(torch, "Generator", CUDAGenerator),
        mock.patch.object(torch.cuda, "init", lambda: None),
        mock.patch.object(torch.cuda, "default_generators", (default,)),
    ):
        streams = RandomStreams(Topology(), 5, "cuda:0")
        found = drawn(streams, lambda: torch.rand(3, generator=default.state))
        before = CUDAGenerator.copies
        with streams.use(SHARED):
            assert CUDAGenerator.copies == before
        assert CUDAGenerator.copies == before
    assert len(found) == len(expected) > 20
    assert all(map(torch.equal, found, expected))
    assert list(streams.state_dict()) == [SHARED, PER_RANK]


@pytest.mark.parametrize("size", [5056, 16])
def test_a_resumed_run_takes_new_streams_on_another_kind_of_device(tmp_path: Path, size: int) -> None:
    """A state of the CPU's generator has 5,056 bytes, one of CUDA's 16."""
    saved = RandomStreams(Topology(), 5)
    states = {f"{RANDOM}/{name}": state[:size].clone() for name, state in saved.state_dict().items()}
    save_file(states, tmp_path / states_file(0, 0))
    streams = RandomStreams(Topology(), 6)
    engine: Any = SimpleNamespace(topology=Topology(), model=SimpleNamespace(streams=streams))
    manifest: Any = SimpleNamespace(tensor=1, data=1, sequence=False, step=3)
    _restore_streams(engine, tmp_path, manifest, 7)
    expected = saved if size == 5056 else RandomStreams(Topology(), 7 + 3)
    for name, state in streams.state_dict().items():
        assert torch.equal(state, expected.state_dict()[name])
