"""Parts of a corpus, as tasks of datatrove make them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zero_tp.tools.corpus.datatrove import CorpusReader, TokenizedCorpus


def make_parts(
    inputs: list[str | Path],
    parts: Path,
    tokenizer: str,
    tasks: int,
    documents: str = "blank-line",
    **options: Any,
) -> Path:
    """Run the tasks one after the other in this process."""
    reader = CorpusReader(inputs, documents=documents)
    corpus = TokenizedCorpus(tokenizer, parts, reader=reader, **options)
    for rank in reversed(range(tasks)):
        corpus.run(reader.run(None, rank, tasks), rank, tasks)
    return parts


def flip_byte(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
