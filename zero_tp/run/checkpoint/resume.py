"""Resume a run from a checkpoint of any topology: TP and DP sizes, SP, ZeRO stage, dtype and offload may all differ.

Each rank reads its pieces of masters and moments, one parameter at a time; the module is filled from the masters, as
after an optimizer step. On the same topology everything is restored bit for bit. On another topology or kind of device,
masters and moments are still exact, but dropout draws from new random streams.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from tqdm import tqdm
from transformers import GenerationConfig

from zero_tp.base.errors import UserError
from zero_tp.engine.zero.zero_engine import ZeroEngine
from zero_tp.run.checkpoint.directory import read_manifest
from zero_tp.run.checkpoint.manifest import Manifest, states_file
from zero_tp.run.checkpoint.reader import RANDOM, CheckpointReader, ParameterLayout


def resume(zero: ZeroEngine, checkpoint: Path, seed: int) -> int:
    """Restore masters, moments, counts, schedule, loss scale and random streams. Collective.

    Args:
        checkpoint: already verified (`broadcast_resume_point`).
        seed: the run's, for new random streams on another grid.

    Returns:
        The checkpoint's step.
    """
    manifest = restore_states(zero, checkpoint)
    zero.restore_progress(manifest.progress.model_dump())
    if manifest.generation is not None:
        zero.model.generation_config = GenerationConfig(**manifest.generation)
    _restore_streams(zero, checkpoint, manifest, seed)
    return manifest.step


def restore_states(zero: ZeroEngine, checkpoint: Path) -> Manifest:
    """Restore masters and moments, fill the module from them, and return the manifest. Collective."""
    manifest = read_manifest(checkpoint)
    reader = CheckpointReader(checkpoint, manifest, zero.topology.data_rank)
    wanted = {name: ParameterLayout.of(parameter) for name, parameter in zero.model.named_parameters()}
    _check_parameters(checkpoint, reader.parameters, wanted)
    _read_states(zero, manifest, reader, wanted)
    zero.fill_module()
    return manifest


def _check_parameters(checkpoint: Path, saved: dict[str, ParameterLayout], wanted: dict[str, ParameterLayout]) -> None:
    for name in sorted(saved.keys() ^ wanted.keys()):
        where = "the model" if name in wanted else "the checkpoint"
        raise UserError(f"{checkpoint}: only {where} has the parameter {name}; resume with the model that was saved")
    for name, parameter in wanted.items():
        if saved[name].shape != parameter.shape:
            raise UserError(f"{checkpoint}: {name} has shape {saved[name].shape}, in the model {parameter.shape}")


@torch.no_grad()
def _read_states(
    zero: ZeroEngine, manifest: Manifest, reader: CheckpointReader, wanted: dict[str, ParameterLayout]
) -> None:
    """Read this rank's masters and moments; on the grid that saved them, its own file has them all."""
    states, topology = zero.states(), zero.topology
    pieces = [(fragment, kind) for fragment in states.fragments for kind in manifest.kinds]
    disable = None if topology.rank == 0 else True
    for fragment, kind in tqdm(pieces, "resuming", unit="tensor", disable=disable, leave=False):
        shard = (wanted[fragment.name], topology.tensor_rank, topology.tensor)
        piece = reader.piece(fragment.name, kind, *shard, fragment.span.whole)
        states.get(fragment, kind).copy_(piece)


def _restore_streams(zero: ZeroEngine, checkpoint: Path, manifest: Manifest, seed: int) -> None:
    """Restore the random streams on the same grid and kind of device; else seed new ones by the step."""
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
