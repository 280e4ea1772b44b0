"""The tokens by which an imported model is proved: of a text, or given as ids."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import torch
from torch import Tensor

from zero_tp.base.errors import UserError, shown
from zero_tp.base.files import read_regular
from zero_tp.base.shipped import shipped_path
from zero_tp.data.tokenizer_files import open_tokenizer
from zero_tp.tools.checkpoint_import.proof import TOKENS

SHIPPED = "launch/corpus/sotu.jsonl.gz"
CHARACTERS = 16 * TOKENS


def shipped_page() -> str:
    """Return the beginning of the first document of the shipped corpus, in English."""
    with gzip.open(shipped_path(SHIPPED), "rt", encoding="utf-8") as file:
        text: str = json.loads(file.readline())["text"]
    return text[:CHARACTERS]


def text_tokens(tokenizer: Path, file: Path | None) -> Tensor:
    """Return the first tokens of a text file, or of the shipped page. [tokens]"""
    try:
        text = shipped_page() if file is None else read_regular(file).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--verify-text: {file}: cannot be read ({error}); give a text") from error
    ids = open_tokenizer(tokenizer).encode(text[:CHARACTERS])
    return torch.tensor(ids[:TOKENS])


def read_ids(file: Path) -> Tensor:
    """Return the ids of a file, with spaces, commas or as a JSON list between them. [tokens]"""
    try:
        text = read_regular(file).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--verify-ids: {file}: cannot be read ({error}); give ids") from error
    words = re.split(r"[\s,]+", text.strip().strip("[]").strip())
    # More digits do not fit in 64 bits.
    wrong = next((word for word in words if not word.isdecimal() or len(word) > 18), None)
    if wrong is not None:
        raise UserError(f"--verify-ids: {file}: {shown(wrong)} is not a token's id; give numbers")
    return torch.tensor([int(word) for word in words][:TOKENS])
