"""Train a byte-level BPE or a WordPiece tokenizer on a corpus."""

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

from zero_tp.base.errors import UserError
from zero_tp.base.weight_files import TOKENIZER_FILES, has_tokenizer, resolve

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer
    from transformers import PreTrainedTokenizerFast

EOS = "<|endoftext|>"
MIN_SIZES = {"bpe": 257, "wordpiece": 6, "wordpiece-cased": 6}
"""Kind → smallest vocabulary: the special tokens and 256 bytes, or the special tokens and one
other.
"""
MAX_SIZE = 2**24  # about 60 times the largest known vocabulary
LONGEST_WORD = 1024
"""In bytes (WordPiece: characters). Training splits longer words, because its time grows with the
square of a word's length: a word of a million letters would take hours.
"""
ALPHABET = 1000  # characters of a WordPiece vocabulary, as in Google's; rarer ones are unknown
WORDPIECE_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@dataclass(frozen=True)
class TokenizerSpec:
    """A tokenizer to train, or the `directory` of an existing one.

    One to train has a `kind` (see `MIN_SIZES`) and a `size`.
    """

    kind: str | None = None
    size: int = 0
    directory: Path | None = None

    @classmethod
    def parse(cls, text: str) -> TokenizerSpec:
        """Parse `KIND:SIZE`, a directory, or a name on the hub."""
        if match := re.fullmatch(rf"({'|'.join(MIN_SIZES)}):([0-9]{{1,20}})", text):
            kind = match[1]
            size = int(match[2])
            if not MIN_SIZES[kind] <= size <= MAX_SIZE:
                raise UserError(
                    f"tokenizer {text}: at least {MIN_SIZES[kind]} and at most {MAX_SIZE:,} tokens"
                )
            return cls(kind, size)
        path = resolve(text, f"tokenizer {text!r}", weights=False)
        if not os.path.isdir(path):
            kinds = ", ".join(f"{kind}:SIZE" for kind in MIN_SIZES)
            raise UserError(f"tokenizer {text!r}: neither a directory nor {kinds} such as bpe:8192")
        if not has_tokenizer(path):
            raise UserError(
                f"tokenizer {text}: the directory holds neither {' nor '.join(TOKENIZER_FILES[:2])}"
            )
        return cls(directory=path)

    def identity(self) -> str:
        """Return `KIND:SIZE`, or the SHA-256 of the directory's files."""
        if self.directory is None:
            return f"{self.kind}:{self.size}"
        digest = hashlib.sha256()
        try:
            # Only files that a tokenizer is read from; a model's weights may be in the same
            # directory.
            for path in sorted(self.directory.iterdir()):
                if path.is_file() and path.suffix in (".json", ".txt", ".model", ".jinja"):
                    digest.update(
                        os.fsencode(path.name) + b"\0" + hashlib.sha256(path.read_bytes()).digest()
                    )
        except OSError as error:
            raise UserError(
                f"tokenizer {self.directory}: can't be read ({error.strerror or error})"
            ) from error
        return f"sha256:{digest.hexdigest()}"

    def train(self, texts: Callable[[], Iterator[str]]) -> PreTrainedTokenizerFast:
        """Train the tokenizer. Each call of `texts` returns all texts."""
        if self.kind == "bpe":
            return train_bpe(texts(), self.size)
        return train_wordpiece(texts, self.size, cased=self.kind == "wordpiece-cased")


def train_bpe(texts: Iterator[str], size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE like GPT-2's; `<|endoftext|>` (id 0) is its eos, bos, padding and unk.

    It encodes every text without loss, because its vocabulary has all 256 bytes. A small corpus may
    yield fewer than `size` tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    # All 256 bytes from the start, so a byte that no training text has can be encoded too.
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.pre_tokenizer = _split_long_words(words)
    tokenizer.train_from_iterator(texts, trainer)
    # Long words are cut for training only; the saved tokenizer splits as GPT-2's does.
    tokenizer.pre_tokenizer = words
    special = dict.fromkeys(("eos_token", "bos_token", "pad_token", "unk_token"), EOS)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **special, clean_up_tokenization_spaces=False
    )


def _split_long_words(words: PreTokenizer) -> PreTokenizer:
    """Return a pre-tokenizer that cuts the pieces of `words` at `LONGEST_WORD`."""
    from tokenizers import pre_tokenizers

    return pre_tokenizers.Sequence([words, pre_tokenizers.FixedLength(length=LONGEST_WORD)])


def train_wordpiece(
    texts: Callable[[], Iterator[str]], size: int, *, cased: bool
) -> PreTrainedTokenizerFast:
    """Train a WordPiece vocabulary like BERT's.

    Its special tokens are [PAD] (id 0), [UNK], [CLS], [SEP] and [MASK].

    Text is cleaned like BERT's: without control characters and, unless `cased`, in lower case
    without accents. Only the 1,000 most frequent characters are known. UserError: they alone are
    more than `size` tokens.

    Args:
        texts: returns all texts; it is called three times.
    """
    from tokenizers import trainers
    from transformers import BertTokenizer

    trained = BertTokenizer(do_lower_case=not cased).backend_tokenizer
    trained.pre_tokenizer = _split_long_words(trained.pre_tokenizer)

    def train(size: int, tokens: list[str], limit: int) -> dict[str, int]:
        trainer = trainers.WordPieceTrainer(
            vocab_size=size, special_tokens=tokens, limit_alphabet=limit, show_progress=False
        )
        trained.train_from_iterator(texts(), trainer)
        vocabulary: dict[str, int] = trained.get_vocab()
        return vocabulary

    # tokenizers numbers one-character pieces in a hash table's order, which differs between runs,
    # and breaks ties between equally frequent merges by these numbers. Therefore a first training
    # only collects the pieces.
    pieces = train(0, [], sys.maxunicode + 1).keys()
    counts: Counter[str] = Counter()
    # Each distinct character is normalised once, not the whole text: BERT's cleaning works by
    # character.
    for raw, count in Counter(chain.from_iterable(texts())).items():
        for character in trained.normalizer.normalize_str(raw):
            counts[character] += 0 if character.isspace() else count
    # Ties in frequency are broken by the character, so each run keeps the same 1,000.
    alphabet = set(sorted(counts, key=lambda character: (-counts[character], character))[:ALPHABET])
    tokens = [*WORDPIECE_TOKENS, *sorted(piece for piece in pieces if piece[-1] in alphabet)]
    if len(tokens) > size:
        kind = "wordpiece-cased" if cased else "wordpiece"
        raise UserError(
            f"tokenizer {kind}:{size}: the corpus' characters alone are {len(tokens)} tokens; "
            "raise SIZE"
        )
    # The second training: the pieces are special tokens now and so have fixed numbers. A limit of 0
    # lets it add no characters of its own.
    return BertTokenizer(vocab=train(size, tokens, 0), do_lower_case=not cased)


def suggested_size(size: int) -> int:
    """Return the next multiple of 128, which is divisible by usual TP sizes and fast on tensor
    cores.
    """
    return -(-size // 128) * 128
