"""DeepSpeed's engine is put around a model, by one class for each ZeRO stage.

What differs between the stages is said here, so that training and checkpoints never ask which stage it is.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
from deepspeed.runtime.constants import GRADIENT_CLIPPING_DEFAULT
from deepspeed.runtime.lr_schedules import LRRangeTest, OneCycle
from deepspeed.runtime.utils import combine_grad_norm_groups, get_global_norm_of_tensors
from torch import Tensor, nn

from zero_tp.config.resolve import copies_gradients
from zero_tp.parallel.gradients import clip_gradients, gradient_norm, sum_of_squares
from zero_tp.topology import Topology
from zero_tp.zero.loss_scale import LossScale
from zero_tp.zero.rows import handle_as_rows
from zero_tp.zero.states import MASTER, Fragment, OptimizerStates, StatesOnNVMe, partition_of

if TYPE_CHECKING:
    from zero_tp.models.model import ParallelModel

Optimized = list[dict[str, Any]] | list[nn.Parameter] | torch.optim.Optimizer
Veto = Callable[[float], bool]
"""Decides from the gradient norm, on every rank alike, that a step is skipped."""

COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


COUNTING_ONE_MORE = (LRRangeTest, OneCycle)
"""Schedules whose formulas take `last_batch_iteration + 1`; those of the others take it as it is."""


def begin_schedule(schedule: Any) -> None:
    """Bring a new schedule to its value at k = 1, and the optimizer to its rates: step k trains at its value at k.

    DeepSpeed makes it at iteration -1 and moves it on after each step, so that a warm-up from 0 would leave the first
    two steps without effect. A checkpoint keeps the iteration: a run that was begun so goes on so.
    """
    schedule.step(0 if isinstance(schedule, COUNTING_ONE_MORE) else 1)


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
    vetoed: float | None = None
    model: ParallelModel
    engine: Any
    loss_scale: LossScale | None
    optimizer: Any
    scheduler: Any

    def __init__(self, settings: dict[str, Any], topology: Topology):
        self.settings, self.topology = settings, topology
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
            begin_schedule(self.scheduler)
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

    def _refused(self, norm: float) -> bool:
        """Tell whether the veto refuses a step of this norm. Every rank asks it, whatever its norm."""
        if self._veto is not None and self._veto(norm):
            self.vetoed = norm
        return self._has_refused()

    def _has_refused(self) -> bool:
        return self.vetoed is not None

    def outcome(self) -> tuple[float, bool]:
        """Return (gradient norm, skipped) of the last step.

        The norm is taken before clipping. A step is skipped, and its norm nan, when gradients were not finite on some
        rank; nothing was updated then, nor after a veto, which has a norm.
        """
        if self.vetoed is not None:
            return self.vetoed, False
        if getattr(self.optimizer, "overflow", False):
            return float("nan"), True
        return self._norm(), False

    def _norm(self) -> float:
        norm = self.engine.get_global_grad_norm()
        return float(norm) if norm is not None else float("nan")

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
        """Bring the engine to what `progress` gave."""
        self.restore_updates(progress)
        for name, value in progress["counters"].items():
            setattr(self.engine, name, value)
        if self.scheduler is not None and progress["schedule"] is not None:
            self.scheduler.load_state_dict(progress["schedule"])
            self.scheduler.step(self.scheduler.last_batch_iteration)  # sets OneCycle's betas too
        for group, rate in zip(self.optimizer.param_groups, progress["learning_rates"], strict=True):
            group["lr"] = rate
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


def measure_in_pieces(optimizer: Any) -> None:
    """Give one of DeepSpeed's ZeRO optimizers the norm of each gradient, where it takes them of copies in fp64."""
    direct = getattr(optimizer, "get_grad_norm_direct", None)
    if direct is None:  # its BF16_Optimizer
        return

    def in_pieces(gradients: Iterable[Tensor], params: Iterable[nn.Parameter], norm_type: float = 2) -> Tensor:
        assert norm_type == 2, "only the 2-norm is taken"
        own = (gradient for gradient in gradients if not getattr(gradient, "_zero_padding", False))
        norm: Tensor = direct([sum_of_squares(gradient).sqrt().reshape(1) for gradient in own], params, norm_type)
        return norm

    optimizer.get_grad_norm_direct = in_pieces


class WithoutZero(ZeroEngine):
    """Under ZeRO-0 every DP rank holds all masters and states. The gradient norm and clipping are ours, in fp64.

    ZeRO-1, -2 and -3 compute both themselves, in fp64. Without ZeRO, DeepSpeed takes fp32 norms (inexact at 1e-4 on
    CPUs), reports none in fp32, and in 16 bit counts only the gradients of TP rank 0. So DeepSpeed's clipping is off.
    """

    def __init__(self, settings: dict[str, Any], topology: Topology):
        self._limit = float(settings.get("gradient_clipping", GRADIENT_CLIPPING_DEFAULT))
        self._last_norm = float("nan")
        super().__init__({**settings, "gradient_clipping": 0.0}, topology)

    def initialize(self, model: ParallelModel, optimized: Optimized) -> None:
        super().initialize(model, optimized)
        # In 16 bit DeepSpeed wraps the optimizer, and keeps fp32 copies of the weights as its masters.
        self._wrapped = hasattr(self.optimizer, "loss_scale_config")
        if self._wrapped:
            self._undo_first_step()

    @torch.no_grad()
    def _undo_first_step(self) -> None:
        """Take back what DeepSpeed's 16-bit optimizers do when they are made.

        To allocate their states they step once on zero gradients, which decays the masters by lr·weight_decay and
        leaves Adam's bias correction one step ahead for good.
        """
        inner = self.optimizer.optimizer
        inner.state.clear()
        for group in inner.param_groups:
            group.pop("step", None)
        for fragment in self.fragments():
            fragment.master.copy_(self.model.get_parameter(fragment.name).flatten())

    def backward(self, loss: Tensor, **options: Any) -> None:
        # DeepSpeed 0.19.8 scales the losses of its ZeRO optimizers alone; that of ZeRO-0 divides by the scale too.
        super().backward(loss if self.loss_scale is None else loss * self.loss_scale.value, **options)

    def _step(self) -> None:
        if self.engine.is_gradient_accumulation_boundary():
            self._clip()
        super()._step()

    def _clip(self) -> None:
        parameters = list(self.model.parameters())
        scale = 1.0 if self.loss_scale is None else self.loss_scale.value
        norm = gradient_norm(parameters, self.topology) / scale
        self._last_norm = norm.item()
        taken = not self._refused(self._last_norm) and bool(norm.isfinite())
        if taken and self._limit > 0:
            clip_gradients(parameters, norm, self._limit)
        if not self._wrapped:
            # A plain torch optimizer checks nothing: leave it no gradients, and tell the engine that it skipped.
            self.optimizer.overflow = not taken
            if not taken:
                for parameter in parameters:
                    parameter.grad = None
        elif self.vetoed is not None:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.fill_(float("nan"))  # which the wrapper looks for

    def _norm(self) -> float:
        return self._last_norm

    def duplicates(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the module's weights, and the masters and states, which no rank shares out here."""
        yield from super().duplicates()
        states = self.states()
        for kind in states.kinds():
            for fragment in states.fragments:
                if kind != MASTER or self._wrapped:
                    yield f"{fragment.name} ({kind})", states.get(fragment, kind)

    def fragments(self) -> Iterator[Fragment]:
        masters = dict(self._masters())
        for name, parameter in self.model.named_parameters():
            flat, offset = masters[parameter]
            yield Fragment(name, 0, flat, offset, parameter.numel())

    def _masters(self) -> Iterator[tuple[nn.Parameter, tuple[Tensor, int]]]:
        """Yield each parameter with its master, (flat tensor, offset): in fp32 the parameter itself."""
        wrapper = self.optimizer
        if not self._wrapped:
            yield from ((parameter, (parameter, 0)) for parameter in self.model.parameters())
        elif hasattr(wrapper, "fp32_groups"):
            for parameters, masters in zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True):
                yield from ((p, (master, 0)) for p, master in zip(parameters, masters, strict=True))
        else:
            for parameters, flat in zip(wrapper.fp16_groups, wrapper.fp32_groups_flat, strict=True):
                offset = 0
                for parameter in parameters:
                    yield parameter, (flat, offset)
                    offset += parameter.numel()

    def share(self, fragment: Fragment) -> slice:
        """Every DP rank holds the same fragment and writes one piece of it."""
        length = -(-fragment.numel // self.topology.data)
        first = self.topology.data_rank * length
        return slice(min(fragment.numel, first), min(fragment.numel, first + length))

    @torch.no_grad()
    def fill_module(self) -> None:
        for fragment in self.fragments():
            self.model.get_parameter(fragment.name).view(-1).copy_(fragment.master)


class PartitionedStates(ZeroEngine):
    """Under ZeRO-1 and ZeRO-2 masters and states are cut over DP, in flat groups of parameters.

    A single replica has nothing to reduce: its gradients stay where backward made them. DeepSpeed would copy each five
    times to take their mean over one rank.
    """

    def __init__(self, settings: dict[str, Any], topology: Topology):
        self._alone = is_alone(settings, topology.data)
        if self._alone:
            zero = {"contiguous_gradients": False, **settings["zero_optimization"]}
            settings = {**settings, "zero_optimization": zero}
        super().__init__(settings, topology)

    def initialize(self, model: ParallelModel, optimized: Optimized) -> None:
        super().initialize(model, optimized)
        measure_in_pieces(self.optimizer)
        if self._alone:
            for name in ("average_tensor", "buffered_reduce_fallback"):
                setattr(self.optimizer, name, lambda *_, **__: None)
        if not hasattr(self.optimizer, "scaled_global_norm"):  # ZeRO-1 whose gradients are added in another dtype
            self._judge_first(self.optimizer)
            return
        measured = self.optimizer.scaled_global_norm

        def judged(norm_type: int = 2) -> Tensor:
            norm: Tensor = measured(norm_type)
            # Without a veto nobody waits for the norm.
            refused = self._veto is not None and self._refused(float(norm / self.optimizer.loss_scale))
            return torch.full_like(norm, float("inf")) if refused else norm

        self.optimizer.scaled_global_norm = judged

    def _judge_first(self, optimizer: Any) -> None:
        """Ask the veto before DeepSpeed's BF16_Optimizer steps, whose step makes the norm that it is judged by."""
        step = optimizer.step

        def judged() -> None:
            if self._veto is not None:
                gradients, _ = optimizer.get_grads_for_norm()
                norm = get_global_norm_of_tensors(gradients, optimizer.norm_type, optimizer.mpu)
                if self._refused(float(norm)):
                    for gradient in gradients:
                        gradient.fill_(float("nan"))  # which it looks for
            step()

        optimizer.step = judged

    def fragments(self) -> Iterator[Fragment]:
        groups = self._flat_groups()
        for name, parameter in self.model.named_parameters():
            mapping = parameter._hp_mapping  # type: ignore[attr-defined]
            if mapping is not None:
                address = mapping.get_hp_fragment_address()
                flat = groups[mapping.param_group_index]
                yield Fragment(name, mapping.lp_fragment_address.start, flat, address.start, address.numel)

    def _flat_groups(self) -> list[Tensor]:
        """Return this rank's flat fp32 partition of each parameter group."""
        for name in ("single_partition_of_fp32_groups", "fp32_groups_flat_partition"):
            if hasattr(self.optimizer, name):
                groups: list[Tensor] = getattr(self.optimizer, name)
                return groups
        raise RuntimeError(f"{type(self.optimizer).__name__}: this version of DeepSpeed keeps its masters elsewhere")

    @torch.no_grad()
    def fill_module(self) -> None:
        self.optimizer.update_lp_params()


def is_alone(settings: dict[str, Any], data: int) -> bool:
    """Tell whether gradients of ZeRO-1 or 2 stay where they are: none is reduced, offloaded, or copied by the config.

    Args:
        settings: DeepSpeed's config.
    """
    offload = settings.get("zero_optimization", {}).get("offload_optimizer") or {}
    return data == 1 and offload.get("device", "none") == "none" and not copies_gradients(settings)


class PartitionedParameters(ZeroEngine):
    """Under ZeRO-3 parameters, too, are cut over DP, each by itself, and gathered while they are needed."""

    lock_step = True

    def __init__(self, settings: dict[str, Any], topology: Topology):
        super().__init__(settings, topology)
        self.notes = handle_as_rows()

    def initialize(self, model: ParallelModel, optimized: Optimized) -> None:
        super().initialize(model, optimized)
        measure_in_pieces(self.optimizer)
        measured = self.optimizer._get_norm_groups

        def judged() -> list[Any]:
            norms: list[Any] = measured()
            if self._veto is None:
                return norms
            norm = combine_grad_norm_groups(norms) / self.optimizer.loss_scale
            return [float("inf")] if self._refused(float(norm)) else norms

        self.optimizer._get_norm_groups = judged

    def duplicates(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights that stay gathered: those smaller than `stage3_param_persistence_threshold`."""
        resident = {id(parameter) for parameter in self.optimizer.persistent_parameters}
        for name, weight in super().duplicates():
            if id(self.model.get_parameter(name)) in resident:
                yield name, weight

    def construction(self) -> AbstractContextManager[Any]:
        return deepspeed.zero.Init(
            # With mpu= alone it ignores the DP group and overwrites the other TP ranks' shards; mpu= is for its reading
            # of the batch sizes.
            data_parallel_group=self.topology.data_group,
            mpu=self.topology,
            # Without dtype=: given one, DeepSpeed 0.19.8 takes bf16 instead wherever fp16 is not supported.
            config_dict_or_path=self.settings,
        )

    def states(self) -> OptimizerStates:
        if self.optimizer.swap_optimizer:
            return StatesOnNVMe(self.fragments(), self.optimizer, self.model)
        return super().states()

    def fragments(self) -> Iterator[Fragment]:
        for name, parameter in self.model.named_parameters():
            group, offset, length = self.optimizer.grad_position[self.optimizer.get_param_id(parameter)]
            start = self.topology.data_rank * length
            whole: int = parameter.ds_numel  # type: ignore[attr-defined]
            numel = max(0, min(length, whole - start))
            yield Fragment(name, start, self.optimizer.fp32_partitioned_groups_flat[group], offset, numel)

    @torch.no_grad()
    def fill_module(self) -> None:
        for fragment in self.states().fragments:
            partition = partition_of(self.model.get_parameter(fragment.name))
            partition.data.view(-1).narrow(0, 0, fragment.numel).copy_(fragment.master)
        resident: list[Any] = list(self.optimizer.persistent_parameters)
        if resident:
            resident[0].partition(resident)
            resident[0].all_gather(resident)


STAGES: dict[int, type[ZeroEngine]] = {
    0: WithoutZero,
    1: PartitionedStates,
    2: PartitionedStates,
    3: PartitionedParameters,
}


def zero_engine(settings: dict[str, Any], topology: Topology) -> ZeroEngine:
    """Choose the class by the stage of a DeepSpeed config; nothing is made yet."""
    return STAGES[int(settings.get("zero_optimization", {}).get("stage", 0))](settings, topology)
