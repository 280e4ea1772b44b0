"""Trainer's checkpoints hold masters and moments as a run's do, so that they go on on any topology.

`checkpoint-500/` is a run directory with one checkpoint: `launch/convert.py` takes it too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from zero_tp.checkpoint import directory
from zero_tp.checkpoint.manifest import Parallelism, states_file
from zero_tp.checkpoint.resume import resume
from zero_tp.checkpoint.resume_point import ResumePoint, broadcast_resume_point
from zero_tp.checkpoint.save import described, in_words, own_entries
from zero_tp.config.resolve import dtype_name
from zero_tp.errors import UserError
from zero_tp.parallel.agreement import all_gather_object, on_rank_zero
from zero_tp.tensors.files import Written, write_tensors
from zero_tp.zero.engine import ZeroEngine

T = TypeVar("T")


def save_states(zero: ZeroEngine, scheduler: Any, folder: Path, step: int, seed: int) -> None:
    """Write masters, moments, counts, schedule, loss scale and random streams into `folder`. Collective.

    Args:
        scheduler: the one that Trainer steps, whose state is kept where DeepSpeed has none.

    Raises:
        UserError: on every rank; a rank could not write.
    """
    topology = zero.topology
    temporary = on_rank_zero(partial(directory.begin, folder))
    try:
        _write(zero, scheduler, folder, temporary, step, seed)
    except UserError:  # told by every rank
        if topology.rank == 0:
            directory.abandon(temporary)
        raise


def _write(zero: ZeroEngine, scheduler: Any, folder: Path, temporary: Path, step: int, seed: int) -> None:
    topology = zero.topology
    name = states_file(topology.tensor_rank, topology.data_rank)
    entries, metadata = own_entries(zero)
    written = _together(folder, partial(write_tensors, temporary / name, entries, metadata))
    files: dict[str, Written] = dict(all_gather_object((name, written)))
    told = described(zero)
    if zero.scheduler is None:
        told["progress"]["schedule"] = scheduler.state_dict()
    manifest = {
        **Parallelism(
            topology.tensor,
            topology.data,
            topology.sequence,
            int(zero.settings["zero_optimization"]["stage"]),
            dtype_name(zero.settings),
        )._asdict(),
        **told,
        "fixed": {"zero_tp.training.seed": seed},
        "corpora": {},
        "tokenizer": None,
        "config": zero.settings,
    }
    commit: Callable[[], list[str]] = partial(directory.commit, folder, temporary, step, manifest, files)
    for note in _together(folder, commit if topology.rank == 0 else list[str]):
        warnings.warn(note, stacklevel=2)


def _together(folder: Path, work: Callable[[], T]) -> T:
    """Do a rank's work; go on only where no rank has failed. Collective.

    Raises:
        UserError: on every rank, naming the first that failed.
    """
    problem = ""
    try:
        done = work()
    except Exception as error:  # whatever it is, the other ranks are to hear of it
        problem = in_words(error, folder)
    for rank, told in enumerate(all_gather_object(problem)):
        if told:
            raise UserError(f"{folder}: rank {rank} could not save: {told}")
    return done


def resume_states(zero: ZeroEngine, scheduler: Any, folder: Path, seed: int) -> None:
    """Restore what `save_states` wrote, on whatever topology. Collective.

    Raises:
        UserError: there is nothing to resume, it is damaged or of another model, or ranks do not see the same.
    """

    def find() -> ResumePoint:
        checkpoint = directory.find_checkpoint(folder)
        return ResumePoint(checkpoint, directory.read_manifest(checkpoint))

    point = broadcast_resume_point(find)
    assert point.checkpoint is not None and point.manifest is not None
    resume(zero, point.checkpoint, seed)
    progress = point.manifest.progress
    if zero.scheduler is None and progress.schedule is not None:
        if "lr_lambdas" not in progress.schedule:
            raise UserError(
                f"{point.checkpoint}: its learning rate came from a scheduler of DeepSpeed's config, which this run "
                "does not have; give the block again"
            )
        scheduler.load_state_dict(progress.schedule)
        for group, rate in zip(zero.optimizer.param_groups, progress.learning_rates, strict=True):
            group["lr"] = rate  # which torch keeps with the optimizer's state
