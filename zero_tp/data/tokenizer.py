"""A corpus's tokenizer is trained on it, or taken from a Hugging Face directory."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from zero_tp.errors import UserError, first_line, shown
from zero_tp.files import read_json, read_object
from zero_tp.weights.files import TOKENIZER_FILES, is_regular

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

EOS = "<|endoftext|>"
_ENDS = re.compile(r"<\W?(/s|eos|eod|end.?of.?(text|document|sentence)|im_end)\W?>")
MOST_IDS = 2**24
LARGEST = 2**24  # about 60 times the largest known vocabulary
ALPHABET = 1000  # of a WordPiece vocabulary, as Google's: rarer characters are unknown
_SPACE, *_BREAKS = (chr(256 + byte) for byte in b" \t\n\v\f\r")  # as byte-level BPE writes them: Ġ is the space
_METASPACE = "\u2581"
WORDPIECE_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


class Trained(NamedTuple):
    """One kind of tokenizer that is trained on the corpus.

    Attributes:
        train: from what gives all texts anew, and the number of tokens.
        smallest: number of tokens, and why.
    """

    train: Callable[[Callable[[], Iterator[str]], int], PreTrainedTokenizerFast]
    smallest: int
    why: str


@dataclass(frozen=True)
class TokenizerSpec:
    """A tokenizer is named by `KIND:SIZE` (kinds: `TRAINED`) or by a directory.

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
        path = Path(text)
        if not os.path.isdir(path):
            kinds = ", ".join(f"{kind}:SIZE" for kind in TRAINED)
            raise UserError(f"tokenizer {text!r}: neither a directory nor {kinds} such as bpe:8192")
        if not os.path.isfile(path / "tokenizer.json") and not os.path.isfile(path / "tokenizer_config.json"):
            raise UserError(f"tokenizer {text}: the directory holds neither tokenizer.json nor tokenizer_config.json")
        return cls(directory=path)

    def fingerprint(self) -> str:
        """Return what is the same for the same tokenizer: `KIND:SIZE`, or the SHA-256 of the directory's files."""
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
        """Return the tokenizer of the kind and size, trained on what `texts` gives each time. UserError as
        `train_wordpiece`."""
        assert self.kind is not None
        return TRAINED[self.kind].train(texts, self.size)


def train_bpe(texts: Iterator[str], size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE as GPT-2's on `texts`; `<|endoftext|>` (id 0) is its eos, bos and unk.

    Every text can be encoded and decoded back exactly, since the 256 bytes are in the vocabulary. A small corpus can
    give fewer than `size` tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        bos_token=EOS,
        unk_token=EOS,
        clean_up_tokenization_spaces=False,
    )


def train_wordpiece(texts: Callable[[], Iterator[str]], size: int, *, cased: bool) -> PreTrainedTokenizerFast:
    """Train a WordPiece vocabulary as BERT's on what `texts` gives, twice; special tokens are [PAD] (id 0), [UNK],
    [CLS], [SEP] and [MASK].

    Text is cleaned as BERT's is: control characters go, and without `cased` capitals and accents too. Characters that
    are not among the 1,000 most frequent are unknown.

    Raises:
        UserError: the characters alone are more than `size` tokens.
    """
    from tokenizers import trainers
    from transformers import BertTokenizer

    trained = BertTokenizer(do_lower_case=not cased).backend_tokenizer
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

    # tokenizers numbers the pieces of one character in the order of a hash table, another one each time, and by these
    # numbers it chooses between merges that are as frequent. So a first training only finds them.
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


def suggested_size(size: int) -> int:
    """Return the vocabulary size from `size` up that TP of any usual size and tensor cores like: a multiple of 128."""
    return -(-size // 128) * 128


TRAINED = {
    "bpe": Trained(lambda texts, size: train_bpe(texts(), size), 257, f"256 bytes and {EOS}"),
    **{
        kind: Trained(partial(train_wordpiece, cased=cased), len(WORDPIECE_TOKENS) + 1, "special tokens and one other")
        for kind, cased in (("wordpiece", False), ("wordpiece-cased", True))
    },
}


def open_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Open the tokenizer of a Hugging Face directory. Code that comes with it is never run.

    Raises:
        UserError: it can't be read, one of its files is none, or a token's id is beyond every vocabulary.
    """
    from transformers import AutoTokenizer

    for name in TOKENIZER_FILES:
        if is_regular(directory / name) and name.endswith(".json"):
            _check_ids(directory / name)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                str(directory), local_files_only=True, trust_remote_code=False
            )
            found.decode(found.encode("a"))  # which use settings that nothing has looked at
    except Exception as error:  # transformers raises anything from KeyError to its own types here
        raise UserError(f"{directory}: its tokenizer can't be read: {first_line(error)}") from error
    return found


def _check_ids(path: Path) -> None:
    """Raise a UserError if a file of a tokenizer isn't strict JSON, or has an id for which tables would fill memory."""
    found = read_json(path)
    model, added = found.get("model"), found.get("added_tokens")
    ids: list[Any] = [token.get("id") for token in added or [] if isinstance(token, dict)]
    ids += found.get("added_tokens_decoder") or []
    vocabularies = [model.get("vocab") if isinstance(model, dict) else None]
    if path.name in ("vocab.json", "added_tokens.json"):
        vocabularies.append(found)
    for vocabulary in vocabularies:
        ids += vocabulary.values() if isinstance(vocabulary, dict) else []
    for id_ in ids:
        if str(id_).isdecimal() and not isinstance(id_, bool) and int(id_) >= MOST_IDS:
            raise UserError(f"{path}: the id {shown(id_)} is beyond every vocabulary; ids go up to {MOST_IDS - 1:,}")


def load_tokenizer(directory: Path, eos: str | None = None) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a Hugging Face directory.

    Args:
        eos: a token that it has, which is its eos token from now on.

    Raises:
        UserError: it can't be read (see `open_tokenizer`), is not a fast one, or has no eos token and is none for the
            masked objective either.
    """
    try:
        tokenizer = open_tokenizer(directory)
    except UserError as error:
        raise UserError(f"tokenizer {directory}: can't be read: {error}") from error
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(f"tokenizer {directory}: it has no tokenizer.json form (a fast tokenizer), which is needed")
    if eos is not None:
        if eos not in tokenizer.get_vocab():
            raise UserError(f"tokenizer {directory}: it has no token {eos!r}: give --eos one that it has")
        tokenizer.eos_token = eos
    if tokenizer.eos_token_id is None and missing_for_masking(tokenizer):
        likely = ", ".join(sorted(filter(_ENDS.fullmatch, tokenizer.get_vocab()))) or "none that is likely"
        raise UserError(
            f"tokenizer {directory}: it has no eos token, which must end each document: name one with --eos ({likely})"
        )
    return cast("PreTrainedTokenizerFast", tokenizer)


def missing_for_masking(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return which of the tokens that the masked objective needs a tokenizer lacks: mask, sep, cls."""
    return [name for name in ("mask", "sep", "cls") if getattr(tokenizer, f"{name}_token_id") is None]


@dataclass(frozen=True)
class MaskingVocabulary:
    """This is what masking knows of a vocabulary of v tokens.

    Attributes:
        mask, separator, classifier, padding: special tokens' ids.
        end: the token that ends documents, which no sample holds; None: there is none.
        special: whether a token is never masked and replaces none, bool [v]: a special one, or one that the tokenizer
            does not have.
        begins: whether a word begins with it. ends: whether one begins after it. bool [v] each.
    """

    mask: int
    separator: int
    classifier: int
    padding: int
    end: int | None
    special: npt.NDArray[np.bool_]
    begins: npt.NDArray[np.bool_]
    ends: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerFast, directory: Path, size: int) -> MaskingVocabulary:
        """Read it from a tokenizer.

        Args:
            directory: for messages.
            size: v, at least that of the tokenizer.

        Raises:
            UserError: it has no mask, separator or class token, or nothing in it says where words begin.
        """
        if missing := missing_for_masking(tokenizer):
            raise UserError(
                f"tokenizer {directory}: it has no {' and no '.join(f'{name}_token' for name in missing)}, which the "
                "masked objective needs; prepare the corpus with --tokenizer wordpiece:SIZE, or a tokenizer that has"
            )
        marks = _Marks.of(json.loads(tokenizer.backend_tokenizer.to_str()), directory)
        special, begins, ends = np.ones(size, bool), np.ones(size, bool), np.zeros(size, bool)
        apart = set(tokenizer.all_special_ids)
        for token, i in tokenizer.get_vocab().items():
            if i not in apart:
                special[i], begins[i], ends[i] = False, marks.begins(token), marks.ends(token)
        padding = tokenizer.pad_token_id
        ids = (
            tokenizer.mask_token_id,
            tokenizer.sep_token_id,
            tokenizer.cls_token_id,
            0 if padding is None else padding,
        )
        return cls(*ids, tokenizer.eos_token_id, special, begins, ends)

    def sha256(self) -> str:
        """Return what is the same for the same vocabulary."""
        ids = (self.mask, self.separator, self.classifier, self.padding, self.end)
        parts = (repr(ids).encode(), *(np.packbits(part).tobytes() for part in (self.special, self.begins, self.ends)))
        return hashlib.sha256(b"".join(parts)).hexdigest()

    def word_begins(self, row: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return which of a row's tokens begin a word, bool [s]: also the first, and the first after a special one."""
        found = self.begins[row]
        found[:1] = True
        found[1:] |= self.ends[row[:-1]] | self.special[row[:-1]]
        return found & ~self.special[row]


@dataclass(frozen=True)
class _Marks:
    """These are a tokenizer's marks.

    Attributes:
        continued: what a token that goes on with a word starts with.
        last: what a word's last token ends with.
        space: what the space before a word is written as; it may be a token of its own.
        breaks: what other white space is written as.
    """

    continued: str = ""
    last: str = ""
    space: str = ""
    breaks: tuple[str, ...] = ()

    @classmethod
    def of(cls, serialized: dict[str, Any], directory: Path) -> _Marks:
        model = serialized["model"]
        around = json.dumps([serialized[key] for key in ("normalizer", "pre_tokenizer", "decoder")], ensure_ascii=False)
        if '"ByteLevel"' in around:
            return cls(space=_SPACE, breaks=tuple(_BREAKS))
        if _METASPACE in around:
            return cls(space=_METASPACE, breaks=("\n", "\t", "<0x0A>", "<0x09>"))
        continued, last = (model.get(key) or "" for key in ("continuing_subword_prefix", "end_of_word_suffix"))
        if not continued and not last:
            raise UserError(
                f"tokenizer {directory}: nothing says where words begin (WordPiece's ##, byte-level BPE's Ġ or "
                "SentencePiece's ▁), which the masked objective needs; use another tokenizer"
            )
        return cls(continued, last)

    def begins(self, token: str) -> bool:
        if self.space:
            return token.startswith((self.space, *self.breaks))
        return bool(self.continued) and not token.startswith(self.continued)

    def ends(self, token: str) -> bool:
        return token.endswith(self.breaks) if self.breaks else bool(self.last) and token.endswith(self.last)


def tokenizer_beside(given: str | None, prefix: str) -> Path | None:
    """Return a run's tokenizer directory: `given`, else `tokenizer/` beside the corpus `prefix`, else None.

    Raises:
        UserError: `given` is not a directory.
    """
    if given is not None:
        if not Path(given).is_dir():
            raise UserError(f"zero_tp.tokenizer: no directory {given}")
        return Path(given)
    beside = Path(prefix).parent / "tokenizer"
    return beside if beside.is_dir() else None


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[int, dict[str, int]]:
    """Return the vocabulary size, and the ids of those of bos, eos and pad that the tokenizer has.

    The keys are `bos_token_id`, `eos_token_id`, `pad_token_id`.
    """
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return len(tokenizer), {name: getattr(tokenizer, name) for name in names if getattr(tokenizer, name) is not None}


def check_same_tokens(data: Path, model: Path) -> None:
    """Check that a model's weights mean the same by each token id as the corpus does.

    Either may have ids that the other lacks, such as added tokens; a directory without tokenizer.json or vocab.json is
    not compared.

    Args:
        data: the tokenizer's directory that the corpus was prepared with.
        model: the Hugging Face directory that the weights come from.

    Raises:
        UserError: an id is one token here and another there; names the first.
    """
    ours, theirs = _tokens(data), _tokens(model)
    for token in sorted(ours.keys() & theirs.keys()):
        if ours[token] != theirs[token]:
            raise UserError(
                f"zero_tp.model.from_pretrained: token {token} is {theirs[token]!r} in {model}, but {ours[token]!r} in "
                f"{data}, the corpus's tokenizer; prepare the corpus with --tokenizer {model}"
            )


def _tokens(directory: Path) -> dict[int, str]:
    """Return each token by its id; empty where the directory does not say."""
    from tokenizers import Tokenizer

    path = directory / "tokenizer.json"
    try:
        if path.is_file():
            return {id_: token for token, id_ in Tokenizer.from_file(str(path)).get_vocab().items()}
        path = directory / "vocab.json"
        return {id_: token for token, id_ in read_object(path).items()} if path.is_file() else {}
    except Exception as error:  # tokenizers raises nothing narrower
        raise UserError(f"{path}: can't be read as a tokenizer ({error})") from error


Encoded = tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]
"""A document's token ids [tokens], and whether a sentence begins with each [tokens], or [0] where nobody asked."""


class DocumentEncoder:
    """An encoder turns documents into token ids, many at a time; it can be sent to another process.

    A text that happens to spell a special token (`<|endoftext|>`) is encoded as ordinary text: only the end of a
    document gives the eos token, where the tokenizer has one (BERT's has none).

    Args:
        language: ISO 639 code of the language by whose rules documents are split into sentences; None: they aren't.

    Attributes:
        ends: tokens that end a document: 0 or 1.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, language: str | None = None) -> None:
        self._set(tokenizer.backend_tokenizer.to_str(), tokenizer.eos_token_id, len(tokenizer), language)

    def _set(self, serialized: str, end: int | None, vocabulary_size: int, language: str | None) -> None:
        from tokenizers import Tokenizer

        self._state = (serialized, end, vocabulary_size, language)
        self._end, self.vocabulary_size, self.language = [] if end is None else [end], vocabulary_size, language
        self.ends = len(self._end)
        # A copy: the tokenizer that is saved keeps its own settings.
        self._backend = Tokenizer.from_str(serialized)
        self._backend.encode_special_tokens = True
        self._backend.no_truncation()
        self._backend.no_padding()

    def __reduce__(self) -> tuple[Callable[..., DocumentEncoder], tuple[Any, ...]]:
        return _encoder, self._state

    def encode(self, texts: list[str]) -> list[Encoded]:
        """Return each text's token ids, eos at the end, and where its sentences begin, if there is a language."""
        encode = self._backend.encode_batch if self.language else self._backend.encode_batch_fast  # has no offsets
        encodings = encode(texts, add_special_tokens=False)
        ids = (np.array([*encoding.ids, *self._end], dtype=np.int64) for encoding in encodings)
        begins = map(self._begins, texts, encodings)
        return list(zip(ids, begins, strict=True))

    def _begins(self, text: str, encoding: Encoding) -> npt.NDArray[np.bool_]:
        if self.language is None:
            return np.zeros(0, np.bool_)
        from sentencex import segment

        lengths = [len(sentence) for sentence in segment(self.language, text)]
        assert sum(lengths) == len(text)
        # A token that also holds the space before it is of the sentence of its last character.
        ends = [end for _, end in encoding.offsets]
        found = np.searchsorted(ends, [0, *np.cumsum(lengths[:-1])], side="right")
        begins = np.zeros(len(ends) + len(self._end), np.bool_)
        begins[found[found < len(ends)]] = True
        return begins


def _encoder(*state: Any) -> DocumentEncoder:
    made = DocumentEncoder.__new__(DocumentEncoder)
    made._set(*state)
    return made
