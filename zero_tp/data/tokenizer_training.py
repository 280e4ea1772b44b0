"""Train a tokenizer of a named kind and size on a corpus."""

from __future__ import annotations

import hashlib
import io
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from zero_tp.data.formats import needed
from zero_tp.errors import UserError, first_line
from zero_tp.weights.weight_files import TOKENIZER_FILES, holds_tokenizer, resolve

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer
    from transformers import PreTrainedTokenizerFast


EOS = "<|endoftext|>"
LARGEST = 2**24  # about 60 times the largest known vocabulary
LONGEST_WORD = 1024
"""Bytes (of a WordPiece vocabulary, characters) of a word in training; longer ones are cut. The time that a merge takes
grows with the square of a word's length, so that a word of a million letters would take hours."""
ALPHABET = 1000  # of a WordPiece vocabulary, as Google's: rarer characters are unknown
_SPECIAL_PIECES = 258  # of a unigram vocabulary: the end of documents, <unk>, bytes
WORDPIECE_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


class Trained(NamedTuple):
    """A kind of tokenizer that is trained on the corpus.

    Attributes:
        train: takes a function that returns all texts, and the number of tokens.
        smallest: number of tokens.
        why: the reason for it.
    """

    train: Callable[[Callable[[], Iterator[str]], int], PreTrainedTokenizerFast]
    smallest: int
    why: str


@dataclass(frozen=True)
class TokenizerSpec:
    """A tokenizer to train, `KIND:SIZE` (kinds: `TRAINED`), or the directory of a finished one.

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
        if match := re.fullmatch(rf"({'|'.join(TRAINED)}):([0-9]+)", text):
            kind, size = match[1], int(match[2][:20])
            if size < TRAINED[kind].smallest:
                raise UserError(f"tokenizer {text}: at least {TRAINED[kind].smallest} ({TRAINED[kind].why}) are needed")
            if size > LARGEST:
                raise UserError(
                    f"tokenizer {kind}:{match[2][:20]}: more than {LARGEST:,} tokens; choose a smaller SIZE"
                )
            return cls(kind, size)
        path = resolve(text, f"tokenizer {text!r}", weights=False)
        if not os.path.isdir(path):
            kinds = ", ".join(f"{kind}:SIZE" for kind in TRAINED)
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
        assert self.kind is not None
        return TRAINED[self.kind].train(texts, self.size)


def train_bpe(texts: Iterator[str], size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE as GPT-2's on `texts`; `<|endoftext|>` (id 0) is its eos, bos and unk.

    Every text can be encoded and decoded back exactly, since the 256 bytes are in the vocabulary. A small corpus can
    give fewer than `size` tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

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
    return _causal(tokenizer, unknown=EOS)


def _cut(words: PreTokenizer) -> PreTokenizer:
    """Return a pre-tokenizer that splits texts into words, and those into pieces of at most `LONGEST_WORD`."""
    from tokenizers import pre_tokenizers

    return pre_tokenizers.Sequence([words, pre_tokenizers.FixedLength(length=LONGEST_WORD)])


def train_wordpiece(texts: Callable[[], Iterator[str]], size: int, *, cased: bool) -> PreTrainedTokenizerFast:
    """Train a WordPiece vocabulary like BERT's; special tokens are [PAD] (id 0), [UNK], [CLS], [SEP] and [MASK].

    Text is cleaned like BERT's: control characters are removed, and without `cased` capitals and accents too. Only the
    1,000 most frequent characters are known.

    Args:
        texts: returns all texts; it is called twice.

    Raises:
        UserError: the characters alone are more than `size` tokens.
    """
    from tokenizers import trainers
    from transformers import BertTokenizer

    trained = BertTokenizer(do_lower_case=not cased).backend_tokenizer
    trained.pre_tokenizer = _cut(trained.pre_tokenizer)
    seen: Counter[str] = Counter()

    def counted() -> Iterator[str]:
        for text in texts():
            seen.update(text)
            yield text

    def train(size: int, tokens: list[str], limit: int = sys.maxunicode + 1) -> dict[str, int]:
        trainer = trainers.WordPieceTrainer(
            vocab_size=size, special_tokens=tokens, limit_alphabet=limit, show_progress=False
        )
        trained.train_from_iterator(counted() if not seen else texts(), trainer)
        vocabulary: dict[str, int] = trained.get_vocab()
        return vocabulary

    # tokenizers numbers pieces of one character in a hash table's order, which differs each time, and chooses between
    # equally frequent merges by these numbers. So a first training only finds the pieces.
    pieces = train(0, []).keys()
    counts: Counter[str] = Counter()
    for raw, count in seen.items():
        for character in trained.normalizer.normalize_str(raw):
            counts[character] += 0 if character.isspace() else count
    alphabet = set(sorted(counts, key=lambda character: (-counts[character], character))[:ALPHABET])
    tokens = [*WORDPIECE_TOKENS, *sorted(piece for piece in pieces if piece[-1] in alphabet)]
    if len(tokens) > size:
        kind = "wordpiece-cased" if cased else "wordpiece"
        raise UserError(f"tokenizer {kind}:{size}: the corpus' characters alone are {len(tokens)} tokens; give more")
    return BertTokenizer(vocab=train(size, tokens, 0), do_lower_case=not cased)


def train_unigram(texts: Iterator[str], size: int) -> PreTrainedTokenizerFast:
    """Train a unigram vocabulary by SentencePiece; `<|endoftext|>` (id 0) is its eos and bos, `<unk>` its unk.

    Characters outside the vocabulary become their bytes in UTF-8, and nothing is normalised. So every text can be
    encoded and decoded back exactly, except U+2581, which stands for a space. A small corpus can give fewer than `size`
    tokens. The texts are held in memory.

    The result is the same each time. The trainer of tokenizers adds in a hash table's order, so its scores differ.

    Raises:
        UserError: the characters and bytes alone are more than `size` tokens, or sentencepiece is missing.
    """
    sentencepiece = needed("sentencepiece", f"tokenizer unigram:{size}")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    serialized = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(line for text in texts for line in text.splitlines(keepends=True)),
            model_writer=serialized,
            model_type="unigram",
            vocab_size=size,
            hard_vocab_limit=False,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            max_sentence_length=2**30,
            num_threads=16,  # whatever the machine has: the sums are added in their order
            eos_id=0,
            eos_piece=EOS,
            unk_id=1,
            required_chars="".join(sorted({*EOS, *"<unk>", *"<0x0123456789ABCDEF>"})),
            bos_id=-1,
            minloglevel=3,
        )
    except RuntimeError as error:
        if match := re.search(r"smaller than required_chars.*?([0-9]+) vs ([0-9]+)", str(error)):
            raise UserError(
                f"tokenizer unigram:{size}: the corpus' characters and the bytes alone are {match[2]} tokens; give more"
            ) from error
        raise UserError(f"tokenizer unigram:{size}: can't be trained: {first_line(error)}") from error
    pieces = sentencepiece.SentencePieceProcessor(model_proto=serialized.getvalue())
    # sentencepiece encodes a text that spells <0x41> or <unk> as text. tokenizers takes it for that piece, unless other
    # pieces are more likely; `required_chars` provides them.
    vocabulary = [
        (pieces.id_to_piece(i), pieces.get_score(i) if i >= _SPECIAL_PIECES else -1e4)
        for i in range(pieces.get_piece_size())
    ]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=1, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _causal(tokenizer, unknown=vocabulary[1][0])


def _causal(tokenizer: Tokenizer, unknown: str) -> PreTrainedTokenizerFast:
    """Return transformers' class of a causal model's tokenizer, whose bos, eos and padding are the same token."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        bos_token=EOS,
        pad_token=EOS,
        unk_token=unknown,
        clean_up_tokenization_spaces=False,
    )


def suggested_size(size: int) -> int:
    """Return the next multiple of 128, which suits any usual TP size and tensor cores."""
    return -(-size // 128) * 128


TRAINED = {
    "bpe": Trained(lambda texts, size: train_bpe(texts(), size), 257, f"256 bytes and {EOS}"),
    **{
        kind: Trained(partial(train_wordpiece, cased=cased), len(WORDPIECE_TOKENS) + 1, "special tokens and one other")
        for kind, cased in (("wordpiece", False), ("wordpiece-cased", True))
    },
    "unigram": Trained(lambda texts, size: train_unigram(texts(), size), 259, f"256 bytes, {EOS}, <unk> and one other"),
}
