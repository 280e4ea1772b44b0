"""The documents of an output, selected from all processed blocks, and the files that hold them."""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from zero_tp.base.errors import UserError
from zero_tp.data.indexed import REPORT, IndexedCorpus, token_dtype
from zero_tp.data.indexed_writer import IndexedWriter
from zero_tp.data.records import RecordCounts, location
from zero_tp.data.tokenizer import DocumentEncoder
from zero_tp.tools.corpus.settings import describe_files, library_versions
from zero_tp.tools.corpus.show import SPLITS
from zero_tp.tools.corpus.similarity import exact_duplicates, near_duplicates
from zero_tp.tools.corpus.spool import DOCUMENT_FACTS, Mask, StoredBlock, split_bytes

ONLY_COPIES = "all documents outside the validation set are copies of documents in it; add others"


class DocumentTable:
    """The facts of all stored documents, in the order of the inputs.

    Memory: 53 bytes a document. The search for near duplicates needs another 0.7 to 1.4 KB for each
    kept document (measured with 40,000).

    Attributes:
        facts: what is stored of each document (`DOCUMENT_FACTS`).
        in_output, in_validation: which documents are in the output, and in its validation set, bool
            [documents].
        names: the sources' names.
        counts: counts of the records of all sources.
    """

    def __init__(
        self, blocks: Sequence[StoredBlock], names: Sequence[str], counts: RecordCounts
    ) -> None:
        self.blocks = blocks
        self.names = names
        self.counts = copy.deepcopy(counts)
        parts = [np.frombuffer(block.read("documents"), DOCUMENT_FACTS) for block in blocks]
        self.facts = np.concatenate([np.zeros(0, DOCUMENT_FACTS), *parts])
        self.block_starts = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(
            np.int64
        )
        self.in_output = np.ones(len(self.facts), np.bool_)
        self.in_validation = np.zeros(len(self.facts), np.bool_)

    def slice_of(self, block: int) -> slice:
        """Return a block's rows of `facts`."""
        return slice(int(self.block_starts[block]), int(self.block_starts[block + 1]))

    def block_to_encode(self, block: int) -> tuple[StoredBlock, npt.NDArray[np.int64], Mask]:
        """Return a block, the lengths of its texts in bytes, and which of its documents are in
        the output.
        """
        rows = self.slice_of(block)
        return self.blocks[block], self.facts["bytes"][rows], self.in_output[rows]

    def texts(self, selected: Mask) -> Iterator[str]:
        """Yield the texts of the selected documents, bool [documents]."""
        for number, block in enumerate(self.blocks):
            rows = self.slice_of(number)
            yield from block.texts(self.facts["bytes"][rows], selected[rows])

    def remove(self, duplicates: str | None) -> Iterator[dict[str, Any]]:
        """Drop exact copies, near copies and documents that overlap with an evaluation set.

        Near copies are dropped only if `duplicates` is "near".

        Yields a record for removed.jsonl of each: its location, the reason, and the document that
        it is a copy of.
        """
        if duplicates is not None:
            # Exact copies first: they need no sketch, and the index of near copies then has fewer
            # documents.
            originals = exact_duplicates(self.facts["content_hash"].copy())
            for number in np.flatnonzero(originals != np.arange(len(originals))).tolist():
                yield self._remove(
                    number, "duplicate", copy_of=self._location(int(originals[number]))
                )
        if duplicates == "near":
            # Lazily, block by block: only the index keeps sketches, and of documents that stay. A
            # document that was dropped above is skipped.
            sketches = enumerate(chain.from_iterable(map(self._sketches, range(len(self.blocks)))))
            numbered = ((number, sketch) for number, sketch in sketches if self.in_output[number])
            for near in near_duplicates(numbered, self._sketch):
                similar = {"similarity": near.similarity} if near.similarity else {}
                yield self._remove(
                    near.document, "near-duplicate", copy_of=self._location(near.earlier), **similar
                )
        for number in np.flatnonzero(self.in_output & self.facts["contaminated"]).tolist():
            yield self._remove(number, "contaminated")

    def _remove(self, document: int, reason: str, **details: Any) -> dict[str, Any]:
        self.in_output[document] = False
        self.counts.dropped[reason] += 1
        return {"removed": self._location(document), "reason": reason, **details}

    def _block_of(self, document: int) -> int:
        return int(np.searchsorted(self.block_starts, document, side="right")) - 1

    def _location(self, document: int) -> str:
        """Return a document's file and line or row."""
        return location(
            self.names[self.blocks[self._block_of(document)].source],
            int(self.facts["place"][document]),
        )

    def _sketches(self, block: int) -> list[bytes]:
        return split_bytes(
            self.blocks[block].read("sketches"), self.facts["sketch_bytes"][self.slice_of(block)]
        )

    def _sketch(self, document: int) -> bytes:
        block = self._block_of(document)
        return self._sketches(block)[document - int(self.block_starts[block])]

    def select_validation(self, validation: float) -> None:
        """Select the validation set: the documents of the output with the smallest hashes.

        Equal documents have equal hashes, so they are in the same split. Adding a document to the
        inputs moves at most a few others to the other split.
        """
        total = int(self.in_output.sum())
        hashes = self.facts["split_hash"]
        count = validation_count(validation, total, self.names, self.counts)
        # Drawn with five documents and a validation set of 2, then of 1; b and d are equal:
        #
        #     document    a  b  c  d  e
        #     hash        7  2  9  2  5
        #     2 smallest     2     2         largest 2: b and d
        #     1 smallest     2               largest 2: b and d, one more than asked for
        #
        # A copy in the training set would make the validation loss too low.
        largest = np.partition(hashes[self.in_output], count - 1)[count - 1]
        self.in_validation = self.in_output & (hashes <= largest)
        if self.in_validation.sum() == total:
            raise UserError(ONLY_COPIES)

    def tokenizer_sample(self, limit: int | None) -> Mask:
        """Select at most `limit` training documents, bool [documents]; None: all.

        They are those with the largest hashes, so the documents' order does not matter.
        """
        # The tokenizer must not see the validation texts either.
        training = self.in_output & ~self.in_validation
        if limit is None or limit >= training.sum():
            return training
        numbers = np.flatnonzero(training)
        order = np.argsort(self.facts["split_hash"][numbers], kind="stable")
        sample = np.zeros(len(training), np.bool_)
        sample[numbers[order[-limit:]]] = True
        return sample


def validation_count(
    validation: float, total: int, names: Sequence[str], counts: RecordCounts
) -> int:
    """Return how many of `total` documents to hold out.

    Raises:
        UserError: none would be left to train on.
    """
    count = int(validation) if validation >= 1 else max(1, round(validation * total))
    dropped = ""
    if counts.problems:
        problem = counts.problems[0]
        dropped = (
            f" ({counts.dropped.total():,} dropped, the first: {problem.where}: {problem.detail})"
        )
    elif counts.dropped.total():
        reasons = (f"{number:,} {reason}" for reason, number in sorted(counts.dropped.items()))
        dropped = f" (dropped: {', '.join(reasons)})"
    if not total:
        raise UserError(f"no text in {', '.join(names)}{dropped}")
    if total < 2:
        raise UserError(
            "the inputs hold 1 document: the split is by document, so give at least 2 (a .txt "
            "file is one, unless "
            f"--documents says otherwise){dropped}"
        )
    if count >= total:
        raise UserError(f"validation {validation:g} of {total:,} documents leaves none to train on")
    return count


class SplitWriter(IndexedWriter):
    """Writes the documents of a split, and counts them.

    Attributes:
        counts: documents, tokens, characters and bytes.
        frequencies: how often each token id occurs, int64 [vocabulary].
    """

    def __init__(self, prefix: Path, vocabulary_size: int) -> None:
        super().__init__(prefix, vocabulary_size)
        self.counts = dict.fromkeys(("documents", "tokens", "characters", "bytes"), 0)
        self.frequencies = np.zeros(vocabulary_size, np.int64)

    def add_selected(
        self,
        selected: Mask,
        facts: npt.NDArray[Any],
        ids: npt.NDArray[Any],
        sizes: npt.NDArray[np.int64],
        begins: Mask,
    ) -> None:
        """Append the selected documents of a block, bool [documents].

        `begins` is that of `add_documents`, or empty.
        """
        # From documents to tokens: sizes 3, 2, 1 and documents yes, no, yes give yes yes yes no no
        # yes.
        is_selected = np.repeat(selected, sizes)
        self.add_documents(
            ids[is_selected], sizes[selected], begins[is_selected] if len(begins) else None
        )
        self.frequencies += np.bincount(ids[is_selected], minlength=self.vocabulary_size)
        self.counts["documents"] += int(selected.sum())
        self.counts["tokens"] += int(is_selected.sum())
        for name in ("characters", "bytes"):
            self.counts[name] += int(facts[name][selected].sum())


def write_output(
    directory: Path,
    documents: DocumentTable,
    encoded_blocks: Sequence[StoredBlock],
    encoder: DocumentEncoder,
    identity: dict[str, Any],
    seconds: dict[str, float],
) -> dict[str, Any]:
    """Write both corpora, the texts of the validation documents and the report.

    They go next to `tokenizer/` in `directory`. Returns the report.

    Args:
        encoded_blocks: the blocks with the documents' tokens.
        identity: everything that decides the output.
        seconds: durations of the earlier stages. `tokens_per_second` divides by the time of the
            stages that tokenized.
    """
    started = time.perf_counter()
    dtype = token_dtype(encoder.vocabulary_size)
    train, validation = (
        SplitWriter(directory / split, encoder.vocabulary_size) for split in SPLITS
    )
    with (
        train,
        validation,
        open(directory / "validation.jsonl", "w", encoding="utf-8") as texts_file,
    ):
        # One block at a time is in memory. Both splits are written in one pass, so each block is
        # read once.
        for number, block in enumerate(encoded_blocks):
            ids = np.frombuffer(block.read("tokens"), dtype)
            sizes = np.frombuffer(block.read("sizes"), np.int64)
            begins = np.frombuffer(block.read("sentences"), np.bool_)
            rows = documents.slice_of(number)
            facts = documents.facts[rows]
            in_validation = documents.in_validation[rows]
            train.add_selected(
                documents.in_output[rows] & ~in_validation, facts, ids, sizes, begins
            )
            validation.add_selected(in_validation, facts, ids, sizes, begins)
            for text in documents.blocks[number].texts(facts["bytes"], in_validation):
                texts_file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    splits = dict(zip(SPLITS, (train.counts, validation.counts), strict=True))
    require_tokens(splits)
    seconds["encoding"] = seconds.get("encoding", 0.0) + time.perf_counter() - started
    # With an existing tokenizer the documents were tokenized while they were read.
    encoding = seconds["encoding"] + (
        seconds["reading"] if encoded_blocks is documents.blocks else 0.0
    )
    report = {
        "identity": identity,
        "inputs": list(documents.names),
        "documents": documents.counts.as_dict(),
        "splits": splits,
        "vocabulary_size": encoder.vocabulary_size,
        "end_of_document": encoder.end_of_document,
        "tokenizer": encoder.fingerprint.model_dump(),
        "unigram": unigram(train.frequencies, validation.frequencies),
    }
    return write_report(directory, report, (train, validation), seconds, encoding)


def write_report(
    directory: Path,
    report: dict[str, Any],
    writers: Sequence[IndexedWriter],
    seconds: dict[str, float],
    encoding: float,
) -> dict[str, Any]:
    """Complete a report and write it beside the corpora; cache their content.

    Args:
        writers: of the corpora of `SPLITS`, closed.
        seconds: durations of the stages.
        encoding: duration of those that made tokens [s].
    """
    hashes = {
        f"{split}.bin": writer.content.sha256 for split, writer in zip(SPLITS, writers, strict=True)
    }
    tokens = sum(writer.tokens for writer in writers)
    # `files` has the hashes of what exists by now. report.json itself and the caches below are not
    # among them, so a missing cache is no damage.
    report |= {
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "tokens_per_second": round(tokens / encoding),
        "versions": library_versions(),
        "files": describe_files(directory, hashes),
    }
    (directory / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    for split, writer in zip(SPLITS, writers, strict=True):
        # Writes the cache, so the first run need not read the tokens.
        IndexedCorpus(directory / split).store_content(writer.content)
    return report


def require_tokens(splits: dict[str, dict[str, int]]) -> None:
    for split, counts in splits.items():
        if not counts["tokens"]:
            raise UserError(
                f"the {split} documents hold no tokens; give more text, or set another "
                "--validation-fraction"
            )


def unigram(train: npt.NDArray[np.int64], validation: npt.NDArray[np.int64]) -> dict[str, float]:
    """Return the loss of a model that knows only token frequencies, nats a token.

    `train_entropy`: the entropy of the training tokens' frequencies. `validation_cross_entropy`:
    the validation tokens under those frequencies, one added to each count so that an unseen token
    has a probability. `uniform`: all tokens equally likely.
    """
    seen = train[train > 0] / train.sum()
    # Add-one smoothing: a validation token that training never saw would make the loss infinite.
    smoothed = (train + 1) / (train.sum() + len(train))
    return {
        "train_entropy": float(-(seen * np.log(seen)).sum()),
        "validation_cross_entropy": float(
            -(validation * np.log(smoothed)).sum() / validation.sum()
        ),
        "uniform": math.log(len(train)),
    }
