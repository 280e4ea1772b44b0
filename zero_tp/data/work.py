"""What is done with each document by itself, in any process: read, judged, hashed, tokenised."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import zstandard

from zero_tp.data.encoder import DocumentEncoder, Encoded
from zero_tp.data.indexed import token_dtype
from zero_tp.data.records import Block, Document, Problem, where
from zero_tp.data.similarity import EvaluationSets, sketches
from zero_tp.data.spool import MOST_PROBLEMS, Found
from zero_tp.data.streams import needed

DOCUMENT = np.dtype(
    [
        *(("split", "<u8"), ("place", "<i8"), ("characters", "<i8"), ("bytes", "<i8")),
        *(("content", "V16"), ("sketch", "<i4"), ("contaminated", "?")),
    ]
)
"""What is kept of each document: 64 bits by which the split is drawn, its place in the input, its sizes, 128 bits of
its content where duplicates are looked for, the bytes of its sketch, and whether it overlaps with an evaluation set."""
READ, ENCODED = ("documents", "texts", "sketches"), ("sizes", "tokens", "sentences")
"""The columns of a spool that hold documents, and those that hold their tokens."""


class Made(NamedTuple):
    """This is what was made of one block: the documents that are kept, and why others are not."""

    source: int
    number: int
    columns: dict[str, bytes]
    read: int
    dropped: Counter[str]
    problems: list[Found]


@dataclass(frozen=True)
class Reading:
    """Reading makes of a block the columns of a spool, tokens among them where the tokenizer is finished.

    Attributes:
        seed: of the split.
        repair: mend Unicode with ftfy.
        min_tokens: shorter documents are dropped; their end is not counted.
        deduplicate: None, "exact" or "near": what is needed to find duplicates.
        sets: the evaluation sets that documents must not overlap with.
    """

    seed: int
    encoder: DocumentEncoder | None = None
    repair: bool = False
    min_tokens: int = 0
    deduplicate: str | None = None
    sets: EvaluationSets | None = None

    def __call__(self) -> Callable[[tuple[int, Block]], Made]:
        return self._read

    def _read(self, item: tuple[int, Block]) -> Made:
        source, block = item
        read, dropped, problems = 0, Counter[str](), list[Found]()

        def drop(place: int, reason: str, detail: str) -> None:
            dropped[reason] += 1
            if len(problems) < MOST_PROBLEMS:
                problems.append(Found(where(block.source, place), reason, detail))

        chosen, places = list[Document](), list[int]()
        for place, document in block.documents():
            read += 1
            if isinstance(document, Problem):
                drop(place, *document)
            elif not document.text.strip():
                drop(place, "empty", "an empty document")
            else:
                chosen.append(self._repaired(document))
                places.append(place)
        columns = {}
        if self.encoder is not None:
            made = self.encoder.encode([document.text for document in chosen])
            long = [len(ids) - self.encoder.ends >= self.min_tokens for ids, _ in made]
            dropped["short"] += long.count(False)
            chosen, places = list(compress(chosen, long)), list(compress(places, long))
            columns = columns_of(list(compress(made, long)), self.encoder)
        stored = [document.text.encode("utf-8") for document in chosen]
        found = sketches([document.text for document in chosen]) if self.deduplicate == "near" else []
        described = self._described(chosen, stored, places)
        described["sketch"] = [len(sketch) for sketch in found] if found else 0
        columns |= {"documents": described.tobytes(), "texts": packed(stored), "sketches": b"".join(found)}
        return Made(source, block.number, columns, read, +dropped, problems)

    def _repaired(self, document: Document) -> Document:
        if not self.repair:
            return document
        fix: Callable[[str], str] = needed("ftfy", "--repair-unicode").fix_text
        return Document(fix(document.text), document.title)

    def _described(
        self, documents: Sequence[Document], stored: Sequence[bytes], places: Sequence[int]
    ) -> npt.NDArray[Any]:
        described, key = np.zeros(len(documents), DOCUMENT), self.seed.to_bytes(8, "little")
        drawn = b"".join(hashlib.blake2b(data, digest_size=8, key=key).digest() for data in stored)
        described["split"] = np.frombuffer(drawn, "<u8")
        described["place"] = places
        described["characters"] = [len(document.text) for document in documents]
        described["bytes"] = [len(data) for data in stored]
        if self.deduplicate is not None:
            contents = b"".join(hashlib.blake2b(data, digest_size=16).digest() for data in stored)
            described["content"] = np.frombuffer(contents, "V16")
        if self.sets is not None:
            described["contaminated"] = [self.sets.has(document) for document in documents]
        return described


@dataclass(frozen=True)
class Encoding:
    """Encoding makes tokens of the texts of one entry of a spool: (packed texts, which to leave out) → columns."""

    encoder: DocumentEncoder

    def __call__(self) -> Callable[[tuple[bytes, npt.NDArray[np.int64], npt.NDArray[np.bool_]]], dict[str, bytes]]:
        return self._encode

    def _encode(self, item: tuple[bytes, npt.NDArray[np.int64], npt.NDArray[np.bool_]]) -> dict[str, bytes]:
        texts, lengths, kept = item
        chosen = [text.decode("utf-8") for text, wanted in zip(unpacked(texts, lengths), kept, strict=True) if wanted]
        sizes = np.zeros(len(kept), np.int64)
        columns = encoded(self.encoder, chosen)
        sizes[kept] = np.frombuffer(columns["sizes"], np.int64)
        return {**columns, "sizes": sizes.tobytes()}


def encoded(encoder: DocumentEncoder, texts: list[str]) -> dict[str, bytes]:
    """Return the columns of texts."""
    return columns_of(encoder.encode(texts), encoder)


def columns_of(documents: Sequence[Encoded], encoder: DocumentEncoder) -> dict[str, bytes]:
    """Return the tokens of all documents, one behind the other, how many each has (int64), and, where the encoder has a
    language, whether a sentence begins with each token (bool)."""
    sizes = np.array([len(ids) for ids, _ in documents], np.int64)
    tokens = np.concatenate([np.zeros(0, np.int64), *(ids for ids, _ in documents)])
    begins = np.concatenate([np.zeros(0, np.bool_), *(begins for _, begins in documents)])
    return {
        "sizes": sizes.tobytes(),
        "tokens": tokens.astype(token_dtype(encoder.vocabulary_size)).tobytes(),
        "sentences": begins.tobytes(),
    }


def packed(texts: Sequence[bytes]) -> bytes:
    """Return the texts behind each other, compressed."""
    return zstandard.compress(b"".join(texts), 1)


def unpacked(data: bytes, lengths: npt.NDArray[np.int64]) -> list[bytes]:
    """Return the texts that were packed, by their lengths [bytes]."""
    whole = zstandard.decompress(data)
    ends = np.cumsum(lengths).tolist()
    return [whole[end - length : end] for end, length in zip(ends, lengths.tolist(), strict=True)]
