"""Train a tokenizer of a named kind and size on a corpus."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from zero_tp.errors import UserError
from zero_tp.weights.weight_files import TOKENIZER_FILES, holds_tokenizer, resolve

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer
    from transformers import PreTrainedTokenizerFast

EOS = "<|endoftext|>"
SMALLEST = {"bpe": 257, "wordpiece": 6, "wordpiece-cased": 6}
"""The kinds that are trained, with their fewest tokens: the special ones and 256 bytes, or the special ones and one."""
LARGEST = 2**24  # about 60 times the largest known vocabulary
LONGEST_WORD = 1024
"""Bytes (of a WordPiece vocabulary, characters) of a word in training; longer ones are cut. The time that a merge takes
grows with the square of a word's length, so that a word of a million letters would take hours."""
ALPHABET = 1000  # of a WordPiece vocabulary, as Google's: rarer characters are unknown
WORDPIECE_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@dataclass(frozen=True)
class TokenizerSpec:
    """A tokenizer to train, `KIND:SIZE` (kinds: `SMALLEST`), or the directory of a finished one.

    Attributes:
        kind: None with a directory.
        size: tokens of one that is trained.
        directory: None with a kind.
    """

    kind: str | None = None
    size: int = 0
    directory: Path | None = None

    @classmethod
    def parse(cls, text: str) -> TokenizerSpec:
        """Read the command-line form.

        Raises:
            UserError: neither a directory with a tokenizer nor `KIND:SIZE`, or SIZE is too small or too large.
        """
        if match := re.fullmatch(rf"({'|'.join(SMALLEST)}):([0-9]{{1,20}})", text):
            kind, size = match[1], int(match[2])
            if not SMALLEST[kind] <= size <= LARGEST:
                raise UserError(f"tokenizer {text}: at least {SMALLEST[kind]} and at most {LARGEST:,} tokens")
            return cls(kind, size)
        path = resolve(text, f"tokenizer {text!r}", weights=False)
        if not os.path.isdir(path):
            kinds = ", ".join(f"{kind}:SIZE" for kind in SMALLEST)
            raise UserError(f"tokenizer {text!r}: neither a directory nor {kinds} such as bpe:8192")
        if not holds_tokenizer(path):
            raise UserError(f"tokenizer {text}: the directory holds neither {' nor '.join(TOKENIZER_FILES[:2])}")
        return cls(directory=path)

    def fingerprint(self) -> str:
        """Return what identifies the tokenizer: `KIND:SIZE`, or the SHA-256 of the directory's files."""
        if self.directory is None:
            return f"{self.kind}:{self.size}"
        digest = hashlib.sha256()
        try:
            for path in sorted(self.directory.iterdir()):
                if path.is_file() and path.suffix in (".json", ".txt", ".model", ".jinja"):
                    digest.update(os.fsencode(path.name) + b"\0" + hashlib.sha256(path.read_bytes()).digest())
        except OSError as error:
            raise UserError(f"tokenizer {self.directory}: can't be read ({error.strerror or error})") from error
        return f"sha256:{digest.hexdigest()}"

    def train(self, texts: Callable[[], Iterator[str]]) -> PreTrainedTokenizerFast:
        """Train the tokenizer on the texts that `texts` returns at each call. UserError as `train_wordpiece`."""
        if self.kind == "bpe":
            return train_bpe(texts(), self.size)
        return train_wordpiece(texts, self.size, cased=self.kind == "wordpiece-cased")


def train_bpe(texts: Iterator[str], size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE as GPT-2's on `texts`; `<|endoftext|>` (id 0) is its eos, bos, padding and unk.

    Every text can be encoded and decoded back exactly, since the 256 bytes are in the vocabulary. A small corpus can
    give fewer than `size` tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer, words = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.pre_tokenizer = _cut(words)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.pre_tokenizer = words
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        bos_token=EOS,
        pad_token=EOS,
        unk_token=EOS,
        clean_up_tokenization_spaces=False,
    )


def _cut(words: PreTokenizer) -> PreTokenizer:
    """Return a pre-tokenizer that splits texts into words, and those into pieces of at most `LONGEST_WORD`."""
    from tokenizers import pre_tokenizers

    return pre_tokenizers.Sequence([words, pre_tokenizers.FixedLength(length=LONGEST_WORD)])


def train_wordpiece(texts: Callable[[], Iterator[str]], size: int, *, cased: bool) -> PreTrainedTokenizerFast:
    """Train a WordPiece vocabulary like BERT's; special tokens are [PAD] (id 0), [UNK], [CLS], [SEP] and [MASK].

    Text is cleaned like BERT's: control characters are removed, and without `cased` capitals and accents too. Only the
    1,000 most frequent characters are known.

    Args:
        texts: returns all texts; it is called three times.

    Raises:
        UserError: the characters alone are more than `size` tokens.
    """
    from tokenizers import trainers
    from transformers import BertTokenizer

    trained = BertTokenizer(do_lower_case=not cased).backend_tokenizer
    trained.pre_tokenizer = _cut(trained.pre_tokenizer)

    def train(size: int, tokens: list[str], limit: int) -> dict[str, int]:
        trainer = trainers.WordPieceTrainer(
            vocab_size=size, special_tokens=tokens, limit_alphabet=limit, show_progress=False
        )
        trained.train_from_iterator(texts(), trainer)
        vocabulary: dict[str, int] = trained.get_vocab()
        return vocabulary

    # tokenizers numbers pieces of one character in a hash table's order, which differs each time, and chooses between
    # equally frequent merges by these numbers. So a first training only finds the pieces.
    pieces = train(0, [], sys.maxunicode + 1).keys()
    counts: Counter[str] = Counter()
    for raw, count in Counter(chain.from_iterable(texts())).items():
        for character in trained.normalizer.normalize_str(raw):
            counts[character] += 0 if character.isspace() else count
    alphabet = set(sorted(counts, key=lambda character: (-counts[character], character))[:ALPHABET])
    tokens = [*WORDPIECE_TOKENS, *sorted(piece for piece in pieces if piece[-1] in alphabet)]
    if len(tokens) > size:
        kind = "wordpiece-cased" if cased else "wordpiece"
        raise UserError(f"tokenizer {kind}:{size}: the corpus' characters alone are {len(tokens)} tokens; give more")
    return BertTokenizer(vocab=train(size, tokens, 0), do_lower_case=not cased)


def suggested_size(size: int) -> int:
    """Return the next multiple of 128, which suits any usual TP size and tensor cores."""
    return -(-size // 128) * 128
