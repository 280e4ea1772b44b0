"""The base of the ZeRO stages: DeepSpeed's engine around a model. zero_stages.py has the stages."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
from torch import Tensor

from zero_tp.base.errors import UserError
from zero_tp.base.settings.deepspeed import DeepSpeedSettings
from zero_tp.base.settings.optimizer import Muon
from zero_tp.base.settings.schedule import TRANSFORMERS_SCHEDULES, Schedule
from zero_tp.engine.zero.expert_groups import Trainable, expert_groups, split_by_group, unsplit
from zero_tp.engine.zero.facts import deepspeed_clips, keeps_gradients_in_place
from zero_tp.engine.zero.fragments import Fragment
from zero_tp.engine.zero.loss_scale import LossScale
from zero_tp.engine.zero.lr_schedules import (
    make_schedule,
    scale_rates,
    set_schedule,
    transformers_schedule,
)
from zero_tp.engine.zero.states import OptimizerStates
from zero_tp.engine.zero.veto import StepVeto
from zero_tp.engine.zero.weight_average import WeightAverage
from zero_tp.parallel.layout import stored_tensors
from zero_tp.parallel.topology import Topology

if TYPE_CHECKING:
    from zero_tp.engine.zero.adamw_update import AdamWUpdate, UnpartitionedAdamWUpdate
    from zero_tp.model.parallel_model import ParallelModel

COUNTERS = ("global_steps", "global_samples", "skipped_steps")


@contextmanager
def without_compiler() -> Iterator[None]:
    """Disable `torch.compile` inside the block, by torch's TORCHDYNAMO_DISABLE.

    To check an optimizer's type, DeepSpeed imports Muon, which compiles at import: loading torch's
    compiler would take 1.5 s of each rank's start.
    """
    before = os.environ.get("TORCHDYNAMO_DISABLE")
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    try:
        yield
    finally:
        del os.environ["TORCHDYNAMO_DISABLE"]
        if before is not None:
            os.environ["TORCHDYNAMO_DISABLE"] = before


def deepspeed_dict(settings: DeepSpeedSettings, data: int) -> dict[str, Any]:
    """Return the config that `deepspeed.initialize` gets.

    A schedule of transformers is passed as a function instead.

    Args:
        data: number of replicas.
    """
    values = settings.written()
    schedule = settings.scheduler
    if schedule is not None and schedule.type in TRANSFORMERS_SCHEDULES:
        del values["scheduler"]
    if settings.optimizer is not None and isinstance(settings.optimizer.params, Muon):
        # DeepSpeed gets a `MatrixOptimizer` instead, which ZeRO takes with this key alone.
        del values["optimizer"]
        values["zero_allow_untested_optimizer"] = True
    # DeepSpeed's own default is true.
    values["timers"] = settings.timers.model_dump()
    if not deepspeed_clips(settings.zero_optimization.stage):
        # As a number, because without the key DeepSpeed clips at 1.0. Stage 0 clips before
        # DeepSpeed's step (`ZeroStage0`).
        values["gradient_clipping"] = 0.0
    if keeps_gradients_in_place(settings, data):
        # DeepSpeed would copy each gradient five times for a mean over one rank.
        contiguous = {"contiguous_gradients": False}
        values["zero_optimization"] = contiguous | values["zero_optimization"]
    return values


class ZeroEngine(ABC):
    """One ZeRO stage: build the model inside `construction()`, then `initialize` wraps it in
    DeepSpeed's engine.

    Attributes:
        settings: DeepSpeed's part of the config.
        model: the unwrapped model. deepspeed_engine, optimizer, scheduler: results of
            `deepspeed.initialize`.
        loss_scale: of fp16; None in another dtype.
        lock_step: all DP ranks must run the same number of forwards, because each forward
            communicates over DP.
        veto: finds spikes, whose steps update nothing.
        average: of the masters (`start_average`); None: none is kept.
        compiled: the update runs in compiled kernels, where a stage has some.
        native_schedule_start: DeepSpeed's schedules start where DeepSpeed starts them
            (`set_schedule`).
        schedule_start: number of updates before the schedule's first step; above 0 if a stage of
            the run has brought the schedule.
    """

    lock_step = False
    native_schedule_start = False
    schedule_start = 0
    compiled = False
    _update: AdamWUpdate | UnpartitionedAdamWUpdate | None = None
    model: ParallelModel
    deepspeed_engine: Any
    loss_scale: LossScale | None
    optimizer: Any
    scheduler: Any

    def __init__(self, settings: DeepSpeedSettings, topology: Topology, veto: StepVeto):
        self.settings = settings
        self.topology = topology
        # With expert parallelism each forward exchanges tokens over DP.
        self.lock_step = type(self).lock_step or topology.expert > 1
        self._config = deepspeed_dict(settings, topology.data)
        self._schedule_factory = transformers_schedule(settings.scheduler)
        self.veto = veto
        self.average: WeightAverage | None = None

    def construction(self) -> AbstractContextManager[Any]:
        """Return the context in which to build the model."""
        return nullcontext()

    def initialize(self, model: ParallelModel, trainable: Trainable) -> None:
        """Make DeepSpeed's engine. Collective over all ranks.

        Args:
            trainable: parameters for the config's optimizer (by default torch's fused AdamW:
                `choose_implementation` in base/settings/optimizer.py), or an optimizer:
                `MatrixOptimizer`, or a Trainer's, whose update must be element-wise.
        """
        # By default cuBLAS may round partial sums of 16-bit products to 16 bits. Under TP the
        # products have other shapes, so the results would differ from the plain run's by more than
        # the order of fp32 sums.
        for dtype in ("bf16", "fp16"):
            setattr(torch.backends.cuda.matmul, f"allow_{dtype}_reduced_precision_reduction", False)
        self.model = model
        argument = (
            "optimizer" if isinstance(trainable, torch.optim.Optimizer) else "model_parameters"
        )
        trainable = split_by_group(trainable, self.topology)
        with without_compiler(), expert_groups(model, self.topology):
            self.deepspeed_engine, self.optimizer, _, self.scheduler = deepspeed.initialize(
                model=model,
                config=self._config | {"zero_optimization": self._fitting_buckets()},
                mpu=self.topology,
                lr_scheduler=self._schedule_factory,
                **{argument: trainable},
            )
        # If the mpu lacks a method, DeepSpeed may count other replicas without an error.
        replicas = self.deepspeed_engine.dp_world_size
        if replicas != self.topology.data:
            raise RuntimeError(
                f"DeepSpeed has {replicas} data-parallel ranks, the topology {self.topology.data}"
            )
        scale_rates(self.scheduler, self.optimizer.param_groups)
        # DeepSpeed has begun its schedule at iteration -1; here the first step gets the schedule's
        # value at 1 (`set_schedule`).
        self._set_schedule(0)
        self.loss_scale = None
        if self.deepspeed_engine.fp16_enabled():
            self.loss_scale = LossScale(self.deepspeed_engine, self.optimizer)

    def _fitting_buckets(self) -> dict[str, Any]:
        """Return the config's ZeRO block, whose bucket is no larger than all gradients together.

        DeepSpeed makes the whole bucket, however small the model is, and copies what fills it.
        """
        block: dict[str, Any] = self._config.get("zero_optimization", {})
        if self.settings.zero_optimization.stage == 0:
            return block
        sizes = (
            # Under ZeRO-3 a parameter is empty, and its gradient whole.
            getattr(parameter, "ds_numel", parameter.numel())
            for parameter in self.model.parameters()
            if parameter.requires_grad
        )
        size = min(self.settings.zero_optimization.reduce_bucket_size, sum(sizes))
        return {**block, "reduce_bucket_size": size}

    def _set_schedule(self, updates: int) -> None:
        """Set the schedule for the next step, after `updates` updates.

        It is the config's, which may differ from that of the saved run.
        """
        if self.scheduler is not None:
            own_updates = max(0, updates - self.schedule_start)
            set_schedule(self.scheduler, own_updates, native_start=self.native_schedule_start)

    @property
    def updates(self) -> int:
        """Return the number of steps that have updated the weights."""
        deepspeed_engine = self.deepspeed_engine
        return int(deepspeed_engine.global_steps - deepspeed_engine.skipped_steps)

    def replace_schedule(self, schedule: Schedule | None, factor: float, start: int) -> None:
        """Take the rates of the next steps from another schedule.

        Args:
            schedule: None: the rate is constant.
            factor: of the optimizer's rate, for all groups.
            start: number of updates before the schedule's first step.
        """
        assert self.settings.optimizer is not None
        rate = float(self.settings.optimizer.params.lr)
        for group in self.optimizer.param_groups:
            # Schedules read the optimizer's rate here, which the one before has moved.
            group["lr"] = rate
            group.pop("initial_lr", None)
        self.scheduler = None
        if schedule is not None:
            # As DeepSpeed makes them: transformers' schedules need an optimizer of torch.
            is_lambda = schedule.type in TRANSFORMERS_SCHEDULES
            owner = self.deepspeed_engine.basic_optimizer if is_lambda else self.optimizer
            self.scheduler = make_schedule(schedule, owner)
        self.deepspeed_engine.lr_scheduler = self.scheduler
        scale_rates(self.scheduler, self.optimizer.param_groups, factor)
        self.schedule_start = start
        self._set_schedule(self.updates)

    def set_batch(self, micro_batch: int, accumulation: int) -> None:
        """Take steps of `accumulation` micro-batches of `micro_batch` samples from now on.

        Call it between steps.
        """
        deepspeed_engine = self.deepspeed_engine
        deepspeed_engine.set_train_micro_batch_size(micro_batch)
        samples = micro_batch * accumulation * self.topology.data
        deepspeed_engine.set_train_batch_size(samples)
        deepspeed_engine.tput_timer.batch_size = samples
        # The ZeRO optimizers have read it, too.
        if hasattr(self.optimizer, "gradient_accumulation_steps"):
            self.optimizer.gradient_accumulation_steps = accumulation
        self._align_micro_steps()

    def _align_micro_steps(self) -> None:
        # DeepSpeed steps when this count is a multiple of the accumulation, which may differ from
        # the saved run's or the stage's before.
        deepspeed_engine = self.deepspeed_engine
        deepspeed_engine.micro_steps = (
            deepspeed_engine.global_steps * deepspeed_engine.gradient_accumulation_steps()
        )

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Run a micro-batch's backward, in fp16 of the scaled loss, with DeepSpeed's options."""
        self.deepspeed_engine.backward(loss, **options)

    def step(self, figures: Tensor | None = None) -> None:
        """End a micro-batch's backward; after the last of a step: norm, veto, clip and update.

        `AdamWUpdate` (adamw_update.py) does them for torch's AdamW at stages 1 and 2, without
        offload. Elsewhere DeepSpeed's step does them, and asks the veto for spikes in what the
        stage's `initialize` (zero_stages.py) wraps. At stage 0 `ZeroStage0` computes the norm and
        vetoes before the update, which for torch's AdamW in 16 bits is
        `UnpartitionedAdamWUpdate`'s. A spike skips the update, as DeepSpeed skips one with
        gradients that are not finite, but keeps fp16's loss scale.

        Args:
            figures: of the whole step, for its last micro-batch: [loss, …]. Without them no spike
                is found.
        """
        self.veto.begin(figures)
        # Asked before the step, which counts the micro-batch.
        last = self.deepspeed_engine.is_gradient_accumulation_boundary()
        self._step()
        if last and self.loss_scale is not None:
            # DeepSpeed's flag is set by a veto, too, but a spike is no overflow of fp16.
            self.loss_scale.update(self.optimizer.overflow and not self.veto.spike)
        # A pass of its own after the update: without an average the step has no more operations.
        if last and self.average is not None and not self._has_skipped():
            self.average.update()

    def _step(self) -> None:
        # It calls `optimizer.step`: for torch's AdamW that of an update in adamw_update.py, which
        # the stage's `initialize` has put there.
        self.deepspeed_engine.step()

    def norm_and_skipped(self) -> tuple[Tensor | float, bool]:
        """Return (gradient norm before clipping, skipped) of the last step, without waiting for the
        device.

        A step with gradients that are not finite on some rank is (nan, True). A spike is skipped,
        too, but is reported by `veto.spike` alone: here it is (norm, False).
        """
        # A vetoed spike also sets DeepSpeed's overflow flag, so it is asked first.
        if self.veto.norm is not None:
            return self.veto.norm, False
        if getattr(self.optimizer, "overflow", False):
            return float("nan"), True
        return self._norm(), False

    def _has_skipped(self) -> bool:
        """Return whether the last step updated nothing, for any reason; equal on all ranks."""
        return self.norm_and_skipped()[1] or bool(self.veto.spike)

    def _norm(self) -> Tensor | float:
        norm: Tensor | float | None = self.deepspeed_engine.get_global_grad_norm()
        return norm if norm is not None else float("nan")

    def states(self) -> OptimizerStates:
        """Return this rank's masters and optimizer states, and their average."""
        return OptimizerStates(self.fragments(), self.optimizer, self.average)

    def start_average(self, decay: float) -> None:
        """Keep an average of the masters from now on; it starts as their present values."""
        self.average = WeightAverage(self.fragments(), decay)

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Give the module the averaged weights inside the block, and then its own again, bit for
        bit. Collective over DP; no step may run inside.

        Buffers, such as routers' biases, stay the last ones. After another error than a UserError,
        which all ranks raise, the module keeps the averaged weights: only this rank may have
        failed, and it must not wait for the others.

        Raises:
            UserError: there is no average.
        """
        if self.average is None:
            raise UserError("averaged_weights: no average is kept; give ema=0.999, its decay")
        self.average.swap()
        self.fill_module()
        can_fill = False
        try:
            yield
            can_fill = True
        except UserError:
            can_fill = True
            raise
        finally:
            self.average.swap()
            if can_fill:
                self.fill_module()

    def progress(self) -> dict[str, Any]:
        """Return the run's progress, equal on all ranks, for a checkpoint's manifest."""
        groups = self.optimizer.param_groups
        # Earlier versions do not read it.
        start = {"schedule_start": self.schedule_start} if self.schedule_start else {}
        return {
            "optimizer_steps": self.states().steps,
            "counters": {name: getattr(self.deepspeed_engine, name) for name in COUNTERS},
            "schedule": self.scheduler.state_dict() if self.scheduler is not None else None,
            # Restored by the Trainer only: the rates of a resumed run follow its config.
            "learning_rates": unsplit([float(group["lr"]) for group in groups], groups),
            "loss_scale": {} if self.loss_scale is None else self.loss_scale.state(),
            "recent": [list(pair) for pair in self.veto.recent],
            **start,
        }

    def restore_progress(self, progress: dict[str, Any]) -> None:
        """Restore `progress()`.

        Schedule and rates follow the config; only a Trainer reads the saved ones.
        """
        self.restore_update_count(progress)
        for name in COUNTERS:
            setattr(self.deepspeed_engine, name, progress["counters"][name])
        self._align_micro_steps()
        self.schedule_start = progress.get("schedule_start", 0)
        self._set_schedule(self.updates)
        self.veto.recent = [list(pair) for pair in progress.get("recent", [])]

    def restore_update_count(self, progress: dict[str, Any]) -> None:
        """Restore only what belongs to the optimizer's states: the count of updates, and the
        loss scale.
        """
        self.states().set_steps(progress["optimizer_steps"])
        if self.loss_scale is not None:
            self.loss_scale.restore(progress["loss_scale"])

    def replicated_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of what is equal on all DP ranks between updates: the module's
        weights.
        """
        yield from ((name, tensor.detach()) for name, tensor in stored_tensors(self.model))

    @abstractmethod
    def fragments(self) -> Iterator[Fragment]:
        """Yield this rank's fragment of each parameter, in the model's order; some may be empty."""

    def updated_tensors(self) -> list[list[Tensor]]:
        """Return this rank's masters that each call of the optimizer's step updates, in order."""
        return [list(group["params"]) for group in self.states().optimizer.param_groups]

    def on_update(self, change: Callable[[Sequence[Tensor]], bool]) -> None:
        """Call `change` after each call of the optimizer's step, before the masters are rounded to
        weights. Steps that are skipped do not call it.

        Args:
            change: gets the masters that the call has updated, and may change them; returns whether
                it did.
        """
        if self._update is not None:
            # It updates masters and weights without the optimizer's own step.
            self._update.change = change
            return
        optimizer = self.states().optimizer
        step = optimizer.step

        def step_and_change(*arguments: Any, **options: Any) -> Any:
            result = step(*arguments, **options)
            # DeepSpeed calls no step that it skips. In fp32 without ZeRO its own flag is set.
            if not getattr(optimizer, "overflow", False):
                change([master for group in optimizer.param_groups for master in group["params"]])
            return result

        optimizer.step = step_and_change

    def checkpoint_slice(self, fragment: Fragment) -> Fragment:
        """Return the part of a fragment that this rank saves; it may be empty."""
        return fragment

    @abstractmethod
    def fill_module(self) -> None:
        """Copy the masters into the module's weights, as an optimizer step does. Collective over
        DP.
        """
