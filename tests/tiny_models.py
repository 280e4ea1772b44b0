"""Small random models with a tokenizer, as Hugging Face directories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from zero_tp.data.tokenizer_training import train_bpe


def tiny_gpt2(directory: Path, texts: list[str], *, positions: int = 64, seed: int = 0, vocabulary: int = 500) -> Path:
    """A GPT-2 of 2 layers and a byte-level BPE of `texts`; its weights are large enough that every token matters."""
    tokenizer = train_bpe(iter(texts), vocabulary)
    torch.manual_seed(seed)
    config = GPT2Config(
        n_layer=2,
        n_embd=32,
        n_head=4,
        n_positions=positions,
        vocab_size=vocabulary + 3,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=0,
    )
    model: Any = GPT2LMHeadModel(config)
    model.save_pretrained(str(directory))
    tokenizer.save_pretrained(str(directory))
    return directory
