"""The engine of a ZeRO stage is DeepSpeed's, put around a model; each stage's own is in stages.py."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
from deepspeed.runtime.lr_schedules import LRRangeTest, OneCycle
from torch import Tensor, nn

from zero_tp.config.deepspeed import OFF_BLOCKS, TIMERS
from zero_tp.topology import Topology
from zero_tp.zero.loss_scale import LossScale
from zero_tp.zero.states import Fragment, OptimizerStates

if TYPE_CHECKING:
    from zero_tp.models.model import ParallelModel

Optimized = list[dict[str, Any]] | list[nn.Parameter] | torch.optim.Optimizer
Veto = Callable[[Tensor], bool]
"""Decides from the gradient norm (0-d, not yet read), on every rank alike, that a step is skipped."""

COUNTERS = ("global_steps", "global_samples", "skipped_steps")
COUNTING_ONE_MORE = (LRRangeTest, OneCycle)
"""Schedules whose formulas take `last_batch_iteration + 1`; those of the others take it as it is."""


def set_schedule(schedule: Any, done: int) -> None:
    """Bring a schedule to its value at k = `done` + 1, and the optimizer to its rates: step k trains at its value at k.

    DeepSpeed makes it at iteration -1 and moves it on after each step, so that a warm-up from 0 would leave the first
    two steps without effect.

    Args:
        done: the steps that have updated the weights.
    """
    schedule.step(done if isinstance(schedule, COUNTING_ONE_MORE) else done + 1)


@contextmanager
def without_compiler() -> Iterator[None]:
    """Let `torch.compile` return what it is given, inside the block, by torch's own variable.

    DeepSpeed imports Muon, which is refused here, to ask of any optimizer whether it is one, and Muon compiles as it is
    imported: torch's whole compiler was loaded, 1.5 s of each rank's start.
    """
    before = os.environ.get("TORCHDYNAMO_DISABLE")
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    try:
        yield
    finally:
        del os.environ["TORCHDYNAMO_DISABLE"]
        if before is not None:
            os.environ["TORCHDYNAMO_DISABLE"] = before


class ZeroEngine(ABC):
    """The engine of one ZeRO stage is DeepSpeed's: the model is built in `construction()`, `initialize` wraps it.

    Attributes:
        settings: DeepSpeed's config, as its engine gets it.
        model: the unwrapped model. engine, optimizer, scheduler: what `deepspeed.initialize` made of it.
        loss_scale: of fp16; None in another dtype.
        lock_step: whether all DP ranks must run the same number of forwards, because each forward gathers over DP.
        vetoed: the gradient norm of the last step, when that was skipped by its veto; else None.
        recent: the losses and norms of the last steps, [loss, norm] each, that the next veto looks back on.
        notes: lines for a run's start.
    """

    lock_step = False
    vetoed: Tensor | None = None
    model: ParallelModel
    engine: Any
    loss_scale: LossScale | None
    optimizer: Any
    scheduler: Any

    def __init__(self, settings: dict[str, Any], topology: Topology):
        throughput = TIMERS["throughput"] | settings.get("timers", {}).get("throughput", {})
        # DeepSpeed takes some blocks as on where they stand, and a scheduler's params to be there.
        self.settings = {key: value for key, value in settings.items() if key not in OFF_BLOCKS}
        self.settings["timers"] = {"throughput": throughput}
        if "scheduler" in settings:
            self.settings["scheduler"] = {"params": {}, **settings["scheduler"]}
        self.topology = topology
        self.recent: list[list[float]] = []
        self.notes: list[str] = []
        self._veto: Veto | None = None

    def construction(self) -> AbstractContextManager[Any]:
        """Return the context in which the model has to be built."""
        return nullcontext()

    def initialize(self, model: ParallelModel, optimized: Optimized) -> None:
        """Make DeepSpeed's engine. Collective over all ranks.

        Args:
            optimized: what the optimizer of the config trains, or another optimizer, whose update is element-wise.
        """
        # cuBLAS may split a 16-bit product's sum, and by torch's default round the parts to 16 bits. TP splits products
        # into other shapes, so its run would differ from the plain one by more than the order of fp32 sums.
        for dtype in ("bf16", "fp16"):
            setattr(torch.backends.cuda.matmul, f"allow_{dtype}_reduced_precision_reduction", False)
        self.model = model
        by = "optimizer" if isinstance(optimized, torch.optim.Optimizer) else "model_parameters"
        with without_compiler():
            self.engine, self.optimizer, _, self.scheduler = deepspeed.initialize(
                model=model, config=self.settings, mpu=self.topology, **{by: optimized}
            )
        found = self.engine.dp_world_size
        if found != self.topology.data:
            raise RuntimeError(f"DeepSpeed sees {found} data-parallel ranks, the topology {self.topology.data}")
        if self.scheduler is not None:
            set_schedule(self.scheduler, 0)
        self.loss_scale = LossScale(self.engine, self.optimizer) if self.engine.fp16_enabled() else None

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Run a micro-batch's backward, in fp16 of the scaled loss; the options are those of DeepSpeed's."""
        self.engine.backward(loss, **options)

    def step(self, veto: Veto | None = None) -> None:
        """End a micro-batch's backward; after the last one of a step, clip the gradients and update the weights.

        A veto skips that update as DeepSpeed skips one whose gradients are not finite, and leaves fp16's loss scale.
        """
        self._ask(veto)
        last = self.engine.is_gradient_accumulation_boundary()
        self._step()
        if last and self.loss_scale is not None:
            self.loss_scale.update(self.optimizer.overflow and not self._has_refused())

    def _step(self) -> None:
        self.engine.step()

    def _ask(self, veto: Veto | None) -> None:
        self._veto, self.vetoed = veto, None

    def _refused(self, norm: Tensor) -> bool:
        """Tell whether the veto refuses a step of this norm. Every rank asks it, whatever its norm."""
        if self._veto is not None and self._veto(norm):
            self.vetoed = norm
        return self._has_refused()

    def _has_refused(self) -> bool:
        return self.vetoed is not None

    def outcome(self) -> tuple[Tensor | float, bool]:
        """Return (gradient norm, skipped) of the last step.

        Nobody waits: DeepSpeed knows on the host whether it skipped the step, and the norm stays on the device.

        The norm is taken before clipping. A step is skipped, and its norm nan, when gradients were not finite on some
        rank; nothing was updated then, nor after a veto, which has a norm.
        """
        if self.vetoed is not None:
            return self.vetoed, False
        if getattr(self.optimizer, "overflow", False):
            return float("nan"), True
        return self._norm(), False

    def _norm(self) -> Tensor | float:
        norm: Tensor | float | None = self.engine.get_global_grad_norm()
        return norm if norm is not None else float("nan")

    def states(self) -> OptimizerStates:
        """Return the masters and the optimizer's states that this rank holds."""
        return OptimizerStates(self.fragments(), self.optimizer)

    def progress(self) -> dict[str, Any]:
        """Return how far the run is, in numbers that all ranks share, as a checkpoint's manifest keeps them."""
        return {
            "optimizer_steps": self.states().steps,
            "counters": {name: getattr(self.engine, name) for name in COUNTERS},
            "schedule": self.scheduler.state_dict() if self.scheduler is not None else None,
            "learning_rates": [float(group["lr"]) for group in self.optimizer.param_groups],
            "loss_scale": {} if self.loss_scale is None else self.loss_scale.state(),
            "recent": [list(pair) for pair in self.recent],
        }

    def restore_progress(self, progress: dict[str, Any]) -> None:
        """Bring the engine to what `progress` gave. Learning rates are those of the config at this step."""
        self.restore_updates(progress)
        for name in COUNTERS:
            setattr(self.engine, name, progress["counters"][name])
        # DeepSpeed steps where this count divides by the accumulation, which may be another than that of the save.
        self.engine.micro_steps = self.engine.global_steps * self.engine.gradient_accumulation_steps()
        if self.scheduler is not None:  # of the config as it is now, which may have another than the save's
            set_schedule(self.scheduler, self.engine.global_steps - self.engine.skipped_steps)
        self.recent = [list(pair) for pair in progress.get("recent", [])]

    def restore_updates(self, progress: dict[str, Any]) -> None:
        """Bring to what `progress` gave only what belongs to the moments: their count of updates and the loss scale."""
        self.states().set_steps(progress["optimizer_steps"])
        if self.loss_scale is not None:
            self.loss_scale.restore(progress["loss_scale"])

    def duplicates(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what every DP rank holds alike from one update to the next, with its name: the module's weights."""
        yield from ((name, parameter.detach()) for name, parameter in self.model.named_parameters())

    @abstractmethod
    def fragments(self) -> Iterator[Fragment]:
        """Yield what this rank holds of each parameter, in the model's order; some may be empty."""

    def share(self, fragment: Fragment) -> slice:
        """Return which of the fragment's elements this rank writes into a checkpoint."""
        return slice(0, fragment.numel)

    @abstractmethod
    def fill_module(self) -> None:
        """Bring the module's weights to the masters, as an optimizer step does. Collective over DP."""
