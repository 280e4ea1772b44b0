"""Resumes a run from a checkpoint of any topology: TP and DP sizes, SP, ZeRO stage, dtype and offload may all differ.

Each rank reads the pieces of masters and moments that it holds now, one parameter at a time, and the module is filled
from the masters, as after an optimizer step. On the topology that saved, everything is restored bit for bit, the random
streams too; on another, masters and moments are moved exactly, and dropout draws from new streams.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from tqdm import tqdm

from zero_tp.checkpoint import directory
from zero_tp.checkpoint.directory import Damaged
from zero_tp.checkpoint.reader import CheckpointReader, Described, states_file
from zero_tp.checkpoint.save import fixed_of, loss_scaler, place_of
from zero_tp.checkpoint.states import OptimizerStates
from zero_tp.config import RunConfig
from zero_tp.errors import UserError

if TYPE_CHECKING:
    from zero_tp.training.engine import TrainingEngine

UNSAID = {"zero_tp.data.document_attention": "continue"}
"""What holds for a checkpoint that was saved before there was such a key."""


def describe_place(place: dict[str, Any]) -> str:
    """`TP 2 × DP 2, SP, ZeRO-2, bf16`."""
    sequence = ", SP" if place["sequence"] else ""
    return f"TP {place['tensor']} × DP {place['data']}{sequence}, ZeRO-{place['zero_stage']}, {place['dtype']}"


def find_resumable(run: Path, config: RunConfig, given: Path | None = None) -> Path | None:
    """The checkpoint that the run would resume from; None to start from nothing. No communication.

    Args:
        given: the checkpoint to resume from, instead of the run's newest complete one.

    Raises:
        UserError: the newest checkpoint is damaged and `checkpoint.on_corrupt` says stop, another model or run saved
            it, or `given` is no checkpoint.
    """
    if given is not None:
        checkpoint = directory.find_checkpoint(given)
        _check_same_run(checkpoint, directory.read_manifest(checkpoint), config)
        return checkpoint
    steps = directory.complete_steps(run)
    while steps:
        checkpoint = directory.step_directory(run, steps.pop())
        try:
            manifest = directory.read_manifest(checkpoint)
        except Damaged as error:
            if config.zero_tp.checkpoint.on_corrupt == "stop" or not steps:
                raise UserError(offer(error, run)) from error
            continue
        _check_same_run(checkpoint, manifest, config)
        return checkpoint
    return None


def offer(error: Damaged, run: Path) -> str:
    """The error with what a person can do: resume from the checkpoint before."""
    told = f"{error.file}: {error.problem}; the checkpoint is damaged"
    steps = [step for step in directory.complete_steps(run) if directory.step_directory(run, step) < error.checkpoint]
    if not steps:
        return f"{told}, and there is none before it: give another --output-dir to start anew"
    before = directory.step_directory(run, steps[-1])
    return f'{told}: use the one before with --resume-from {before}, or set zero_tp.checkpoint.on_corrupt to "previous"'


def _check_same_run(checkpoint: Path, manifest: dict[str, Any], config: RunConfig) -> None:
    if "offload_optimizer" in config.nvme_paths:
        raise UserError(
            "zero_optimization.offload_optimizer.device: a run cannot be resumed with its optimizer on NVMe, where "
            'DeepSpeed does not restore its states; use "cpu"'
        )
    if len(manifest["kinds"]) == 1 and manifest["progress"]["optimizer_steps"] is not None:
        raise UserError(
            f"{checkpoint}: saved with the optimizer on NVMe, without its states, so it cannot be resumed; export it "
            "with launch/convert.py to-hf, or give another --output-dir"
        )
    for key, value in fixed_of(config).items():
        before = {**UNSAID, **manifest["fixed"]}[key]
        if before != value:
            raise UserError(
                f"{key}: {value!r}, but the run of {checkpoint} was started with {before!r}; "
                "start it with that, or give another --output-dir"
            )


def verify(checkpoint: Path) -> None:
    """Read the checkpoint from end to end and compare its checksums, each rank its share of the files. Collective.

    Raises:
        Damaged: on every rank, naming the first damaged file.
    """
    files = directory.read_manifest(checkpoint)["files"]
    rank, world = dist.get_rank(), dist.get_world_size()
    problem = None
    try:
        for name in sorted(files)[rank::world]:
            directory.check_file(checkpoint, name, files[name])
    except Damaged as error:
        problem = (error.file.name, error.problem)
    problems: list[tuple[str, str] | None] = [None] * world
    dist.all_gather_object(problems, problem)
    for found in problems:
        if found is not None:
            raise Damaged(checkpoint / found[0], found[1])


def verified(
    checkpoint: Path, run: Path, config: RunConfig, given: Path | None = None
) -> tuple[Path | None, list[str]]:
    """The checkpoint, or with `on_corrupt` "previous" the newest before it, that is whole. Collective.

    Returns:
        The checkpoint, and a line on each damaged one that was set aside.

    Raises:
        UserError: it is damaged and `on_corrupt` says stop, or it was asked for by name.
    """
    notes: list[str] = []
    found: Path | None = checkpoint
    while found is not None:
        try:
            verify(found)
            return found, notes
        except Damaged as error:
            if given is not None or config.zero_tp.checkpoint.on_corrupt == "stop":
                raise UserError(offer(error, run)) from error
            dist.barrier()  # every rank has read the directory as it was
            if dist.get_rank() == 0:
                directory.set_aside(found)
            dist.barrier()
            notes.append(f"{error.file}: {error.problem}; set aside, going back to the checkpoint before")
            found = find_resumable(run, config)
    return None, notes


def resume(engine: TrainingEngine, checkpoint: Path, config: RunConfig) -> int:
    """Restore masters, moments, counts, schedule, loss scale and random streams. Collective.

    Returns:
        The checkpoint's step.

    Raises:
        UserError: the model has other parameters than the checkpoint, or elements are missing.
    """
    with directory.in_use(checkpoint):
        manifest = directory.read_manifest(checkpoint)
        reader = CheckpointReader(checkpoint, manifest)
        described = {name: Described.of(parameter) for name, parameter in engine.model.named_parameters()}
        _check_parameters(checkpoint, reader.parameters, described)
        states = OptimizerStates(engine)
        _fill(states, reader, described, manifest["kinds"])
        _restore_progress(engine, states, manifest["progress"])
        _restore_streams(engine, checkpoint, manifest, place_of(config))
    step: int = manifest["step"]
    return step


def _check_parameters(checkpoint: Path, saved: dict[str, Described], wanted: dict[str, Described]) -> None:
    for name in sorted(saved.keys() ^ wanted.keys()):
        where = "the model" if name in wanted else "the checkpoint"
        raise UserError(f"{checkpoint}: only {where} has a parameter {name}; resume the model that was saved")
    for name, parameter in wanted.items():
        if saved[name].shape != parameter.shape:
            raise UserError(f"{checkpoint}: {name} is {saved[name].shape}, the model's {parameter.shape}")


@torch.no_grad()
def _fill(states: OptimizerStates, reader: CheckpointReader, described: dict[str, Described], kinds: list[str]) -> None:
    topology = states.engine.topology
    runs = tqdm(states.held, "resuming", unit="parameter", disable=None if topology.rank == 0 else True, leave=False)
    for run in runs:
        for kind in kinds:
            piece = reader.piece(
                run.name, kind, described[run.name], topology.tensor_rank, topology.tensor, run.start, run.numel
            )
            states.get(run, kind).copy_(piece)
    states.fill_module()


def _restore_progress(engine: TrainingEngine, states: OptimizerStates, progress: dict[str, Any]) -> None:
    states.set_steps(progress["optimizer_steps"])
    for name, value in progress["counters"].items():
        setattr(engine.engine, name, value)
    if engine.scheduler is not None and progress["schedule"] is not None:
        engine.scheduler.load_state_dict(progress["schedule"])
    for group, rate in zip(engine.optimizer.param_groups, progress["learning_rates"], strict=True):
        group["lr"] = rate
    scaler = loss_scaler(engine)
    for name, value in progress["loss_scale"].items():
        if hasattr(scaler, name):
            setattr(scaler, name, value)


def _restore_streams(engine: TrainingEngine, checkpoint: Path, manifest: dict[str, Any], place: dict[str, Any]) -> None:
    """The streams as they were where the grid is the same; elsewhere new ones, chosen by seed and step."""
    topology, streams = engine.topology, engine.model.streams
    if any(manifest[key] != place[key] for key in ("tensor", "data", "sequence")):
        streams.reseed(topology, manifest["fixed"]["zero_tp.training.seed"] + manifest["step"])
        return
    with safe_open(checkpoint / states_file(topology.tensor_rank, topology.data_rank), framework="pt") as file:
        names = [key for key in file.keys() if key.startswith("random/")]  # noqa: SIM118 - not a mapping
        streams.load_state_dict({name.removeprefix("random/"): file.get_tensor(name) for name in names})
