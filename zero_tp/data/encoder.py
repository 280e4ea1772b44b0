"""Documents become token ids, many at a time, in any process."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerFast


Encoded = tuple[npt.NDArray[np.uintc], npt.NDArray[np.bool_]]
"""A document's token ids [tokens], and whether a sentence begins with each [tokens], or [0] where nobody asked."""


class DocumentEncoder:
    """An encoder turns documents into token ids, many at a time; it can be sent to another process.

    A text that happens to spell a special token (`<|endoftext|>`) is encoded as ordinary text: only the end of a
    document gives the eos token, where the tokenizer has one (BERT's has none).

    Args:
        language: ISO 639 code of the language by whose rules documents are split into sentences; None: they aren't.

    Attributes:
        ends: tokens that end a document: 0 or 1.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, language: str | None = None) -> None:
        self._set(tokenizer.backend_tokenizer.to_str(), tokenizer.eos_token_id, len(tokenizer), language)

    def _set(self, serialized: str, end: int | None, vocabulary_size: int, language: str | None) -> None:
        from tokenizers import Tokenizer

        self._state = (serialized, end, vocabulary_size, language)
        self._end, self.vocabulary_size, self.language = [] if end is None else [end], vocabulary_size, language
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

    def encode(self, texts: list[str]) -> list[Encoded]:
        """Return each text's token ids, eos at the end, and where its sentences begin, if there is a language."""
        encode = self._backend.encode_batch if self.language else self._backend.encode_batch_fast  # has no offsets
        encodings = encode(texts, add_special_tokens=False)
        ids = (self._ended(encoding.ids) for encoding in encodings)
        begins = map(self._begins, texts, encodings)
        return list(zip(ids, begins, strict=True))

    def _ended(self, ids: list[int]) -> npt.NDArray[np.uintc]:
        ended = array("I", ids)  # three times as fast as np.array
        ended.extend(self._end)
        return np.frombuffer(ended, np.uintc)

    def _begins(self, text: str, encoding: Encoding) -> npt.NDArray[np.bool_]:
        if self.language is None:
            return np.zeros(0, np.bool_)
        from sentencex import segment

        lengths = [len(sentence) for sentence in segment(self.language, text)]
        assert sum(lengths) == len(text)
        # A token that also holds the space before it is of the sentence of its last character.
        ends = [end for _, end in encoding.offsets]
        found = np.searchsorted(ends, [0, *np.cumsum(lengths[:-1])], side="right")
        begins = np.zeros(len(ends) + len(self._end), np.bool_)
        begins[found[found < len(ends)]] = True
        return begins


def _encoder(*state: Any) -> DocumentEncoder:
    made = DocumentEncoder.__new__(DocumentEncoder)
    made._set(*state)
    return made
