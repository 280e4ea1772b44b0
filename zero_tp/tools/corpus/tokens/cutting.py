"""Blocks of whole documents of token files.

Documents are the files' items, or what stands between end-of-text tokens. In the second case a
document may begin in one file and end in the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from zero_tp.data.records import Problem
from zero_tp.tools.corpus.tokens.files import FlatFile, TokenFile, TokenRange, merge_ranges

BEFORE = "before"
AFTER = "after"
_SEARCHED = 2**16  # tokens that are searched for an end-of-text token at once


class UnlikelyTokens(ValueError):
    """The tokens show that a setting is wrong; the message says how."""


@dataclass(frozen=True)
class TokenBlock:
    """Tokens of documents that begin in one file.

    Attributes:
        source: the file's name.
        number: the block's number in its file, from 0.
        parts: where the tokens are; of several files if the last document is.
        place: number of the first item, or of the first token, in the file, from 1.
        sizes: tokens of each item, int64 [items]; None: end-of-text tokens separate documents.
        problems, sentences: see `Items`.
    """

    source: str
    number: int
    parts: Sequence[TokenRange]
    place: int
    sizes: npt.NDArray[np.int64] | None = None
    problems: Sequence[tuple[int, Problem]] = ()
    sentences: npt.NDArray[np.int64] | None = None

    def load(self) -> npt.NDArray[np.generic]:
        """Return the block's tokens."""
        loaded = [part.load() for part in self.parts]
        return loaded[0] if len(loaded) == 1 else np.concatenate(loaded)


def item_blocks(files: Sequence[TokenFile]) -> Iterator[tuple[int, TokenBlock | None]]:
    """Yield the number of a file and a block of its items; None after its last one."""
    for number, file in enumerate(files):
        for block, items in enumerate(file.items()):
            yield (
                number,
                TokenBlock(
                    file.name,
                    block,
                    [items.tokens],
                    items.place,
                    items.sizes,
                    items.problems,
                    items.sentences,
                ),
            )
        yield number, None


@dataclass
class EosCutter:
    """Cuts files at end-of-text tokens.

    Two files and windows of four tokens; E stands before each document:

        tokens    E a b E | c d e f      E g h i | E
        blocks    E a b   | E c d e f            | E g h i | E

    A block begins with E (after: ends with it), but for what a first or last file lacks.

    Attributes:
        limit: tokens of the longest document.
    """

    files: Sequence[TokenFile]
    eos: int
    position: str
    limit: int

    def __iter__(self) -> Iterator[tuple[int, TokenBlock | None]]:
        """Yield the number of a file and a block; None after its last one."""
        numbers = [0] * len(self.files)
        # The document whose end was not read yet: its file, place and tokens.
        owner, place, carry = 0, 1, list[TokenRange]()

        def block(number: int, parts: list[TokenRange], place: int) -> tuple[int, TokenBlock]:
            numbers[number] += 1
            name, merged = self.files[number].name, merge_ranges(parts)
            return number, TokenBlock(name, numbers[number] - 1, merged, place)

        self._check_ends()
        finished = 0
        for number, file in enumerate(self.files):
            read = 0
            for part in file.windows():
                start = 0
                if carry and owner != number and (edge := self._first_edge(part)) is not None:
                    # The documents of a block begin in one file.
                    yield block(owner, [*carry, part.slice(0, edge)], place)
                    carry, start = [], edge
                if not carry or owner == number:
                    edge = self._last_edge(part, start if carry else start + 1)
                    if edge is not None:
                        first = place if carry else read + start + 1
                        yield block(number, [*carry, part.slice(start, edge)], first)
                        carry, start = [], edge
                if start < part.count:
                    if not carry:
                        owner, place = number, read + start + 1
                    carry.append(part.slice(start, part.count))
                    self._check_length(carry)
                read += part.count
            while finished < (owner if carry else number + 1):
                yield finished, None
                finished += 1
        if carry:
            self._check_rest(carry, is_all=not any(numbers))
            yield block(owner, carry, place)
        while finished < len(self.files):
            yield finished, None
            finished += 1

    def _check_ends(self) -> None:
        """Compare the first and the last token with the position."""
        parts = [file.tokens for file in self.files if isinstance(file, FlatFile)]
        parts = [part for part in parts if part.count]
        if not parts:
            return
        last = parts[-1].count
        ends = parts[0].slice(0, 1).load(), parts[-1].slice(last - 1, last).load()
        begins, stops = (int(end[0]) == self.eos for end in ends)
        if begins and not stops and self.position == AFTER:
            raise UnlikelyTokens(
                f"the first token is end-of-text, {self.eos:,}, and the last one is not, so it "
                "stands before documents: give --eos-position before"
            )
        if stops and not begins and self.position == BEFORE:
            raise UnlikelyTokens(
                f"the last token is end-of-text, {self.eos:,}, and the first one is not, so it "
                "stands after documents: give --eos-position after"
            )

    def _check_rest(self, carry: Sequence[TokenRange], is_all: bool) -> None:
        if is_all and not any((part.load() == self.eos).any() for part in carry):
            count = sum(part.count for part in carry)
            raise UnlikelyTokens(f"no end-of-text token {self.eos:,} in all {count:,} tokens")

    def _edges(self, part: TokenRange, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return where documents begin in these tokens of a part."""
        places = start + np.flatnonzero(part.slice(start, stop).load() == self.eos)
        return places + (self.position == AFTER)

    def _first_edge(self, part: TokenRange) -> int | None:
        for start in range(0, part.count, _SEARCHED):
            edges = self._edges(part, start, min(start + _SEARCHED, part.count))
            if len(edges):
                return int(edges[0])
        return None

    def _last_edge(self, part: TokenRange, least: int) -> int | None:
        """Return the last edge from `least` on."""
        for stop in range(part.count, least - 1, -_SEARCHED):
            edges = self._edges(part, max(0, stop - _SEARCHED), stop)
            if len(edges) and edges[-1] >= least:
                return int(edges[-1])
        return None

    def _check_length(self, carry: Sequence[TokenRange]) -> None:
        if (count := sum(part.count for part in carry)) > self.limit + 1:
            raise UnlikelyTokens(
                f"no end-of-text token {self.eos:,} in {count:,} tokens, and a document has at "
                f"most --max-document-tokens {self.limit:,}"
            )
