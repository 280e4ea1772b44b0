"""The marks of words that masking reads from a tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.support.tokenizers import BARE, SPEECHES
from tests.tiers import in_tiers
from zero_tp.base.errors import UserError
from zero_tp.data.masking_vocabulary import MaskingVocabulary
from zero_tp.tools.corpus.tokenizer_training import train_bpe, train_wordpiece

SPECIAL = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}


def wordpiece() -> PreTrainedTokenizerFast:
    return train_wordpiece(lambda: iter(SPEECHES), 1500, cased=False)


def byte_level() -> PreTrainedTokenizerFast:
    tokenizer = train_bpe(iter(BARE), 600)
    tokenizer.add_special_tokens(
        {name: token for name, token in SPECIAL.items() if name != "unk_token"}
    )
    return tokenizer


def metaspace() -> PreTrainedTokenizerFast:
    """A tokenizer as SentencePiece makes them: ALBERT's and T5's kind."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=600,
        special_tokens=list(SPECIAL.values()),
        unk_token="[UNK]",
        show_progress=False,
    )
    tokenizer.train_from_iterator(BARE, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)


def suffixed() -> PreTrainedTokenizerFast:
    """A tokenizer that marks where words end, as the first GPT's and CLIP's."""
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]", end_of_word_suffix="</w>"))
    # CLIP has both.
    words = [pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer, tokenizer.normalizer = (
        pre_tokenizers.Sequence(words),
        normalizers.Lowercase(),
    )
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=list(SPECIAL.values()),
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(BARE, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)


def vocabulary_of(tokenizer: PreTrainedTokenizerFast) -> MaskingVocabulary:
    return MaskingVocabulary.from_tokenizer(tokenizer, Path("tokenizer"), len(tokenizer))


MADE: list[tuple[Callable[[], PreTrainedTokenizerFast], list[str]]] = [
    (wordpiece, SPEECHES),
    (byte_level, BARE),
    (metaspace, BARE),
    (suffixed, BARE),
]


@pytest.mark.parametrize(("make", "texts"), in_tiers(MADE, MADE[:2]))
def test_words_are_those_of_the_tokenizer(
    make: Callable[[], PreTrainedTokenizerFast], texts: list[str]
) -> None:
    """The outside reference is the number of its word that tokenizers gives with each token."""
    tokenizer = make()
    vocabulary = vocabulary_of(tokenizer)
    for text in texts:
        encoding = tokenizer(text, add_special_tokens=False)
        ids, words = np.array(encoding.input_ids), np.array(encoding.word_ids())
        known = ids != tokenizer.unk_token_id
        begins = np.flatnonzero(np.diff(words, prepend=-1) & known)
        assert np.array_equal(np.flatnonzero(vocabulary.word_begins(ids)), begins)
        assert 1.1 * len(begins) < len(ids), "words of several tokens"


def test_a_first_token_and_one_after_a_special_one_begin_a_word() -> None:
    tokenizer = wordpiece()
    vocabulary = vocabulary_of(tokenizer)
    middle = tokenizer.convert_tokens_to_ids("##s")
    the, sep = tokenizer.convert_tokens_to_ids("the"), tokenizer.sep_token_id
    row = np.array([middle, middle, sep, middle, the, middle, tokenizer.unk_token_id, the])
    assert vocabulary.word_begins(row).tolist() == [
        True,
        False,
        False,
        True,
        True,
        False,
        False,
        True,
    ]


def test_a_tokenizer_that_cannot_mask_is_refused() -> None:
    with pytest.raises(
        UserError,
        match=r"tokenizer has it: it has no mask_token and no sep_token and no cls_token, ",
    ):
        MaskingVocabulary.from_tokenizer(train_bpe(iter(BARE), 300), Path("has it"), 300)
    words = {token: i for i, token in enumerate([*SPECIAL.values(), "a", "b"])}
    plain = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    with pytest.raises(UserError, match="does not mark where words begin"):
        vocabulary_of(PreTrainedTokenizerFast(tokenizer_object=plain, **SPECIAL))
