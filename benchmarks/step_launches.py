"""Count the operations (on a GPU: launches) of one training step of a small Llama, by phase, on one
CPU rank.

    DS_ACCELERATOR=cpu python -m benchmarks.step_launches [KEY=VALUE …]
    DS_ACCELERATOR=cpu python -m benchmarks.step_launches zero_optimization.stage=2
    DS_ACCELERATOR=cpu PYTHONPATH=DIR:. python -m benchmarks.step_launches zero_tp.compile=true

24 layers, TP 1, bf16, ZeRO-1, AdamW. Views are not counted. With `zero_tp.compile` a call of a
compiled function counts as the kernels that inductor generates for an H200, as gpu_kernels.py
counts them (DIR has triton), otherwise as its eager operations. Trees are compared each with its
own copy of this script.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from benchmarks.contenders import connected, engine_of
from benchmarks.device import llama
from benchmarks.gpu_kernels import Input, generate, pretend_device
from zero_tp.engine.engine import TrainingEngine
from zero_tp.parallel import elementwise
from zero_tp.run.config import RunConfig

LENGTH = 64
VOCABULARY = 512
VIEWS = {
    *("view", "t", "transpose", "permute", "detach", "alias", "unsqueeze", "squeeze", "expand"),
    *("slice", "select", "_unsafe_view", "as_strided", "split", "split_with_sizes"),
    *("_reshape_alias", "empty", "empty_like", "new_empty", "lift_fresh"),
    *("device", "prim_device"),
}
"""Operations that launch no kernel."""
OPTIMIZER_PARTS = (
    "check_overflow",
    "scaled_global_norm",
    "flatten_dense_tensors_aligned",
    "unscale_and_clip_grads",
    "_optimizer_step",
)
"""Methods of DeepSpeed's ZeRO optimizers that count as phases, where an optimizer has them."""


class CompiledCall(NamedTuple):
    """A call of a compiled function with certain shapes.

    Attributes:
        arguments: `Input`s for the tensors, and the other arguments.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    def kernels(self) -> list[str]:
        """Return the kernels that inductor generates for it, on a pretended device."""
        inputs = [value for value in self.arguments if isinstance(value, Input)]

        def call(*tensors: Tensor) -> Any:
            rest = iter(tensors)
            return self.function(
                *(next(rest) if isinstance(value, Input) else value for value in self.arguments)
            )

        options = getattr(self.function, elementwise.INDUCTOR_OPTIONS, {})
        return generate(call, inputs, **options).names


class OperationCounter(TorchDispatchMode):
    """Count the operations of each phase while the mode is on.

    Attributes:
        phase: the phase that is running.
        operations: phase → operation → count.
        compiled_calls: phase → call of a compiled function → count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = "start"
        self.operations: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.compiled_calls: defaultdict[str, Counter[CompiledCall]] = defaultdict(Counter)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        if name not in VIEWS:
            self.operations[self.phase][name] += 1
        return function(*args, **(kwargs or {}))

    def begin(self, phase: str) -> None:
        self.phase = phase

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that counts its calls as one that torch has compiled."""

        def call(*arguments: Any) -> Any:
            specs = tuple(
                Input(tuple(value.shape), value.dtype, value.stride())
                if isinstance(value, Tensor)
                else value
                for value in arguments
            )
            self.compiled_calls[self.phase][CompiledCall(function, specs)] += 1
            with _disable_current_modes():
                return function(*arguments)

        return call

    def count_kernels(self) -> None:
        """Count the kernels of the compiled calls as operations.

        From then on the process seems to have a GPU.
        """
        if not self.compiled_calls:
            return
        pretend_device()
        names = {
            call: [f"{call.function.__name__}:{index}" for index, _ in enumerate(call.kernels())]
            for calls in self.compiled_calls.values()
            for call in calls
        }
        for phase, calls in self.compiled_calls.items():
            for call, count in calls.items():
                for name in names[call]:
                    self.operations[phase][name] += count

    def count_as_phase(self, owner: Any, name: str) -> None:
        """Count what the method `name` of `owner` does as a phase of that name."""
        method = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            before = self.phase
            self.phase = name
            try:
                return method(*args, **kwargs)
            finally:
                self.phase = before

        setattr(owner, name, counted)


def small_llama(length: int, **settings: Any) -> dict[str, Any]:
    """Return a run's config: 24 layers of 64, bf16, ZeRO-1.

    Args:
        settings: more keys of its `zero_tp` block.
    """
    model = llama(64, 24, 4, 4, 128, VOCABULARY)
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "zero_tp": {
            "model": model,
            "parallel": {"tensor": 1},
            "data": {"train": "none", "sequence_length": length},
            "training": {"steps": 50, "seed": 1},
            **settings,
        },
    }


def load(config: dict[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """Return the checked config of a run of one rank."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "config.json"
        path.write_text(json.dumps(config))
        return RunConfig.load(path, list(overrides), 1)


def count_step(engine: TrainingEngine, tokens: torch.Tensor, counter: OperationCounter) -> None:
    """Count the operations of the engine's second step, by phase.

    Args:
        tokens: [batch, length + 1].
    """
    batch = [(tokens[:, :-1], tokens[:, 1:])]
    engine.train_step(batch)
    counter.compiled_calls.clear()
    engine.on_phase = counter.begin
    counter.count_as_phase(engine.zero, "step")
    for name in OPTIMIZER_PARTS:
        if hasattr(engine.zero.optimizer, name):
            counter.count_as_phase(engine.zero.optimizer, name)
    with counter:
        engine.train_step(batch)


def main() -> None:
    torch.set_num_threads(1)
    config = small_llama(LENGTH, compile=False)
    config["optimizer"]["params"] |= {"betas": [0.9, 0.95], "weight_decay": 0.1}
    run = load(config, sys.argv[1:])
    topology, device = connected(run)
    counter = OperationCounter()
    with mock.patch.object(elementwise, "_compiled", counter.compile):
        engine = engine_of(run, topology, device)
        count_step(engine, torch.randint(VOCABULARY, (1, LENGTH + 1)), counter)
    counter.count_kernels()
    for name, operations in counter.operations.items():
        common = dict(operations.most_common(12))
        print(f"{name:32s} {operations.total():6d} {common}")
    total = sum(operations.total() for operations in counter.operations.values())
    print(f"together {total}, {len(list(engine.model.parameters()))} parameters")


if __name__ == "__main__":
    main()
