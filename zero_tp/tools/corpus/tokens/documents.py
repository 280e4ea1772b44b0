"""Find the documents of a block of tokens, check and hash them, and join them again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from zero_tp.data.records import Problem, RecordCounts, location
from zero_tp.tools.corpus.spool import Mask, ProcessedBlock, StoredBlock
from zero_tp.tools.corpus.tokens.cutting import BEFORE, TokenBlock, UnlikelyTokens
from zero_tp.tools.corpus.tokens.files import Ids, TokenRange

if TYPE_CHECKING:
    from zero_tp.tools.corpus.settings import PrepareSettings
    from zero_tp.tools.corpus.tokens.layout import TokenLayout

_HALVES = 8
"""Read in half their width, tokens below 2^19 alternate with numbers below 8."""
_TRIED = 2**16  # tokens of a file that are tried for that
_LEAST_TRIED = 32
_HASHED_TOKENS = 16  # of a document
_HASHED_DOCUMENTS = 2**13  # at once
CUT = Problem(
    "cut", "a document whose other part is not in the inputs: it has no end-of-text token there"
)
EMPTY = Problem("empty", "an empty document")


class DocumentSpans(NamedTuple):
    """Documents of a block without end-of-text tokens, int64 [documents].

    Attributes:
        starts, sizes: of their tokens.
        places: their numbers, or those of their first tokens, in the file.
    """

    starts: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]

    def select(self, selected: Mask) -> DocumentSpans:
        return DocumentSpans(*(values[selected] for values in self))


@dataclass(frozen=True)
class TokenProcessor:
    """Finds, checks and hashes the documents of a block; can be pickled for another process.

    Attributes:
        dtype: the type of the corpus.
        vocabulary_size: ids are below it.
        eos: the files' end-of-text token.
        position: where that stands; None: items are documents.
        checks_width: the tokens' type is an answer, and not in the files.
    """

    dtype: str
    vocabulary_size: int
    eos: int
    position: str | None
    checks_width: bool
    max_document_tokens: int
    min_tokens: int
    seed: int
    deduplicate: bool

    @classmethod
    def of(cls, layout: TokenLayout, settings: PrepareSettings) -> TokenProcessor:
        return cls(
            layout.dtype.str,
            layout.vocabulary_limit,
            layout.file_eos,
            layout.position,
            layout.asks_type,
            layout.limit,
            settings.min_tokens,
            settings.seed,
            settings.deduplicate is not None,
        )

    def __call__(self, source: int, block: TokenBlock, sha256: str | None = None) -> ProcessedBlock:
        counts = RecordCounts()
        for place, problem in block.problems:
            counts.read += 1
            counts.drop(location(block.source, place), problem)
        if not block.parts:
            return ProcessedBlock(source, block.number, sha256, {}, counts)
        tokens, spans, cuts, bounds = self.documents(block)
        counts.read += len(spans.sizes) + len(cuts)
        for place in cuts:
            counts.drop(location(block.source, place), CUT)
        spans = self._drop_short(spans, block, counts)
        hashes = _content_hashes(tokens, spans, self.deduplicate)
        columns = {
            "split_hashes": _split_hashes(tokens, spans, self.seed).tobytes(),
            "content_hashes": hashes,
            "places": spans.places.tobytes(),
            "starts": spans.starts.tobytes(),
            "sizes": spans.sizes.tobytes(),
            "bounds": np.array(bounds, np.int64).tobytes(),
        }
        if block.sentences is not None:
            is_first = np.zeros(len(tokens), np.bool_)
            is_first[block.sentences] = True
            columns["sentences"] = is_first.tobytes()
        if any(part.ids is not None for part in block.parts):
            columns["tokens"] = tokens.tobytes()
        else:
            columns["parts"] = json.dumps([asdict(part) for part in block.parts]).encode()
        return ProcessedBlock(source, block.number, sha256, columns, counts)

    def documents(self, block: TokenBlock) -> tuple[Ids, DocumentSpans, list[int], tuple[int, int]]:
        """Return the tokens of a block, its documents, the places of what is no whole one, and the
        smallest and largest id.

        Raises:
            UnlikelyTokens: a setting is wrong.
        """
        raw = block.load()
        bounds = _bounds(raw)
        self._check_ids(block, raw, bounds)
        tokens = raw.astype(self.dtype, copy=False)
        spans, cuts = self._find(tokens, block)
        self._check_lengths(block, spans)
        return tokens, spans, cuts, bounds

    def _check_ids(self, block: TokenBlock, ids: Ids, bounds: tuple[int, int]) -> None:
        low, high = bounds
        if low < 0 or high >= self.vocabulary_size:
            bad = low if low < 0 else high
            raise UnlikelyTokens(
                f"{block.source}: token id {bad:,} lies outside the vocabulary of "
                f"{self.vocabulary_size:,}"
            )
        if self.checks_width and block.number == 0 and _alternates(ids[:_TRIED]):
            raise UnlikelyTokens(
                f"{block.source}: every second token is below {_HALVES}, as if each were half of a "
                "wider one"
            )

    def _find(self, tokens: Ids, block: TokenBlock) -> tuple[DocumentSpans, list[int]]:
        """Return the documents, and the places of what is no whole one."""
        places = np.flatnonzero(tokens == self.eos)
        if block.sizes is not None:
            return self._trim(places, tokens, block), []
        if self.position == BEFORE:
            starts = places + 1
            ends = np.append(places, len(tokens))[1:]
            cut = (0, int(places[0]) if len(places) else len(tokens))
        else:
            starts = np.concatenate([[0], places + 1])[:-1].astype(np.int64)
            ends = places
            cut = (int(places[-1]) + 1 if len(places) else 0, len(tokens))
        cuts = [block.place + cut[0]] if cut[1] > cut[0] else []
        return DocumentSpans(starts, ends - starts, block.place + starts), cuts

    def _trim(self, eos: npt.NDArray[np.int64], tokens: Ids, block: TokenBlock) -> DocumentSpans:
        """Return items without the end-of-text tokens at their ends."""
        assert block.sizes is not None
        ends = np.cumsum(block.sizes)
        starts = ends - block.sizes
        numbers = block.place + np.arange(len(ends))
        if len(eos):
            is_eos = np.append(tokens == self.eos, False)
            # One more at each pass: a padded row may end with many.
            while (more := (starts < ends) & is_eos[ends - 1]).any():
                ends = ends - more
            while (more := (starts < ends) & is_eos[starts]).any():
                starts = starts + more
            inside = np.searchsorted(eos, ends) - np.searchsorted(eos, starts)
            if inside.any():
                raise UnlikelyTokens(
                    f"{location(block.source, int(numbers[np.argmax(inside > 0)]))}: the "
                    f"end-of-text token {self.eos:,} stands inside, so it holds parts of several "
                    "documents: cut them there with --eos-position before or after"
                )
        return DocumentSpans(starts, ends - starts, numbers)

    def _check_lengths(self, block: TokenBlock, spans: DocumentSpans) -> None:
        if spans.sizes.max(initial=0) > self.max_document_tokens:
            longest = int(spans.sizes.argmax())
            raise UnlikelyTokens(
                f"{location(block.source, int(spans.places[longest]))}: a document of "
                f"{int(spans.sizes[longest]):,} tokens, and --max-document-tokens is "
                f"{self.max_document_tokens:,}"
            )

    def _drop_short(
        self, spans: DocumentSpans, block: TokenBlock, counts: RecordCounts
    ) -> DocumentSpans:
        for place in spans.places[spans.sizes == 0].tolist():
            counts.drop(location(block.source, place), EMPTY)
        is_short = (spans.sizes > 0) & (spans.sizes < self.min_tokens)
        if is_short.any():
            counts.dropped["short"] += int(is_short.sum())
        return spans.select((spans.sizes > 0) & ~is_short)


def _bounds(ids: Ids) -> tuple[int, int]:
    return (int(ids.min()), int(ids.max())) if len(ids) else (0, 0)


def _alternates(ids: Ids) -> bool:
    """Return whether every second token is low, and most of the others are not."""
    halves = ids[0::2], ids[1::2]
    return len(ids) >= _LEAST_TRIED and any(
        low.max() < _HALVES <= np.median(high) for low, high in (halves, halves[::-1])
    )


def _split_hashes(tokens: Ids, spans: DocumentSpans, seed: int) -> npt.NDArray[np.uint64]:
    """Return a hash of each document that depends on the seed, uint64 [documents].

    It is of the length and of 16 evenly spread tokens, which are all of a short document: a hash of
    all tokens would take longer than reading and writing them. Equal documents have equal hashes;
    if two that differ have one, they are in the same split, and no more.
    """
    numbers = np.arange(_HASHED_TOKENS)
    factors = _mix(numbers.astype(np.uint64)) | np.uint64(1)
    hashes = np.zeros(len(spans.sizes), np.uint64)
    for first in range(0, len(hashes), _HASHED_DOCUMENTS):
        rows = slice(first, first + _HASHED_DOCUMENTS)
        sizes = spans.sizes[rows, None]
        places = spans.starts[rows, None] + numbers * (sizes - 1) // (_HASHED_TOKENS - 1)
        sums = (tokens[places].astype(np.uint64) * factors).sum(axis=1, dtype=np.uint64)
        hashes[rows] = sums + _mix(sizes[:, 0].astype(np.uint64))
    # The finalizer of splitmix64 (Steele, Lea and Flood 2014), once for the seed and once more.
    return _mix(hashes + _mix(np.array([seed], np.uint64)))


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _content_hashes(tokens: Ids, spans: DocumentSpans, wanted: bool) -> bytes:
    """Return 16 bytes of BLAKE2b of each document, if they are wanted."""
    if not wanted:
        return b""
    ends = (spans.starts + spans.sizes).tolist()
    return b"".join(
        hashlib.blake2b(tokens[start:end].data, digest_size=16).digest()
        for start, end in zip(spans.starts.tolist(), ends, strict=True)
    )


class LoadedBlock:
    """A block of the spool: its documents, and on request their tokens.

    Attributes:
        spans: its documents.
        split_hashes: uint64 [documents].
    """

    def __init__(self, block: StoredBlock, dtype: np.dtype) -> None:
        self._block = block
        self._dtype = dtype
        self.spans = DocumentSpans(
            *(np.frombuffer(block.read(name), np.int64) for name in ("starts", "sizes", "places"))
        )
        self.split_hashes = np.frombuffer(block.read("split_hashes"), np.uint64)

    def tokens(self) -> Ids:
        if data := self._block.read("tokens"):
            return np.frombuffer(data, self._dtype)
        parts = [TokenRange(**part) for part in json.loads(self._block.read("parts") or b"[]")]
        loaded = [part.load().astype(self._dtype, copy=False) for part in parts]
        nothing = np.zeros(0, self._dtype)
        return loaded[0] if len(loaded) == 1 else np.concatenate([nothing, *loaded])

    def bounds(self, eos: int) -> tuple[int, int]:
        """Return what no id is below or above, that of end-of-text included."""
        low, high = np.frombuffer(self._block.read("bounds"), np.int64).tolist()
        return min(low, eos), max(high, eos)

    def sentences(self) -> Mask | None:
        """Return whether a sentence begins with each token, if that is known."""
        data = self._block.read("sentences")
        return np.frombuffer(data, np.bool_) if data else None


def join(
    values: npt.NDArray[Any], spans: DocumentSpans, selected: Mask, last: Any
) -> npt.NDArray[Any]:
    """Return the values of the selected documents, and `last` after each.

    Drawn with end-of-text tokens E and documents that are all selected but the third:

        values    a b E c d E e f E g h E
        spans     a b   c d   e f   g h
        runs      a b E c d         g h         copied at once, then `last` follows
    """
    return np.concatenate([np.zeros(0, values.dtype), *_runs(values, spans, selected, last)])


def _runs(
    values: npt.NDArray[Any], spans: DocumentSpans, selected: Mask, last: Any
) -> Iterator[npt.NDArray[Any]]:
    starts = spans.starts[selected]
    ends = starts + spans.sizes[selected]
    end = np.array([last], values.dtype)
    if not len(starts):
        return
    # One value between two documents, and it is `last` already.
    is_next = (starts[1:] == ends[:-1] + 1) & (
        values[np.minimum(ends[:-1], len(values) - 1)] == last
    )
    firsts = np.flatnonzero(np.append(True, ~is_next))
    lasts = np.append(firsts[1:], len(starts)) - 1
    for first, final in zip(starts[firsts].tolist(), ends[lasts].tolist(), strict=True):
        yield values[first:final]
        yield end
