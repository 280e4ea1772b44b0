"""Tokenizers of the makes that published models have, trained here on a few texts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from tests.support.tiny_models import speeches
from zero_tp.tools.corpus.tokenizer_training import train_bpe

OTHER_SCRIPTS = "你好 世界 नमस्ते दुनिया हिन्दी привет мир 12345 67 € cafe\u0301 It's we'll I'M"
LLAMA_3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_WORDS = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
Make = Callable[[], PreTrainedTokenizerFast]


@cache
def _texts() -> tuple[str, ...]:
    return (*speeches(4, 1500), *[OTHER_SCRIPTS] * 3)


def _trained_once(train: Make) -> Make:
    """Return a function that copies one trained tokenizer: some trainers break ties differently
    each time.
    """

    @cache
    def serialized() -> tuple[str, dict[str, Any]]:
        tokenizer: Any = train()
        return tokenizer.backend_tokenizer.to_str(), tokenizer.special_tokens_map

    @wraps(train)
    def copy() -> PreTrainedTokenizerFast:
        backend, special = serialized()
        return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(backend), **special)

    return copy


@_trained_once
def own_bpe() -> PreTrainedTokenizerFast:
    """That of `bpe:SIZE`."""
    return train_bpe(iter(_texts()), 400)


def _byte_level(words: list[Any], special: list[str], **settings: Any) -> Tokenizer:
    backend = Tokenizer(models.BPE(**settings))
    backend.pre_tokenizer = pre_tokenizers.Sequence(words)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(_texts(), trainer)
    return backend


def _split(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def _bytes(*, words: bool) -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)


def _begin(token: str, number: int) -> Any:
    return processors.TemplateProcessing(f"{token} $A", special_tokens=[(token, number)])


@_trained_once
def llama_3() -> PreTrainedTokenizerFast:
    begin, end = "<|begin_of_text|>", "<|end_of_text|>"
    backend = _byte_level(
        [_split(LLAMA_3_WORDS), _bytes(words=False)], [begin, end], ignore_merges=True
    )
    backend.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=False), _begin(begin, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=begin, eos_token=end)


@_trained_once
def smollm() -> PreTrainedTokenizerFast:
    end, turn = "<|endoftext|>", "<|im_start|>"
    words = [pre_tokenizers.Digits(individual_digits=True), _bytes(words=True)]
    backend = _byte_level(words, [end, turn])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=end, eos_token=end, unk_token=end
    )


@_trained_once
def deepseek() -> PreTrainedTokenizerFast:
    begin, end = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
    backend = _byte_level([*map(_split, DEEPSEEK_WORDS), _bytes(words=False)], [begin, end])
    backend.post_processor = _begin(begin, 0)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=begin, eos_token=end, pad_token=end
    )


@_trained_once
def sentencepiece_bpe() -> PreTrainedTokenizerFast:
    """As SentencePiece's of Llama 2: unknown characters become bytes."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    replace = decoders.Replace("▁", " ")
    backend.decoder = decoders.Sequence(
        [replace, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    octets = [f"<0x{octet:02X}>" for octet in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<unk>", "<s>", "</s>", *octets],
        limit_alphabet=60,
        show_progress=False,
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()  # of the training alone
    backend.train_from_iterator(_texts(), trainer)
    values = json.loads(backend.to_str())
    values["added_tokens"] = [
        token for token in values["added_tokens"] if token["content"] not in octets
    ]
    backend = Tokenizer.from_str(json.dumps(values | {"pre_tokenizer": None}))
    backend.post_processor = _begin("<s>", 1)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@_trained_once
def unigram() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    special = ["<unk>", "<s>", "</s>", "<pad>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=400, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(_texts(), trainer)
    names = dict(zip(("unk_token", "bos_token", "eos_token", "pad_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


MAKES: dict[str, Make] = {
    "bpe": own_bpe,
    "llama_3": llama_3,
    "smollm": smollm,
    "deepseek": deepseek,
    "sentencepiece": sentencepiece_bpe,
    "unigram": unigram,
}
VOCABULARY = 512
"""More tokens than any of them has."""


SPEECHES = speeches(12, 20_000)
BARE = [" ".join(re.sub(r"[^A-Za-z]", " ", text).split()) for text in SPEECHES]
"""Words and single spaces alone: there all marks and transformers' collator mean the same by a
word.
"""
