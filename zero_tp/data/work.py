"""Process each document by itself, in worker processes: read, check, hash and tokenize it.

`Reading` processes one block of records, `Encoding` the stored texts of one block. `in_order` runs either in several
processes and yields the results in the order of the items.
"""

from __future__ import annotations

import ctypes
import hashlib
import multiprocessing
import os
import signal
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import compress, islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import zstandard

from zero_tp.data.formats import needed
from zero_tp.data.index_format import token_dtype
from zero_tp.data.records import Document, Problem, RecordBatch, RecordCounts, where
from zero_tp.data.similarity import EvaluationSets, sketches
from zero_tp.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Encoding as TokenizerEncoding
    from transformers import PreTrainedTokenizerFast

Item = TypeVar("Item")
Result = TypeVar("Result")
_PR_SET_PDEATHSIG = 1  # prctl(2)
_ITEMS_AHEAD = 3  # of each process: they are read and not yet done

_work: Callable[[Any], Any]
"""The work of this worker process: concurrent.futures has no other place where an initializer can leave it."""

DOCUMENT = np.dtype(
    [
        *(("split", "<u8"), ("place", "<i8"), ("characters", "<i8"), ("bytes", "<i8")),
        *(("content", "V16"), ("sketch", "<i4"), ("contaminated", "?")),
    ]
)
"""What is stored of each document: 64 bits by which the split is drawn, its place in the input, its sizes, 128 bits of
its content if duplicates are removed, the bytes of its sketch, and whether it overlaps with an evaluation set."""
READ, ENCODED = ("documents", "texts", "sketches"), ("sizes", "tokens", "sentences")
"""The columns of a spool that hold documents, and those that hold their tokens."""
EncodedDocument = tuple[npt.NDArray[np.uintc], npt.NDArray[np.bool_]]
"""A document's token ids [tokens], and whether a sentence begins with each [tokens], or [0] without a language."""


# --- tokens -----------------------------------------------------------------------------------------------------------


class DocumentEncoder:
    """Encodes documents in batches; can be pickled for another process.

    A text that spells a special token (`<|endoftext|>`) is encoded as ordinary text. Only the end of a document gives
    the eos token, if the tokenizer has one (BERT's has none).

    Args:
        language: ISO 639 code: documents are split into sentences by the rules of this language; None: they aren't.

    Attributes:
        ends: tokens that end a document: 0 or 1.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, language: str | None = None) -> None:
        self._set(tokenizer.backend_tokenizer.to_str(), tokenizer.eos_token_id, len(tokenizer), language)

    def _set(self, serialized: str, end: int | None, vocabulary_size: int, language: str | None) -> None:
        from tokenizers import Tokenizer

        self._state = (serialized, end, vocabulary_size, language)
        self._end, self.vocabulary_size, self.language = (
            array("I", [] if end is None else [end]),
            vocabulary_size,
            language,
        )
        self.ends = len(self._end)
        # A copy: the tokenizer that is saved keeps its own settings.
        self._backend = Tokenizer.from_str(serialized)
        self._backend.encode_special_tokens = True
        self._backend.no_truncation()
        self._backend.no_padding()

    @property
    def end_of_document(self) -> str | None:
        """Return the token that ends documents; None: there is none."""
        token: str | None = self._backend.id_to_token(self._end[0]) if self._end else None
        return token

    def __reduce__(self) -> tuple[Callable[..., DocumentEncoder], tuple[Any, ...]]:
        return _encoder, self._state

    def encode(self, texts: list[str]) -> list[EncodedDocument]:
        """Return each text's token ids, eos at the end, and the starts of its sentences, if there is a language."""
        encode = self._backend.encode_batch if self.language else self._backend.encode_batch_fast  # has no offsets
        encodings = encode(texts, add_special_tokens=False)
        return list(zip(map(self._ids, encodings), map(self._sentence_starts, texts, encodings), strict=True))

    def _ids(self, encoding: TokenizerEncoding) -> npt.NDArray[np.uintc]:
        return np.frombuffer(array("I", encoding.ids) + self._end, np.uintc)  # np.array would take three times as long

    def _sentence_starts(self, text: str, encoding: TokenizerEncoding) -> npt.NDArray[np.bool_]:
        if self.language is None:
            return np.zeros(0, np.bool_)
        from sentencex import segment

        lengths = [len(sentence) for sentence in segment(self.language, text)]
        assert sum(lengths) == len(text)
        # A token that also holds the space before it is of the sentence of its last character.
        ends = [end for _, end in encoding.offsets]
        first_tokens = np.searchsorted(ends, [0, *np.cumsum(lengths[:-1])], side="right")
        starts = np.zeros(len(ends) + len(self._end), np.bool_)
        starts[first_tokens[first_tokens < len(ends)]] = True
        return starts


def _encoder(*state: Any) -> DocumentEncoder:
    encoder = DocumentEncoder.__new__(DocumentEncoder)
    encoder._set(*state)
    return encoder


# --- the work on one item ---------------------------------------------------------------------------------------------


class BlockColumns(NamedTuple):
    """Columns of one block's documents, and the counts of its records."""

    source: int
    number: int
    columns: dict[str, bytes]
    counts: RecordCounts


class SourceEnd(NamedTuple):
    """All blocks of a source have been read."""

    source: int
    sha256: str


@dataclass(frozen=True)
class Reading:
    """Turns a block into the columns of a spool, with tokens if the tokenizer is finished.

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

    def __call__(self, item: tuple[int, RecordBatch] | SourceEnd) -> BlockColumns | SourceEnd:
        return item if isinstance(item, SourceEnd) else self.columns(*item)

    def columns(self, source: int, block: RecordBatch) -> BlockColumns:
        """Return the columns of a block of the source with this number."""
        counts, documents, places = RecordCounts(), list[Document](), list[int]()
        for place, document in block.documents():
            counts.read += 1
            if isinstance(document, Problem):
                counts.drop(where(block.source, place), *document)
            elif not document.text.strip():
                counts.drop(where(block.source, place), "empty", "an empty document")
            else:
                documents.append(self._repair(document))
                places.append(place)
        columns = {}
        if self.encoder is not None:
            encodings = self.encoder.encode([document.text for document in documents])
            long = [len(ids) - self.encoder.ends >= self.min_tokens for ids, _ in encodings]
            if short := long.count(False):
                counts.dropped["short"] += short
            documents, places = list(compress(documents, long)), list(compress(places, long))
            columns = token_columns(list(compress(encodings, long)), self.encoder)
        stored = [document.text.encode("utf-8") for document in documents]
        sketched = sketches([document.text for document in documents]) if self.deduplicate == "near" else []
        described = self._describe(documents, stored, places)
        described["sketch"] = [len(sketch) for sketch in sketched] if sketched else 0
        columns |= {"documents": described.tobytes(), "texts": packed(stored), "sketches": b"".join(sketched)}
        return BlockColumns(source, block.number, columns, counts)

    def _repair(self, document: Document) -> Document:
        if not self.repair:
            return document
        fix: Callable[[str], str] = needed("ftfy", "--repair-unicode").fix_text
        return Document(fix(document.text), document.title)

    def _describe(
        self, documents: Sequence[Document], stored: Sequence[bytes], places: Sequence[int]
    ) -> npt.NDArray[Any]:
        described, key = np.zeros(len(documents), DOCUMENT), self.seed.to_bytes(8, "little")
        hashes = b"".join(hashlib.blake2b(data, digest_size=8, key=key).digest() for data in stored)
        described["split"] = np.frombuffer(hashes, "<u8")
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
    """Tokenizes the texts of one entry of a spool: (packed texts, lengths, kept) → columns."""

    encoder: DocumentEncoder

    def __call__(self, item: tuple[bytes, npt.NDArray[np.int64], npt.NDArray[np.bool_]]) -> dict[str, bytes]:
        texts, lengths, kept = item
        chosen = [text.decode("utf-8") for text in compress(unpacked(texts, lengths), kept)]
        columns = token_columns(self.encoder.encode(chosen), self.encoder)
        sizes = np.zeros(len(kept), np.int64)
        sizes[kept] = np.frombuffer(columns["sizes"], np.int64)
        return {**columns, "sizes": sizes.tobytes()}


def token_columns(documents: Sequence[EncodedDocument], encoder: DocumentEncoder) -> dict[str, bytes]:
    """Return the columns of documents: their tokens joined, tokens of each document (int64), and, if the encoder has a
    language, whether a sentence begins with each token (bool)."""
    sizes = np.array([len(ids) for ids, _ in documents], np.int64)
    tokens = np.concatenate([np.zeros(0, np.int64), *(ids for ids, _ in documents)])
    starts = np.concatenate([np.zeros(0, np.bool_), *(starts for _, starts in documents)])
    return {
        "sizes": sizes.tobytes(),
        "tokens": tokens.astype(token_dtype(encoder.vocabulary_size)).tobytes(),
        "sentences": starts.tobytes(),
    }


def packed(texts: Sequence[bytes]) -> bytes:
    """Join texts and compress them."""
    return zstandard.compress(b"".join(texts), 1)


def unpacked(data: bytes, lengths: npt.NDArray[np.int64]) -> list[bytes]:
    """Return the texts of `packed`, by their lengths in bytes."""
    whole = zstandard.decompress(data)
    ends = np.cumsum(lengths).tolist()
    return [whole[end - length : end] for end, length in zip(ends, lengths.tolist(), strict=True)]


# --- in several processes ---------------------------------------------------------------------------------------------


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def in_order(work: Callable[[Item], Result], items: Iterable[Item], processes: int) -> Iterator[Result]:
    """Yield `work(item)` for each item, in order; with one process all is done in this one.

    Args:
        work: is pickled once for each process; items and results are pickled each time.

    Raises:
        UserError: a process was killed.
    """
    if processes <= 1:
        yield from map(work, items)
        return
    # Forks of a process with threads may hang: tokenizers, torch and pyarrow have some.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_start_worker, initargs=(work,)) as pool:
        source, pending = iter(items), deque[Future[Result]]()
        try:
            while True:
                ahead = islice(source, _ITEMS_AHEAD * processes - len(pending))
                pending.extend(pool.submit(_run, item) for item in ahead)
                if not pending:
                    return
                yield pending.popleft().result()
        except BrokenProcessPool as error:
            raise UserError(
                "a process that prepares documents was killed, perhaps for want of memory: "
                "start again, with fewer --processes"
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _start_worker(work: Callable[[Any], Any]) -> None:
    global _work
    parent = multiprocessing.parent_process()
    assert parent is not None
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent.pid:  # it was killed before the call
        os.kill(os.getpid(), signal.SIGKILL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each core has a process already
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends the others
    _work = work


def _run(item: Any) -> Any:
    return _work(item)
