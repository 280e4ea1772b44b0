"""Resume a run from a checkpoint of any topology: TP and DP sizes, SP, ZeRO stage, dtype and offload may all differ.

Each rank reads the pieces of masters and moments that it holds now, one parameter at a time, and the module is filled
from the masters, as after an optimizer step. On the topology that saved, everything is restored bit for bit, the random
streams too; on another, masters and moments are moved exactly, and dropout draws from new streams, as it does on
another kind of device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from threading import Event

import torch
import torch.distributed as dist
from safetensors import safe_open
from tqdm import tqdm
from transformers import GenerationConfig

from zero_tp.checkpoint import directory
from zero_tp.checkpoint.directory import Damaged, check_file, check_sizes, read_manifest
from zero_tp.checkpoint.manifest import Manifest, ManifestFile, states_file
from zero_tp.checkpoint.reader import RANDOM, CheckpointReader, Described, destinations_of
from zero_tp.errors import UserError
from zero_tp.parallel.agreement import all_gather_object
from zero_tp.tensors.files import Destination, read_hashed
from zero_tp.topology import Topology
from zero_tp.zero.engine import ZeroEngine
from zero_tp.zero.states import Fragment, OptimizerStates


def _share(files: Mapping[str, ManifestFile]) -> dict[str, ManifestFile]:
    """Return this rank's share of a checkpoint's files: each is one rank's."""
    return {name: files[name] for name in sorted(files)[dist.get_rank() :: dist.get_world_size()]}


def check_all_there(checkpoint: Path) -> None:
    """Check that a checkpoint's files are there and as long as its manifest says, before any is read. Collective.

    Each rank looks at its share.

    Raises:
        Damaged: on every rank, naming the first that is not.
    """
    damaged = None
    try:
        check_sizes(checkpoint, _share(read_manifest(checkpoint).files))
    except Damaged as error:  # told where the others wait
        damaged = error
    _agree_on_damage(checkpoint, damaged)


def _agree_on_damage(checkpoint: Path, damaged: Damaged | None, failure: Exception | None = None) -> None:
    """Go on only where no rank has found damage, and none has failed. Collective.

    Args:
        failure: what this rank's work on the files, which may be damaged, has ended with.

    Raises:
        Damaged: on every rank, naming the first damaged file.
        UserError: another rank has failed; where it is this one, its own error.
    """
    damage = None if damaged is None else (damaged.file.name, damaged.problem)
    ranks = all_gather_object((damage, None if failure is None else str(failure)))
    for damage, _ in ranks:
        if damage is not None:
            raise Damaged(checkpoint / damage[0], damage[1])
    if failure is not None:
        raise failure
    for _, failed in ranks:
        if failed is not None:
            raise UserError(failed)


class Verification(AbstractContextManager["Verification"]):
    """A verification reads and hashes a checkpoint, each rank its share of the files, on a thread that starts at once.

    Each file is read once from end to end, and on the way brought to where its bytes belong. Leaving the block that it
    opens ends the reading.
    """

    def __init__(
        self,
        checkpoint: Path,
        files: Mapping[str, ManifestFile],
        own: str | None = None,
        destinations: Iterable[Destination] = (),
    ):
        """Start to read this rank's share.

        Args:
            files: all that the manifest lists.
            own: the file that is this rank's share, where there is one for each rank.
            destinations: where bytes of `own` belong.
        """
        self.checkpoint = checkpoint
        self._thread, self._given_up = ThreadPoolExecutor(1), Event()
        self._share = {own: files[own]} if own is not None else _share(files)
        self._readings = {
            name: self._thread.submit(read_hashed, checkpoint / name, destinations if own else (), self._given_up)
            for name in self._share
        }

    def agree(self, failure: Exception | None = None) -> None:
        """Wait for the reading; no rank goes on unless all found their files whole and none failed. Collective.

        Args:
            failure: what this rank's work on the files, which may be damaged, has ended with.

        Raises:
            Damaged: on every rank, naming the first damaged file.
            UserError: another rank has failed; where it is this one, its own error.
        """
        found = self._damage() or (failure if isinstance(failure, Damaged) else None)
        _agree_on_damage(self.checkpoint, found, failure)

    def _damage(self) -> Damaged | None:
        """Return what is wrong with the first of this rank's files that is not as it was written."""
        try:
            for name, reading in self._readings.items():
                check_file(self.checkpoint / name, self._share[name], reading.result)
        except Damaged as error:
            return error
        return None

    def __exit__(self, *raised: object) -> None:
        self._given_up.set()
        self._thread.shutdown(cancel_futures=True)


def resume(zero: ZeroEngine, checkpoint: Path, seed: int) -> int:
    """Restore masters, moments, counts, schedule, loss scale and random streams; check every file. Collective.

    Args:
        seed: of the run, for new random streams on another grid.

    Returns:
        The checkpoint's step.

    Raises:
        Damaged, UserError: see `restored_states`.
    """
    with restored_states(zero, checkpoint) as manifest:
        zero.restore_progress(manifest.progress.model_dump())
        _restore_streams(zero, checkpoint, manifest, seed)
    return manifest.step


@contextmanager
def restored_states(zero: ZeroEngine, checkpoint: Path) -> Iterator[Manifest]:
    """Restore masters and moments, fill the module, and hold the checkpoint while the block runs. Collective.

    On the grid that saved it, each rank reads its own file, once. On another one, ranks share out the files to hash,
    and read the pieces that they hold from whichever files have them.

    Raises:
        Damaged: on every rank, naming the first damaged file; masters and states are then undefined.
        UserError: the model has other parameters than the checkpoint, or elements are missing.
    """
    states, topology, model = zero.states(), zero.topology, zero.model
    with directory.in_use(checkpoint) as manifest:
        same_grid = (manifest.tensor, manifest.data) == (topology.tensor, topology.data)
        own = states_file(topology.tensor_rank, topology.data_rank) if same_grid else None
        pieces = [(fragment, kind) for fragment in states.fragments for kind in manifest.kinds]
        placed: dict[tuple[str, str], Destination] = {}
        failure: Exception | None = None
        try:
            reader = CheckpointReader(checkpoint, manifest, compared=False)
            described = {name: Described.of(parameter) for name, parameter in model.named_parameters()}
            _check_parameters(checkpoint, reader.parameters, described)
            placed = destinations_of(checkpoint / own, states, pieces) if own else {}
        except Exception as error:  # a damaged file can end this in any way, and the others are to hear of it
            failure = error
        with Verification(checkpoint, manifest.files, own, placed.values()) as whole:
            try:
                if failure is None:
                    rest = [(fragment, kind) for fragment, kind in pieces if (fragment.name, kind) not in placed]
                    _fill(states, reader, described, rest, topology)
            except Exception as error:  # the same
                failure = error
            whole.agree(failure)
        zero.fill_module()
        if manifest.generation is not None:
            model.generation_config = GenerationConfig(**manifest.generation)
        yield manifest


def _check_parameters(checkpoint: Path, saved: dict[str, Described], wanted: dict[str, Described]) -> None:
    for name in sorted(saved.keys() ^ wanted.keys()):
        where = "the model" if name in wanted else "the checkpoint"
        raise UserError(f"{checkpoint}: only {where} has a parameter {name}; resume the model that was saved")
    for name, parameter in wanted.items():
        if saved[name].shape != parameter.shape:
            raise UserError(f"{checkpoint}: {name} is {saved[name].shape}, the model's {parameter.shape}")


@torch.no_grad()
def _fill(
    states: OptimizerStates,
    reader: CheckpointReader,
    described: dict[str, Described],
    pieces: list[tuple[Fragment, str]],
    topology: Topology,
) -> None:
    """Read masters and moments that this rank holds, in pieces of any file. No communication."""
    shown = tqdm(pieces, "resuming", unit="tensor", disable=None if topology.rank == 0 else True, leave=False)
    for fragment, kind in shown:
        wanted, start, numel = described[fragment.name], fragment.start, fragment.numel
        piece = reader.piece(fragment.name, kind, wanted, topology.tensor_rank, topology.tensor, start, numel)
        states.get(fragment, kind).copy_(piece)


def _restore_streams(zero: ZeroEngine, checkpoint: Path, manifest: Manifest, seed: int) -> None:
    """Restore the streams where the grid and the kind of device are the same; elsewhere seed new ones by the step."""
    topology, streams = zero.topology, zero.model.streams
    split_sequence = manifest.sequence and manifest.tensor > 1
    before = (manifest.tensor, manifest.data, split_sequence)
    if before == (topology.tensor, topology.data, topology.sequence):
        with safe_open(checkpoint / states_file(topology.tensor_rank, topology.data_rank), framework="pt") as file:
            states = {name: file.get_tensor(f"{RANDOM}/{name}") for name in streams.state_dict()}
        if streams.fit(states):
            streams.load_state_dict(states)
            return
    streams.reseed(topology, seed + manifest.step)
