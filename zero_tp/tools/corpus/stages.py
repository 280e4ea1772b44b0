"""What preparing texts and preparing token files have in common: reading the inputs block by block
into a spool, in several processes.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from zero_tp.base.errors import UserError
from zero_tp.data.records import Source
from zero_tp.data.tokenizer import load_tokenizer, save_tokenizer
from zero_tp.tools.corpus.blocks import map_in_order
from zero_tp.tools.corpus.settings import PrepareSettings
from zero_tp.tools.corpus.spool import ProcessedBlock, Spool
from zero_tp.tools.corpus.tokenizer_training import TokenizerSpec

_SMALL = 4 << 20  # bytes; smaller inputs are read faster than other processes start


class Stages(ABC):
    """The stages of `prepare` before the output is in place.

    Each resumes where an interrupted preparation stopped.

    Attributes:
        processor: makes a block of the spool of a block of the inputs; pickled for each process.
        seconds: stage → its duration.
    """

    processor: Callable[..., ProcessedBlock]

    def __init__(
        self,
        sources: Sequence[Source],
        spec: TokenizerSpec | None,
        settings: PrepareSettings,
        spool: Spool,
        strict: bool,
        processes: int | None,
        progress: bool,
    ) -> None:
        self.sources = sources
        self.spec = spec or TokenizerSpec()
        self.settings = settings
        self.spool = spool
        self.strict = strict
        # disable=None: a bar on a terminal only.
        self.bar: Callable[..., tqdm] = partial(
            tqdm, leave=False, disable=None if progress else True
        )
        self._processes = processes
        self.total_bytes = sum(source.size_and_time[0] for source in sources)
        small = all(source.path is not None for source in sources) and self.total_bytes < _SMALL
        self.processes = processes or (1 if small else len(os.sched_getaffinity(0)))
        self.tokenizer = (
            None
            if self.spec.directory is None
            else load_tokenizer(self.spec.directory, settings.eos)
        )
        self.seconds: dict[str, float] = {}

    def save_existing_tokenizer(self, destination: Path) -> None:
        """Save the tokenizer, unless it is to be trained.

        This comes before any document is read, because the tokenizer may be refused.
        """
        started = time.perf_counter()
        if self.tokenizer is not None and self.spec.directory is not None:
            save_tokenizer(self.tokenizer, destination, self.spec.directory)
            self.seconds["tokenizer"] = time.perf_counter() - started

    def read(self) -> None:
        """Read all sources into the spool."""
        started = time.perf_counter()
        spool = self.spool
        with self.bar(
            desc="reading", total=self.total_bytes or None, unit="B", unit_scale=True
        ) as bar:
            self._check_strict()
            # In order, although a later block may be ready first: the spool, and with it the
            # output, has the same bytes with any number of processes.
            for block in map_in_order(self.processor, self._missing_blocks(bar), self.processes):
                spool.append(block)
                self._check_strict()
        spool.flush()
        self.seconds["reading"] = time.perf_counter() - started

    @abstractmethod
    def _missing_blocks(self, bar: tqdm) -> Iterator[tuple[int, Any, str | None]]:
        """Yield the blocks that are not in the spool, with the numbers of their sources.

        After a source's last block comes an empty one with the source's SHA-256.
        """

    @abstractmethod
    def write(
        self, staging: Path, compute_identity: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """Write both corpora and the report, next to the tokenizer. Return the report."""

    def _check_strict(self) -> None:
        if self.strict and self.spool.counts.problems:
            problem = self.spool.counts.problems[0]
            raise UserError(f"{problem.where}: {problem.detail}")
