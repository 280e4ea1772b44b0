"""Where the checkpoints of recomputation are at every moment, on an accelerator: on the device, on the host, between.

Forward and backward run on fake tensors of the simulated accelerator, for whatever a config file accepts.
tests/activations/test_stores.py shows that what comes back is what has left.
"""

from __future__ import annotations

import functools
import itertools
import json
import weakref
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.planned import BASE, FILE
from tests.tiers import in_tiers
from zero_tp.activations.activation_memory import ActivationMemory
from zero_tp.activations.stores import LEAVING
from zero_tp.config import RunConfig
from zero_tp.errors import ConfigError
from zero_tp.huggingface import ZeroTPForCausalLM
from zero_tp.planning.accelerator import accelerator
from zero_tp.planning.dryrun import Unfilled, topology_of
from zero_tp.planning.formulas import Layer, saved_full
from zero_tp.planning.tracking import Allocations

ROOT = Path(__file__).resolve().parents[2]
WORLD, LAYERS, S, B, H, HEADS = 4, 3, 64, 2, 256, 8
P_A, HOST, BUFFER = "partition_activations", "cpu_checkpointing", "contiguous_memory_optimization"


class Travels(TorchDispatchMode):
    """Notes copies between device and host, `log`ged with the number of the checkpoint, and how many that have come
    back are there at the same time."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log, self.most = log, 0
        self._numbers: dict[tuple[int, int], int] = {}
        self._back: list[weakref.ref[Any]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function._schema.name
        if name in ("aten::copy_", "aten::_to_copy"):
            target, source = (args[0], args[1]) if name == "aten::copy_" else (result, args[0])
            if target.device.type == "cpu" != source.device.type:
                self._numbers[self._place(target)] = len(self._numbers)
                self.log.append(f"{self._numbers[self._place(target)]} leaves")
            if source.device.type == "cpu" != target.device.type and self._place(source) in self._numbers:
                self._back.append(weakref.ref(target.untyped_storage()))
                self.log.append(f"{self._numbers.pop(self._place(source))} comes")
        self.most = max(self.most, sum(each() is not None for each in self._back))
        return result

    def _place(self, tensor: Tensor) -> tuple[int, int]:
        return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


class Micro(NamedTuple):
    """Of one micro-batch.

    Attributes:
        device, host: bytes between forward and backward, beside parameters and inputs.
        device_after, host_after: after backward.
        buffers: addresses of the host's memory after backward.
        log: copies, and which layer runs, or runs again. most: of `Travels`.
    """

    device: int
    host: int
    device_after: int
    host_after: int
    buffers: set[int]
    log: list[str]
    most: int


def held(side: Allocations) -> int:
    return sum(one.bytes for one in side.alive())


def micro_batches(config: RunConfig, count: int) -> list[Micro]:
    """What is seen of micro-batches after one another."""
    parallel = config.zero_tp.parallel
    found = []
    with ExitStack() as stack:
        device = stack.enter_context(accelerator())
        stack.enter_context(torch.random.fork_rng([]))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))  # as in the dry run
        stack.enter_context(FakeTensorMode())
        topology = topology_of(parallel.tensor, parallel.sequence)
        model = ZeroTPForCausalLM(
            config.hf_config(), topology, source=Unfilled(), dtype=torch.bfloat16, device=device
        ).train()
        settings = config.deepspeed_config().get("activation_checkpointing", {})
        activations = ActivationMemory(model, config.zero_tp.recompute_policy, settings, device)
        tokens = torch.zeros(B, S, dtype=torch.long, device=device)
        log: list[str] = []
        for number, layer in enumerate(model.transformer.layers):
            layer.attention_norm.register_forward_pre_hook(lambda *_, number=number: log.append(f"{number} runs"))

        def let_go(parameter: nn.Parameter) -> None:
            parameter.grad = None

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(let_go)
        there = stack.enter_context(Allocations(device.type))
        here = stack.enter_context(Allocations("cpu"))
        for _ in range(count):
            log.clear()
            activations.begin_micro_batch(0)
            with Travels(log) as travels:
                loss = model(tokens, shift_labels=tokens).loss
                device_bytes, host_bytes = held(there), held(here)
                loss.backward()
                del loss
            found.append(
                Micro(
                    device_bytes,
                    host_bytes,
                    held(there),
                    held(here),
                    {one.allocated for one in here.alive()},
                    list(log),
                    travels.most,
                )
            )
    return found


GRIDS = {"TP 1": (1, False), "TP 2": (2, False), "SP": (2, True)}


def load(grid: str, recompute: Any, checkpointing: dict[str, Any]) -> RunConfig:
    tensor, sequence = GRIDS[grid]
    overrides = [*BASE, f"zero_tp.parallel.tensor={tensor}", f"zero_tp.parallel.sequence={json.dumps(sequence)}"]
    overrides += [f"zero_tp.recompute={json.dumps(recompute)}", f"activation_checkpointing={json.dumps(checkpointing)}"]
    return RunConfig.load(ROOT / FILE, overrides, WORLD)


@functools.cache
def in_place(grid: str, recompute: str) -> Micro:
    """What is seen where no store is chosen; tests/planning/test_plan_accelerator.py holds it to the papers."""
    return micro_batches(load(grid, json.loads(recompute), {}), 1)[0]


def expected_log(layers: list[int], *, host: bool) -> list[str]:
    """Of full recomputation: each checkpoint leaves as its layer begins, and comes back while the layer above it runs
    again."""
    log = []
    for number in range(LAYERS):
        if host and number in layers:
            log.append(f"{layers.index(number)} leaves")
        log.append(f"{number} runs")
    for place in reversed(range(len(layers))):
        if host and place == len(layers) - 1:
            log.append(f"{place} comes")
        if host and place > 0:
            log.append(f"{place - 1} comes")
        log.append(f"{layers[place]} runs")
    return log


def check(grid: str, recompute: Any, checkpointing: dict[str, Any]) -> None:
    config = load(grid, recompute, checkpointing)
    plain = in_place(grid, json.dumps(recompute))
    found = micro_batches(config, 2)
    tensor, sequence = GRIDS[grid]
    host, partitioned = bool(checkpointing.get(HOST)), bool(checkpointing.get(P_A)) and tensor > 1 and not sequence
    layer = Layer(S, B, H, HEADS, tensor, sequence)
    layers = list(config.zero_tp.recompute_policy.recomputed_layers(LAYERS))
    whole, piece = saved_full(layer), saved_full(layer, partitioned=partitioned)
    slots = checkpointing.get("number_checkpoints") or len(layers)
    preallocated = slots * piece if checkpointing.get(BUFFER) else 0
    kept = preallocated or len(layers) * piece
    if recompute == "selective":
        whole = kept = piece = 0  # nothing that a store keeps
    leaving = min(LEAVING, len(layers)) * piece
    for each in found:
        assert each.device == plain.device - len(layers) * whole + (leaving if host else kept)
        assert each.host == (kept if host else 0)
        assert each.device_after == (0 if host else preallocated)
        assert each.host_after == (preallocated if host else 0)
        assert each.buffers == found[0].buffers or not preallocated, "the buffer of before"
        assert each.most == (min(2, len(layers)) if host else 0), "one layer ahead"
        if recompute != "selective":
            assert each.log == expected_log(layers, host=host)


NAMES = {"P_a": P_A, "host": HOST, "buffer": BUFFER}
CASES = [
    (grid, recompute, " ".join(itertools.compress(NAMES, switches)))
    for grid in GRIDS
    for recompute in ("selective", "full")
    for switches in itertools.product((False, True), repeat=3)
]
FIRST = [("TP 2", "full", kept) for kept in ("host", "P_a buffer", "P_a host buffer")] + [("SP", "full", "buffer")]


@pytest.mark.parametrize(("grid", "recompute", "composed"), in_tiers(CASES, FIRST))
def test_checkpoints_are_where_the_config_says(grid: str, recompute: str, composed: str) -> None:
    """In every composition that a config accepts."""
    names = composed.split()
    checkpointing = {NAMES[name]: True for name in names}
    if names and recompute != "full":
        with pytest.raises(ConfigError):
            load(grid, recompute, checkpointing)
    else:
        check(grid, recompute, checkpointing)


@pytest.mark.thorough
@pytest.mark.parametrize("recompute", [{"mode": "full", "every": 2}, {"mode": "full", "layers": 1}])
@pytest.mark.parametrize(
    "checkpointing", [{HOST: True}, {P_A: True, BUFFER: True, HOST: True, "number_checkpoints": 3}]
)
def test_so_are_those_of_some_layers(recompute: dict[str, Any], checkpointing: dict[str, Any]) -> None:
    check("TP 2", recompute, checkpointing)
