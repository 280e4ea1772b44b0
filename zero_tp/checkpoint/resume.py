"""Resume a run from a checkpoint of any topology: TP and DP sizes, SP, ZeRO stage, dtype and offload may all differ.

Each rank reads the pieces of masters and moments that it holds now, one parameter at a time, and the module is filled
from the masters, as after an optimizer step. On the topology that saved, everything is restored bit for bit, the random
streams too; on another, masters and moments are moved exactly, and dropout draws from new streams, as it does on
another kind of device.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from tqdm import tqdm
from transformers import GenerationConfig

from zero_tp.checkpoint.directory import read_manifest
from zero_tp.checkpoint.manifest import Manifest, states_file
from zero_tp.checkpoint.reader import RANDOM, CheckpointReader, ParameterLayout
from zero_tp.errors import UserError
from zero_tp.zero.zero_engine import ZeroEngine


def resume(zero: ZeroEngine, checkpoint: Path, seed: int) -> int:
    """Restore masters, moments, counts, schedule, loss scale and random streams. Collective.

    Args:
        checkpoint: verified already, as `broadcast_resume_point` does.
        seed: of the run, for new random streams on another grid.

    Returns:
        The checkpoint's step.
    """
    manifest = restore_states(zero, checkpoint)
    zero.restore_progress(manifest.progress.model_dump())
    _restore_streams(zero, checkpoint, manifest, seed)
    return manifest.step


def restore_states(zero: ZeroEngine, checkpoint: Path) -> Manifest:
    """Restore masters and moments, fill the module with them, and return the manifest. Collective.

    Raises:
        Damaged: a file cannot be read, or elements are missing.
        UserError: the model has other parameters than the checkpoint.
    """
    manifest = read_manifest(checkpoint)
    reader = CheckpointReader(checkpoint, manifest, zero.topology.data_rank)
    wanted = {name: ParameterLayout.of(parameter) for name, parameter in zero.model.named_parameters()}
    _check_parameters(checkpoint, reader.parameters, wanted)
    _read_states(zero, manifest, reader, wanted)
    zero.fill_module()
    if manifest.generation is not None:
        zero.model.generation_config = GenerationConfig(**manifest.generation)
    return manifest


def _check_parameters(checkpoint: Path, saved: dict[str, ParameterLayout], wanted: dict[str, ParameterLayout]) -> None:
    for name in sorted(saved.keys() ^ wanted.keys()):
        where = "the model" if name in wanted else "the checkpoint"
        raise UserError(f"{checkpoint}: only {where} has a parameter {name}; resume the model that was saved")
    for name, parameter in wanted.items():
        if saved[name].shape != parameter.shape:
            raise UserError(f"{checkpoint}: {name} is {saved[name].shape}, the model's {parameter.shape}")


@torch.no_grad()
def _read_states(
    zero: ZeroEngine, manifest: Manifest, reader: CheckpointReader, wanted: dict[str, ParameterLayout]
) -> None:
    """Read the masters and moments that this rank holds, on the grid that saved them from its own file alone."""
    states, topology = zero.states(), zero.topology
    pieces = [(fragment, kind) for fragment in states.fragments for kind in manifest.kinds]
    disable = None if topology.rank == 0 else True
    for fragment, kind in tqdm(pieces, "resuming", unit="tensor", disable=disable, leave=False):
        shard = (wanted[fragment.name], topology.tensor_rank, topology.tensor)
        piece = reader.piece(fragment.name, kind, *shard, fragment.start, fragment.numel)
        states.get(fragment, kind).copy_(piece)


def _restore_streams(zero: ZeroEngine, checkpoint: Path, manifest: Manifest, seed: int) -> None:
    """Restore the streams where the grid and the kind of device are the same; elsewhere seed new ones by the step."""
    topology, streams = zero.topology, zero.model.streams
    split_sequence = manifest.sequence and manifest.tensor > 1
    before = (manifest.tensor, manifest.data, split_sequence)
    if before == (topology.tensor, topology.data, topology.sequence):
        with safe_open(checkpoint / states_file(topology.tensor_rank, topology.data_rank), framework="pt") as file:
            states = {name: file.get_tensor(f"{RANDOM}/{name}") for name in streams.state_dict()}
        if streams.are_compatible(states):
            streams.load_state_dict(states)
            return
    streams.reseed(topology, seed + manifest.step)
