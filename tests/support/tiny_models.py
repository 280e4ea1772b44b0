"""Small random models and what they are trained on: texts, fields of configs, Hugging Face
directories.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tests.support.settings import gpt2_config
from zero_tp.data import PrepareSettings, prepare
from zero_tp.data.documents import read_documents
from zero_tp.data.indexed_writer import IndexedWriter
from zero_tp.tools.corpus.tokenizer_training import train_bpe

CORPUS = Path(__file__).parents[2] / "launch" / "corpus" / "sotu.jsonl.gz"


def speeches(count: int, characters: int) -> list[str]:
    """The first so many of the shipped corpus, cut at so many characters."""
    return [text[:characters] for text in itertools.islice(read_documents(CORPUS), count)]


def prepared_speeches(
    folder: Path, tokenizer: str, count: int, characters: int, *, validation: float
) -> Path:
    """The corpus that `prepare_data.py` makes of them, sentences kept, as `folder`/data."""
    source = folder / "speeches.jsonl"
    source.write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in speeches(count, characters))
    )
    settings = PrepareSettings(tokenizer, validation, sentences="en")
    return prepare([source], folder / "data", settings, progress=False).output


def write_corpus(prefix: Path, documents: Iterable[Any], vocabulary: int) -> Path:
    """Write `prefix`.bin and `prefix`.idx of documents: sequences or arrays of token ids."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with IndexedWriter(prefix, vocabulary) as writer:
        for document in documents:
            writer.add_documents(document, [len(document)])
    return prefix


def bert_fields(**changes: Any) -> dict[str, Any]:
    """Fields of a small encoder's config, without dropout."""
    fields = {
        **{
            "model_type": "megatron-bert",
            "num_hidden_layers": 2,
            "hidden_size": 32,
            "num_attention_heads": 4,
        },
        **{"intermediate_size": 64, "max_position_embeddings": 48, "vocab_size": 600},
        **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    }
    return {**fields, **changes}


def tiny_gpt2(
    directory: Path, texts: list[str], *, positions: int = 64, vocabulary: int = 500
) -> Path:
    """A GPT-2 of 2 layers and a byte-level BPE of `texts`; its weights are large enough that
    every token matters.
    """
    tokenizer = train_bpe(iter(texts), vocabulary)
    torch.manual_seed(0)
    config = gpt2_config(
        0.1, n_embd=32, n_positions=positions, vocab_size=vocabulary + 3, initializer_range=0.3
    )
    model: Any = GPT2LMHeadModel(config)
    model.save_pretrained(str(directory))
    tokenizer.save_pretrained(str(directory))
    return directory


def tiny_gpt2_config(**changes: Any) -> GPT2Config:
    """Return a config that TP 8 divides, but for its 61 tokens, which no TP size divides."""
    return gpt2_config(**{"n_head": 8, "n_embd": 32, **changes})
