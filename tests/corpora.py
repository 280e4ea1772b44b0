"""Small corpora, prepared."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from zero_tp.data import Prepared, PrepareSettings, prepare

TEXTS = [f"Document {i}: the café at number {i * i}\n\tcosts {i} €. 你好 👋 <|endoftext|> 'tis  so" for i in range(40)]


def write_jsonl(path: Path, texts: list[str], key: str = "text") -> Path:
    data = "".join(json.dumps({"id": i, key: text}) + "\n" for i, text in enumerate(texts))
    path.write_bytes(gzip.compress(data.encode()) if path.suffix == ".gz" else data.encode())
    return path


def run(tmp_path: Path, name: str = "out", texts: list[str] = TEXTS, **settings: object) -> Prepared:
    source = write_jsonl(tmp_path / f"{name}.jsonl", texts)
    chosen = PrepareSettings(**({"tokenizer": "bpe:300", "validation": 0.1} | settings))  # type: ignore[arg-type]
    return prepare([source], tmp_path / name, chosen)


def held_out(output: Path) -> list[str]:
    lines = (output / "validation.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines]
