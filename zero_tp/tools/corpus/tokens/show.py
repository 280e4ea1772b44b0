"""Decode the first documents of token files, before they are prepared."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from zero_tp.base.errors import UserError
from zero_tp.data.records import location
from zero_tp.data.tokenizer import load_tokenizer
from zero_tp.tools.corpus.settings import PrepareSettings, check_settings
from zero_tp.tools.corpus.show import shorten
from zero_tp.tools.corpus.tokenizer_training import TokenizerSpec
from zero_tp.tools.corpus.tokens.cutting import UnlikelyTokens
from zero_tp.tools.corpus.tokens.documents import TokenProcessor
from zero_tp.tools.corpus.tokens.formats import find_token_files
from zero_tp.tools.corpus.tokens.layout import find_layout


def show_token_files(path: Path, settings: PrepareSettings, sample: int) -> Iterator[str]:
    """Yield the texts of the first documents, or their ids without a tokenizer.

    A line that names it comes before each.

    Args:
        sample: how many.
    """
    if sample < 1:
        raise UserError(f"sample {sample}: at least 1")
    check_settings(settings)
    tokenizer = None
    if settings.tokenizer is not None:
        directory = TokenizerSpec.parse(settings.tokenizer).directory
        assert directory is not None
        tokenizer = load_tokenizer(directory, settings.eos)
    files = find_token_files([path], settings)
    layout = find_layout(files, settings, tokenizer)
    processor = TokenProcessor.of(layout, settings)
    left = sample
    try:
        for _, block in layout.blocks(files):
            if block is None or not block.parts:
                continue
            raw, spans, _, _ = processor.documents(block)
            rows = zip(
                spans.starts.tolist(), spans.sizes.tolist(), spans.places.tolist(), strict=True
            )
            for start, size, place in rows:
                if left == 0:
                    return
                if not size:
                    continue
                ids = raw[start : start + size]
                yield f"--- {location(block.source, place)}: {size:,} tokens"
                yield shorten(
                    " ".join(map(str, ids[:200].tolist()))
                    if tokenizer is None
                    else str(tokenizer.decode(ids))
                )
                left -= 1
        if left == sample:
            raise UserError(f"no documents in {path}")
    except UnlikelyTokens as error:
        raise UserError(f"{error}: {layout.describe_tokens(files)}") from error
