"""Resume a run from a checkpoint of any topology: TP and DP sizes, SP, ZeRO stage, dtype and offload may all differ.

Each rank reads the pieces of masters and moments that it holds now, one parameter at a time, and the module is filled
from the masters, as after an optimizer step. On the topology that saved, everything is restored bit for bit, the random
streams too; on another, masters and moments are moved exactly, and dropout draws from new streams.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Event

import torch
import torch.distributed as dist
from safetensors import safe_open
from tqdm import tqdm
from transformers import GenerationConfig

from zero_tp.checkpoint import directory
from zero_tp.checkpoint.directory import Damaged, check_file, check_sizes, read_manifest
from zero_tp.checkpoint.manifest import Manifest, ManifestFile, check_same_run, states_file
from zero_tp.checkpoint.reader import RANDOM, CheckpointReader, Described, destinations_of
from zero_tp.config import RunConfig
from zero_tp.errors import UserError
from zero_tp.files import VIEW_SECONDS, arrives, is_local
from zero_tp.parallel.agreement import by_the_first, from_all, require_alike
from zero_tp.tensors.files import Destination, read_hashed
from zero_tp.topology import Topology
from zero_tp.zero.stages import ZeroEngine
from zero_tp.zero.states import Fragment, OptimizerStates

LOOK_SECONDS = 5.0


def find_resumable(run: Path, config: RunConfig, given: Path | None = None) -> Path | None:
    """Find the checkpoint that the run would resume from; None to start from nothing. No communication.

    Args:
        given: the checkpoint to resume from, instead of the run's newest complete one.

    Raises:
        UserError: the newest checkpoint is damaged and `checkpoint.on_corrupt` says stop, another model or run saved
            it, or `given` is no checkpoint.
    """
    return _find(run, config, given)[0]


def _find(run: Path, config: RunConfig, given: Path | None) -> tuple[Path | None, Manifest | None, list[Damaged]]:
    """Return what `find_resumable` does, its manifest, and what is wrong with the newer ones that were passed over."""
    if given is not None:
        checkpoint = directory.find_checkpoint(given)
        manifest = read_manifest(checkpoint)
        check_same_run(checkpoint, manifest, config)
        return checkpoint, manifest, []
    passed: list[Damaged] = []
    steps = directory.complete_steps(run)
    while steps:
        checkpoint = directory.step_directory(run, steps.pop())
        try:
            manifest = read_manifest(checkpoint)
        except Damaged as error:
            if config.zero_tp.checkpoint.on_corrupt == "stop" or not steps:
                raise UserError(offer(error, run)) from error
            passed.append(error)
            continue
        check_same_run(checkpoint, manifest, config)
        return checkpoint, manifest, passed
    return None, None, passed


@dataclass(frozen=True)
class Found:
    """A rank has found this to resume from, before it knew of the others; `agree` says whether they found the same.

    Attributes:
        checkpoint, manifest: None where there is nothing to resume.
        notes: a line on each newer directory whose damage made it no candidate.
        refusal: why it cannot be resumed.
    """

    checkpoint: Path | None = None
    manifest: Manifest | None = None
    notes: tuple[str, ...] = ()
    refusal: UserError | None = None

    def describe(self) -> str:
        """Return it as ranks compare it: equal where they found the same."""
        if self.refusal is not None:
            return f"an error ({self.refusal})"
        if self.manifest is None:
            return "no checkpoint"
        return f"step {self.manifest.step} (manifest {self.manifest.digest()[:12]})"


def look(
    run: Path,
    config: RunConfig,
    given: Path | None = None,
    check: Callable[[Path, Manifest], None] = lambda checkpoint, manifest: None,
) -> Found:
    """Look what this rank would resume from; see `find_resumable`. No communication.

    Args:
        check: raises UserError where the checkpoint does not fit what else the run reads.
    """
    try:
        checkpoint, manifest, passed = _find(run, config, given)
        if checkpoint is not None and manifest is not None:
            check(checkpoint, manifest)
        lost = [] if given is not None else directory.incomplete_since(run, manifest.step if manifest else 0)
    except UserError as error:  # raised by `agree`, on every rank
        return Found(refusal=error)
    except OSError as error:
        return Found(refusal=UserError(f"{error.filename}: cannot be read ({error.strerror}); mend the run directory"))
    notes = [f"{one.file}: {one.problem}; going back to the checkpoint before" for one in passed]
    notes += [f"{path}: has no {directory.MANIFEST}, so that it is no checkpoint" for path in lost]
    return Found(checkpoint, manifest, tuple(notes))


@contextmanager
def probed(run: Path) -> Iterator[str]:
    """Give the name of a file that the first rank has just written in a run's directory, or "nothing" on a rank that
    does not see it: machines may each have a directory of that name. Collective.

    Raises:
        UserError: on every rank; it cannot be written.
    """

    def write() -> str:
        name = f".probe.{secrets.token_hex(8)}"
        (run / name).touch()
        return name

    name = by_the_first(write)
    try:
        yield name if arrives((run / name).exists, run) else "nothing"
    finally:
        if dist.get_rank() == 0:
            (run / name).unlink(missing_ok=True)


def agree(
    found: Found, run: Path, read: Mapping[str, str] | None = None, again: Callable[[], Found] | None = None
) -> Found:
    """Return what every rank has found. Collective: each rank comes here whatever it has found.

    Args:
        read: what else this rank has read, by what it is; all must have read the same.
        again: looks again. A network's file system may show a machine for a minute what it was.

    Raises:
        UserError: what they found or read differs, or cannot be resumed.
    """
    for _ in range(math.ceil(VIEW_SECONDS / LOOK_SECONDS) + 1 if again else 0):  # as often on every rank
        views = from_all((found.describe(), is_local(run)))
        if len({seen for seen, _ in views}) == 1 or all(local for _, local in views):
            break
        time.sleep(LOOK_SECONDS)
        found = again() if again else found
    require_alike(
        {
            f"{run}: the ranks do not see the same checkpoint": found.describe(),
            **{f"the ranks do not read the same {what}": content for what, content in (read or {}).items()},
        }
    )
    if found.refusal is not None:
        raise found.refusal
    return found


def offer(error: Damaged, run: Path) -> str:
    """Return the error with what a person can do: resume from the checkpoint before."""
    told = f"{error.file}: {error.problem}; the checkpoint is damaged"
    steps = _steps_before(error, run)
    if not steps:
        return f"{told}, and there is none before it: give another --output-dir to start anew"
    before = directory.step_directory(run, steps[-1])
    return f'{told}: use the one before with --resume-from {before}, or set zero_tp.checkpoint.on_corrupt to "previous"'


def _steps_before(error: Damaged, run: Path) -> list[int]:
    return [step for step in directory.complete_steps(run) if directory.step_directory(run, step) < error.checkpoint]


def take_whole(
    found: Found, run: Path, config: RunConfig, take: Callable[[Path], object], given: Path | None = None
) -> Found:
    """Take the checkpoint, or with `on_corrupt` "previous" the newest before it that is whole. Collective.

    Args:
        take: takes a checkpoint; raises Damaged, on every rank, where it is not whole.

    Returns:
        What was taken, with a line on each damaged one that was set aside.

    Raises:
        UserError: it is damaged and `on_corrupt` says stop, it was asked for by name, or there is none before it.
    """
    while True:
        checkpoint = found.checkpoint
        assert checkpoint is not None
        try:
            take(checkpoint)
            return found
        except Damaged as error:
            stop = given is not None or config.zero_tp.checkpoint.on_corrupt == "stop"
            if any(from_all(stop or not _steps_before(error, run))):  # each has read the directory as it was
                raise UserError(offer(error, run)) from error
            aside = by_the_first(partial(directory.set_aside, checkpoint))
            told = f"{error.file}: {error.problem}; set aside as {aside}, going back to the checkpoint before"
            before = agree(look(run, config), run)
            if before.checkpoint is None:
                raise UserError(f"{run}: the checkpoints before {checkpoint} are gone; start again") from error
            found = replace(before, notes=(*found.notes, told, *before.notes))


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
    ranks = from_all((damage, None if failure is None else str(failure)))
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
    with restored_states(zero, checkpoint) as manifest, directory.taken_as_it_stands(checkpoint, manifest):
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
        with directory.taken_as_it_stands(checkpoint, manifest):
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
    """Restore the streams as they were where the grid is the same; elsewhere take new ones, chosen by seed and step."""
    topology, streams = zero.topology, zero.model.streams
    split_sequence = manifest.sequence and manifest.tensor > 1
    before = (manifest.tensor, manifest.data, split_sequence)
    if before != (topology.tensor, topology.data, topology.sequence):
        streams.reseed(topology, seed + manifest.step)
        return
    with safe_open(checkpoint / states_file(topology.tensor_rank, topology.data_rank), framework="pt") as file:
        names = [key for key in file.keys() if key.startswith(f"{RANDOM}/")]  # noqa: SIM118 - not a mapping
        streams.load_state_dict({name.removeprefix(f"{RANDOM}/"): file.get_tensor(name) for name in names})
