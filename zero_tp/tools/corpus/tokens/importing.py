"""The stages of `prepare` for token files.

1. `read` finds, checks and hashes documents block by block. The spool has where they are; tokens
   stay in their files, unless those are compressed or tables.
2. `write` selects the validation set by a bound of the documents' hashes, and copies both splits.

Memory holds a few blocks a process, and about 0.5 KB for each block of 4 million tokens;
`--deduplicate exact` needs 70 bytes a document more.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from zero_tp.base.errors import UserError
from zero_tp.data.documents import file_sha256, size_and_time
from zero_tp.data.indexed_writer import IndexedWriter
from zero_tp.data.records import location
from zero_tp.data.tokenizer_fingerprint import TokenizerFingerprint
from zero_tp.tools.corpus.output import (
    ONLY_COPIES,
    require_tokens,
    unigram,
    validation_count,
    write_report,
)
from zero_tp.tools.corpus.show import SPLITS
from zero_tp.tools.corpus.similarity import exact_duplicates
from zero_tp.tools.corpus.spool import Mask
from zero_tp.tools.corpus.stages import Stages
from zero_tp.tools.corpus.tokens.cutting import TokenBlock, UnlikelyTokens
from zero_tp.tools.corpus.tokens.documents import (
    LoadedBlock,
    TokenProcessor,
    join,
)
from zero_tp.tools.corpus.tokens.files import Ids, TokenFile, changed
from zero_tp.tools.corpus.tokens.layout import TokenLayout, find_layout

Result = TypeVar("Result")
REMOVED = "removed.jsonl"
_COUNTED = 2**25
"""Tokens of which frequencies are counted: evenly spread blocks of a longer corpus, because
counting takes longer than reading, hashing and writing.
"""


class TokenPreparation(Stages):
    """The stages of token files."""

    sources: Sequence[TokenFile]

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        if self.requested_processes is None:
            # Threads hash and write beside this one, and NumPy does the rest: that keeps two cores
            # busy, and other processes take longer to start than they save.
            self.processes = 1
        self.layout = find_layout(self.sources, self.settings, self.tokenizer)
        self.processor = TokenProcessor.of(self.layout, self.settings)

    def read(self) -> None:
        """Read all files into the spool."""
        try:
            super().read()
        except UnlikelyTokens as error:
            raise UserError(f"{error}: {self.layout.describe_tokens(self.sources)}") from error

    def _missing_blocks(self, bar: tqdm) -> Iterator[tuple[int, TokenBlock, str | None]]:
        # Hashing a file is one thread's work, while processes find documents.
        with ThreadPoolExecutor(1) as pool:
            hashes = dict[int, Future[str]]()
            for number, block in self.layout.blocks(self.sources):
                source = self.sources[number]
                is_known = number in self.spool.sha256
                if not is_known and number not in hashes:
                    assert source.path is not None
                    hashes[number] = pool.submit(file_sha256, source.path)
                if block is not None:
                    if not is_known and block.number > self.spool.last_blocks.get(number, -1):
                        yield number, block, None
                elif not is_known:
                    sha256 = hashes.pop(number).result()
                    if source.path is None or source.size_and_time != size_and_time(source.path):
                        raise changed(source.name)
                    bar.update(source.size_and_time[0])
                    yield number, TokenBlock(source.name, 0, (), 0), sha256

    def write(
        self, staging: Path, compute_identity: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        started = time.perf_counter()
        table = TokenTable(self)
        if self.settings.deduplicate is not None:
            with open(staging / REMOVED, "w", encoding="utf-8") as file:
                for document in table.remove_duplicates():
                    file.write(json.dumps(document, ensure_ascii=False) + "\n")
        table.select_validation(self.settings.validation)
        writers = [TokenWriter(staging / split, self.layout) for split in SPLITS]
        every = -(-table.tokens // _COUNTED)
        with writers[0], writers[1]:
            # A thread reads the next block while this one is hashed and written.
            selections = enumerate(table.selections())
            for number, joined in _ahead(partial(_join_splits, self.layout.eos), selections):
                for writer, split in zip(writers, joined, strict=True):
                    writer.add(split, number % every == 0)
        for source in self.sources:
            if source.path is None or source.size_and_time != size_and_time(source.path):
                raise changed(source.name)
        splits = {
            split: {"documents": writer.documents, "tokens": writer.tokens}
            for split, writer in zip(SPLITS, writers, strict=True)
        }
        require_tokens(splits)
        size = self.layout.vocabulary_size or 1 + max(w.content.largest for w in writers)
        self.seconds["writing"] = time.perf_counter() - started
        report = {
            "identity": compute_identity(),
            "inputs": [source.name for source in self.sources],
            "documents": table.counts.as_dict(),
            "splits": splits,
            "vocabulary_size": size,
            "end_of_document": self.layout.eos_token,
            "tokenizer": self.tokenizer and TokenizerFingerprint.of(self.tokenizer).model_dump(),
            "unigram": unigram(*(writer.frequencies(size) for writer in writers)),
        }
        total = self.seconds["reading"] + self.seconds["writing"]
        return write_report(staging, report, writers, self.seconds, total)


class TokenTable:
    """All documents of the spool, read block by block each time they are needed.

    Attributes:
        counts: counts of the records of all files.
        tokens: of all documents, without end-of-text tokens.
    """

    def __init__(self, preparation: TokenPreparation) -> None:
        spool = preparation.spool
        self.counts = copy.deepcopy(spool.counts)
        self._names = [source.name for source in preparation.sources]
        self._dtype = preparation.layout.dtype
        self._stored = [block for block in spool.blocks if any(block.lengths)]
        self._is_copy: Mask | None = None
        self._bound = 0
        self.tokens = sum(int(block.spans.sizes.sum()) for block in self._blocks())

    def _blocks(self) -> Iterator[LoadedBlock]:
        for block in self._stored:
            yield LoadedBlock(block, self._dtype)

    def _without_copies(self) -> Iterator[tuple[LoadedBlock, Mask]]:
        """Yield the blocks, and which of their documents are no copies."""
        start = 0
        for block in self._blocks():
            count = len(block.split_hashes)
            is_selected = (
                np.ones(count, np.bool_)
                if self._is_copy is None
                else ~self._is_copy[start : start + count]
            )
            yield block, is_selected
            start += count

    def remove_duplicates(self) -> Iterator[dict[str, Any]]:
        """Drop exact copies of earlier documents; yield a record for removed.jsonl of each."""
        hashes = [np.frombuffer(block.read("content_hashes"), "V16") for block in self._stored]
        ends = np.cumsum([len(part) for part in hashes])
        originals = exact_duplicates(np.concatenate([np.zeros(0, "V16"), *hashes]))
        self._is_copy = originals != np.arange(len(originals))

        def describe(document: int) -> str:
            block = int(np.searchsorted(ends, document, side="right"))
            stored = self._stored[block]
            places = LoadedBlock(stored, self._dtype).spans.places
            return location(self._names[stored.source], int(places[document - ends[block]]))

        for number in np.flatnonzero(self._is_copy).tolist():
            self.counts.dropped["duplicate"] += 1
            yield {
                "removed": describe(number),
                "reason": "duplicate",
                "copy_of": describe(int(originals[number])),
            }

    def select_validation(self, validation: float) -> None:
        """Select the documents with the smallest hashes, as `DocumentTable` does."""
        total = sum(int(is_selected.sum()) for _, is_selected in self._without_copies())
        count = validation_count(validation, total, self._names, self.counts)
        self._bound = kth_smallest(
            lambda: (
                block.split_hashes[is_selected] for block, is_selected in self._without_copies()
            ),
            count,
        )
        if all(
            (block.split_hashes[is_selected] <= self._bound).all()
            for block, is_selected in self._without_copies()
        ):
            raise UserError(ONLY_COPIES)

    def selections(self) -> Iterator[tuple[LoadedBlock, Mask, Mask]]:
        """Yield the blocks, and which of their documents are for training and for validation."""
        for block, is_selected in self._without_copies():
            is_small = block.split_hashes <= self._bound
            yield block, is_selected & ~is_small, is_selected & is_small


def kth_smallest(parts: Callable[[], Iterable[npt.NDArray[np.uint64]]], k: int) -> int:
    """Return the k-th smallest of many 64-bit numbers, k from 1, in constant memory.

    Each of four passes finds 16 bits of it, the highest first: it counts the numbers with the bits
    that are known already, by their next 16.
    """
    known = 0
    for shift in (48, 32, 16, 0):
        counts = np.zeros(2**16, np.int64)
        for part in parts():
            digits = part >> np.uint64(shift)
            if shift < 48:
                digits = digits[digits >> np.uint64(16) == known]
            counts += np.bincount((digits & np.uint64(0xFFFF)).astype(np.int64), minlength=2**16)
        before = np.concatenate([[0], np.cumsum(counts)])
        digit = int(np.searchsorted(before, k)) - 1
        k -= int(before[digit])
        known = known << 16 | digit
    return known


class JoinedSplit(NamedTuple):
    """The documents of a block that are in a split, as `IndexedWriter.add_documents` takes them."""

    ids: Ids
    sizes: npt.NDArray[np.int64]
    begins: Mask | None
    bounds: tuple[int, int]


def _join_splits(
    eos: int, number: int, selection: tuple[LoadedBlock, Mask, Mask]
) -> tuple[int, list[JoinedSplit]]:
    block, *masks = selection
    tokens = block.tokens()
    sentences = block.sentences()
    joined = [
        JoinedSplit(
            join(tokens, block.spans, selected, eos),
            block.spans.sizes[selected] + 1,
            None if sentences is None else join(sentences, block.spans, selected, False),
            block.bounds(eos),
        )
        for selected in masks
    ]
    return number, joined


def _ahead(work: Callable[..., Result], items: Iterable[tuple[Any, ...]]) -> Iterator[Result]:
    """Yield `work(*item)` for each item, in order, while a thread works on the next one."""
    with ThreadPoolExecutor(1) as pool:
        pending: Future[Result] | None = None
        for item in items:
            done, pending = pending, pool.submit(work, *item)
            if done is not None:
                yield done.result()
        if pending is not None:
            yield pending.result()


class TokenWriter(IndexedWriter):
    """Writes the documents of a split, and counts them.

    Attributes:
        documents: how many.
    """

    def __init__(self, prefix: Path, layout: TokenLayout) -> None:
        super().__init__(prefix, layout.vocabulary_limit, layout.dtype)
        self._frequencies = np.zeros(0, np.int64)
        self.documents = 0

    def add(self, split: JoinedSplit, is_counted: bool) -> None:
        """Append documents.

        Args:
            is_counted: the frequencies of their tokens are counted.
        """
        self.add_documents(*split)
        self.documents += len(split.sizes)
        if is_counted or not len(self._frequencies):
            counts = np.bincount(split.ids, minlength=len(self._frequencies))
            counts[: len(self._frequencies)] += self._frequencies
            self._frequencies = counts

    def frequencies(self, size: int) -> npt.NDArray[np.int64]:
        """Return how often each token id occurs in what was counted, int64 [size]."""
        return np.pad(self._frequencies, (0, size - len(self._frequencies)))
