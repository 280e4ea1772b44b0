"""A corpus's tokenizer is trained on it, or taken from a Hugging Face directory."""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from zero_tp.errors import UserError, first_line, shown
from zero_tp.files import read_json, read_object
from zero_tp.weights.files import TOKENIZER_FILES, is_regular

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

EOS = "<|endoftext|>"
MOST_IDS = 2**24
SMALLEST_BPE = 257  # the 256 bytes and the end-of-text token
LARGEST_BPE = 2**24  # about 60 times the largest known vocabulary


@dataclass(frozen=True)
class TokenizerSpec:
    """A tokenizer is named by `bpe:SIZE` or by a directory: exactly one of the two fields is set."""

    bpe_size: int | None = None
    directory: Path | None = None

    @classmethod
    def parse(cls, text: str) -> TokenizerSpec:
        """Read the command-line form. UserError: neither a directory with a tokenizer nor `bpe:SIZE`, SIZE < 257."""
        if match := re.fullmatch(r"bpe:([0-9]+)", text):
            size = int(match[1][:20])
            if size < SMALLEST_BPE:
                raise UserError(f"tokenizer {text}: at least {SMALLEST_BPE} (256 bytes and {EOS}) are needed")
            if size > LARGEST_BPE:
                raise UserError(
                    f"tokenizer bpe:{match[1][:20]}: more than {LARGEST_BPE:,} tokens; choose a smaller SIZE"
                )
            return cls(bpe_size=size)
        path = Path(text)
        if not os.path.isdir(path):
            raise UserError(f"tokenizer {text!r}: neither a directory nor bpe:SIZE such as bpe:8192")
        if not os.path.isfile(path / "tokenizer.json") and not os.path.isfile(path / "tokenizer_config.json"):
            raise UserError(f"tokenizer {text}: the directory holds neither tokenizer.json nor tokenizer_config.json")
        return cls(directory=path)

    def fingerprint(self) -> str:
        """Return what is the same for the same tokenizer: `bpe:SIZE`, or the SHA-256 of the directory's files."""
        if self.directory is None:
            return f"bpe:{self.bpe_size}"
        digest = hashlib.sha256()
        try:
            for path in sorted(self.directory.iterdir()):
                if path.is_file() and path.suffix in (".json", ".txt", ".model", ".jinja"):
                    digest.update(os.fsencode(path.name) + b"\0" + hashlib.sha256(path.read_bytes()).digest())
        except OSError as error:
            raise UserError(f"tokenizer {self.directory}: can't be read ({error.strerror or error})") from error
        return f"sha256:{digest.hexdigest()}"


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


def load_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a Hugging Face directory.

    Raises:
        UserError: it can't be read (see `open_tokenizer`), is not a fast one, or has no eos token.
    """
    try:
        tokenizer = open_tokenizer(directory)
    except UserError as error:
        raise UserError(f"tokenizer {directory}: can't be read: {error}") from error
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(f"tokenizer {directory}: it has no tokenizer.json form (a fast tokenizer), which is needed")
    if tokenizer.eos_token_id is None:
        raise UserError(f"tokenizer {directory}: it has no eos token, which must end each document")
    return cast("PreTrainedTokenizerFast", tokenizer)


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


def special_tokens(directory: Path) -> tuple[int, dict[str, int]]:
    """Return the vocabulary size, and the ids of those of bos, eos and pad that the tokenizer has.

    The keys are `bos_token_id`, `eos_token_id`, `pad_token_id`.
    """
    tokenizer = load_tokenizer(directory)
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


class DocumentEncoder:
    """An encoder turns documents into token ids, many at a time; it can be sent to another process.

    A text that happens to spell a special token (`<|endoftext|>`) is encoded as ordinary text: only the end of a
    document gives the eos token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._set(tokenizer.backend_tokenizer.to_str(), cast("int", tokenizer.eos_token_id), len(tokenizer))

    def _set(self, serialized: str, eos: int, vocabulary_size: int) -> None:
        from tokenizers import Tokenizer

        self._serialized, self.eos, self.vocabulary_size = serialized, eos, vocabulary_size
        # A copy: the tokenizer that is saved keeps its own settings.
        self._backend = Tokenizer.from_str(serialized)
        self._backend.encode_special_tokens = True
        self._backend.no_truncation()
        self._backend.no_padding()

    def __reduce__(self) -> tuple[Callable[..., DocumentEncoder], tuple[Any, ...]]:
        return _encoder, (self._serialized, self.eos, self.vocabulary_size)

    def encode(self, texts: list[str]) -> list[npt.NDArray[np.int64]]:
        """Return the token ids of each text, eos at the end; int64 [tokens] each."""
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array([*encoding.ids, self.eos], dtype=np.int64) for encoding in encodings]


def _encoder(*state: Any) -> DocumentEncoder:
    made = DocumentEncoder.__new__(DocumentEncoder)
    made._set(*state)
    return made
