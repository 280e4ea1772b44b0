"""Verification tells whether a checkpoint is what was written.

Each file is read once from end to end, hashed, and on the way brought to where its bytes belong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from types import TracebackType
from typing import Any

import torch.distributed as dist

from zero_tp.checkpoint.directory import Damaged, read_manifest
from zero_tp.errors import UserError
from zero_tp.tensors.files import Destination, Written, read_hashed


def check_file(file: Path, manifested: dict[str, Any], read: Callable[[], Written] | None = None) -> None:
    """Check that a file has the SHA-256 that the manifest says.

    Args:
        read: gives what was found, where it isn't read here.

    Raises:
        Damaged: it has another one, or cannot be read.
    """
    try:
        found = read() if read else read_hashed(file)
    except OSError as error:
        raise Damaged(file, f"cannot be read ({error.strerror})") from error
    if found.sha256 != manifested["sha256"]:
        raise Damaged(file, f"SHA-256 is {found.sha256[:12]}…, not {manifested['sha256'][:12]}…")


class Verification:
    """A verification reads and hashes a checkpoint, each rank its share of the files, on a thread that starts at once.

    Leaving the block that it opens ends the reading.
    """

    def __init__(self, checkpoint: Path, own: str | None = None, destinations: Iterable[Destination] = ()):
        """
        Args:
            own: the file that is this rank's share, where there is one for each rank.
            destinations: where bytes of `own` belong.

        Raises:
            Damaged, UserError: see `read_manifest`.
        """
        self.checkpoint = checkpoint
        self._files: dict[str, Any] = read_manifest(checkpoint)["files"]
        self._thread, self._given_up = ThreadPoolExecutor(1), Event()
        share = [own] if own else sorted(self._files)[dist.get_rank() :: dist.get_world_size()]
        self._readings = {
            name: self._thread.submit(read_hashed, checkpoint / name, destinations if own else (), self._given_up)
            for name in share
        }

    def agree(self, failure: Exception | None = None) -> None:
        """Wait for the reading; no rank goes on unless all found their files whole and none failed. Collective.

        Args:
            failure: what this rank's work on the files, which may be damaged, has ended with.

        Raises:
            Damaged: on every rank, naming the first damaged file.
            UserError: another rank has failed; where it is this one, its own error.
        """
        told = (self._damage(), None if failure is None else str(failure))
        ranks: list[tuple[tuple[str, str] | None, str | None]] = [told] * dist.get_world_size()
        dist.all_gather_object(ranks, told)
        for damage, _ in ranks:
            if damage is not None:
                raise Damaged(self.checkpoint / damage[0], damage[1])
        if failure is not None:
            raise failure
        for _, failed in ranks:
            if failed is not None:
                raise UserError(failed)

    def _damage(self) -> tuple[str, str] | None:
        """Return (file, what is wrong) of the first of this rank's files that is not as it was written."""
        try:
            for name, reading in self._readings.items():
                check_file(self.checkpoint / name, self._files[name], reading.result)
        except Damaged as error:
            return error.file.name, error.problem
        return None

    def __enter__(self) -> Verification:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._given_up.set()
        self._thread.shutdown(cancel_futures=True)
