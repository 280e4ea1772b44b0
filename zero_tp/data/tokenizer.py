"""Load the tokenizer of a Hugging Face directory, and encode documents with it."""

from __future__ import annotations

import hashlib
import re
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from zero_tp.base.errors import UserError, first_line
from zero_tp.base.files import read_regular
from zero_tp.base.strict_json import InvalidJson, read_object
from zero_tp.base.validation import validate
from zero_tp.base.weight_files import TOKENIZER_FILES, has_tokenizer, is_regular, resolve
from zero_tp.data.indexed import REPORT, bin_path
from zero_tp.data.masking_vocabulary import missing_for_masking
from zero_tp.data.tokenizer_files import match_tokenizer, open_tokenizer
from zero_tp.data.tokenizer_fingerprint import TokenizerFingerprint

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_EOS_NAMES = re.compile(
    r"[<\[]\W?(/s|eos|eod|end.?of.?(text|document|sentence))\W?[>\]]", re.IGNORECASE
)
# sentencex 1.0.32 panics at white space of several bytes between a letter and a period; a space
# changes no boundary.
_SENTENCEX_PANICS = re.compile(r"([^\W\d_]\s*)[^\S\x00-\x7f](?=\.)")
EncodedDocument = tuple[npt.NDArray[np.uintc], npt.NDArray[np.bool_]]
"""A document's token ids [tokens], and whether a sentence begins with each [tokens]; [0] if
sentences are not split.
"""


def load_tokenizer(directory: Path, eos: str | None = None) -> PreTrainedTokenizerFast:
    """Load a fast tokenizer from a Hugging Face directory.

    Args:
        eos: one of its tokens, to use as its eos token. None: its own eos token, or its only token
            with a well-known name, unless it is a tokenizer for the masked objective.
    """
    tokenizer = open_tokenizer(directory)
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(
            f"tokenizer {directory}: it has no tokenizer.json form (a fast tokenizer), which is "
            "needed"
        )
    if eos is not None:
        if eos not in tokenizer.get_vocab():
            raise UserError(
                f"tokenizer {directory}: it has no token {eos!r}: give --eos one that it has"
            )
        _set_eos(tokenizer, eos)
    # A tokenizer for the masked objective, as BERT's, needs no eos: its documents are windows of
    # their own.
    if tokenizer.eos_token_id is None and missing_for_masking(tokenizer):
        likely = sorted(filter(_EOS_NAMES.fullmatch, tokenizer.get_vocab()))
        if len(likely) != 1:
            candidates = ", ".join(likely) or "none with a well-known name"
            raise UserError(
                f"tokenizer {directory}: it has no eos token, which must end each document: choose "
                "a token with --eos "
                f"(candidates: {candidates})"
            )
        _set_eos(tokenizer, *likely)
    return cast("PreTrainedTokenizerFast", tokenizer)


def _set_eos(tokenizer: PreTrainedTokenizerBase, token: str) -> None:
    # Not `tokenizer.eos_token = token`: transformers makes the eos an added token when it opens the
    # saved files.
    tokenizer.add_special_tokens({"eos_token": token})


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, directory: Path, source: Path) -> None:
    """Save a corpus's tokenizer.

    Args:
        source: the directory that it was opened from.

    Raises:
        UserError: transformers would not open the saved files with the same ids.
    """
    tokenizer.save_pretrained(str(directory))
    if problem := match_tokenizer(directory, tokenizer):
        raise UserError(
            f"tokenizer {source}: transformers opens a saved copy of it with other ids: {problem}"
        )


def corpus_fingerprint(prefix: str) -> TokenizerFingerprint | None:
    """Return the fingerprint of a corpus's tokenizer, as `prepare` recorded it.

    None: it recorded none.
    """
    path = bin_path(prefix).with_name(REPORT)
    try:
        report = read_object(path)
    except (OSError, InvalidJson):  # a corpus of Megatron-LM has none
        return None
    recorded = report.get("tokenizer")
    files = report.get("files")
    if recorded is None or not isinstance(files, dict) or bin_path(prefix).name not in files:
        return None
    return validate(TokenizerFingerprint, recorded, f"{path}: tokenizer")


class DocumentEncoder:
    """Encodes documents in batches; can be pickled for another process.

    A text that spells a special token (`<|endoftext|>`) is encoded as ordinary text. Each document
    ends with the eos token, if the tokenizer has one (BERT's has none).

    Args:
        language: ISO 639 code: documents are split into sentences by the rules of this language;
            None: they aren't.

    Attributes:
        eos_count: eos tokens of a document: 0 or 1.
        end_of_document: the eos token; None: there is none.
        fingerprint: the tokenizer's.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, language: str | None = None) -> None:
        from tokenizers import Tokenizer

        eos = tokenizer.eos_token_id
        self._eos = array("I", [] if eos is None else [eos])
        self.eos_count = len(self._eos)
        self.language = language
        self.vocabulary_size = vocabulary_size(tokenizer)
        self.fingerprint = TokenizerFingerprint.of(tokenizer)
        # A copy, because the tokenizer that is saved must keep its own settings.
        self._backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._backend.no_truncation()
        self._backend.no_padding()
        self.end_of_document: str | None = None if eos is None else self._backend.id_to_token(eos)

    def encode(self, texts: list[str]) -> list[EncodedDocument]:
        """Return each text's token ids and the starts of its sentences.

        The eos comes last. Sentences are split if there is a language.
        """
        self._backend.encode_special_tokens = True  # a pickled tokenizer forgets it
        # No offsets.
        encode = self._backend.encode_batch if self.language else self._backend.encode_batch_fast
        try:
            encodings = encode(texts, add_special_tokens=False)
        except Exception as error:  # tokenizers raises no other type
            remedy = "use a tokenizer with an unknown token"
            raise UserError(
                f"the tokenizer can't encode a document ({first_line(error)}); {remedy}"
            ) from error
        return list(
            zip(
                map(self._ids, encodings), map(self._sentence_starts, texts, encodings), strict=True
            )
        )

    def _ids(self, encoding: Encoding) -> npt.NDArray[np.uintc]:
        # np.array would take three times as long.
        return np.frombuffer(array("I", encoding.ids) + self._eos, np.uintc)

    def _sentence_starts(self, text: str, encoding: Encoding) -> npt.NDArray[np.bool_]:
        if self.language is None:
            return np.zeros(0, np.bool_)
        from sentencex import segment

        # sentencex keeps all characters, so lengths give the offsets of sentences.
        lengths = list(map(len, segment(self.language, _SENTENCEX_PANICS.sub(r"\1 ", text))))
        assert sum(lengths) == len(text)
        # A token that includes the space before a sentence belongs to the sentence of its last
        # character.
        ends = [end for _, end in encoding.offsets]
        first_tokens = np.searchsorted(ends, [0, *np.cumsum(lengths[:-1])], side="right")
        starts = np.zeros(len(ends) + self.eos_count, np.bool_)
        starts[first_tokens[first_tokens < len(ends)]] = True
        return starts


def find_tokenizer(name: str | None, prefix: str) -> Path | None:
    """Return the directory of the tokenizer `name`, else that beside `prefix`.

    `name` is a directory or a name on the hub; the other is `tokenizer/`, or None.

    UserError: there is no tokenizer `name`.
    """
    if name is not None:
        directory = resolve(name, "zero_tp.tokenizer", weights=False)
        if not directory.is_dir():
            raise UserError(
                f"zero_tp.tokenizer: no directory {name}; copy the tokenizer that the corpus was "
                "prepared with to it"
            )
        return directory
    # Where `prepare` writes it.
    default = Path(prefix).parent / "tokenizer"
    return default if default.is_dir() else None


def files_sha256(directory: Path) -> str:
    """Return the SHA-256 of a tokenizer's files, in hexadecimal."""
    digest = hashlib.sha256()
    for name in TOKENIZER_FILES:
        if is_regular(directory / name):
            digest.update(
                f"{name} {hashlib.sha256(read_regular(directory / name)).hexdigest()}\n".encode()
            )
    return digest.hexdigest()


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return 1 + the largest id; ids may have gaps."""
    # Not `len`: the embedding needs a row for the largest id, also if ids below it are unused.
    return 1 + max(tokenizer.get_vocab().values(), default=-1)


def special_token_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return those of `bos_token_id`, `eos_token_id` and `pad_token_id` that a tokenizer has."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {
        name: getattr(tokenizer, name) for name in names if getattr(tokenizer, name) is not None
    }


def check_same_tokens(data: Path, model: Path) -> None:
    """Check that each token id is the same token for a model's weights and for the corpus.

    Either may have ids that the other lacks, such as added tokens. A directory without a tokenizer
    is not compared.

    Args:
        data: directory of the corpus' tokenizer.
        model: the Hugging Face directory of the weights.

    Raises:
        UserError: one is not.
    """
    ours = _tokens(data)
    theirs = _tokens(model)
    for token in sorted(ours.keys() & theirs.keys()):
        if ours[token] != theirs[token]:
            raise UserError(
                f"zero_tp.model.from_pretrained: token {token} is {theirs[token]!r} in {model}, "
                f"but {ours[token]!r} in "
                f"{data}, the corpus's tokenizer; prepare the corpus with --tokenizer {model}"
            )


def _tokens(directory: Path) -> dict[int, str]:
    """Return id → token; empty without a tokenizer in the directory."""
    vocabulary = open_tokenizer(directory).get_vocab() if has_tokenizer(directory) else {}
    return {number: token for token, number in vocabulary.items()}
