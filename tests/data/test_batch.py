"""Rows of separate documents, against documents cut up one by one; batches read ahead."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.tiny_models import write_corpus
from zero_tp.base.constants import IGNORE_INDEX
from zero_tp.base.errors import UserError
from zero_tp.data.batch import Batch, ReadAhead
from zero_tp.data.samples import PackedSamples
from zero_tp.data.validation_samples import ValidationSamples

Piece = list[int]

LENGTHS = st.lists(st.integers(0, 12), min_size=1, max_size=30).filter(
    lambda lengths: max(lengths) > 1
)


def write(prefix: Path, lengths: list[int], first: int = 0) -> list[list[int]]:
    """A corpus of the tokens first, first + 1, …, and its documents."""
    ends = np.cumsum(lengths) + first
    documents = [
        list(range(end - length, end)) for end, length in zip(ends.tolist(), lengths, strict=True)
    ]
    write_corpus(prefix, documents, 1_000_000)
    return documents


def pieces(documents: list[list[int]], start: int, stop: int) -> list[tuple[Piece, bool]]:
    """What the tokens start … stop - 1 of the stream hold of each document, and whether its next
    token follows at `stop`, to be a target only.
    """
    parts, at = [], 0
    for document in documents:
        low, high = max(start - at, 0), min(stop - at, len(document))
        if low < high:
            parts.append((document[low:high], high < len(document)))
        at += len(document)
    return parts


def check_row(batch: Batch, row: int, expected: list[tuple[Piece, bool]]) -> int:
    """Inputs, labels and positions of the pieces, and that documents part them. How many labels
    there are.
    """
    assert batch.position_ids is not None and batch.document_ids is not None
    inputs, labels, positions = (part[row].tolist() for part in batch[:3] if part is not None)
    at = count = 0
    numbers = []
    for piece, has_target in expected:
        here = slice(at, at + len(piece))
        assert inputs[here] == piece
        # Tokens count upwards inside a document, so that each is followed by itself plus one.
        assert labels[here] == [token + 1 for token in piece[:-1]] + [
            piece[-1] + 1 if has_target else IGNORE_INDEX
        ]
        assert positions[here] == list(range(len(piece)))
        (number,) = set(batch.document_ids[row, here].tolist())
        numbers.append(number)
        at, count = here.stop, count + len(piece) - 1 + has_target
    assert len(set(numbers)) == len(numbers)
    assert set(labels[at:]) <= {IGNORE_INDEX} and not set(
        batch.document_ids[row, at:].tolist()
    ) & set(numbers)
    return count


@given(lengths=LENGTHS, s=st.integers(1, 9), micro=st.integers(1, 3), seed=st.integers(0, 5))
@example([1, 1, 1, 2, 1, 1], 3, 1, 0)  # windows without any label
@example([0, 5, 0, 0, 5, 0], 5, 1, 0)
def test_training_rows_hold_each_document_by_itself(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], s: int, micro: int, seed: int
) -> None:
    prefix = str(tmp_path_factory.mktemp("corpus") / "c")
    lengths = [*lengths, s + 1]
    documents = write(Path(prefix), lengths)
    samples = PackedSamples({prefix: 1.0}, s, seed, separate=True)
    size = 2 * micro
    for step in range(3):
        for rank in range(2):
            (batch,) = samples.batches_from(step * size, micro, 1, rank, 2)
            for row in range(micro):
                k = step * size + rank * micro + row
                start = int(samples.locate(np.array([k]))[2][0]) * s
                check_row(batch, row, pieces(documents, start, start + s))
                assert (
                    batch.input_ids[row].tolist()
                    == PackedSamples({prefix: 1.0}, s, seed)[k][:-1].tolist()
                )


@given(lengths=LENGTHS, more=LENGTHS, s=st.integers(1, 9), micro=st.integers(1, 3))
def test_validation_scores_every_token_but_the_first_of_each_document(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    more: list[int],
    s: int,
    micro: int,
) -> None:
    folder = tmp_path_factory.mktemp("corpora")
    corpora = [write(folder / "a", lengths), write(folder / "b", more, first=1000)]
    samples = ValidationSamples([folder / "a", folder / "b"], s, separate=True)
    windows = [
        pieces(documents, start, start + s)
        for documents, tokens in zip(corpora, (sum(lengths), sum(more)), strict=True)
        for start in range(0, tokens - 1, s)
    ]
    assert len(samples) == len(windows)
    scored: list[int] = []
    for batches in zip(*(samples.batches(None, micro, rank, 2) for rank in range(2)), strict=True):
        for batch in batches:
            for row in range(micro):
                labels = batch.labels[row][batch.labels[row] != IGNORE_INDEX].tolist()
                assert len(labels) == check_row(batch, row, windows.pop(0) if windows else [])
                scored += labels
    assert not windows
    plain = ValidationSamples([folder / "a", folder / "b"], s)
    rows = [
        row
        for rank in range(2)
        for batch in plain.batches(None, micro, rank, 2)
        for row in zip(*batch[:2], strict=True)
    ]
    targets = [
        (int(i), int(t))
        for ids, labels in rows
        for i, t in zip(ids, labels, strict=True)
        if t != IGNORE_INDEX
    ]
    streams = [[token for document in documents for token in document] for documents in corpora]
    assert sorted(targets) == [pair for stream in streams for pair in itertools.pairwise(stream)], (
        "each token once"
    )
    assert sorted(scored) == [
        token for documents in corpora for document in documents for token in document[1:]
    ]


def test_a_corpus_without_anything_to_predict(tmp_path: Path) -> None:
    write(tmp_path / "c", [1] * 9)
    assert len(PackedSamples({str(tmp_path / "c"): 1.0}, 4, 0)[0]) == 5
    message = "c: its 9 documents of 9 tokens are too short for a sample"
    with pytest.raises(UserError, match=message):
        PackedSamples({str(tmp_path / "c"): 1.0}, 4, 0, separate=True)
    with pytest.raises(UserError, match=message):
        ValidationSamples(tmp_path / "c", 4, separate=True)


def test_reading_ahead_gives_what_reading_gives() -> None:
    read, there = list[int](), threading.Event()

    def reading(step: int) -> list[int]:
        read.append(step)
        if step == 4:
            raise UserError("step 4 can't be read")
        if step == 3:
            there.set()
        return [step]

    with ReadAhead(reading, 3) as ahead:
        assert ahead.take(2) == [2] and there.wait(60), "it reads while nobody asks"
        assert ahead.take(3) == [3] and ahead.take(2) == [2]
    assert sorted(read) in ([2, 2, 3], [2, 2, 3, 3]), "and not beyond the last"
    with ReadAhead(reading, 9) as ahead:
        assert ahead.take(3) == [3]
        with pytest.raises(UserError, match="step 4"):
            ahead.take(4)
