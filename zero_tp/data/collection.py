"""All documents of the spools together: remove duplicates, draw the split, write both corpora.

`Documents` is the collection. `choose_validation` draws the split, and `assemble` writes the output.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from zero_tp.data.indexed import IndexedWriter, token_dtype
from zero_tp.data.records import where
from zero_tp.data.show import SPLITS
from zero_tp.data.similarity import exact_duplicates, near_duplicates
from zero_tp.data.spool import MOST_PROBLEMS, DroppedRecord, Spool, in_input_order
from zero_tp.data.work import DOCUMENT, DocumentEncoder, unpacked
from zero_tp.errors import UserError


class Documents:
    """Documents of the spools, in the order of the inputs.

    Memory: 53 bytes a document. The search for near duplicates needs another 0.7 to 1.4 KB for each kept document
    (measured with 40,000).

    Attributes:
        entries: (spool, its entry) of each block.
        about: what is known of each document (`DOCUMENT`).
        kept: which documents are in the output.
        dropped: how many are not, by reason.
        names: of the sources.
    """

    def __init__(self, spools: Sequence[Spool], names: Sequence[str]) -> None:
        self.entries, self.names, self.dropped = list(in_input_order(spools)), names, Counter[str]()
        parts = [np.frombuffer(spool.part(entry, "documents"), DOCUMENT) for spool, entry in self.entries]
        self.about = np.concatenate([np.zeros(0, DOCUMENT), *parts])
        self.firsts = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)
        self.kept = np.ones(len(self.about), np.bool_)

    def __len__(self) -> int:
        """Return the number of documents in the output."""
        return int(self.kept.sum())

    def slice_of(self, entry: int) -> slice:
        """Return the numbers of an entry's documents."""
        return slice(int(self.firsts[entry]), int(self.firsts[entry + 1]))

    def part(self, entry: int, column: str) -> bytes:
        """Return the bytes of a column that belong to an entry."""
        spool, its = self.entries[entry]
        return spool.part(its, column)

    def item(self, entry: int) -> tuple[bytes, npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Return the packed texts of an entry, their lengths, and which are kept."""
        return self.part(entry, "texts"), self.about["bytes"][self.slice_of(entry)], self.kept[self.slice_of(entry)]

    def stored(self, entry: int, which: npt.NDArray[np.bool_]) -> list[bytes]:
        """Return the texts of those documents of an entry that `which` says, in UTF-8."""
        if not which.any():
            return []
        texts = unpacked(self.part(entry, "texts"), self.about["bytes"][self.slice_of(entry)])
        return [text for text, wanted in zip(texts, which, strict=True) if wanted]

    def where(self, number: int) -> str:
        """Return the place of a document in the inputs."""
        spool, entry = self.entries[int(np.searchsorted(self.firsts, number, side="right")) - 1]
        return where(self.names[spool.sources[entry]], int(self.about["place"][number]))

    def remove_duplicates(self, kind: str | None) -> list[dict[str, Any]]:
        """Drop exact copies, and near ones if `kind` is "near"; return each with the document that it copies."""
        removed = list[dict[str, Any]]()
        if kind is None:
            return removed
        firsts = exact_duplicates(self.about["content"].copy())
        for number in np.flatnonzero(firsts != np.arange(len(firsts))).tolist():
            removed.append(self._removed(number, "duplicate", int(firsts[number])))
        if kind == "near":
            for near in near_duplicates(self._sketches(), self._sketch):
                removed.append(self._removed(near.document, "near-duplicate", near.earlier, near.similarity))
        return removed

    def remove_contaminated(self) -> list[dict[str, Any]]:
        """Drop documents that overlap with an evaluation set, and return them."""
        found = np.flatnonzero(self.kept & self.about["contaminated"]).tolist()
        return [self._removed(number, "contaminated") for number in found]

    def _removed(
        self, number: int, reason: str, earlier: int | None = None, similarity: float | None = None
    ) -> dict[str, Any]:
        self.kept[number] = False
        self.dropped[reason] += 1
        of = {} if earlier is None else {"copy_of": self.where(earlier)}
        return {
            "removed": self.where(number),
            "reason": reason,
            **of,
            **({"similarity": similarity} if similarity else {}),
        }

    def _sketches(self) -> Iterator[tuple[int, bytes]]:
        """Yield the number and the sketch of each document that is kept."""
        for entry in range(len(self.entries)):
            here, data, at = self.slice_of(entry), self.part(entry, "sketches"), 0
            for number, length in zip(range(here.start, here.stop), self.about["sketch"][here].tolist(), strict=True):
                if self.kept[number]:
                    yield number, data[at : at + length]
                at += length

    def _sketch(self, number: int) -> bytes:
        entry = int(np.searchsorted(self.firsts, number, side="right")) - 1
        at = int(self.about["sketch"][self.firsts[entry] : number].sum())
        return self.part(entry, "sketches")[at : at + int(self.about["sketch"][number])]

    def sample(self, which: npt.NDArray[np.bool_], most: int | None) -> npt.NDArray[np.bool_]:
        """Return `most` of those kept documents that `which` says, bool [documents]: those with the largest hashes, so
        that their order plays no part. None: all."""
        numbers = np.flatnonzero(which & self.kept)
        if most is not None and most < len(numbers):
            order = np.argsort(self.about["split"][numbers], kind="stable")
            numbers = numbers[order[-most:]]
        found = np.zeros(len(which), np.bool_)
        found[numbers] = True
        return found

    def texts(self, which: npt.NDArray[np.bool_]) -> Iterator[str]:
        """Yield the kept texts that `which`, bool [documents], says."""
        for entry in range(len(self.entries)):
            here = self.slice_of(entry)
            yield from (text.decode("utf-8") for text in self.stored(entry, which[here] & self.kept[here]))


def count_documents(spools: Sequence[Spool], documents: Documents) -> dict[str, Any]:
    """Return how many documents there were, how many are kept, and why the others are not."""
    dropped = sum((spool.dropped for spool in spools), documents.dropped)
    read = sum(spool.read for spool in spools)
    problems = [problem._asdict() for problem in _problems(spools)]
    counted = {"read": read, "kept": len(documents), "dropped": dict(sorted(dropped.items())), "problems": problems}
    assert read == len(documents) + dropped.total(), counted
    return counted


def _problems(spools: Sequence[Spool]) -> list[DroppedRecord]:
    """Return the first problems, in the order of the inputs."""
    found = sorted((each for spool in spools for each in spool.problems), key=lambda each: each[:2])
    return [problem for _, _, problem in found][:MOST_PROBLEMS]


def describe_dropped(spools: Sequence[Spool]) -> str:
    """Return a parenthesis for messages: how many documents were dropped, and the first; "" if none were."""
    count, problems = sum(spool.dropped.total() for spool in spools), _problems(spools)
    return f" ({count:,} dropped, the first: {problems[0].where}: {problems[0].detail})" if problems else ""


def choose_validation(documents: Documents, validation: float, dropped: str) -> npt.NDArray[np.bool_]:
    """Return which documents are held out: those of the kept with the smallest hashes, bool [documents].

    Equal documents have equal hashes, so they are on the same side. A new document moves at most a few others across.
    """
    hashes = documents.about["split"][documents.kept]
    chosen = _smallest(hashes, validation, dropped)
    held_out = np.zeros(len(documents.kept), np.bool_)
    held_out[documents.kept] = chosen
    return held_out


def _smallest(hashes: npt.NDArray[np.uint64], validation: float, dropped: str) -> npt.NDArray[np.bool_]:
    documents = len(hashes)
    count = int(validation) if validation >= 1 else max(1, round(validation * documents))
    if documents < 2:
        raise UserError(
            "the inputs hold 1 document: the split is by document, so give at least 2 (a .txt file is one, unless "
            f"--documents says otherwise){dropped}"
        )
    if count >= documents:
        raise UserError(f"validation {validation:g} of {documents:,} documents leaves none to train on")
    held_out: npt.NDArray[np.bool_] = hashes <= np.partition(hashes, count - 1)[count - 1]
    if held_out.all():
        raise UserError(f"all {documents:,} documents outside the validation set are copies of documents in it")
    return held_out


# --- the output -------------------------------------------------------------------------------------------------------


def assemble(
    documents: Documents,
    part: Callable[[int, str], bytes],
    encoder: DocumentEncoder,
    held_out: npt.NDArray[np.bool_],
    directory: Path,
) -> tuple[dict[str, npt.NDArray[np.int64]], dict[str, dict[str, int]]]:
    """Write both corpora, and the texts of the validation documents.

    Args:
        part: returns the bytes of a column of an entry.
        held_out: which documents are in the validation set, bool [documents].

    Returns:
        Of each split, how often each token occurs [vocabulary], and its documents, tokens, characters and bytes.
    """
    size, dtype = encoder.vocabulary_size, token_dtype(encoder.vocabulary_size)
    counts = {split: np.zeros(size, np.int64) for split in SPLITS}
    splits = {split: dict.fromkeys(("documents", "tokens", "characters", "bytes"), 0) for split in SPLITS}
    with ExitStack() as stack:
        writers = {split: stack.enter_context(IndexedWriter(directory / split, size)) for split in SPLITS}
        texts_out = stack.enter_context(open(directory / "validation.jsonl", "w", encoding="utf-8"))
        for entry in range(len(documents.entries)):
            here = documents.slice_of(entry)
            sizes, ids = np.frombuffer(part(entry, "sizes"), np.int64), np.frombuffer(part(entry, "tokens"), dtype)
            begins = np.frombuffer(part(entry, "sentences"), np.bool_) if encoder.language is not None else None
            of_document = np.repeat(held_out[here], sizes)
            of_kept = np.repeat(documents.kept[here], sizes)
            for split, out in (("train", False), ("validation", True)):
                chosen = documents.kept[here] & (held_out[here] == out)
                if not chosen.any():
                    continue
                written = of_kept & (of_document == out)
                its = ids[written]
                writers[split].add_documents(its, sizes[chosen], None if begins is None else begins[written])
                counts[split] += np.bincount(its, minlength=size)
                total, about = splits[split], documents.about[here][chosen]
                total["documents"] += len(about)
                total["tokens"] += len(its)
                total["characters"] += int(about["characters"].sum())
                total["bytes"] += int(about["bytes"].sum())
                if split == "validation":
                    for text in documents.stored(entry, chosen):
                        texts_out.write(json.dumps({"text": text.decode("utf-8")}, ensure_ascii=False) + "\n")
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
