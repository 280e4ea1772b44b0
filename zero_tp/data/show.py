"""A prepared corpus is shown again as text, and drawn as one page in which nothing comes from a network."""

from __future__ import annotations

import html
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from zero_tp import page
from zero_tp.data.indexed import IndexedCorpus, idx_path
from zero_tp.data.tokenizer import open_tokenizer, tokenizer_beside
from zero_tp.errors import UserError, one_line
from zero_tp.files import open_regular
from zero_tp.strict_json import InvalidJson, parse_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPLITS = ("train", "validation")
REMOVED = "removed.jsonl"
_BLOCK = 2**22  # tokens
_FREQUENT = 40


def corpora_of(path: Path) -> dict[str, IndexedCorpus]:
    """Return the corpora of a directory that `prepare` wrote, by split, or the one of a prefix.

    Raises:
        UserError: there is none.
    """
    if idx_path(path).is_file():
        return {path.name: IndexedCorpus(path)}
    found = {split: IndexedCorpus(path / split) for split in SPLITS if idx_path(path / split).is_file()}
    if not found:
        raise UserError(f"{path}: holds no {' and no '.join(f'{split}.idx' for split in SPLITS)}, and is no prefix")
    return found


def _tokenizer(path: Path) -> PreTrainedTokenizerBase:
    inside = path / "tokenizer"
    directory = inside if inside.is_dir() else tokenizer_beside(None, str(path))
    if directory is None:
        raise UserError(f"{path}: there is no tokenizer/ in it or beside it to read its tokens with")
    return open_tokenizer(directory)


def shown(path: Path, sample: int, sequence_length: int) -> Iterator[str]:
    """Yield the texts of documents and of packed samples of each corpus, with lines that say where they begin.

    Args:
        path: what `prepare` wrote, or a prefix.
        sample: documents, and samples, of each corpus; documents are evenly spread.
        sequence_length: tokens of a sample, at most; samples lie as they do in training, in the order of the corpus.

    Raises:
        UserError: there is no corpus or tokenizer, or the two don't fit.
    """
    if sample < 1 or sequence_length < 1:
        raise UserError(f"sample {sample}, sequence length {sequence_length}: at least 1")
    tokenizer = _tokenizer(path)
    for name, corpus in corpora_of(path).items():
        corpus.check_vocabulary(len(tokenizer))
        documents, tokens = len(corpus), corpus.tokens
        yield f"=== {name}: {documents:,} documents, {tokens:,} tokens"
        count = min(sample, documents)
        for i in sorted({n * (documents - 1) // max(1, count - 1) for n in range(count)}):
            ids = corpus.document(i)
            yield f"--- {name}, document {i:,}: {len(ids):,} tokens"
            yield str(tokenizer.decode(ids))
        length = min(sequence_length, tokens)
        for window in range(min(sample, tokens // length) if length else 0):
            start = window * length
            numbers = corpus.documents(start, length)
            ids = corpus.read(start, length)
            begins = np.flatnonzero(np.diff(numbers, prepend=-1))
            yield f"--- {name}, sample {window:,}: tokens {start:,} to {start + length:,}, {len(begins):,} documents"
            for begin, end in zip(begins, [*begins[1:], length], strict=True):
                first = corpus.extent(int(numbers[begin]))[0]
                goes_on = "" if first == start + begin else f", from its token {start + begin - first:,} on"
                yield f"[document {numbers[begin]:,}{goes_on}]"
                yield str(tokenizer.decode(ids[begin:end]))


def write_page(path: Path, to: Path) -> None:
    """Write one page: tokens of documents, duplicates by size, the most frequent tokens. All of a corpus is read.

    Raises:
        UserError: as `shown`, or the page can't be written.
    """
    tokenizer = _tokenizer(path)
    parts: list[str] = []
    for name, corpus in corpora_of(path).items():
        corpus.check_vocabulary(len(tokenizer))
        sizes = _sizes(corpus)
        mean = corpus.tokens / max(1, len(corpus))
        middle = float(np.median(sizes)) if len(sizes) else 0.0
        parts.append(f"<h2>{html.escape(name)}: tokens per document</h2>")
        parts.append(
            f"<p>{len(corpus):,} documents, {corpus.tokens:,} tokens: {mean:,.1f} on average, half have at most "
            f"{middle:,.0f}, the longest {int(sizes.max()) if len(sizes) else 0:,}.</p>"
        )
        parts.append(_bars(_by_size(sizes)))
        parts.append(f"<h2>{html.escape(name)}: most frequent tokens</h2>")
        counts = _counts(corpus, len(tokenizer))
        most = np.argsort(-counts, kind="stable")[:_FREQUENT]
        rows = {f"{i}: {json.dumps(tokenizer.decode([i]), ensure_ascii=False)}": int(counts[i]) for i in most.tolist()}
        parts.append(_bars({label: count for label, count in rows.items() if count}, corpus.tokens))
    if (path / REMOVED).is_file():
        parts.append("<h2>Duplicates: documents by the number of their copies that were removed</h2>")
        parts.append(_bars(_copies(path / REMOVED)))
    page.write(to, one_line(str(path)), parts)


def _sizes(corpus: IndexedCorpus) -> npt.NDArray[np.int64]:
    return np.diff(corpus.first_tokens(0, len(corpus) + 1))


def _counts(corpus: IndexedCorpus, size: int) -> npt.NDArray[np.int64]:
    counts = np.zeros(size, np.int64)
    for start in range(0, corpus.tokens, _BLOCK):
        counts += np.bincount(corpus.read(start, min(_BLOCK, corpus.tokens - start)), minlength=size)
    return counts


def _by_size(sizes: npt.NDArray[np.int64]) -> dict[str, int]:
    """Return how many there are by powers of two."""
    powers = Counter(int(size).bit_length() for size in sizes)
    bins = range(min(powers), max(powers) + 1) if powers else ()
    return {f"{(1 << power) >> 1:,} to {(1 << power) - 1:,}": powers[power] for power in bins}


def _copies(path: Path) -> dict[str, int]:
    """Return how many documents there are by the number of their copies.

    Raises:
        UserError: the file cannot be read, or a line is not an object.
    """
    copies = Counter[str]()
    try:
        with open_regular(path) as lines:
            for number, line in enumerate(lines, 1):
                try:
                    removed = parse_object(line)
                except InvalidJson as error:
                    what = f"{path}, line {number}: {error}"
                    raise UserError(f"{what}; make the corpus again with --overwrite") from None
                if "copy_of" in removed:
                    copies[str(removed["copy_of"])] += 1
    except OSError as error:
        raise UserError(f"{path}: can't be read ({error.strerror or error})") from error
    sizes = Counter(copies.values())
    return {f"{size:,}": sizes[size] for size in sorted(sizes)}


def _bars(rows: dict[str, int], whole: int | None = None) -> str:
    most = max(rows.values(), default=0)
    lines = []
    for label, count in rows.items():
        share = f" ({count / whole:.2%})" if whole else ""
        lines.append(
            f"<tr><td><code>{html.escape(label)}</code></td><td>{count:,}{share}</td>"
            f'<td><div style="width:{100 * count / most:.2f}%"></div></td></tr>'
        )
    return '<table class="bars">' + "\n".join(lines) + "</table>"
