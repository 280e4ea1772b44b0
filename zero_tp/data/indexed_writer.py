"""Write corpora in Megatron-LM's format, which `indexed` describes."""

from __future__ import annotations

from array import array
from pathlib import Path

import numpy as np
import numpy.typing as npt

from zero_tp.base.errors import UserError
from zero_tp.data.indexed import DTYPES, HEADER, MAGIC, VERSION, bin_path, idx_path, token_dtype


class IndexedWriter:
    """Writes a corpus, document by document: `.bin` as it goes, `.idx` at the end.

    It is a context manager: if the block raises, no `.idx` is written, so there is no corpus.
    Memory: 4 bytes a sequence, and 8 a document.
    """

    def __init__(self, prefix: str | Path, vocabulary_size: int) -> None:
        self.prefix = str(prefix)
        self.vocabulary_size = vocabulary_size
        self.dtype = token_dtype(vocabulary_size)
        self.tokens = 0
        self._sizes = array("i")
        self._documents = array("q", [0])
        self._file = open(bin_path(prefix), "wb")  # noqa: SIM115 - closed by close() and __exit__

    def add_documents(
        self, ids: npt.ArrayLike, sizes: npt.ArrayLike, begins: npt.ArrayLike | None = None
    ) -> None:
        """Append documents of `sizes` tokens, with concatenated ids.

        Documents of 3 and 2 tokens, of which the first has two sentences: `begins` is 1 0 1 1 0.
        The index gets sequences of 2, 1 and 2 tokens; the documents begin at sequences 0 and 2.

        Args:
            begins: whether each token begins a sentence, bool; each sentence is a sequence. None:
                each document.

        Raises:
            UserError: an id is outside the vocabulary.
        """
        values = np.asarray(ids)
        lengths = np.asarray(sizes, dtype=np.int64)
        assert lengths.sum() == values.size, (lengths.sum(), values.size)
        if values.size:
            low = int(values.min())
            high = int(values.max())
            if low < 0 or high >= self.vocabulary_size:
                bad = low if low < 0 else high
                raise UserError(
                    f"token id {bad} lies outside the vocabulary of {self.vocabulary_size:,} tokens"
                )
        assert lengths.max(initial=0) <= np.iinfo(np.int32).max, (
            "the format has 31 bits for a document's length"
        )
        self._file.write(values.astype(self.dtype).tobytes())
        ends = np.cumsum(lengths)
        inside = (
            np.zeros(0, np.int64)
            if begins is None
            else np.setdiff1d(np.flatnonzero(begins), ends - lengths)
        )
        # The starts of documents are taken from their sizes, so an empty document has a sequence,
        # too.
        starts = np.sort(np.concatenate([ends - lengths, inside]))
        self._sizes.frombytes(np.diff(starts, append=values.size).astype(np.intc).tobytes())
        sequences = 1 + np.searchsorted(inside, ends) - np.searchsorted(inside, ends - lengths)
        self._documents.frombytes((self._documents[-1] + np.cumsum(sequences)).tobytes())
        self.tokens += values.size

    def close(self) -> None:
        """Write the index, which completes the corpus."""
        self._file.close()
        sizes = np.array(self._sizes, dtype="<i4")
        starts = np.zeros(len(sizes), dtype="<i8")
        # In 64 bits: the lengths are of 32, and their sum need not fit.
        np.cumsum(sizes[:-1], out=starts[1:])
        # Last, because a corpus without an index is none: a killed writer leaves no corpus that
        # looks complete.
        with open(idx_path(self.prefix), "wb") as file:
            code = next(code for code, dtype in DTYPES.items() if dtype == self.dtype)
            file.write(HEADER.pack(MAGIC, VERSION, code, len(sizes), len(self._documents)))
            file.write(sizes.tobytes())
            file.write((starts * self.dtype.itemsize).tobytes())
            file.write(np.array(self._documents, dtype="<i8").tobytes())

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.close()
        else:
            self._file.close()
