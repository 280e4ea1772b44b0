"""The stages of `prepare`: those of all inputs, and of texts.

tokens/importing.py has those of token files.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from zero_tp.base.errors import UserError
from zero_tp.base.files import remove, sync
from zero_tp.data.documents import read_blocks
from zero_tp.data.records import RecordBlock, RecordCounts, Source
from zero_tp.data.tokenizer import DocumentEncoder, load_tokenizer, save_tokenizer
from zero_tp.tools.corpus.blocks import BlockProcessor, encode_stored, map_in_order
from zero_tp.tools.corpus.output import DocumentTable, write_output
from zero_tp.tools.corpus.settings import PrepareSettings
from zero_tp.tools.corpus.similarity import EvaluationSets
from zero_tp.tools.corpus.spool import ProcessedBlock, Spool, StoredBlock
from zero_tp.tools.corpus.tokenizer_training import TokenizerSpec

TOKENIZER = "tokenizer"
REMOVED = "removed.jsonl"
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
        self.requested_processes = processes
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


class Preparation(Stages):
    """The stages of texts."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        settings = self.settings
        encoder = (
            None if self.tokenizer is None else DocumentEncoder(self.tokenizer, settings.sentences)
        )
        sets = EvaluationSets.read(settings.decontaminate) if settings.decontaminate else None
        self.processor: BlockProcessor = BlockProcessor(settings, encoder, sets)

    def _missing_blocks(self, bar: tqdm) -> Iterator[tuple[int, RecordBlock, str | None]]:
        bytes_before = 0
        for number, source in enumerate(self.sources):
            if number not in self.spool.sha256:
                # A source that is half in the spool is read from its start, because a compressed
                # file has no other; its known blocks are only not processed again.
                last = self.spool.last_blocks.get(number, -1)
                for block in read_blocks(source):
                    bar.update(bytes_before + source.position - bar.n)
                    if block.number > last:
                        yield number, block, None
                # The hash of a file is known once it was read to its end: an empty block brings it.
                yield number, RecordBlock(source.name, 0, None, []), source.sha256
            bytes_before += source.size_and_time[0]

    def write(
        self, staging: Path, compute_identity: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        documents = self.select(staging)
        encoder, encoded_blocks = self.encode(documents, staging / TOKENIZER)
        return write_output(
            staging, documents, encoded_blocks, encoder, compute_identity(), self.seconds
        )

    def select(self, staging: Path) -> DocumentTable:
        """Return the documents of the output, and write `removed.jsonl` if a step can remove
        some.
        """
        documents = DocumentTable(
            self.spool.blocks, [source.name for source in self.sources], self.spool.counts
        )
        if self.settings.deduplicate or self.settings.decontaminate:
            with open(staging / REMOVED, "w", encoding="utf-8") as file:
                for document in documents.remove(self.settings.deduplicate):
                    file.write(json.dumps(document, ensure_ascii=False) + "\n")
        documents.select_validation(self.settings.validation)
        return documents

    def encode(
        self, documents: DocumentTable, destination: Path
    ) -> tuple[DocumentEncoder, Sequence[StoredBlock]]:
        """Return the encoder, and the blocks with the documents' tokens.

        A tokenizer that has to be trained is trained first, and saved in `destination`.
        """
        started = time.perf_counter()
        if self.processor.encoder is not None:
            return self.processor.encoder, self.spool.blocks
        directory = self._train(documents)
        shutil.copytree(directory, destination)
        encoder = DocumentEncoder(load_tokenizer(directory), self.settings.sentences)
        self.seconds["tokenizer"] = time.perf_counter() - started
        # Its identity is empty: the directory around it has one, and another tokenizer would be
        # another directory.
        with contextlib.closing(Spool(self.spool.directory / "encoded").open({})) as encoded:
            # Block k of tokens belongs to block k of documents, so the number of blocks says where
            # to resume.
            numbers = range(len(encoded.blocks), len(documents.blocks))
            items = map(documents.block_to_encode, self.bar(numbers, "encoding", unit=" blocks"))
            results = map_in_order(partial(encode_stored, encoder), items, self.processes)
            for number, columns in zip(numbers, results, strict=True):
                encoded.append(ProcessedBlock(0, number, None, columns, RecordCounts()))
            encoded.flush()
        self.seconds["encoding"] = time.perf_counter() - started - self.seconds["tokenizer"]
        return encoder, encoded.blocks

    def _train(self, documents: DocumentTable) -> Path:
        """Train the tokenizer on the training documents and return its directory.

        If the spool's directory has it from an earlier start, it is not trained again.
        """
        # A kill during the training must not lose documents that were read.
        self.spool.commit()
        trained = self.spool.directory / TOKENIZER
        unfinished = self.spool.directory / "tokenizer.new"
        if not trained.exists():
            remove(unfinished)
            sample = documents.tokenizer_sample(self.settings.tokenizer_documents)
            bar = partial(
                self.bar, desc="training the tokenizer", total=int(sample.sum()), unit=" documents"
            )
            tokenizer = self.spec.train(lambda: iter(bar(documents.texts(sample))))
            tokenizer.save_pretrained(str(unfinished))
            sync(unfinished)
            # A rename, after all files are on disk: a directory of this name is always complete.
            os.replace(unfinished, trained)
        return trained
