"""All documents of a spool together: remove duplicates, draw the split, write both corpora and the report.

`Documents` is the collection. `choose_validation` draws the split, and `write_output` writes the corpus.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from zero_tp.data.indexed import REPORT, IndexedWriter, token_dtype
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
        about: what is known of each document (`DOCUMENT`).
        kept: which documents are in the output.
        dropped: how many are not, by reason.
        names: of the sources.
    """

    def __init__(self, spool: Spool, names: Sequence[str]) -> None:
        self.spool, self.names, self.dropped = spool, names, Counter(spool.dropped)
        parts = [np.frombuffer(spool.part(entry, "documents"), DOCUMENT) for entry in range(len(spool))]
        self.about = np.concatenate([np.zeros(0, DOCUMENT), *parts])
        self.firsts = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)
        self.kept = np.ones(len(self.about), np.bool_)

    def __len__(self) -> int:
        """Return the number of documents in the output."""
        return int(self.kept.sum())

    def slice_of(self, entry: int) -> slice:
        """Return the numbers of an entry's documents."""
        return slice(int(self.firsts[entry]), int(self.firsts[entry + 1]))

    def item(self, entry: int) -> tuple[bytes, npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Return the packed texts of an entry, their lengths, and which are kept."""
        return (
            self.spool.part(entry, "texts"),
            self.about["bytes"][self.slice_of(entry)],
            self.kept[self.slice_of(entry)],
        )

    def stored(self, entry: int, which: npt.NDArray[np.bool_]) -> list[bytes]:
        """Return the texts of those documents of an entry that `which` says, in UTF-8."""
        if not which.any():
            return []
        texts = unpacked(self.spool.part(entry, "texts"), self.about["bytes"][self.slice_of(entry)])
        return [text for text, wanted in zip(texts, which, strict=True) if wanted]

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
        for entry in range(len(self.spool)):
            here, data, at = self.slice_of(entry), self.spool.part(entry, "sketches"), 0
            for number, length in zip(range(here.start, here.stop), self.about["sketch"][here].tolist(), strict=True):
                if self.kept[number]:
                    yield number, data[at : at + length]
                at += length

    def _sketch(self, number: int) -> bytes:
        entry = self._entry_of(number)
        at = int(self.about["sketch"][self.firsts[entry] : number].sum())
        return self.spool.part(entry, "sketches")[at : at + int(self.about["sketch"][number])]

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
        for entry in range(len(self.spool)):
            here = self.slice_of(entry)
            yield from (text.decode("utf-8") for text in self.stored(entry, which[here] & self.kept[here]))

    def count(self) -> dict[str, Any]:
        """Return how many documents there were, how many are kept, and why the others are not."""
        problems = [problem._asdict() for _, _, problem in self.spool.problems]
        dropped = dict(sorted(self.dropped.items()))
        counted = {"read": self.spool.read, "kept": len(self), "dropped": dropped, "problems": problems}
        assert self.spool.read == len(self) + self.dropped.total(), counted
        return counted

    def describe_dropped(self) -> str:
        """Return a parenthesis for messages: how many records were no documents, and the first; "" if none were."""
        if not self.spool.problems:
            return ""
        problem = self.spool.problems[0][-1]
        return f" ({self.spool.dropped.total():,} dropped, the first: {problem.where}: {problem.detail})"


def choose_validation(documents: Documents, validation: float) -> npt.NDArray[np.bool_]:
    """Return which documents are held out: those of the kept with the smallest hashes, bool [documents].

    Equal documents have equal hashes, so they are on the same side. A new document moves at most a few others across.
    """
    kept, hashes = len(documents), documents.about["split"]
    count = int(validation) if validation >= 1 else max(1, round(validation * kept))
    if not kept:
        raise UserError(f"no text in {', '.join(documents.names)}{documents.describe_dropped()}")
    if kept < 2:
        raise UserError(
            "the inputs hold 1 document: the split is by document, so give at least 2 (a .txt file is one, unless "
            f"--documents says otherwise){documents.describe_dropped()}"
        )
    if count >= kept:
        raise UserError(f"validation {validation:g} of {kept:,} documents leaves none to train on")
    held_out: npt.NDArray[np.bool_] = documents.kept & (
        hashes <= np.partition(hashes[documents.kept], count - 1)[count - 1]
    )
    if held_out.sum() == kept:
        raise UserError(f"all {kept:,} documents outside the validation set are copies of documents in it")
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
    counts, splits = _write_corpora(documents, tokens, encoder, held_out, directory)
    seconds["encoding"] = seconds.get("encoding", 0.0) + time.perf_counter() - started
    encoding = seconds["encoding"] + (seconds["reading"] if tokens is documents.spool else 0.0)
    report = {
        "identity": identity,
        "inputs": list(documents.names),
        "documents": documents.count(),
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
        texts_out = stack.enter_context(open(directory / "validation.jsonl", "w", encoding="utf-8"))
        for entry in range(len(tokens)):
            here, sizes = documents.slice_of(entry), np.frombuffer(tokens.part(entry, "sizes"), np.int64)
            ids = np.frombuffer(tokens.part(entry, "tokens"), dtype)
            begins = np.frombuffer(tokens.part(entry, "sentences"), np.bool_) if encoder.language is not None else None
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
