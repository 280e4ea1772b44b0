"""Tokens in a spool become the two corpora of an output."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import numpy.typing as npt

from zero_tp.data.collection import Documents
from zero_tp.data.encoder import DocumentEncoder
from zero_tp.data.indexed import IndexedWriter, token_dtype
from zero_tp.data.show import SPLITS


def assemble(
    documents: Documents,
    part: Callable[[int, str], bytes],
    encoder: DocumentEncoder,
    held_out: npt.NDArray[np.bool_],
    directory: Path,
) -> tuple[dict[str, npt.NDArray[np.int64]], dict[str, dict[str, int]]]:
    """Write both corpora and the texts of the documents that are held out."""
    size, dtype = encoder.vocabulary_size, token_dtype(encoder.vocabulary_size)
    counts = {split: np.zeros(size, np.int64) for split in SPLITS}
    splits = {split: dict.fromkeys(("documents", "tokens", "characters", "bytes"), 0) for split in SPLITS}
    with ExitStack() as stack:
        writers = {split: stack.enter_context(IndexedWriter(directory / split, size)) for split in SPLITS}
        texts_out = stack.enter_context(open(directory / "validation.jsonl", "w", encoding="utf-8"))
        for entry in range(len(documents.entries)):
            here = documents.of(entry)
            sizes, ids = np.frombuffer(part(entry, "sizes"), np.int64), np.frombuffer(part(entry, "tokens"), dtype)
            begins = np.frombuffer(part(entry, "sentences"), np.bool_) if encoder.language is not None else None
            of_document = np.repeat(held_out[here], sizes)
            of_kept = np.repeat(documents.kept[here], sizes)
            for split, out in (("train", False), ("validation", True)):
                chosen = documents.kept[here] & (held_out[here] == out)
                if not chosen.any():
                    continue
                written = of_kept & (of_document == out)
                its = ids[written]
                writers[split].add_documents(its, sizes[chosen], None if begins is None else begins[written])
                counts[split] += np.bincount(its, minlength=size)
                total, about = splits[split], documents.about[here][chosen]
                total["documents"] += len(about)
                total["tokens"] += len(its)
                total["characters"] += int(about["characters"].sum())
                total["bytes"] += int(about["bytes"].sum())
                if split == "validation":
                    for text in documents.stored(entry, chosen):
                        texts_out.write(json.dumps({"text": text.decode("utf-8")}, ensure_ascii=False) + "\n")
    return counts, splits


def unigram(train: npt.NDArray[np.int64], validation: npt.NDArray[np.int64]) -> dict[str, float]:
    """Return the loss of a model that knows only token frequencies, nats a token.

    `train_entropy`: the entropy of the training tokens' frequencies. `validation_cross_entropy`: the validation tokens
    under those frequencies, one added to each count so that an unseen token has a probability.
    """
    seen = train[train > 0] / train.sum()
    smoothed = (train + 1) / (train.sum() + len(train))
    return {
        "train_entropy": float(-(seen * np.log(seen)).sum()),
        "validation_cross_entropy": float(-(validation * np.log(smoothed)).sum() / validation.sum()),
        "uniform": math.log(len(train)),
    }
