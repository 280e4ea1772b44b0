"""Write corpora in Megatron-LM's format, which `indexed` describes."""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from zero_tp.base.errors import UserError
from zero_tp.data.indexed import (
    DTYPES,
    HEADER,
    MAGIC,
    VERSION,
    CorpusContent,
    bin_path,
    idx_path,
    token_dtype,
)

_ENTRIES = 2**18  # of the index in memory at once


class IndexedWriter:
    """Writes a corpus, document by document: `.bin` as it goes, `.idx` at the end.

    It is a context manager: if the block raises, no `.idx` is written, so there is no corpus.
    Memory does not grow with the corpus: the index's entries wait in unnamed files beside it.

    Args:
        dtype: the tokens' type; None: that of `token_dtype`.
    """

    def __init__(
        self, prefix: str | Path, vocabulary_size: int, dtype: np.dtype | None = None
    ) -> None:
        self.prefix = str(prefix)
        self.vocabulary_size = vocabulary_size
        self.dtype = token_dtype(vocabulary_size) if dtype is None else dtype
        self.tokens = 0
        self._smallest = 0
        self._largest = -1
        self._sha256 = hashlib.sha256()
        self._opened = contextlib.ExitStack()
        # Hashing and writing release the interpreter's lock, so neither waits for the other.
        self._pool = self._opened.enter_context(ThreadPoolExecutor(2))
        self._writing = list[Future[Any]]()
        folder = bin_path(prefix).parent
        self._sizes = self._opened.enter_context(_unnamed_file(folder))
        self._documents = self._opened.enter_context(_unnamed_file(folder))
        self._sequence_count = 0
        self._document_count = 0
        self._file = self._opened.enter_context(bin_path(prefix).open("wb"))

    def add_documents(
        self,
        ids: npt.ArrayLike,
        sizes: npt.ArrayLike,
        begins: npt.ArrayLike | None = None,
        bounds: tuple[int, int] | None = None,
    ) -> None:
        """Append documents of `sizes` tokens, with concatenated ids.

        Documents of 3 and 2 tokens, of which the first has two sentences: `begins` is 1 0 1 1 0.
        The index gets sequences of 2, 1 and 2 tokens; the documents begin at sequences 0 and 2.

        Args:
            begins: whether each token begins a sentence, bool; each sentence is a sequence. None:
                each document.
            bounds: no id is below the first number or above the second. It saves a look at ids that
                are no new extremes.

        Raises:
            UserError: an id is outside the vocabulary.
        """
        values = np.asarray(ids)
        lengths = np.asarray(sizes, dtype=np.int64)
        assert lengths.sum() == values.size, (lengths.sum(), values.size)
        if values.size:
            low, high = self._smallest, self._largest
            if bounds is None or bounds[0] < low or bounds[1] > high:
                low, high = int(values.min()), int(values.max())
            if low < 0 or high >= self.vocabulary_size:
                bad = low if low < 0 else high
                raise UserError(
                    f"token id {bad} lies outside the vocabulary of {self.vocabulary_size:,} tokens"
                )
            is_first = not self.tokens
            self._smallest = low if is_first else min(self._smallest, low)
            self._largest = max(self._largest, high)
        assert lengths.max(initial=0) <= np.iinfo(np.int32).max, (
            "the format has 31 bits for a document's length"
        )
        self._write_tokens(np.ascontiguousarray(values, self.dtype).data)
        ends = np.cumsum(lengths)
        inside = (
            np.zeros(0, np.int64)
            if begins is None
            else np.setdiff1d(np.flatnonzero(begins), ends - lengths)
        )
        # The starts of documents are taken from their sizes, so an empty document has a sequence,
        # too.
        starts = ends - lengths
        if len(inside):
            starts = np.sort(np.concatenate([starts, inside]))
        self._sizes.write(np.diff(starts, append=values.size).astype("<i4").tobytes())
        sequences = 1 + np.searchsorted(inside, ends) - np.searchsorted(inside, ends - lengths)
        self._documents.write((self._sequence_count + np.cumsum(sequences)).astype("<i8").tobytes())
        self._sequence_count += len(starts)
        self._document_count += len(lengths)
        self.tokens += values.size

    def _write_tokens(self, data: memoryview) -> None:
        """Begin to hash and write tokens, after the last ones were."""
        self._finish_writing()
        self._writing = [
            self._pool.submit(self._sha256.update, data),
            self._pool.submit(self._file.write, data),
        ]

    def _finish_writing(self) -> None:
        for task in self._writing:
            task.result()
        self._writing = []

    @property
    def content(self) -> CorpusContent:
        """The content of PREFIX.bin so far."""
        self._finish_writing()
        return CorpusContent(self._sha256.hexdigest(), self._smallest, self._largest)

    def close(self) -> None:
        """Write the index, which completes the corpus."""
        self._finish_writing()
        self._file.close()
        # Last, because a corpus without an index is none: a killed writer leaves no corpus that
        # looks complete.
        with self._opened, open(idx_path(self.prefix), "wb") as file:
            code = next(code for code, dtype in DTYPES.items() if dtype == self.dtype)
            boundaries = self._document_count + 1
            file.write(HEADER.pack(MAGIC, VERSION, code, self._sequence_count, boundaries))
            file.writelines(sizes.data for sizes in _entries(self._sizes, "<i4"))
            start = 0
            for sizes in _entries(self._sizes, "<i4"):
                # In 64 bits: the lengths are of 32, and their sum need not fit.
                ends = start + np.cumsum(sizes, dtype=np.int64)
                file.write(((ends - sizes) * self.dtype.itemsize).astype("<i8").data)
                start = int(ends[-1])
            file.write(bytes(8))
            file.writelines(sequences.data for sequences in _entries(self._documents, "<i8"))

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.close()
        else:
            self._opened.close()


def _unnamed_file(folder: Path) -> IO[bytes]:
    return tempfile.TemporaryFile(dir=folder)


def _entries(file: IO[bytes], dtype: str) -> Iterator[npt.NDArray[Any]]:
    """Yield the entries of a part of the index, in blocks."""
    file.seek(0)
    while block := file.read(_ENTRIES * np.dtype(dtype).itemsize):
        yield np.frombuffer(block, dtype)
