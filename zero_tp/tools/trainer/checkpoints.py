"""Trainer's checkpoints hold masters and moments as a run's do: any topology can resume them.

`checkpoint-500/` is a run directory with one checkpoint: `launch/convert.py` takes it too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zero_tp.base.errors import UserError
from zero_tp.engine.zero.expert_groups import split, unsplit
from zero_tp.engine.zero.zero_engine import ZeroEngine
from zero_tp.model.parallel_model import ParallelModel
from zero_tp.model.weights.load import PretrainedSource
from zero_tp.parallel.agreement import on_rank_zero
from zero_tp.parallel.layout import layout_of, stored_tensors, whole_shape
from zero_tp.parallel.parameter import ConstantInit
from zero_tp.run.checkpoint.find import find_checkpoint, find_on_all_ranks
from zero_tp.run.checkpoint.manifest import Parallelism
from zero_tp.run.checkpoint.save import Saver, describe_model
from zero_tp.run.checkpoint.start_point import Resume, describe_average

STATES = ("checkpoints", "optimizer*", "scheduler*", "global_step*")
"""Files of an optimizer's states in a checkpoint: ours, plain Trainer's and DeepSpeed's."""
GROUP_VALUES = ("base_lrs", "_last_lr", "lr_lambdas")
"""Keys of a torch schedule's state that have a value for each group of the optimizer."""


def save_states(
    zero: ZeroEngine,
    scheduler: Any,
    folder: Path,
    step: int,
    seed: int,
    *,
    timeout_minutes: float = 30,
) -> None:
    """Write masters, moments, counts, schedule, loss scale and random streams into `folder`.
    Collective.

    Args:
        scheduler: the one that Trainer steps; its state is saved if DeepSpeed has none.
    """

    def describe() -> dict[str, Any]:
        topology = zero.topology
        settings = zero.settings
        model = describe_model(zero)
        if zero.scheduler is None:
            # One that Trainer steps. DeepSpeed's own is among what `describe_model` has.
            schedule = scheduler.state_dict()
            model["progress"]["schedule"] = _map_groups(
                schedule, lambda values: unsplit(values, zero.optimizer.param_groups)
            )
        return {
            **Parallelism(
                topology.tensor,
                topology.data,
                topology.sequence,
                settings.stage,
                settings.dtype,
                topology.expert,
            ).to_json(),
            **model,
            "fixed": {"zero_tp.training.seed": seed},
            "corpora": {},
            "tokenizer": None,
            "config": settings.written(),
        }

    # `checkpoint-500/` then has Trainer's files and a directory `checkpoints/step_00000500`, as a
    # run has it.
    saver = Saver(zero, folder, describe, timeout_minutes=timeout_minutes)
    saver.save(step)
    outcome = saver.outcome()
    dist.barrier()  # rank 0 may host the store, which other ranks still read
    if outcome is not None and outcome[1]:
        raise UserError(f"{folder}: step {step} was not saved: {outcome[1]}")
    for note in saver.notes:
        warnings.warn(note, stacklevel=2)


def has_only_weights(folder: Path) -> bool:
    """Return whether a checkpoint was saved with `save_only_model`. Collective.

    The files of other optimizers' states, as plain Trainer and DeepSpeed write them, are no
    weights.
    """

    def find() -> bool:
        # If there are states of another library's optimizer too, starting a new optimizer would
        # silently lose them.
        states = [path for pattern in STATES for path in folder.glob(pattern)]
        return not states and any(folder.glob("*.safetensors"))

    return on_rank_zero(find)


@torch.no_grad()
def load_weights(model: ParallelModel, folder: Path) -> None:
    """Fill a model with the weights of a checkpoint.

    No engine may have partitioned it yet. Each rank reads its slices.
    """
    source = PretrainedSource(folder, model.config)
    if source.new_heads:
        raise UserError(
            f"{folder}: has no weights of {', '.join(source.new_heads)}; resume with the model of "
            "the save"
        )
    for name, parameter in stored_tensors(model):
        layout = layout_of(parameter, name)
        shape = whole_shape(parameter)
        source.fill(parameter, name, shape, layout, ConstantInit(0.0), model.topology)
    if dist.get_rank() == 0:
        warnings.warn(
            f"{folder}: was saved with save_only_model; the optimizer and the schedule start again",
            stacklevel=2,
        )


def resume_states(zero: ZeroEngine, scheduler: Any, folder: Path, seed: int) -> None:
    """Restore the states of `save_states`, on any topology. Collective."""
    checkpoint = find_on_all_ranks(partial(find_checkpoint, folder))
    assert checkpoint is not None
    optimizer = zero.states().optimizer
    # Adam's moments are `exp_avg` and `exp_avg_sq`, SGD's momentum `momentum_buffer`: neither has a
    # meaning for the other.
    foreign = "exp_avg" if isinstance(optimizer, torch.optim.SGD) else "momentum_buffer"
    if foreign in checkpoint.manifest.kinds:
        raise UserError(
            f"{checkpoint.path} has {foreign} of each parameter, which {type(optimizer).__name__} "
            "does not use; train "
            "with the optim that it was saved with"
        )
    for line in describe_average(checkpoint.manifest, has_average=zero.average is not None):
        if dist.get_rank() == 0:
            warnings.warn(f"{checkpoint.path}: {line}", stacklevel=2)
    Resume(checkpoint).restore(zero, seed)
    progress = checkpoint.manifest.progress
    if zero.scheduler is None and progress.schedule is not None:
        # Of each scheduler of DeepSpeed, and of none of torch.
        if "last_batch_iteration" in progress.schedule:
            raise UserError(
                f"{checkpoint.path}: its learning rate came from a scheduler of DeepSpeed's "
                "config, which this run "
                "does not have; give the block again"
            )
        groups = zero.optimizer.param_groups
        count = len(unsplit(groups, groups))
        if count != len(progress.learning_rates):
            raise UserError(
                f"{checkpoint.path}: its optimizer has {len(progress.learning_rates)} groups of "
                f"parameters, and this run's has {count}; give the param_groups of the save"
            )
        scheduler.load_state_dict(
            _map_groups(progress.schedule, lambda values: split(values, groups))
        )
        for group, rate in zip(groups, split(progress.learning_rates, groups), strict=True):
            group["lr"] = rate  # a torch scheduler's state does not have it


def _map_groups(
    schedule: dict[str, Any], change: Callable[[list[Any]], list[Any]]
) -> dict[str, Any]:
    """Return the state of a torch schedule with its values for each group of the optimizer changed.

    A checkpoint has those before expert parallelism splits groups, as without it.
    """
    mapped = dict(schedule)
    for name, value in schedule.items():
        if name in GROUP_VALUES:
            mapped[name] = change(value)
        elif name == "_schedulers":  # of a schedule made of others
            mapped[name] = [_map_groups(part, change) for part in value]
    return mapped
