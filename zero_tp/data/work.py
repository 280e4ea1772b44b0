"""What is done with each document by itself, in any process: read, judged, hashed, tokenised."""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from zero_tp.data.documents import Block, Problem, where
from zero_tp.data.indexed import token_dtype
from zero_tp.data.spool import MOST_PROBLEMS, Found
from zero_tp.data.tokenizer import DocumentEncoder

DOCUMENT = np.dtype([("split", "<u8"), ("place", "<i8"), ("characters", "<i8"), ("bytes", "<i8")])
"""What is kept of each document: 64 bits by which the split is drawn, its place in the input, its sizes."""
READ, ENCODED = ("documents", "texts"), ("sizes", "tokens")
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
    """

    seed: int
    encoder: DocumentEncoder | None = None

    def __call__(self) -> Callable[[tuple[int, Block]], Made]:
        return self._read

    def _read(self, item: tuple[int, Block]) -> Made:
        source, block = item
        read, dropped, problems = 0, Counter[str](), list[Found]()

        def drop(place: int, reason: str, detail: str) -> None:
            dropped[reason] += 1
            if len(problems) < MOST_PROBLEMS:
                problems.append(Found(where(block.source, place), reason, detail))

        texts, places = list[str](), list[int]()
        for place, document in block.documents():
            read += 1
            if isinstance(document, Problem):
                drop(place, *document)
            elif not document.text.strip():
                drop(place, "empty", "an empty document")
            else:
                texts.append(document.text)
                places.append(place)
        stored = [text.encode("utf-8") for text in texts]
        columns = {
            "documents": _described(texts, stored, places, self.seed),
            "texts": packed(stored),
        }
        if self.encoder is not None:
            columns |= encoded(self.encoder, texts)
        return Made(source, block.number, columns, read, dropped, problems)


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
    """Return the tokens of all texts, one behind the other, and how many each has (int64)."""
    documents = encoder.encode(texts)
    sizes = np.array([len(ids) for ids in documents], np.int64)
    tokens = np.concatenate(documents) if documents else np.zeros(0, np.int64)
    return {"sizes": sizes.tobytes(), "tokens": tokens.astype(token_dtype(encoder.vocabulary_size)).tobytes()}


def _described(texts: Sequence[str], stored: Sequence[bytes], places: Sequence[int], seed: int) -> bytes:
    described, key = np.zeros(len(texts), DOCUMENT), seed.to_bytes(8, "little")
    drawn = b"".join(hashlib.blake2b(data, digest_size=8, key=key).digest() for data in stored)
    described["split"] = np.frombuffer(drawn, "<u8")
    described["place"] = places
    described["characters"] = [len(text) for text in texts]
    described["bytes"] = [len(data) for data in stored]
    return described.tobytes()


def packed(texts: Sequence[bytes]) -> bytes:
    """Return the texts behind each other, compressed."""
    return zlib.compress(b"".join(texts), 1)


def unpacked(data: bytes, lengths: npt.NDArray[np.int64]) -> list[bytes]:
    """Return the texts that were packed, by their lengths [bytes]."""
    whole = zlib.decompress(data)
    ends = np.cumsum(lengths).tolist()
    return [whole[end - length : end] for end, length in zip(ends, lengths.tolist(), strict=True)]
