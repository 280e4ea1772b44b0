"""Process blocks of documents in several processes: check, repair, hash and tokenize them."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import compress, islice, starmap
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import zstandard

from zero_tp.base.errors import UserError
from zero_tp.data.formats import import_optional
from zero_tp.data.indexed import token_dtype
from zero_tp.data.records import Document, Problem, RecordBlock, RecordCounts, location
from zero_tp.data.tokenizer import DocumentEncoder, EncodedDocument
from zero_tp.tools.corpus.settings import PrepareSettings
from zero_tp.tools.corpus.similarity import EvaluationSets, sketches
from zero_tp.tools.corpus.spool import DOCUMENT_FACTS, Mask, ProcessedBlock, StoredBlock

Result = TypeVar("Result")
_ITEMS_AHEAD = 3  # submitted items per process


@dataclass(frozen=True)
class BlockProcessor:
    """Checks, repairs and hashes the records of a block, and tokenizes them if there is an encoder.

    Attributes:
        encoder: None if the tokenizer is to be trained on these documents.
        sets: the evaluation sets that documents must not overlap with.
    """

    settings: PrepareSettings
    encoder: DocumentEncoder | None = None
    sets: EvaluationSets | None = None

    def __call__(
        self, source: int, block: RecordBlock, sha256: str | None = None
    ) -> ProcessedBlock:
        counts = RecordCounts()
        documents = list[Document]()
        places = list[int]()
        settings = self.settings
        for place, document in block.documents():
            counts.read += 1
            if settings.repair and isinstance(document, Document):
                ftfy = import_optional("ftfy", "--repair-unicode")
                document = document._replace(text=ftfy.fix_text(document.text))
            # After the repair, which may leave nothing.
            if isinstance(document, Document) and not document.text.strip():
                document = Problem("empty", "an empty document")
            if isinstance(document, Problem):
                counts.drop(location(block.source, place), document)
            else:
                documents.append(document)
                places.append(place)
        columns = {}
        if self.encoder is not None:
            encodings = self.encoder.encode([document.text for document in documents])
            is_long = [
                len(ids) - self.encoder.eos_count >= settings.min_tokens for ids, _ in encodings
            ]
            if short := is_long.count(False):
                counts.dropped["short"] += short
            documents = list(compress(documents, is_long))
            places = list(compress(places, is_long))
            columns = token_columns(self.encoder, list(compress(encodings, is_long)))
        texts = [document.text.encode("utf-8") for document in documents]
        facts = np.zeros(len(documents), DOCUMENT_FACTS)
        # The seed is the key of the hash that decides the split: another seed gives another split
        # of the same documents.
        key = settings.seed.to_bytes(8, "little")
        facts["split_hash"] = _hashes(texts, "<u8", key)
        facts["place"] = places
        facts["characters"] = [len(document.text) for document in documents]
        facts["bytes"] = list(map(len, texts))
        if settings.deduplicate is not None:
            facts["content_hash"] = _hashes(texts, "V16")
        if settings.deduplicate == "near":
            minhashes = sketches([document.text for document in documents])
            facts["sketch_bytes"] = list(map(len, minhashes))
            columns["sketches"] = b"".join(minhashes)
        if self.sets is not None:
            facts["contaminated"] = [self.sets.overlap_with(document) for document in documents]
        # Level 1, because a spool is temporary and reading must not wait for it.
        columns |= {"documents": facts.tobytes(), "texts": zstandard.compress(b"".join(texts), 1)}
        return ProcessedBlock(source, block.number, sha256, columns, counts)


def _hashes(texts: Sequence[bytes], dtype: str, key: bytes = b"") -> npt.NDArray[Any]:
    """Return a BLAKE2b hash of each text, as wide as `dtype`."""
    size = np.dtype(dtype).itemsize
    return np.frombuffer(
        b"".join(hashlib.blake2b(text, digest_size=size, key=key).digest() for text in texts), dtype
    )


def encode_stored(
    encoder: DocumentEncoder, block: StoredBlock, lengths: npt.NDArray[np.int64], selected: Mask
) -> dict[str, bytes]:
    """Return the token columns of a block.

    Documents that are not selected have no tokens; `lengths` are the bytes of each text.
    """
    columns = token_columns(encoder, encoder.encode(block.texts(lengths, selected)))
    sizes = np.zeros(len(selected), np.int64)
    # Every document has a size, so that the k-th size stays that of the k-th document.
    sizes[selected] = np.frombuffer(columns["sizes"], np.int64)
    return columns | {"sizes": sizes.tobytes()}


_worker_function: Callable[..., Any]
"""The function that this worker process runs; a global, because a pool's initializer cannot
return it.
"""


def map_in_order(
    work: Callable[..., Result], items: Iterable[tuple[Any, ...]], processes: int
) -> Iterator[Result]:
    """Yield `work(*item)` for each item, in order; with one process, call `work` in this one.

    Args:
        work: is pickled once for each process; items and results are pickled each time.
    """
    if processes <= 1:
        yield from starmap(work, items)
        return
    # A fork of a process with threads may hang, and tokenizers, torch and pyarrow start threads.
    context = multiprocessing.get_context("spawn")
    # `work` has a tokenizer and is large: it goes to a process once, and afterwards only items do.
    with ProcessPoolExecutor(
        processes, mp_context=context, initializer=_start_worker, initargs=(work,)
    ) as pool:
        items = iter(items)
        # Two processes, three items ahead for each; results leave in order:
        #
        #     submitted   1 2 3 4 5 6       1 is slow, 2 to 6 are computed meanwhile
        #     yielded     1                 then 7 is submitted
        #
        # More items ahead would only hold more blocks in memory.
        pending = deque[Future[Result]]()
        try:
            while True:
                ahead = islice(items, _ITEMS_AHEAD * processes - len(pending))
                pending.extend(pool.submit(_call_worker_function, *item) for item in ahead)
                if not pending:
                    return
                yield pending.popleft().result()
        except BrokenProcessPool as error:
            raise UserError(
                "a process that prepares documents was killed (out of memory?): run it again with "
                "fewer --processes; "
                'a script that calls prepare must do so under if __name__ == "__main__":'
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _start_worker(work: Callable[..., Any]) -> None:
    global _worker_function
    # A worker waits for its next item, and a killed parent sends none: without this thread it would
    # never end.
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each core has a process already
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process ends its workers
    _worker_function = work


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    # The parent's end is readable on a pipe that it holds open; joining waits for that.
    parent.join()
    # Not sys.exit, which would end this thread only.
    os._exit(1)


def _call_worker_function(*item: Any) -> Any:
    return _worker_function(*item)


def token_columns(
    encoder: DocumentEncoder, encodings: Sequence[EncodedDocument]
) -> dict[str, bytes]:
    """Return a block's token columns, see `spool.COLUMNS`."""
    tokens = np.concatenate([np.zeros(0, np.int64), *(ids for ids, _ in encodings)])
    starts = np.concatenate([np.zeros(0, np.bool_), *(starts for _, starts in encodings)])
    return {
        "sizes": np.array([len(ids) for ids, _ in encodings], np.int64).tobytes(),
        # The type of the corpus, so that blocks are copied into it unchanged.
        "tokens": tokens.astype(token_dtype(encoder.vocabulary_size)).tobytes(),
        "sentences": starts.tobytes(),
    }
