"""Encode documents in batches: their token ids, and where their sentences begin."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from zero_tp.data.indexed import token_dtype

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerFast

EncodedDocument = tuple[npt.NDArray[np.uintc], npt.NDArray[np.bool_]]
"""A document's token ids [tokens], and whether a sentence begins with each [tokens]; [0] if sentences are not split."""


class DocumentEncoder:
    """Encodes documents in batches; can be pickled for another process.

    A text that spells a special token (`<|endoftext|>`) is encoded as ordinary text. Each document ends with the eos
    token, if the tokenizer has one (BERT's has none).

    Args:
        language: ISO 639 code: documents are split into sentences by the rules of this language; None: they aren't.

    Attributes:
        eos_count: eos tokens of a document: 0 or 1.
        end_of_document: the eos token; None: there is none.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, language: str | None = None) -> None:
        from tokenizers import Tokenizer

        eos = tokenizer.eos_token_id
        self._eos = array("I", [] if eos is None else [eos])
        self.eos_count, self.language = len(self._eos), language
        self.vocabulary_size = 1 + max(tokenizer.get_vocab().values(), default=-1)  # ids may have gaps
        # A copy, because the tokenizer that is saved must keep its own settings.
        self._backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._backend.no_truncation()
        self._backend.no_padding()
        self.end_of_document: str | None = None if eos is None else self._backend.id_to_token(eos)

    def encode(self, texts: list[str]) -> list[EncodedDocument]:
        """Return each text's token ids, eos at the end, and the starts of its sentences, if there is a language."""
        self._backend.encode_special_tokens = True  # a pickled tokenizer forgets it
        encode = self._backend.encode_batch if self.language else self._backend.encode_batch_fast  # has no offsets
        encodings = encode(texts, add_special_tokens=False)
        return list(zip(map(self._ids, encodings), map(self._sentence_starts, texts, encodings), strict=True))

    def _ids(self, encoding: Encoding) -> npt.NDArray[np.uintc]:
        return np.frombuffer(array("I", encoding.ids) + self._eos, np.uintc)  # np.array would take three times as long

    def _sentence_starts(self, text: str, encoding: Encoding) -> npt.NDArray[np.bool_]:
        if self.language is None:
            return np.zeros(0, np.bool_)
        from sentencex import segment

        lengths = [len(sentence) for sentence in segment(self.language, text)]
        assert sum(lengths) == len(text)
        # A token that includes the space before a sentence belongs to the sentence of its last character.
        ends = [end for _, end in encoding.offsets]
        first_tokens = np.searchsorted(ends, [0, *np.cumsum(lengths[:-1])], side="right")
        starts = np.zeros(len(ends) + self.eos_count, np.bool_)
        starts[first_tokens[first_tokens < len(ends)]] = True
        return starts

    def columns(self, encodings: Sequence[EncodedDocument]) -> dict[str, bytes]:
        """Return a block's token columns, see `spool.COLUMNS`."""
        tokens = np.concatenate([np.zeros(0, np.int64), *(ids for ids, _ in encodings)])
        starts = np.concatenate([np.zeros(0, np.bool_), *(starts for _, starts in encodings)])
        return {
            "sizes": np.array([len(ids) for ids, _ in encodings], np.int64).tobytes(),
            "tokens": tokens.astype(token_dtype(self.vocabulary_size)).tobytes(),
            "sentences": starts.tobytes(),
        }
