"""What is known about all token files together: their end-of-text token, and the corpus's type."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from zero_tp.base.errors import UserError, one_line
from zero_tp.data.indexed import DTYPES, token_dtype
from zero_tp.data.tokenizer import vocabulary_size
from zero_tp.tools.corpus.settings import PrepareSettings
from zero_tp.tools.corpus.tokens.cutting import EosCutter, TokenBlock, item_blocks
from zero_tp.tools.corpus.tokens.files import MAX_VOCABULARY, Ids, TokenFile, TokenRange
from zero_tp.tools.corpus.tokens.formats import FORMATS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_SHOWN_TOKENS = 16
_TWINS = {
    "uint8": "uint16",
    "uint16": "uint32",
    "int16": "uint32",
    "uint32": "uint16",
    "int32": "uint16",
    "uint64": "uint32",
    "int64": "uint32",
}
"""Type of a token → the one that is probably meant if it is wrong."""


@dataclass(frozen=True)
class TokenLayout:
    """How documents are found in token files, and how they are written.

    Attributes:
        file_eos: the files' end-of-text token.
        position: where it stands, if it separates documents; None: items are documents.
        eos, eos_token: that of the corpus, and its text, if there is a tokenizer.
        dtype: type of the corpus.
        vocabulary_size: ids are below it; None: nobody says it.
        limit: tokens of the longest document.
        asks_type: the files do not say their type.
    """

    file_eos: int
    position: str | None
    eos: int
    eos_token: str | None
    dtype: np.dtype
    vocabulary_size: int | None
    limit: int
    asks_type: bool
    tokenizer: PreTrainedTokenizerFast | None

    @property
    def vocabulary_limit(self) -> int:
        """Ids are below it, and below what the corpus's type can hold."""
        limit = MAX_VOCABULARY if self.dtype.itemsize > 2 else 2**16
        return min(self.vocabulary_size or limit, limit)

    def blocks(self, files: Sequence[TokenFile]) -> Iterator[tuple[int, TokenBlock | None]]:
        """Yield the number of a file and a block; None after its last one."""
        if self.position is None:
            return item_blocks(files)
        return iter(EosCutter(files, self.file_eos, self.position, self.limit))

    def describe_tokens(self, files: Sequence[TokenFile]) -> str:
        """Describe the first tokens as they are read, and as another type would read them."""
        first = next((part for file in files for part in file.windows() if part.count), None)
        if first is None:
            return "there are no tokens"
        part = first.slice(0, min(first.count, _SHOWN_TOKENS))
        kind = np.dtype(part.dtype).name
        if not self.asks_type or part.ids is not None:
            return f"the first tokens are {self._describe(part.load())}"
        twin = np.dtype(_TWINS[kind])
        other = TokenRange(twin.str, part.count * np.dtype(part.dtype).itemsize // twin.itemsize)
        other = TokenRange(other.dtype, min(other.count, _SHOWN_TOKENS), part.path, part.offset)
        return (
            f"as {kind} the first tokens are {self._describe(part.load())}; as {twin.name} they "
            f"are {self._describe(other.load())}"
        )

    def _describe(self, ids: Ids) -> str:
        listed = ids.tolist()
        if self.tokenizer is None:
            return f"{' '.join(map(str, listed))} (the largest id is {max(listed, default=0):,})"
        size = vocabulary_size(self.tokenizer)
        inside = [number for number in listed if 0 <= number < size]
        text = f'"{one_line(str(self.tokenizer.decode(inside)), 120)}"'
        outside = len(listed) - len(inside)
        return text + (f" and {outside} ids that the tokenizer lacks" if outside else "")


def find_layout(
    files: Sequence[TokenFile],
    settings: PrepareSettings,
    tokenizer: PreTrainedTokenizerFast | None,
) -> TokenLayout:
    """Return the layout of token files.

    Raises:
        UserError: something is needed that neither they nor the settings say.
    """
    kind = str(settings.format)
    form = FORMATS[kind]
    dtypes = {np.dtype(file.dtype) for file in files if file.dtype is not None}
    position = settings.eos_position or form.position
    if position is None and not form.has_items:
        raise UserError(
            f"--format {kind} does not say where documents end: give --eos-position before or "
            "after, the place of the end-of-text token"
        )
    eos = None if tokenizer is None else tokenizer.eos_token_id
    fixed = {(form.eos or {}).get(dtype.str) for dtype in dtypes}
    file_eos = settings.eos_id
    if file_eos is None and len(fixed) == 1:
        (file_eos,) = fixed
    if file_eos is None:
        file_eos = eos
    if file_eos is None:
        raise UserError(
            f"--format {kind} does not say the end-of-text token: give --eos-id, or --tokenizer"
        )
    size = settings.vocab_size
    if tokenizer is not None:
        size = min(size or MAX_VOCABULARY, vocabulary_size(tokenizer))
    fits = all(dtype.kind == "u" and dtype.itemsize <= 2 for dtype in dtypes)
    layout = TokenLayout(
        file_eos,
        position,
        file_eos if eos is None else eos,
        None if tokenizer is None else str(tokenizer.eos_token),
        token_dtype(size) if size is not None else DTYPES[8 if fits else 4],
        size,
        settings.max_document_tokens,
        settings.token_type is not None,
        tokenizer,
    )
    if max(file_eos, layout.eos) >= layout.vocabulary_limit:
        raise UserError(
            f"the end-of-text token {max(file_eos, layout.eos):,} lies outside the vocabulary of "
            f"{layout.vocabulary_limit:,}: give the right --eos-id"
        )
    for width in dtypes:
        if position is not None and file_eos > np.iinfo(width).max:
            raise UserError(
                f"the end-of-text token {file_eos:,} is no {width.name}: give the right "
                "--eos-id, or --token-type"
            )
    return layout
