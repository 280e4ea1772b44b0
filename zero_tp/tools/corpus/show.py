"""Decode documents and packed samples of a prepared corpus."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from zero_tp.base.errors import UserError
from zero_tp.data.indexed import IndexedCorpus, idx_path
from zero_tp.data.tokenizer import corpus_fingerprint, find_tokenizer, vocabulary_size
from zero_tp.data.tokenizer_files import open_tokenizer

SPLITS = ("train", "validation")
MAX_SHOWN_CHARACTERS = 400
"""Longer texts are cut: whole documents would fill the terminal."""


def show_corpus(
    path: Path, sample: int, sequence_length: int, tokenizer_name: str | None = None
) -> Iterator[str]:
    """Yield the texts of documents and of packed samples of each corpus.

    A line that names it comes before each text.

    Args:
        path: an output of `prepare`, or a prefix.
        sample: how many documents (evenly spread) and how many samples to show of each corpus.
        sequence_length: tokens of a sample; the samples are in corpus order, which training
            shuffles.
        tokenizer_name: a directory or a name on the hub; None: the one beside the corpus.
    """
    if sample < 1 or sequence_length < 1:
        raise UserError(f"sample {sample}, sequence length {sequence_length}: at least 1")
    directory = find_tokenizer(tokenizer_name, f"{path}/train") or find_tokenizer(None, str(path))
    if directory is None:
        raise UserError(
            f"{path}: its tokens can't be decoded: there is no tokenizer/ in it or beside it; "
            "name one with --tokenizer"
        )
    prefixes = [
        prefix
        for prefix in (path, *(path / split for split in SPLITS))
        if idx_path(prefix).is_file()
    ]
    if not prefixes:
        raise UserError(
            f"{path}: holds no {' and no '.join(f'{split}.idx' for split in SPLITS)}, and is no "
            "prefix"
        )
    tokenizer = open_tokenizer(directory)
    remedy = f"put the corpus's own tokenizer at {directory}"
    if (recorded := corpus_fingerprint(str(prefixes[0]))) is not None:
        recorded.check(tokenizer, f"the tokenizer {directory}", f"the one of {prefixes[0]}", remedy)
    for prefix in prefixes:
        corpus = IndexedCorpus(prefix)
        name = prefix.name
        corpus.check_vocabulary(vocabulary_size(tokenizer), "tokenizer", remedy)
        documents = len(corpus)
        tokens = corpus.tokens
        yield f"=== {name}: {documents:,} documents, {tokens:,} tokens"
        count = min(sample, documents)
        for i in sorted({n * (documents - 1) // max(1, count - 1) for n in range(count)}):
            ids = corpus.document(i)
            yield f"--- {name}, document {i:,}: {len(ids):,} tokens"
            yield shorten(str(tokenizer.decode(ids)))
        length = min(sequence_length, tokens)
        for window in range(min(sample, tokens // length) if length else 0):
            start = window * length
            numbers = corpus.document_ids(start, length)
            ids = corpus.read(start, length)
            begins = np.flatnonzero(np.diff(numbers, prepend=-1))
            yield (
                f"--- {name}, sample {window:,}: tokens {start:,} to {start + length:,}, "
                f"{len(begins):,} documents"
            )
            for begin, end in zip(begins, [*begins[1:], length], strict=True):
                first = corpus.extent(int(numbers[begin]))[0]
                offset = (
                    ""
                    if first == start + begin
                    else f", from its token {start + begin - first:,} on"
                )
                yield f"[document {numbers[begin]:,}{offset}]"
                yield shorten(str(tokenizer.decode(ids[begin:end])))


def shorten(text: str) -> str:
    """Return the beginning of a text, and how much more there is."""
    more = len(text) - MAX_SHOWN_CHARACTERS
    return f"{text[:MAX_SHOWN_CHARACTERS]}… {more:,} more characters" if more > 0 else text
