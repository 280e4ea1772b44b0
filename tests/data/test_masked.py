"""Samples of the masked objective: segments, windows, n-grams and masks, the same on any
topology.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tiny_models import prepared_speeches, write_corpus
from tests.tiers import THOROUGH
from zero_tp.base.constants import IGNORE_INDEX
from zero_tp.base.errors import UserError
from zero_tp.data import PrepareSettings, masked, prepare
from zero_tp.data.batch import MaskedBatch
from zero_tp.data.indexed import IndexedCorpus
from zero_tp.data.indexed_writer import IndexedWriter
from zero_tp.data.masked import (
    DocumentWindows,
    MaskedRowBuilder,
    MaskedSamples,
    MaskedValidation,
    Masking,
)
from zero_tp.data.masking_vocabulary import MaskingVocabulary
from zero_tp.data.tokenizer import load_tokenizer

S = 64


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Real text, with sentences and without."""
    folder = tmp_path_factory.mktemp("masked")
    split = prepared_speeches(folder, "wordpiece:2000", 20, 20_000, validation=0.2)
    settings = PrepareSettings(str(split / "tokenizer"), 0.2)
    plain = prepare([folder / "speeches.jsonl"], folder / "plain", settings).output
    return {"sentences": split, "plain": plain}


def builder_of(corpus: Path, *, length: int = S, order: bool = True) -> MaskedRowBuilder:
    tokenizer = load_tokenizer(corpus / "tokenizer")
    vocabulary = MaskingVocabulary.from_tokenizer(tokenizer, corpus, len(tokenizer) + 3)
    return MaskedRowBuilder(length, Masking(vocabulary, 0.15, 3), order)


def samples_of(corpus: Path, seed: int, **options: bool | int) -> MaskedSamples:
    return MaskedSamples({str(corpus / "train"): 1.0}, builder_of(corpus, **options), seed)  # type: ignore[arg-type]


def window_of(samples: MaskedSamples, k: int) -> int:
    return int(samples.locate(np.array([k]))[2][0])


def documents(samples: MaskedSamples) -> list[list[int]]:
    corpus = samples.corpora[0]
    return [corpus.document(i).tolist() for i in range(len(corpus))]


def unmasked(row: dict[str, np.ndarray]) -> np.ndarray:
    return np.where(row["labels"] == IGNORE_INDEX, row["input_ids"], row["labels"])


def segments(
    row: dict[str, np.ndarray], vocabulary: MaskingVocabulary
) -> tuple[list[int], list[int]]:
    """The two segments in the order of the text, after everything else of the row is seen to be
    as it should be.
    """
    ids, used = unmasked(row), int(row["attention_mask"].sum())
    assert row["attention_mask"].tolist() == [1] * used + [0] * (len(ids) - used)
    assert (ids[used:] == vocabulary.padding).all() and ids[0] == vocabulary.classifier
    (first, second) = np.flatnonzero(ids == vocabulary.separator)
    assert second == used - 1 and 1 < first < second - 1, "neither segment is empty"
    assert row["token_type_ids"].tolist() == [0] * (first + 1) + [1] * (second - first) + [0] * (
        len(ids) - used
    )
    assert all(part.dtype == np.int64 for part in row.values())
    a, b = ids[1:first].tolist(), ids[first + 1 : second].tolist()
    return (b, a) if row["next_sentence_label"] else (a, b)


@pytest.mark.slow
def test_every_sample_is_two_segments_of_one_document(corpora: dict[str, Path], seed: int) -> None:
    samples = samples_of(corpora["plain"], seed)
    vocabulary, corpus = samples.row_builder.masking.vocabulary, samples.corpora[0]
    texts, count = documents(samples), samples.windows[0]
    seen = np.zeros(corpus.tokens, np.int64)
    for k in range(count):  # one pass
        document, j = samples._windows[0].locate(window_of(samples, k))
        a, b = segments(samples[k], vocabulary)
        first, size = corpus.extent(document)
        at = j * (S - 3)
        assert texts[document][at : at + len(a + b)] == a + b
        assert len(a + b) == S - 3 or at + len(a + b) == size, (
            "only a document's last window is shorter"
        )
        seen[first + at : first + at + len(a + b)] += 1
        assert vocabulary.begins[texts[document][at + len(a)]]
    rests = [len(text) % (S - 3) for text in texts]
    assert seen.max() == 1 and seen.sum() == corpus.tokens - sum(
        rest for rest in rests if rest < 3
    ), "each once"


@pytest.mark.slow
def test_segments_are_sentences_of_which_the_longer_is_trimmed(
    corpora: dict[str, Path], seed: int
) -> None:
    """Where the text is cut and what is trimmed is looked for, not computed."""
    samples = samples_of(corpora["sentences"], seed)
    vocabulary, corpus = samples.row_builder.masking.vocabulary, samples.corpora[0]
    texts, count, of_sentences = documents(samples), samples.windows[0], 0
    for k in range(count):
        document, j = samples._windows[0].locate(window_of(samples, k))
        a, b = segments(samples[k], vocabulary)
        text, nominal = texts[document], j * (S - 3)
        begun = corpus.sequence_starts(*corpus.extent(document)).tolist()
        start = max(begin for begin in begun if begin <= nominal)
        stop = min(end for end in [*begun, len(text)] if end >= min(start + S - 3, len(text)))
        meets = [begin for begin in begun if start < begin < stop]
        if nominal - start > S // 2 - 2 or stop - start > 2 * (S - 3) - 1 or not meets:
            continue  # a sentence as long as a window, or half of one before it
        assert any(trims(text[start:meet], text[meet:stop], a, b) for meet in meets)
        of_sentences += 1
    assert of_sentences > 0.2 * count


def trims(first: list[int], second: list[int], a: list[int], b: list[int]) -> bool:
    """Whether a and b are what is left of two segments of whole sentences when the longer loses
    its ends.
    """
    for part, whole, other in ((a, first, b), (b, second, a)):
        if part not in (whole[at : at + len(part)] for at in range(len(whole))):
            return False
        if part != whole and len(part) + 1 < len(other):
            return False
    return len(a + b) == min(S - 3, len(first + second))


@pytest.mark.slow
def test_no_full_stop_tells_the_order(corpora: dict[str, Path], seed: int) -> None:
    """Where one segment alone ends with one, it is as often the earlier as the later: no window is
    cut at its end.

    Of 256 tokens: where sentences are half as long as a window, the earlier segment is the shorter
    one more often.
    """
    samples = samples_of(corpora["sentences"], seed, length=256)
    vocabulary = samples.row_builder.masking.vocabulary
    stop = load_tokenizer(corpora["sentences"] / "tokenizer").convert_tokens_to_ids(".")
    ends = [[part[-1] == stop for part in segments(samples[k], vocabulary)] for k in range(1500)]
    earlier, later = ends.count([True, False]), ends.count([False, True])
    assert earlier + later > 500
    assert abs(earlier / (earlier + later) - 0.5) < 0.1


@THOROUGH
@pytest.mark.slow
def test_statistics_on_real_text(corpora: dict[str, Path], seed: int) -> None:
    samples = samples_of(corpora["sentences"], seed)
    vocabulary, count = samples.row_builder.masking.vocabulary, 3000
    rows = [samples[k] for k in range(count)]
    swapped = sum(int(row["next_sentence_label"]) for row in rows)
    assert abs(swapped / count - 0.5) < 5 * 0.5 / np.sqrt(count)
    full = [row for row in rows if row["attention_mask"].all()]
    assert len(full) > 0.95 * count
    masked_tokens = np.array([int((row["labels"] != IGNORE_INDEX).sum()) for row in full])
    unknown = np.array([int(vocabulary.special[unmasked(row)].sum()) - 3 for row in full])
    assert (masked_tokens[unknown == 0] <= round(0.15 * (S - 3))).all()
    assert abs(masked_tokens.mean() / (S - 3) - 0.15) < 0.003, (
        "rounding, and a word that does not fit"
    )
    selected = [
        (row["input_ids"][mask], row["labels"][mask])
        for row in rows
        if (mask := row["labels"] >= 0).any()
    ]
    assert len(selected) == count, "at least one token a row"
    inputs, labels = (np.concatenate(parts) for parts in zip(*selected, strict=True))
    replaced = inputs[(inputs != vocabulary.mask) & (inputs != labels)]
    ordinary = np.flatnonzero(~vocabulary.special)
    assert np.isin(replaced, ordinary).all()
    mean, spread = np.mean(ordinary), np.std(ordinary) / np.sqrt(len(replaced))
    assert abs(np.mean(replaced) - mean) < 5 * spread, (
        "replacements are uniform over the vocabulary"
    )


@pytest.mark.slow
def test_one_segment_without_sentence_order(corpora: dict[str, Path], seed: int) -> None:
    samples = samples_of(corpora["sentences"], seed, order=False)
    vocabulary, texts = samples.row_builder.masking.vocabulary, documents(samples)
    for k in range(100):
        row = samples[k]
        assert "next_sentence_label" not in row and not row["token_type_ids"].any()
        ids, used = unmasked(row), int(row["attention_mask"].sum())
        assert ids[0] == vocabulary.classifier and np.flatnonzero(
            ids == vocabulary.separator
        ).tolist() == [used - 1]
        document, _ = samples._windows[0].locate(window_of(samples, k))
        assert f" {ids[1 : used - 1].tolist()} "[2:-2] in str(texts[document])


@pytest.mark.slow
@given(
    micro=st.integers(1, 4),
    accumulation=st.integers(1, 3),
    data=st.integers(1, 4),
    step=st.integers(0, 10**9),
)
def test_every_factoring_of_a_batch_has_the_same_rows(
    corpora: dict[str, Path], micro: int, accumulation: int, data: int, step: int
) -> None:
    weights = {str(corpora["sentences"] / "train"): 0.7, str(corpora["plain"] / "train"): 0.3}
    samples = MaskedSamples(weights, builder_of(corpora["plain"]), 3)
    size = micro * accumulation * data
    ranks = [
        samples.batches_from(step * size, micro, accumulation, rank, data) for rank in range(data)
    ]
    # As a resumed run, or another rank, has it.
    again = MaskedSamples(weights, builder_of(corpora["plain"]), 3)
    rows = iter(range(step * size, (step + 1) * size))
    for i, rank in itertools.product(range(accumulation), range(data)):
        batch = ranks[rank][i]
        assert isinstance(batch, MaskedBatch) and batch["next_sentence_label"].shape == (micro,)
        for m in range(micro):
            expected = again[next(rows)]
            assert expected.keys() == batch.keys()
            assert all(np.array_equal(batch[name][m].numpy(), expected[name]) for name in expected)


def test_samples_differ_by_number_and_seed_and_passes_by_masks(corpora: dict[str, Path]) -> None:
    samples, other = samples_of(corpora["plain"], 1), samples_of(corpora["plain"], 2)
    count = samples.windows[0]
    places = {window_of(samples, k): k for k in range(count)}
    for k in range(count, count + 50):
        again, once = samples[k], samples[places[window_of(samples, k)]]
        assert sorted(unmasked(again)) == sorted(unmasked(once)), "the same window, one pass later"
        assert not np.array_equal(again["labels"], once["labels"])
    assert any(window_of(samples, k) != window_of(other, k) for k in range(count))


def test_the_samples_never_change(tmp_path: Path) -> None:
    """Runs resume by them, so these values are part of the promise."""
    ids = np.arange(50)
    vocabulary = MaskingVocabulary(4, 3, 2, 0, None, ids < 5, ids % 3 > 0, ids < 0)
    with IndexedWriter(tmp_path / "c", 50) as writer:
        writer.add_documents(np.arange(200) * 7 % 45 + 5, [200])
        writer.add_documents(
            np.arange(100) * 11 % 45 + 5, [100], np.isin(np.arange(100), [13, 29, 50, 71])
        )
    samples = MaskedSamples(
        {str(tmp_path / "c"): 1.0}, MaskedRowBuilder(24, Masking(vocabulary, 0.3, 3), True), 1234
    )
    for k, pinned in PINNED.items():
        row = samples[k]
        labels = {
            place: label
            for place, label in enumerate(row["labels"].tolist())
            if label != IGNORE_INDEX
        }
        assert (row["input_ids"].tolist(), labels, int(row["next_sentence_label"])) == pinned


PINNED = {
    3: (
        [2, 27, 38, 49, 15, 26, 37, 48, 14, 25, 36, 3, 24, 4, 4, 48, 4, 16, 4, 11, 22, 33, 44, 3],
        {13: 35, 14: 46, 15: 12, 16: 23, 17: 34, 18: 45},
        0,
    ),
    10**12: (
        [2, 4, 37, 48, 14, 4, 4, 4, 4, 24, 35, 46, 12, 23, 3, 17, 28, 39, 5, 16, 27, 38, 49, 3],
        {1: 26, 5: 25, 6: 36, 7: 47, 8: 13, 9: 24},
        1,
    ),
}
"""Ids, labels by their place, and whether the segments are swapped."""


@given(st.data())
def test_windows_are_found_by_counting(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    sizes = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=60))
    length, shortest = data.draw(st.integers(3, 12)), data.draw(st.integers(1, 3))
    prefix = write_corpus(tmp_path_factory.mktemp("windows") / "c", map(np.arange, sizes), 100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masked, "_DOCUMENTS", 8)
        windows = DocumentWindows(IndexedCorpus(prefix), length, shortest)
        expected = [
            (document, j)
            for document, size in enumerate(sizes)
            for j in range(size)
            if size - j * length >= shortest
        ]
        assert [windows.locate(w) for w in range(len(windows))] == expected


def test_a_token_that_ends_documents_is_in_no_sample(
    tmp_path: Path, corpora: dict[str, Path]
) -> None:
    """As a tokenizer with both, such as RoBERTa's, prepares them; the last window would tell the
    order by it.
    """
    builder = builder_of(corpora["plain"])
    eos = int(np.flatnonzero(~builder.masking.vocabulary.special)[7])
    builder = replace(
        builder,
        masking=replace(builder.masking, vocabulary=replace(builder.masking.vocabulary, eos=eos)),
    )
    sizes = (2, 10, S - 3, S - 2, S - 1, S, 2 * S)
    prefix = write_corpus(tmp_path / "c", [[*([100] * size), eos] for size in sizes], 2000)
    samples = MaskedSamples({str(prefix): 1.0}, builder, 1)
    assert samples.windows == [1 + 1 + 1 + 1 + 2 + 2 + 3]
    for k in range(200):
        a, b = segments(samples[k], builder.masking.vocabulary)
        assert eos not in a + b


def test_sentences_longer_than_a_sample_are_cut(tmp_path: Path, corpora: dict[str, Path]) -> None:
    prefix, ids = tmp_path / "c", [*[100] * 30, *range(200, 500), *[100] * 30]
    with IndexedWriter(prefix, 2000) as writer:
        writer.add_documents(ids, [360], np.isin(np.arange(360), [30, 330]))
    samples = MaskedSamples({str(prefix): 1.0}, builder_of(corpora["plain"]), 1)
    seen = set[int]()
    for k in range(samples.windows[0]):
        a, b = segments(samples[k], samples.row_builder.masking.vocabulary)
        seen |= {*a, *b}
    assert len(seen & {*range(200, 500)}) > 270, "not only its beginning, each time"


def test_what_is_too_short_is_refused(tmp_path: Path, corpora: dict[str, Path]) -> None:
    builder, prefix = (
        builder_of(corpora["plain"]),
        str(write_corpus(tmp_path / "c", [[7, 8]] * 9, 2000)),
    )
    for make in (
        lambda: MaskedSamples({prefix: 1.0}, builder, 1),
        lambda: MaskedValidation([prefix], builder),
    ):
        with pytest.raises(
            UserError, match=r"c: its 9 documents of 18 tokens are too short for a sample; use"
        ):
            make()
    with pytest.raises(
        UserError,
        match=r"sequence_length: 5 tokens, of which .* special ones are 3; use at least 6",
    ):
        builder_of(corpora["plain"], length=5)
    row, prefix = (
        builder_of(corpora["plain"], length=6),
        str(write_corpus(tmp_path / "d", [[100, 101, 102]], 2000)),
    )
    segments(MaskedSamples({prefix: 1.0}, row, 1)[0], row.masking.vocabulary)


def test_validation_has_the_same_masks_on_every_split(corpora: dict[str, Path]) -> None:
    builder = builder_of(corpora["sentences"])
    validation = MaskedValidation([str(corpora[kind] / "validation") for kind in corpora], builder)
    count = len(validation)
    whole = [
        {name: part[0] for name, part in batch.items()}
        for batch in validation.batches(None, 1, 0, 1)
    ]
    assert len(whole) == count and count % 7
    for row in whole:
        segments({name: part.numpy() for name, part in row.items()}, builder.masking.vocabulary)
    ranks = [
        list(
            MaskedValidation(
                [str(corpora[kind] / "validation") for kind in corpora], builder
            ).batches(None, 3, rank, 2)
        )
        for rank in range(2)
    ]
    assert len(ranks[0]) == len(ranks[1])
    rows = [
        {name: part[m] for name, part in ranks[rank][i].items()}
        for i in range(len(ranks[0]))
        for rank in range(2)
        for m in range(3)
    ]
    for found, expected in zip(rows, whole, strict=False):
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert len(rows) > count
    for row in rows[count:]:
        assert (row["labels"] == IGNORE_INDEX).all() and row["next_sentence_label"] == IGNORE_INDEX
        assert row["attention_mask"].sum() == 1, "softmax sees something"
    some = [batch["input_ids"] for batch in validation.batches(5, 1, 0, 1)]
    assert len(some) == 5 and torch.equal(some[0][0], whole[0]["input_ids"])


def test_what_masking_knows_of_the_tokenizer_is_part_of_a_corpus(corpora: dict[str, Path]) -> None:
    samples = samples_of(corpora["plain"], 1)
    known = samples.identity(samples.corpora[0])
    vocabulary = samples.row_builder.masking.vocabulary
    assert (
        known["vocabulary"] == vocabulary.sha256() and known["tokens"] == samples.corpora[0].tokens
    )
    begins = vocabulary.begins.copy()
    begins[1999] ^= True
    assert (
        replace(vocabulary, begins=begins).sha256()
        != vocabulary.sha256()
        != replace(vocabulary, mask=7).sha256()
    )
