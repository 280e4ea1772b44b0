"""Find exact and near duplicates, and documents that overlap with evaluation sets.

Near duplicates share most of their shingles, 5 consecutive words each. A MinHash sketch of 128
numbers estimates the Jaccard similarity of two sets of shingles. Locality-sensitive hashing (32
bands of 4) finds the pairs to compare, one of similarity 0.7 with probability 0.9998. Sources:
Broder 1997; Leskovec, Rajaraman, Ullman, "Mining of Massive Datasets", 3.4; Megatron-LM, section
4.1, which removed documents at 0.7.
"""

from __future__ import annotations

import functools
import re
import unicodedata
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from zero_tp.base.errors import UserError
from zero_tp.data.documents import stream
from zero_tp.data.formats import import_optional
from zero_tp.data.records import EVERY_STRING, Document, Problem

SHINGLE = 5
THRESHOLD = 0.7
NGRAM = 13
_NUM_PERM = 128
_BANDS = 32
_SEED = 42
_HEADING = re.compile(r"^ ?= ([^=\n]+) = ?$", re.MULTILINE)  # the title of a WikiText article
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def words(text: str) -> list[str]:
    """Return the words of a text, runs of letters and digits with their combining marks, in
    lower case.
    """
    return _word_pattern().findall(text.lower())


@functools.cache
def _word_pattern() -> re.Pattern[str]:
    """Return the pattern of a word, as UTS 18 defines it: Python's `\\w` lacks marks (vowel
    signs, points), joiners.
    """
    # There are no other marks.
    candidates = map(chr, (*range(0x300, 0x20000), *range(0xE0100, 0xE01F0)))
    marks = "".join(letter for letter in candidates if unicodedata.category(letter).startswith("M"))
    # The lookahead, which fails at once in Latin text, saves half of the time there.
    return re.compile(rf"\w+(?:(?=[^\0-\u02ff])[{marks}\u200c\u200d]+\w*)*")


# --- near duplicates ------------------------------------------------------------------------------


def shingles(text: str) -> list[str]:
    """Return all shingles of a text; a text of fewer than 5 words is one shingle."""
    tokens = words(text)
    return (
        [" ".join(tokens[i : i + SHINGLE]) for i in range(max(1, len(tokens) - SHINGLE + 1))]
        if tokens
        else []
    )


def sketches(texts: Sequence[str]) -> list[bytes]:
    """Return a sketch of each text; empty for one without words."""
    rensa = import_optional("rensa", "--deduplicate near")
    sets = [shingles(text) for text in texts]
    # The sets are sketched in one call, in Rust. 43 µs a document of 80 words
    # (benchmarks/results/measured.md).
    minhashes = rensa.RMinHash.from_token_sets(sets, num_perm=_NUM_PERM, seed=_SEED)
    return [
        # The pickled state as bytes: rensa has no other way to store a sketch.
        minhash.__reduce__()[2] if tokens else b""
        for minhash, tokens in zip(minhashes, sets, strict=True)
    ]


def _restore(sketch: bytes) -> Any:
    minhash = import_optional("rensa", "--deduplicate near").RMinHash(_NUM_PERM, _SEED)
    minhash.__setstate__(sketch)
    return minhash


class NearDuplicate(NamedTuple):
    """A near copy of an earlier document, with their estimated Jaccard similarity."""

    document: int
    earlier: int
    similarity: float


def near_duplicates(
    numbered: Iterable[tuple[int, bytes]], sketch_of: Callable[[int], bytes]
) -> Iterator[NearDuplicate]:
    """Yield the documents that are near copies of an earlier one.

    Their similarity is at least 0.7. The earlier one is no near copy itself.

    Memory: 0.7 to 1.4 KB a document that is no duplicate (measured with 40,000).

    Args:
        numbered: number and sketch of each document.
        sketch_of: returns the sketch of an earlier document.
    """
    rensa = import_optional("rensa", "--deduplicate near")
    # A band is 4 of the 128 numbers. Two documents are compared if they agree in one whole band:
    #
    #     similarity s                        0.3    0.4    0.5    0.6    0.7
    #     compared: 1 - (1 - s⁴)³²            0.23   0.56   0.87   0.99   0.9998
    #
    # The bands only find candidates: rensa then compares all 128 numbers with the threshold. Their
    # estimate of 0.7 has a standard error of √(0.7 · 0.3 / 128) = 0.04.
    index = rensa.RMinHashDeduplicator(THRESHOLD, _NUM_PERM, True, _BANDS, _SEED)
    for number, sketch in numbered:
        if not sketch:
            continue
        minhash = _restore(sketch)
        # `add` refuses a near copy, so the index has kept documents only: memory grows with them,
        # and a chain of near copies is compared with its kept documents alone.
        if not index.add(str(number), minhash):
            earlier = min(map(int, index.get_duplicates(minhash)))
            yield NearDuplicate(number, earlier, minhash.jaccard(_restore(sketch_of(earlier))))


def exact_duplicates(content: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return the first document with the same 128-bit hash (V16) for each document, [documents]."""
    # np.unique's `return_index` is the first occurrence, so the earliest document is the original.
    _, firsts, inverse = np.unique(content, return_index=True, return_inverse=True)
    return firsts[inverse]


# --- evaluation sets ------------------------------------------------------------------------------


def ngram_hashes(text: str) -> npt.NDArray[np.uint64]:
    """Return a hash of every 13 consecutive words, uint64 [words - 12]."""
    # A rolling hash over 13 words for all windows at once, in uint64, which wraps around. Drawn
    # with 3 words instead of 13:
    #
    #     words       w0 w1 w2 w3 w4
    #     hashes      h0 h1 h2 h3 h4
    #     pass i = 0  h0 h1 h2           the first word of each window
    #     pass i = 1  h1 h2 h3           mixed in
    #     pass i = 2  h2 h3 h4           mixed in: 5 - 2 windows
    #
    # The + 1, because a window's first words would have no effect if their hashes were 0.
    hashes = np.array([zlib.crc32(word.encode()) + 1 for word in words(text)], np.uint64) * _FACTOR
    count = len(hashes) - NGRAM + 1
    combined = np.zeros(max(count, 0), np.uint64)
    for i in range(NGRAM if count > 0 else 0):
        # A product carries bits upwards only; the shift brings the high ones down again.
        combined = (combined ^ (combined >> np.uint64(29))) * _FACTOR + hashes[i : i + count]
    return combined


def _normalized(text: str) -> str:
    return " ".join(words(text))


@dataclass(frozen=True)
class EvaluationSets:
    """The n-grams and titles of evaluation sets.

    `hashes` are the sorted hashes of their 13-grams (`ngram_hashes`), `titles` the normalised
    titles of WikiText articles.
    """

    hashes: npt.NDArray[np.uint64]
    titles: frozenset[str]

    @classmethod
    def read(cls, paths: Sequence[Path]) -> EvaluationSets:
        """Read sets from files of any kind; all strings of a record are its text. UserError: a
        file has no text.
        """
        parts = [np.zeros(0, np.uint64)]
        titles = set[str]()
        for path in paths:
            before = len(parts), len(titles)
            for where, document in stream([path], EVERY_STRING):
                if isinstance(document, Problem):
                    raise UserError(f"--decontaminate: {where}: {document.detail}")
                if len(hashes := ngram_hashes(document.text)):
                    parts.append(hashes)
                titles |= {
                    title
                    for heading in _HEADING.findall(document.text)
                    if (title := _normalized(heading))
                }
            # An evaluation set without effect is probably a wrong file.
            if (len(parts), len(titles)) == before:
                raise UserError(
                    f"--decontaminate: {path}: no record has {NGRAM} words, so it has no effect: "
                    "leave it out, or give "
                    "the file with the questions and answers as strings"
                )
        return cls(np.unique(np.concatenate(parts)), frozenset(titles))

    def overlap_with(self, document: Document) -> bool:
        """Return whether a document overlaps with a set.

        It does if it has 13 consecutive words of one, or if its title or first line is a set's
        title.
        """
        first = document.text.lstrip().partition("\n")[0]
        if self.titles and not self.titles.isdisjoint(
            map(_normalized, (first, document.title or ""))
        ):
            return True
        hashes = ngram_hashes(document.text)
        # A hash larger than all of the set's has the position behind its end, which cannot be read.
        # np.isin would sort the sets for each document.
        positions = np.searchsorted(self.hashes, hashes)
        is_inside = positions < len(self.hashes)
        return bool((self.hashes[positions[is_inside]] == hashes[is_inside]).any())
