"""How a run starts: new, from its own checkpoint, or from the checkpoint of another run.

| class    | weights                  | optimizer's states | counts, streams | `parent`    |
|----------|--------------------------|--------------------|-----------------|-------------|
| `New`    | the seed, a hub's model  | zero               | from step 1     | none        |
| `Resume` | masters of the run       | of the run         | of the run      | as saved    |
| `Branch` | masters of another run   | of the other run   | from step 1     | the other's |

An average of the weights (`zero_tp.training.ema`) starts as these weights; `Resume` restores it if
the checkpoint has one.

A checkpoint moves to any topology: TP and DP sizes, SP, ZeRO stage, dtype and offload may differ.
A `Resume` keeps the batch of a step, the model, data, seed and optimizer (`fixed_settings`).
Each rank reads its pieces of masters and states, one parameter at a time, and fills the module from
the masters, as after an optimizer step. On the same topology everything is restored bit for bit. On
another one, or on another kind of device, dropout draws from new random streams.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
from safetensors import safe_open
from tqdm import tqdm
from transformers import GenerationConfig

from zero_tp.base.errors import UserError
from zero_tp.engine.zero.states import EMA, MASTER
from zero_tp.engine.zero.zero_engine import ZeroEngine
from zero_tp.parallel.agreement import on_rank_zero
from zero_tp.parallel.layout import stored_buffers, stored_tensors
from zero_tp.parallel.parameter import Zeros
from zero_tp.run.checkpoint import directory
from zero_tp.run.checkpoint.check_imported import describe_imported
from zero_tp.run.checkpoint.directory import Damaged
from zero_tp.run.checkpoint.find import Check, RunCheckpoint, find_checkpoint, find_on_all_ranks
from zero_tp.run.checkpoint.manifest import Manifest, Parallelism, Parent, states_file
from zero_tp.run.checkpoint.parent import (
    check_child,
    check_parent,
    describe_parent,
    inherits_states,
)
from zero_tp.run.checkpoint.reader import RANDOM, CheckpointReader, ParameterLayout, Place
from zero_tp.run.checkpoint.same_run import check_same_run, differences
from zero_tp.run.config import RunConfig

if TYPE_CHECKING:
    from zero_tp.model.weights.load import PretrainedSource
    from zero_tp.run.run_inputs import RunInputs


@dataclass(frozen=True)
class New:
    """A run that starts from the weights of its config.

    Attributes:
        notes: a line on each incomplete checkpoint in the run's directory.
        step: the last completed step.
        parent: recorded in the run's checkpoints: the checkpoint that it was started from.
    """

    notes: tuple[str, ...] = ()
    step: ClassVar[int] = 0
    parent: ClassVar[Parent | None] = None

    def weights(self, inputs: RunInputs) -> PretrainedSource | Zeros | None:
        """Return what the engine is built with: the source of the weights; None for the seed."""
        return inputs.pretrained()

    def restore(self, zero: ZeroEngine, seed: int) -> None:
        """Leave the engine as it was built."""

    def describe(self, inputs: RunInputs) -> list[str]:
        """Return the lines of the log that only this kind of start has."""
        return []


@dataclass(frozen=True)
class Resume:
    """A run that continues from its own checkpoint. Its members are those of `New`."""

    checkpoint: RunCheckpoint

    @property
    def notes(self) -> tuple[str, ...]:
        return self.checkpoint.notes

    @property
    def step(self) -> int:
        return self.checkpoint.step

    @property
    def parent(self) -> Parent | None:
        return self.checkpoint.manifest.parent

    @classmethod
    def find(
        cls,
        run: Path,
        config: RunConfig,
        resume_from: Path | None = None,
        *,
        known: RunCheckpoint | None = None,
        check: Check = lambda checkpoint, manifest: None,
        check_owner: Callable[[], None] = lambda: None,
    ) -> Resume | None:
        """Find the run's newest checkpoint, check and verify it; None for a new run. Collective.

        With `on_corrupt` "previous", a damaged one is set aside for the one before.

        Args:
            resume_from: a checkpoint or run to open instead; no other one replaces it.
            known, check: see `find_on_all_ranks`.
            check_owner: raises OwnerChanged on rank 0 if another launch owns the run directory.
        """

        def newest() -> RunCheckpoint | None:
            if resume_from is None:
                # Without it, a machine that restarts the run could resume an older checkpoint than
                # the last one.
                directory.refresh_view(run)
                if not directory.complete_steps(run):
                    return None
            checkpoint = find_checkpoint(resume_from or run, known)
            # On rank 0 only: all ranks have the same config, and the error travels to them.
            check_same_run(checkpoint.path, checkpoint.manifest, config)
            return checkpoint

        # A checkpoint that a person has named is not exchanged for another one.
        may_go_back = resume_from is None and config.zero_tp.checkpoint.on_corrupt == "previous"
        go_back = partial(_go_back, may_go_back, check_owner)
        checkpoint = find_on_all_ranks(newest, known=known, check=check, on_damage=go_back)
        return None if checkpoint is None else cls(checkpoint)

    def weights(self, inputs: RunInputs) -> Zeros:
        return Zeros()

    def restore(self, zero: ZeroEngine, seed: int) -> None:
        """Restore masters, states, counts, schedule, loss scale and random streams. Collective.

        Args:
            seed: the run's, for new random streams on another topology.
        """
        manifest = self.checkpoint.manifest
        _restore_states(zero, self.checkpoint, manifest.kinds)
        zero.restore_progress(manifest.progress.model_dump())
        if manifest.generation is not None:
            zero.model.generation_config = GenerationConfig(**manifest.generation)
        _restore_streams(zero, self.checkpoint.path, manifest, seed)

    def describe(self, inputs: RunInputs) -> list[str]:
        manifest = self.checkpoint.manifest
        config = inputs.config
        if manifest.imported is not None:
            return describe_imported(manifest, config.global_batch)
        before = Parallelism.from_manifest(manifest)
        now = Parallelism.of(config)
        moved = "" if before == now else f" saved at {before} → {now}"
        changes = differences(manifest, config, inputs.validation_corpora)
        average = describe_average(manifest, has_average=config.zero_tp.training.ema is not None)
        return [f"resuming step {self.step}{moved}", *changes, *average]


@dataclass(frozen=True)
class Branch:
    """A new run from the weights and moments of another run. Its members are those of `New`.

    Its config sets everything else. With an optimizer of other states it has the weights alone.
    """

    checkpoint: RunCheckpoint
    notes: tuple[str, ...] = ()
    inherits_states: bool = True
    step: ClassVar[int] = 0

    @property
    def parent(self) -> Parent:
        return Parent.of(self.checkpoint.path, self.checkpoint.manifest)

    def weights(self, inputs: RunInputs) -> Zeros:
        return Zeros()

    def restore(self, zero: ZeroEngine, seed: int) -> None:
        """Restore masters, states and their update counts. Collective."""
        if not self.inherits_states:
            _restore_states(zero, self.checkpoint, [MASTER])
            return
        # The parent's average is of weights before this run's.
        kinds = [kind for kind in self.checkpoint.manifest.kinds if kind != EMA]
        _restore_states(zero, self.checkpoint, kinds)
        zero.restore_update_count(self.checkpoint.manifest.progress.model_dump())

    def describe(self, inputs: RunInputs) -> list[str]:
        corpora = inputs.corpora, inputs.validation_corpora
        lines = describe_parent(self.checkpoint, inputs.config, *corpora)
        if inputs.config.zero_tp.training.ema is not None:
            lines.append("the average (ema) starts as the parent's weights")
        return lines


def find_start(
    inputs: RunInputs,
    *,
    init_from: Path | None = None,
    resume_from: Path | None = None,
    known: RunCheckpoint | None = None,
    check_owner: Callable[[], None] = lambda: None,
) -> New | Resume | Branch:
    """Find out how a run starts, the same on every rank. Collective.

    Args:
        init_from: another run or its checkpoint. A run that was started from it resumes.
        resume_from, known, check_owner: see `Resume.find`.
    """
    run = inputs.directory
    config = inputs.config
    # First: the same command with `--from` must continue the run that it has started, not start it
    # again.
    resume = Resume.find(
        run,
        config,
        resume_from,
        known=known,
        check=inputs.check_resumed,
        check_owner=check_owner,
    )
    if resume is not None:
        if init_from is not None:
            check_child(init_from, run, resume.checkpoint.manifest)
        return resume
    notes = on_rank_zero(partial(directory.incomplete_after, run, 0))
    if init_from is None:
        return New(notes)

    def find_parent() -> RunCheckpoint:
        parent = find_checkpoint(init_from)
        own_notes = check_parent(parent, config, inputs.model_config, inputs.fingerprint)
        return replace(parent, notes=parent.notes + own_notes)

    parent = find_on_all_ranks(find_parent)
    assert parent is not None
    return Branch(parent, notes, inherits_states(parent.manifest, config))


def describe_average(manifest: Manifest, *, has_average: bool) -> list[str]:
    """Return a line if a run that resumes has no average to restore, or restores none.

    Args:
        has_average: the run that resumes keeps one.
    """
    step = manifest.step
    if has_average and manifest.ema is None:
        return [f"the average (ema) starts as the weights of step {step}, which has none"]
    if not has_average and manifest.ema is not None:
        return [f"the average (ema) of step {step} is dropped: none is kept from here on"]
    return []


def _go_back(may_go_back: bool, check_owner: Callable[[], None], damage: Damaged) -> str:
    """Set a damaged checkpoint aside, so that the one before is the newest; return a note.

    Raises:
        UserError: there is none before, or `may_go_back` is false.
    """
    problem = f"{damage.file}: {damage.problem}"
    damaged = damage.checkpoint.absolute()
    run = damaged.parent.parent  # another run if `resume_from` is a checkpoint of it
    complete = [directory.step_directory(run, step) for step in directory.complete_steps(run)]
    before = complete[: complete.index(damaged)] if damaged in complete else []
    if not before:
        raise UserError(
            f"{problem}; the checkpoint is damaged, and there is none before it: give another "
            "--output-dir"
        )
    if not may_go_back:
        raise UserError(
            f"{problem}; the checkpoint is damaged: use the one before with "
            f'--resume-from {before[-1]}, or set zero_tp.checkpoint.on_corrupt to "previous"'
        )
    # Before the rename: a launch that has lost the run must not change its checkpoints.
    check_owner()
    aside = directory.set_aside(damage.checkpoint)
    return f"{problem}; set aside as {aside}, going back to the checkpoint before"


def _restore_states(zero: ZeroEngine, checkpoint: RunCheckpoint, kinds: Sequence[str]) -> None:
    """Restore masters and states of these kinds, and fill the module from them. Collective.

    An average that is not among them starts as the masters.

    The checkpoint's files have been verified.
    """
    reader = CheckpointReader(checkpoint.path, checkpoint.manifest, zero.topology.data_rank)
    wanted = {name: ParameterLayout.of(tensor) for name, tensor in stored_tensors(zero.model)}
    # Before the first tensor is read: an error in the middle would leave a model of two
    # checkpoints.
    _check_parameters(checkpoint.path, reader.parameters, wanted)
    has_average = zero.average is not None
    _read_states(zero, [kind for kind in kinds if has_average or kind != EMA], reader, wanted)
    if zero.average is not None and EMA not in kinds:
        zero.average.restart()
    # The module holds rounded copies of the masters. Without it, the first forward would use the
    # weights that the engine was built with.
    zero.fill_module()


def _check_parameters(
    checkpoint: Path, saved: dict[str, ParameterLayout], wanted: dict[str, ParameterLayout]
) -> None:
    # Names that only one side has. Sorted, so that all ranks name the same one.
    for name in sorted(saved.keys() ^ wanted.keys()):
        where = "the model" if name in wanted else "the checkpoint"
        raise UserError(
            f"{checkpoint}: only {where} has the parameter {name}; resume with the model that was "
            "saved"
        )
    for name, parameter in wanted.items():
        before = saved[name].shape
        now = parameter.shape
        if before != now:
            raise UserError(f"{checkpoint}: {name} has shape {before}, in the model {now}")


@torch.no_grad()
def _read_states(
    zero: ZeroEngine,
    kinds: Sequence[str],
    reader: CheckpointReader,
    wanted: dict[str, ParameterLayout],
) -> None:
    """Read this rank's masters and states; on the grid that saved them, its own file has all.

    The fragments are those of engine/zero/zero_stages.py. `states.get` is a view of the optimizer's
    own tensor (engine/zero/states.py), so a copy into it restores it. States on NVMe were refused.
    """
    states = zero.states()
    topology = zero.topology
    place = Place.of(topology)
    # All kinds of one parameter after each other: its maps are cached, and in the file its tensors
    # follow each other.
    pieces = [
        (fragment, kind)
        for fragment in states.fragments
        for kind in kinds
        if states.has(fragment, kind)
    ]
    disable = None if topology.rank == 0 else True
    for fragment, kind in tqdm(pieces, "resuming", unit="tensor", disable=disable, leave=False):
        parameter = wanted[fragment.name]
        piece = reader.piece(fragment.name, kind, parameter, place, fragment.span.whole)
        # The tensor is made here if the optimizer has not stepped.
        states.get(fragment, kind).copy_(piece)
    for name, buffer in stored_buffers(zero.model):
        piece = reader.piece(name, MASTER, wanted[name], place)
        buffer.copy_(piece.view(buffer.shape))


def _restore_streams(zero: ZeroEngine, checkpoint: Path, manifest: Manifest, seed: int) -> None:
    """Restore the random streams on the same grid and kind of device; else seed new ones."""
    topology = zero.topology
    streams = zero.model.streams
    # SP without TP splits nothing, so it draws the same numbers.
    split_sequence = manifest.sequence and manifest.tensor > 1
    before = (manifest.tensor, manifest.data, split_sequence)
    is_same_grid = before == (topology.tensor, topology.data, topology.sequence)
    if is_same_grid and manifest.imported is None:  # which has no streams
        name = states_file(topology.tensor_rank, topology.data_rank)
        with safe_open(checkpoint / name, framework="pt") as file:
            states = {key: file.get_tensor(f"{RANDOM}/{key}") for key in streams.state_dict()}
        if streams.are_compatible(states):
            streams.load_state_dict(states)
            return
    # Not the seed alone: the new streams would repeat the draws of the first steps.
    streams.reseed(topology, seed + manifest.step)
