"""Encoded documents: sentences, and ids of any size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from sentencex import segment
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.support.corpora import held_out, run
from tests.support.tiny_models import speeches
from zero_tp.data.encoder import DocumentEncoder
from zero_tp.data.indexed import IndexedCorpus

SPEECHES = speeches(12, 20_000)


def test_sentences_are_kept_as_sequences_and_the_tokens_stay_the_same(tmp_path: Path) -> None:
    for name, kind in (("wordpiece", "wordpiece:400"), ("bpe", "bpe:400")):
        plain = run(tmp_path, f"{name}-plain", texts=SPEECHES, tokenizer=kind).output
        split = run(tmp_path, f"{name}-split", texts=SPEECHES, tokenizer=kind, sentences="en").output
        assert (plain / "train.bin").read_bytes() == (split / "train.bin").read_bytes()
        tokenizer = AutoTokenizer.from_pretrained(str(split / "tokenizer"))
        held = held_out(split)
        corpus, number = IndexedCorpus(split / "train"), 0
        assert len(corpus) == len(SPEECHES) - len(held)
        for i, text in enumerate(text for text in SPEECHES if text not in held):
            expected = [sentence.strip() for sentence in segment("en", text) if sentence.strip()]
            begins = corpus.sequences(*corpus.extent(i))
            assert begins[0] == 0
            sentences = [part.tolist() for part in np.split(corpus.document(i), begins[1:])]
            number += len(sentences)
            if name == "wordpiece":
                assert sentences == [tokenizer.encode(sentence, add_special_tokens=False) for sentence in expected]
            else:
                decoded = [str(tokenizer.decode(sentence, skip_special_tokens=True)).strip() for sentence in sentences]
                assert decoded == expected and sentences[-1][-1] == tokenizer.eos_token_id
        assert number > 20 * len(corpus)


def test_ids_with_gaps_are_kept() -> None:
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 70_000}, "a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    encoder = DocumentEncoder(PreTrainedTokenizerFast(tokenizer_object=backend))
    columns = encoder.columns(encoder.encode(["a b"]))
    assert encoder.vocabulary_size == 70_001
    assert np.frombuffer(columns["tokens"], np.int32).tolist() == [0, 70_000]
