"""Small corpora, prepared."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

from zero_tp.data import Prepared, PrepareSettings, prepare

TEXTS = [
    f"Document {i}: the café at number {i * i}\n\tcosts {i} €. 你好 👋 <|endoftext|> 'tis  so"
    for i in range(40)
]


def write_jsonl(path: Path, texts: list[str]) -> Path:
    data = "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts))
    path.write_bytes(gzip.compress(data.encode()) if path.suffix == ".gz" else data.encode())
    return path


def run(
    tmp_path: Path, name: str = "out", texts: list[str] = TEXTS, **settings: object
) -> Prepared:
    source = write_jsonl(tmp_path / f"{name}.jsonl", texts)
    chosen = PrepareSettings(**({"tokenizer": "bpe:300", "validation": 0.1} | settings))  # type: ignore[arg-type]
    return prepare([source], tmp_path / name, chosen)


def held_out(output: Path) -> list[str]:
    lines = (output / "validation.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines]


def texts_of(chance: random.Random, count: int) -> list[str]:
    """Texts of up to 60 words, a tenth of them twice, and two that are empty."""
    words = [f"word{i}" for i in range(300)]
    texts = [" ".join(chance.choices(words, k=chance.randrange(1, 60))) for _ in range(count)]
    return [*texts, *chance.sample(texts, count // 10), "", " "]


def trained_tokenizer(directory: Path) -> str:
    """A byte-level BPE of 300 tokens, trained on 50 texts."""
    return str(run(directory, "sample", texts_of(random.Random(1), 50)).output / "tokenizer")


def content_of(output: Path) -> dict[str, bytes]:
    """The bytes of an output's corpora, validation texts and tokenizer."""
    return {
        str(path.relative_to(output)): path.read_bytes()
        for path in output.rglob("*")
        if path.is_file()
        and (path.suffix in (".bin", ".idx", ".jsonl") or path.parent.name == "tokenizer")
    }


def output_of(output: Path) -> dict[str, Any]:
    """The content of an output and its report, without times."""
    report = json.loads((output / "report.json").read_text())
    return content_of(output) | {
        key: report[key] for key in ("identity", "documents", "splits", "unigram", "files")
    }
