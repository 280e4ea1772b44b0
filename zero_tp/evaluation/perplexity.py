"""Perplexity of a text under a causal language model, by sliding windows.

Each document is scored by itself, after the tokenizer's bos token (eos when it has none): so every one of its tokens is
a target, the first included, and the model sees what it saw in training, where an eos stands before each document.

Windows of s tokens advance by o, the overlap (arXiv 1909.08053, appendix E.1): the first window scores all its targets,
each later one only its last o, which therefore have at least s - o tokens of context. With o = s windows don't overlap
and each token is read once; with o = 1 every token but the first s has the longest context, at s times the cost.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IGNORED = -100

Scorer = Callable[[Tensor, Tensor], Tensor]
"""(input_ids int64 [b, n], labels int64 [b, n]) → negative log-likelihoods float [b, n], nats, 0 where a label is -100.

Labels are already shifted: `labels[i, j]` is the token after `input_ids[i, j]`.
"""


@dataclass(frozen=True)
class Window:
    """One row for the model: `input_ids` and `labels` [n], n ≤ s; labels are shifted and -100 where nothing is
    scored."""

    input_ids: Sequence[int]
    labels: Sequence[int]


@dataclass(frozen=True)
class Perplexity:
    """The sum of the losses and what it can be divided by.

    Attributes:
        nll: summed negative log-likelihood, nats.
        tokens: sub-word tokens scored, T.
        words: words separated by white space.
        characters: Unicode code points.
        bytes: of the UTF-8 text.
        documents: scored; those without any token are left out.
    """

    nll: float = 0.0
    tokens: int = 0
    words: int = 0
    characters: int = 0
    bytes: int = 0
    documents: int = 0

    @property
    def loss(self) -> float:
        """Nats a token."""
        return self.nll / self.tokens

    @property
    def perplexity(self) -> float:
        """exp(nats a token). It depends on the tokenizer; the figures a byte, character or word don't."""
        return _exp(self.nll / self.tokens)

    @property
    def word_perplexity(self) -> float:
        return _exp(self.nll / self.words)

    @property
    def bits_per_byte(self) -> float:
        return self.nll / math.log(2) / self.bytes

    @property
    def bits_per_character(self) -> float:
        return self.nll / math.log(2) / self.characters

    def as_dict(self) -> dict[str, Any]:
        """Fields and properties, for JSON; a figure too large for a float is null."""
        figures = {
            name: getattr(self, name)
            for name in ("loss", "perplexity", "word_perplexity", "bits_per_byte", "bits_per_character")
        }
        return asdict(self) | {name: value if math.isfinite(value) else None for name, value in figures.items()}


def _exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


def sliding_windows(tokens: Sequence[int], sequence_length: int, overlap: int) -> Iterator[Window]:
    """Windows that together score each of `tokens[1:]` exactly once.

    `tokens[0]` is context only. Windows wholly past the end don't exist, so none scores nothing.
    """
    assert 1 <= overlap <= sequence_length
    targets = len(tokens) - 1
    start, scored = 0, 0  # `scored` targets are done; window covers targets start+1 … start+s
    while scored < targets:
        end = min(start + sequence_length, targets)
        labels = [IGNORED] * (scored - start) + list(tokens[scored + 1 : end + 1])
        yield Window(tokens[start:end], labels)
        scored = end
        start += overlap


@torch.inference_mode()
def perplexity(
    documents: Iterable[str],
    encode: Callable[[str], list[int]],
    score: Scorer,
    *,
    prefix_token: int,
    sequence_length: int,
    overlap: int | None = None,
    batch_size: int = 8,
    device: torch.device | str = "cpu",
    report: Callable[[int], None] = lambda tokens: None,
) -> Perplexity:
    """Perplexity of `documents`, each scored by itself.

    Args:
        encode: text → token ids, without special tokens.
        score: the model; see `Scorer`.
        prefix_token: read before each document, never scored.
        sequence_length: s, tokens.
        overlap: o, 1 … s; None: s, so that windows don't overlap.
        batch_size: rows given to `score` at once; windows of several documents share a batch.
        report: called with the number of tokens scored since the last call.

    Memory: one document's tokens and one batch.
    """
    totals = Perplexity().__dict__.copy()

    def windows() -> Iterator[Window]:
        for text in documents:
            ids = encode(text)
            if not ids:
                continue
            totals["documents"] += 1
            totals["tokens"] += len(ids)
            totals["words"] += len(text.split())
            totals["characters"] += len(text)
            totals["bytes"] += len(text.encode("utf-8"))
            yield from sliding_windows([prefix_token, *ids], sequence_length, overlap or sequence_length)

    for batch in _batches(windows(), batch_size):
        input_ids, labels = _padded(batch)
        nll = score(input_ids.to(device), labels.to(device))
        totals["nll"] += nll.double().sum().item()
        report(int((labels != IGNORED).sum()))
    return Perplexity(**totals)


def _batches(windows: Iterable[Window], size: int) -> Iterator[list[Window]]:
    batch: list[Window] = []
    for window in windows:
        batch.append(window)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def _padded(windows: Sequence[Window]) -> tuple[Tensor, Tensor]:
    """Input ids and labels [b, n], n the longest window's length, padded on the right.

    A causal model's outputs don't depend on what follows, so padding needs no attention mask.
    """
    longest = max(len(window.input_ids) for window in windows)
    input_ids = torch.zeros(len(windows), longest, dtype=torch.long)
    labels = torch.full((len(windows), longest), IGNORED)
    for row, window in enumerate(windows):
        input_ids[row, : len(window.input_ids)] = torch.tensor(window.input_ids)
        labels[row, : len(window.labels)] = torch.tensor(window.labels)
    return input_ids, labels


class HuggingFaceScorer:
    """A `Scorer` of a Hugging Face causal language model.

    Logits are made for at most `logits_bytes` at once (fp32 bytes, for one row at least): rows go through the model
    in smaller groups when a batch would need more, and only the positions from the first scored one on get logits where
    the model takes `logits_to_keep`. The fp32 copy for the loss is made in pieces of 128 positions.
    """

    POSITIONS = 128

    def __init__(self, model: PreTrainedModel, logits_bytes: int = 512 << 20) -> None:
        self.model = model.eval()
        self.logits_bytes = logits_bytes
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters

    def __call__(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        scored = (labels != IGNORED).any(dim=0).nonzero()
        if len(scored) == 0:
            return torch.zeros(labels.shape, device=labels.device)
        first = int(scored[0]) if self._keeps else 0
        kept = labels.shape[1] - first
        rows = max(1, self.logits_bytes // (kept * self.model.config.get_text_config().vocab_size * 4))
        nll = torch.zeros(labels.shape, device=labels.device)
        options: dict[str, Any] = {"use_cache": False}
        if self._keeps:
            options["logits_to_keep"] = kept
        for ids, out, targets in zip(
            input_ids.split(rows), nll[:, first:].split(rows), labels[:, first:].split(rows), strict=True
        ):
            logits = self.model(input_ids=ids, **options).logits
            for at in range(0, kept, self.POSITIONS):
                piece = slice(at, at + self.POSITIONS)
                # Rows of logits, not [b, v, n]: with a strided class dimension this was 6 to 10 times slower on CPU.
                rows_of_logits = logits[:, piece].flatten(0, 1).float()
                out[:, piece] = functional.cross_entropy(
                    rows_of_logits, targets[:, piece].flatten(), ignore_index=IGNORED, reduction="none"
                ).view_as(out[:, piece])
        return nll
