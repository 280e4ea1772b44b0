"""Rows of documents, and their files."""

from __future__ import annotations

import io
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

TEXTS = [
    "one\ntwo, three",
    'he said "no"',
    "café 👋",
    "  spaces ",
    "",
    "NA",
    "1234",
    "last \r\n line",
]
ROWS = [{"id": i, "title": f"Title {i}", "text": text} for i, text in enumerate(TEXTS)]


def as_parquet(rows: list[dict[str, Any]]) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), out, row_group_size=3)
    return out.getvalue()
