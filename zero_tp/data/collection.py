"""Process all documents of a spool together: remove duplicates, draw the split, write both corpora and the report.

`Documents` is the collection. `choose_validation` draws the split, and `write_output` writes the corpus.
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from zero_tp.data.content import REPORT
from zero_tp.data.indexed import IndexedWriter, token_dtype
from zero_tp.data.records import where
from zero_tp.data.settings import describe_files, library_versions
from zero_tp.data.show import SPLITS
from zero_tp.data.similarity import exact_duplicates, near_duplicates
from zero_tp.data.spool import Spool
from zero_tp.data.work import DOCUMENT, DocumentEncoder, unpacked
from zero_tp.errors import UserError


class Documents:
    """Documents of a spool, in the order of the inputs.

    Memory: 53 bytes a document. The search for near duplicates needs another 0.7 to 1.4 KB for each kept document
    (measured with 40,000).

    Attributes:
        about: the stored facts of each document (`DOCUMENT`).
        in_output: which documents are in the output, bool [documents].
        counts: of the records of all sources.
        names: of the sources.
    """

    def __init__(self, spool: Spool, names: Sequence[str]) -> None:
        self.spool, self.names, self.counts = spool, names, copy.deepcopy(spool.counts)
        parts = [np.frombuffer(spool.part(entry, "documents"), DOCUMENT) for entry in range(len(spool))]
        self.about = np.concatenate([np.zeros(0, DOCUMENT), *parts])
        self.firsts = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)
        self.in_output = np.ones(len(self.about), np.bool_)

    def __len__(self) -> int:
        """Return the number of documents in the output."""
        return int(self.in_output.sum())

    def slice_of(self, entry: int) -> slice:
        """Return the numbers of an entry's documents."""
        return slice(int(self.firsts[entry]), int(self.firsts[entry + 1]))

    def packed_texts(self, entry: int) -> tuple[bytes, npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Return the packed texts of an entry, their lengths, and which of them are in the output."""
        numbers = self.slice_of(entry)
        return self.spool.part(entry, "texts"), self.about["bytes"][numbers], self.in_output[numbers]

    def texts(self, chosen: npt.NDArray[np.bool_]) -> Iterator[str]:
        """Yield the texts of the chosen documents, bool [documents]."""
        for entry in range(len(self.spool)):
            yield from self.entry_texts(entry, chosen[self.slice_of(entry)])

    def entry_texts(self, entry: int, chosen: npt.NDArray[np.bool_]) -> Iterator[str]:
        """Yield the texts of the chosen documents of an entry, bool [its documents]."""
        if chosen.any():
            data, lengths, _ = self.packed_texts(entry)
            yield from (text.decode("utf-8") for text in compress(unpacked(data, lengths), chosen))

    def where(self, number: int) -> str:
        """Return the place of a document in the inputs."""
        return where(self.names[self.spool.sources[self._entry_of(number)]], int(self.about["place"][number]))

    def _entry_of(self, number: int) -> int:
        return int(np.searchsorted(self.firsts, number, side="right")) - 1

    def remove_duplicates(self, kind: str | None) -> list[dict[str, Any]]:
        """Drop exact copies, and near ones if `kind` is "near"; return each with the document that it copies."""
        removed = list[dict[str, Any]]()
        if kind is None:
            return removed
        firsts = exact_duplicates(self.about["content"].copy())
        for number in np.flatnonzero(firsts != np.arange(len(firsts))).tolist():
            removed.append(self._remove(number, "duplicate", int(firsts[number])))
        if kind == "near":
            for near in near_duplicates(self._sketches(), self._sketch):
                removed.append(self._remove(near.document, "near-duplicate", near.earlier, near.similarity))
        return removed

    def remove_contaminated(self) -> list[dict[str, Any]]:
        """Drop documents that overlap with an evaluation set, and return them."""
        numbers = np.flatnonzero(self.in_output & self.about["contaminated"]).tolist()
        return [self._remove(number, "contaminated") for number in numbers]

    def _remove(
        self, number: int, reason: str, earlier: int | None = None, similarity: float | None = None
    ) -> dict[str, Any]:
        self.in_output[number] = False
        self.counts.dropped[reason] += 1
        original = {} if earlier is None else {"copy_of": self.where(earlier)}
        similar = {"similarity": similarity} if similarity else {}
        return {"removed": self.where(number), "reason": reason, **original, **similar}

    def _sketches(self) -> Iterator[tuple[int, bytes]]:
        """Yield the number and the sketch of each document of the output."""
        for entry in range(len(self.spool)):
            numbers, data, start = self.slice_of(entry), self.spool.part(entry, "sketches"), 0
            for number, length in enumerate(self.about["sketch"][numbers].tolist(), start=numbers.start):
                if self.in_output[number]:
                    yield number, data[start : start + length]
                start += length

    def _sketch(self, number: int) -> bytes:
        entry = self._entry_of(number)
        start = int(self.about["sketch"][self.firsts[entry] : number].sum())
        return self.spool.part(entry, "sketches")[start : start + int(self.about["sketch"][number])]

    def sample(self, which: npt.NDArray[np.bool_], most: int | None) -> npt.NDArray[np.bool_]:
        """Choose at most `most` of the given documents, bool [documents] each; None: all that are in the output.

        Those with the largest hashes are chosen, so the documents' order does not matter.
        """
        numbers = np.flatnonzero(which & self.in_output)
        if most is not None and most < len(numbers):
            order = np.argsort(self.about["split"][numbers], kind="stable")
            numbers = numbers[order[-most:]]
        chosen = np.zeros(len(which), np.bool_)
        chosen[numbers] = True
        return chosen

    def describe_dropped(self) -> str:
        """Return a parenthesis for messages: how many records were no documents, and the first; "" if none were."""
        if not self.counts.problems:
            return ""
        problem = self.counts.problems[0]
        return f" ({self.counts.dropped.total():,} dropped, the first: {problem.where}: {problem.detail})"


def choose_validation(documents: Documents, validation: float) -> npt.NDArray[np.bool_]:
    """Choose the validation set, bool [documents]: the documents of the output with the smallest hashes.

    Equal documents have equal hashes, so they are on the same side. A new document moves at most a few others across.

    Args:
        validation: see `PrepareSettings`.

    Raises:
        UserError: there are too few documents for two sets.
    """
    total, hashes = len(documents), documents.about["split"]
    count = int(validation) if validation >= 1 else max(1, round(validation * total))
    if not total:
        raise UserError(f"no text in {', '.join(documents.names)}{documents.describe_dropped()}")
    if total < 2:
        raise UserError(
            "the inputs hold 1 document: the split is by document, so give at least 2 (a .txt file is one, unless "
            f"--documents says otherwise){documents.describe_dropped()}"
        )
    if count >= total:
        raise UserError(f"validation {validation:g} of {total:,} documents leaves none to train on")
    largest = np.partition(hashes[documents.in_output], count - 1)[count - 1]
    held_out: npt.NDArray[np.bool_] = documents.in_output & (hashes <= largest)
    if held_out.sum() == total:
        raise UserError(f"all {total:,} documents outside the validation set are copies of documents in it")
    return held_out


# --- the output -------------------------------------------------------------------------------------------------------


def write_output(
    directory: Path,
    documents: Documents,
    tokens: Spool,
    encoder: DocumentEncoder,
    held_out: npt.NDArray[np.bool_],
    identity: dict[str, Any],
    seconds: dict[str, float],
) -> dict[str, Any]:
    """Write both corpora, the texts of the validation documents and the report beside `tokenizer/`; return the report.

    Args:
        tokens: has the columns of `ENCODED`, entry by entry as the documents' spool.
        held_out: which documents are in the validation set, bool [documents].
        identity: what decides the output.
        seconds: of what was done before; those of "encoding" (and of "reading" if it gave the tokens) make tokens/s.
    """
    started = time.perf_counter()
    assert documents.counts.kept == len(documents)
    counts, splits = _write_corpora(documents, tokens, encoder, held_out, directory)
    seconds["encoding"] = seconds.get("encoding", 0.0) + time.perf_counter() - started
    encoding = seconds["encoding"] + (seconds["reading"] if tokens is documents.spool else 0.0)
    report = {
        "identity": identity,
        "inputs": list(documents.names),
        "documents": documents.counts.as_dict(),
        "splits": splits,
        "vocabulary_size": encoder.vocabulary_size,
        "end_of_document": encoder.end_of_document,
        "unigram": unigram(counts["train"], counts["validation"]),
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "tokens_per_second": round(sum(figures["tokens"] for figures in splits.values()) / encoding),
        "versions": library_versions(),
        "files": describe_files(directory),
    }
    (directory / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return report


def _write_corpora(
    documents: Documents, tokens: Spool, encoder: DocumentEncoder, held_out: npt.NDArray[np.bool_], directory: Path
) -> tuple[dict[str, npt.NDArray[np.int64]], dict[str, dict[str, int]]]:
    """Return, by split, how often each token occurs [vocabulary], and the documents, tokens, characters and bytes."""
    size, dtype = encoder.vocabulary_size, token_dtype(encoder.vocabulary_size)
    counts = {split: np.zeros(size, np.int64) for split in SPLITS}
    splits = {split: dict.fromkeys(("documents", "tokens", "characters", "bytes"), 0) for split in SPLITS}
    with ExitStack() as stack:
        writers = {split: stack.enter_context(IndexedWriter(directory / split, size)) for split in SPLITS}
        texts_file = stack.enter_context(open(directory / "validation.jsonl", "w", encoding="utf-8"))
        for entry in range(len(tokens)):
            numbers, sizes = documents.slice_of(entry), np.frombuffer(tokens.part(entry, "sizes"), np.int64)
            ids = np.frombuffer(tokens.part(entry, "tokens"), dtype)
            starts = np.frombuffer(tokens.part(entry, "sentences"), np.bool_) if encoder.language is not None else None
            for split in SPLITS:
                chosen = documents.in_output[numbers] & (held_out[numbers] == (split == "validation"))
                if not chosen.any():
                    continue
                of_chosen = np.repeat(chosen, sizes)
                chosen_ids = ids[of_chosen]
                writers[split].add_documents(chosen_ids, sizes[chosen], None if starts is None else starts[of_chosen])
                counts[split] += np.bincount(chosen_ids, minlength=size)
                total, about = splits[split], documents.about[numbers][chosen]
                total["documents"] += len(about)
                total["tokens"] += len(chosen_ids)
                total["characters"] += int(about["characters"].sum())
                total["bytes"] += int(about["bytes"].sum())
                if split == "validation":
                    for text in documents.entry_texts(entry, chosen):
                        texts_file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    return counts, splits


def unigram(train: npt.NDArray[np.int64], validation: npt.NDArray[np.int64]) -> dict[str, float]:
    """Return the loss of a model that knows only token frequencies, nats a token.

    `train_entropy`: the entropy of the training tokens' frequencies. `validation_cross_entropy`: the validation tokens
    under those frequencies, one added to each count so that an unseen token has a probability.
    """
    seen = train[train > 0] / train.sum()
    smoothed = (train + 1) / (train.sum() + len(train))
    return {
        "train_entropy": float(-(seen * np.log(seen)).sum()),
        "validation_cross_entropy": float(-(validation * np.log(smoothed)).sum() / validation.sum()),
        "uniform": math.log(len(train)),
    }
