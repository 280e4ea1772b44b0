"""Is a checkpoint what was written? Each file is read once from end to end, hashed, and on the way brought to where its
bytes belong."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from types import TracebackType
from typing import Any

import torch.distributed as dist

from zero_tp.checkpoint import directory
from zero_tp.checkpoint.directory import Damaged
from zero_tp.errors import UserError
from zero_tp.tensors.files import Place, read_hashed


class Verification:
    """A checkpoint that is read and hashed, each rank its share of the files, on a thread of its own from now on.

    Leaving the block that it opens ends the reading.
    """

    def __init__(self, checkpoint: Path, own: str | None = None, places: Iterable[Place] = ()):
        """
        Args:
            own: the file that is this rank's share, where there is one for each rank.
            places: where bytes of `own` belong.

        Raises:
            Damaged, UserError: see `read_manifest`.
        """
        self.checkpoint = checkpoint
        self._files: dict[str, Any] = directory.read_manifest(checkpoint)["files"]
        self._thread, self._given_up = ThreadPoolExecutor(1), Event()
        share = [own] if own else sorted(self._files)[dist.get_rank() :: dist.get_world_size()]
        self._readings = {
            name: self._thread.submit(read_hashed, checkpoint / name, places if own else (), self._given_up)
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
        """(file, what is wrong) of the first of this rank's files that is not as it was written."""
        try:
            for name, reading in self._readings.items():
                directory.compare(self.checkpoint / name, self._files[name], reading.result)
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
