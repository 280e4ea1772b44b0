"""What masking knows of a tokenizer: special ids, and where words begin."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from zero_tp.base.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

# As byte-level BPE writes them: Ġ is the space.
_SPACE, *_BREAKS = (chr(256 + byte) for byte in b" \t\n\v\f\r")
_METASPACE = "\u2581"


def missing_for_masking(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the special tokens of the masked objective (mask, sep, cls) that a tokenizer lacks."""
    return [
        name for name in ("mask", "sep", "cls") if getattr(tokenizer, f"{name}_token_id") is None
    ]


@dataclass(frozen=True)
class MaskingVocabulary:
    """The properties of a vocabulary of v tokens that masking uses.

    Attributes:
        mask, separator, classifier, padding, eos: special tokens' ids. No sample contains the eos;
            it may be None.
        special: whether a token is never masked and never a replacement, bool [v]: special tokens
            and unused ids.
        begins: whether a word begins with it, bool [v].
        ends: whether a word begins after it, bool [v].
    """

    mask: int
    separator: int
    classifier: int
    padding: int
    eos: int | None
    special: npt.NDArray[np.bool_]
    begins: npt.NDArray[np.bool_]
    ends: npt.NDArray[np.bool_]

    @classmethod
    def from_tokenizer(
        cls, tokenizer: PreTrainedTokenizerFast, directory: Path, size: int
    ) -> MaskingVocabulary:
        """Read a tokenizer with ids below v = `size`.

        Raises:
            UserError: it lacks special tokens, or marks of words.
        """
        if missing := missing_for_masking(tokenizer):
            raise UserError(
                f"tokenizer {directory}: it has no "
                f"{' and no '.join(f'{name}_token' for name in missing)}, which the "
                "masked objective needs; prepare the corpus with --tokenizer wordpiece:SIZE, or a "
                "tokenizer with them"
            )
        firsts, lasts, continuing = _word_marks(
            json.loads(tokenizer.backend_tokenizer.to_str()), directory
        )
        # Ids without a token (gaps, a padded vocabulary) stay special: they are never drawn as a
        # replacement.
        special = np.ones(size, bool)
        begins = np.ones(size, bool)
        ends = np.zeros(size, bool)
        special_ids = set(tokenizer.all_special_ids)
        for token, i in tokenizer.get_vocab().items():
            if i not in special_ids:
                # Without a prefix for continuing tokens, a token continues a word unless it begins
                # with a mark of a first one.
                continues = not continuing or token.startswith(continuing)
                special[i], begins[i], ends[i] = (
                    False,
                    token.startswith(firsts) or not continues,
                    token.endswith(lasts),
                )
        mask = tokenizer.mask_token_id
        separator = tokenizer.sep_token_id
        classifier = tokenizer.cls_token_id
        # Any id does: the attention mask hides padding, and it has no label.
        padding = 0 if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        return cls(
            mask, separator, classifier, padding, tokenizer.eos_token_id, special, begins, ends
        )

    def sha256(self) -> str:
        """Return a hash of the vocabulary."""
        # Not the tokens' texts: masks depend only on these ids and marks.
        ids = (self.mask, self.separator, self.classifier, self.padding, self.eos)
        parts = (
            repr(ids).encode(),
            *(np.packbits(part).tobytes() for part in (self.special, self.begins, self.ends)),
        )
        return hashlib.sha256(b"".join(parts)).hexdigest()

    def word_begins(self, row: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return which tokens of a row begin a word, bool [s].

        Its first token does, too, and the first one after a special token.
        """
        begins = self.begins[row]
        # A row may begin inside a word, because windows are cut by tokens.
        begins[:1] = True
        begins[1:] |= self.ends[row[:-1]] | self.special[row[:-1]]
        return begins & ~self.special[row]


def _word_marks(
    serialized: dict[str, Any], directory: Path
) -> tuple[tuple[str, ...], tuple[str, ...], str]:
    """Return the marks of words.

    They are the prefixes of first tokens, the suffixes of last tokens, and the prefix of continuing
    tokens.

    If the third is "", a token without one of the first prefixes continues a word.
    """
    model = serialized["model"]
    continuing, last = (
        model.get(key) or "" for key in ("continuing_subword_prefix", "end_of_word_suffix")
    )
    if continuing or last:
        return (), (last,) if last else (), continuing
    pipeline = json.dumps(
        [serialized[key] for key in ("normalizer", "pre_tokenizer", "decoder")], ensure_ascii=False
    )
    if '"ByteLevel"' in pipeline:
        return (_SPACE, *_BREAKS), tuple(_BREAKS), ""
    if _METASPACE in pipeline:
        breaks = ("\n", "\t", "<0x0A>", "<0x09>")
        return (_METASPACE, *breaks), breaks, ""
    raise UserError(
        f"tokenizer {directory}: it does not mark where words begin (as WordPiece's ##, byte-level "
        "BPE's Ġ or "
        "SentencePiece's ▁ do), which the masked objective needs; use another tokenizer"
    )
