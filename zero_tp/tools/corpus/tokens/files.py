"""Token files: consecutive tokens, a file with its items, and blocks of whole documents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from zero_tp.base.errors import UserError
from zero_tp.data.records import Problem, Source, location

Ids = npt.NDArray[Any]
"""Token ids of any integer type, [tokens]."""
WINDOW = 2**22
"""Tokens of a block: it ends at the last document's end in a window of so many."""
MAX_VOCABULARY = 2**24
"""No vocabulary is larger; a larger id shows a wrong type."""
_ENDS = 2**18  # ends of items in memory at once


@dataclass(frozen=True)
class TokenRange:
    """Consecutive tokens: their place in a file, or the ids themselves.

    Attributes:
        dtype: the tokens' type, as NumPy writes it.
        count: of tokens.
        path, offset: the file, and the byte at which they begin; without `ids`.
    """

    dtype: str
    count: int
    path: str = ""
    offset: int = 0
    ids: Ids | None = None

    def load(self) -> Ids:
        if self.ids is not None:
            return self.ids
        ids = np.fromfile(self.path, self.dtype, self.count, offset=self.offset)
        if len(ids) != self.count:
            raise changed(self.path)
        return ids

    def is_followed_by(self, other: TokenRange) -> bool:
        """Return whether the other tokens come next in the same file."""
        end = self.offset + self.count * np.dtype(self.dtype).itemsize
        in_file = self.ids is None and other.ids is None
        return in_file and (self.path, self.dtype, end) == (other.path, other.dtype, other.offset)

    def slice(self, start: int, stop: int) -> TokenRange:
        """Return the tokens `start` … `stop` - 1."""
        if self.ids is not None:
            return TokenRange(self.dtype, stop - start, ids=self.ids[start:stop])
        offset = self.offset + start * np.dtype(self.dtype).itemsize
        return TokenRange(self.dtype, stop - start, self.path, offset)


def merge_ranges(parts: Iterable[TokenRange]) -> list[TokenRange]:
    """Return the same tokens in fewer parts: those that follow each other in a file are one."""
    merged = list[TokenRange]()
    for part in parts:
        last = merged[-1] if merged else None
        if last is not None and last.is_followed_by(part):
            merged[-1] = TokenRange(part.dtype, last.count + part.count, part.path, last.offset)
        else:
            merged.append(part)
    return merged


class Items(NamedTuple):
    """Consecutive items of a file: samples, rows or documents.

    Attributes:
        sizes: tokens of each, int64 [items].
        place: number of the first one in the file, from 1.
        problems: what stands in place of an item, with its number.
        sentences: the tokens with which a sentence begins, int64; None: sentences are not marked.
    """

    tokens: TokenRange
    sizes: npt.NDArray[np.int64]
    place: int = 1
    problems: Sequence[tuple[int, Problem]] = ()
    sentences: npt.NDArray[np.int64] | None = None


@dataclass
class TokenFile(Source):
    """A file without tokens, such as an index: its hash counts, and its tokens are in others.

    Attributes:
        dtype: the type of its tokens, as NumPy writes it; None: it has none.
    """

    dtype: str | None = None

    def items(self) -> Iterator[Items]:
        """Yield all items, in order."""
        yield from ()

    def windows(self) -> Iterator[TokenRange]:
        """Yield all tokens in order, without the borders of items.

        Raises:
            UserError: something stands in place of an item; a document may go on after it.
        """
        for items in self.items():
            for place, problem in items.problems:
                raise UserError(f"{location(self.name, place)}: {problem.detail}")
            yield items.tokens


@dataclass
class FlatFile(TokenFile):
    """A file in which all tokens follow each other without gaps.

    Attributes:
        tokens: all of them.
        ends: the end of each item, in tokens from the first one; empty: they are not stored.
    """

    tokens: TokenRange = TokenRange("<u2", 0)
    ends: Sequence[int] | npt.NDArray[Any] = ()

    def __post_init__(self) -> None:
        self.dtype = self.tokens.dtype

    def windows(self) -> Iterator[TokenRange]:
        for start in range(0, self.tokens.count, WINDOW):
            yield self.tokens.slice(start, min(start + WINDOW, self.tokens.count))

    def items(self) -> Iterator[Items]:
        start = 0
        for first in range(0, len(self.ends), _ENDS):
            ends = np.asarray(self.ends[first : first + _ENDS]).astype(np.int64)
            if (np.diff(ends, prepend=start) < 0).any() or ends[-1] > self.tokens.count:
                raise UserError(
                    f"{self.name}: damaged: the ends of its documents don't rise to its "
                    f"{self.tokens.count:,} tokens: copy it again"
                )
            done = 0
            while done < len(ends):
                # At least one, which may be longer than a window.
                stop = max(done + 1, int(np.searchsorted(ends, start + WINDOW, side="right")))
                sizes = np.diff(ends[done:stop], prepend=start)
                tokens = self.tokens.slice(start, int(ends[stop - 1]))
                sentences = self.sentences(start, tokens.count)
                yield Items(tokens, sizes, first + done + 1, sentences=sentences)
                done, start = stop, int(ends[stop - 1])
        if start != self.tokens.count:
            raise UserError(
                f"{self.name}: damaged: its documents end at token {start:,} of "
                f"{self.tokens.count:,}: copy it again"
            )

    def sentences(self, start: int, count: int) -> npt.NDArray[np.int64] | None:
        """Return which of these tokens begin a sentence; None: that is not stored."""
        return None


def changed(name: str | Path) -> UserError:
    return UserError(f"{name}: the file has changed since the start: run the command again")
