"""Trained tokenizers: those of Hugging Face's trainers, the same each time, from training
documents alone.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, BertTokenizer

from tests.support.corpora import held_out, run
from tests.support.tiny_models import speeches
from tests.tiers import THOROUGH, in_tiers
from zero_tp.base.errors import UserError
from zero_tp.data.indexed import IndexedCorpus
from zero_tp.tools.corpus.tokenizer_training import (
    EOS,
    LONGEST_WORD,
    MIN_SIZES,
    TokenizerSpec,
    suggested_size,
    train_bpe,
    train_wordpiece,
)

SPEECHES = speeches(12, 20_000)


def test_a_tokenizer_is_trained_on_a_sample(tmp_path: Path) -> None:
    """Of the training documents alone, whatever their order."""
    texts = [f"{chr(97 + i) * 6} {chr(122 - i) * 4} number {i}" for i in range(26)]
    forward = run(tmp_path, texts=texts, tokenizer_documents=5)
    backward = run(tmp_path, "backward", texts[::-1], tokenizer_documents=5)
    models = [
        json.loads((each.output / "tokenizer" / "tokenizer.json").read_text())["model"]
        for each in (forward, backward)
    ]
    train = [text for text in texts if text not in held_out(forward.output)]
    whole = json.loads(train_bpe(iter(train), 300).backend_tokenizer.to_str())["model"]
    assert models[0]["vocab"].keys() == models[1]["vocab"].keys() and models[0] != whole
    assert len(IndexedCorpus(forward.output / "train")) == len(train)
    with pytest.raises(UserError, match="at least 1, for a tokenizer that is trained"):
        run(
            tmp_path,
            "given",
            texts,
            tokenizer=str(forward.output / "tokenizer"),
            tokenizer_documents=5,
        )


@THOROUGH
@pytest.mark.slow
def test_a_word_of_a_million_letters_is_cut_for_training() -> None:
    """In one piece, whose letters differ, it takes hours; of this one a token would be half of
    it.
    """
    word = "a" * 10**6
    trained = (train_bpe(iter([word]), 300), train_wordpiece(lambda: iter([word]), 30, cased=True))
    for tokenizer in trained:
        longest = max(len(token.removeprefix("##")) for token in tokenizer.get_vocab())
        assert longest == LONGEST_WORD, "the pieces, whole"
    assert json.loads(trained[0].backend_tokenizer.to_str())["pre_tokenizer"]["type"] == "ByteLevel"
    assert trained[0].decode(trained[0](word).input_ids) == word


def test_words_that_are_not_cut_give_what_tokenizers_give() -> None:
    texts = ["x" * 1023 + " " + "y" * 1023, *SPEECHES]
    whole = Tokenizer(models.BPE())
    whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False
    )
    whole.train_from_iterator(texts, trainer)
    ours = json.loads(train_bpe(iter(texts), 700).backend_tokenizer.to_str())
    assert ours["model"]["merges"] == json.loads(whole.to_str())["model"]["merges"]


@pytest.mark.slow
@pytest.mark.parametrize("cased", in_tiers([False, True], [False]))
def test_a_wordpiece_vocabulary_is_that_of_tokenizers_and_the_same_each_time(
    tmp_path: Path, cased: bool
) -> None:
    kind = "wordpiece-cased:400" if cased else "wordpiece:400"
    texts = [*SPEECHES, "Ünïcode \u4f60\u597d €"]
    first, second = (
        run(tmp_path, name, texts=texts, tokenizer=kind, validation=2) for name in ("a", "b")
    )
    assert first.report["files"] == second.report["files"], (
        "tokenizers alone gives other ids each time"
    )
    tokenizer = AutoTokenizer.from_pretrained(str(first.output / "tokenizer"))
    assert isinstance(tokenizer, BertTokenizer) and len(tokenizer) == 400
    assert tokenizer.convert_ids_to_tokens(list(range(5))) == [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
    ]
    assert ("The" in tokenizer.get_vocab()) == cased

    # Which merge comes first of several that are as frequent is chance in tokenizers, so a few
    # pieces may differ.
    held = held_out(first.output)
    other = BertTokenizer(do_lower_case=not cased).train_new_from_iterator(
        iter([text for text in texts if text not in held]), 400, show_progress=False
    )
    assert len(other.get_vocab().keys() ^ tokenizer.get_vocab().keys()) <= 8
    corpus = IndexedCorpus(first.output / "validation")
    for i, text in enumerate(held):
        assert corpus.document(i).tolist() == tokenizer.encode(text, add_special_tokens=False), (
            "no token ends it"
        )


@pytest.mark.parametrize("kind", sorted(MIN_SIZES))
def test_every_trained_tokenizer_has_a_padding_token(kind: str) -> None:
    tokenizer = TokenizerSpec(kind=kind, size=400).train(lambda: iter(SPEECHES))
    assert tokenizer.pad_token_id is not None
    batch = tokenizer(["a", "two words and more"], padding=True)["input_ids"]
    assert len(batch[0]) == len(batch[1])


def test_suggested_sizes() -> None:
    assert [suggested_size(size) for size in (1, 128, 129, 50_257)] == [128, 128, 256, 50_304]
