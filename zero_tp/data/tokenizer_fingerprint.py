"""The identity of a tokenizer: what decides its ids, and the ids of some texts.

Corpora, checkpoints and exports record it. Wherever two of them meet, it shows that the same text
has the same ids.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_tp.base.errors import UserError, shown
from zero_tp.base.strict_json import InvalidJson, parse_object
from zero_tp.base.validation import ConfigModel, validate
from zero_tp.base.weight_files import safetensors_metadata

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FINGERPRINT = "zero_tp.tokenizer_fingerprint"
"""The key of an export's fingerprint in the metadata of its safetensors files."""
PROBES = (
    "It's 2024: we'll pay 12,345.67 €, 8 of 100 don't.",
    "  two  spaces,\ta tab\n\n  new lines \r\n   ",
    "camelCase snake_case HTTPServer2 x=f(a[0])+{'k': \"v\"}; // #!",
    "I'M HERE, THEY'D GO; \u2019tis",
    "Größe façade \ufb01ne cafe\u0301 \uff21\uff22\uff23①²",
    "Привет, мир. Γειά σου",
    "你好,世界。こんにちは 안녕하세요",
    "नमस्ते दुनिया ภาษาไทย مرحبا שלום",
    "\U0001f44b\U0001f3fd \U0001f469\u200d\U0001f4bb na\u00efve\u200bzero\ufeff",
    "Four score and seven years ago our fathers brought forth",
    "<s> [CLS] <|endoftext|> </s> <|im_start|> [INST] <think>",
    "a" * 40 + " " + "0" * 12,
)
"""Texts that tokenizers of different makes split differently."""
_ADDED_PROBES = 2  # of the first added tokens, and as many of the last
_NOT_ENCODABLE = "not encodable"
_SHOWN_TEXTS = 2
_SHOWN_IDS = 6


class TokenizerFingerprint(ConfigModel):
    """What decides a tokenizer's ids.

    Chat template, padding, truncation and tokens around a text are not part of it.

    Attributes:
        parts: the SHA-256 of normalizer, pre-tokenizer, model, vocabulary and added tokens.
        probes: text → its ids, joined by spaces. They describe a difference if the other tokenizer
            is gone.
        versions: of the libraries that serialised the parts.
    """

    parts: dict[str, str]
    probes: dict[str, str]
    versions: dict[str, str]

    @classmethod
    def of(
        cls, tokenizer: PreTrainedTokenizerBase, texts: Iterable[str] = ()
    ) -> TokenizerFingerprint:
        """Return the fingerprint of a tokenizer.

        Args:
            texts: further texts for `probes`, such as those of a fingerprint that this one is
                compared with.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:  # a tokenizer in Python has no serialised form
            parts: dict[str, Any] = {
                "model": type(tokenizer).__name__,
                "vocabulary": tokenizer.get_vocab(),
            }
            added = list(tokenizer.added_tokens_encoder)
        else:
            parts = _parts_of(json.loads(backend.to_str()))
            added = [token["content"] for token in parts["added_tokens"]]
        ends = (*added[:_ADDED_PROBES], *added[-_ADDED_PROBES:])
        probes = dict.fromkeys((*PROBES, *(f"a {token} b" for token in ends), *texts))
        return cls(
            parts={name: _sha256(part) for name, part in parts.items()},
            probes={text: probe_ids(tokenizer, text) for text in probes},
            versions={name: version(name) for name in ("tokenizers", "transformers")},
        )

    def difference(self, other: TokenizerFingerprint, here: str, there: str) -> str:
        """Describe with up to two texts how another tokenizer differs.

        "" if it gives the same ids.

        Other versions of the libraries may serialise an equal tokenizer differently. Then the
        vocabulary and the ids of all probes decide. A probe with an added token that only one of
        the two has is a difference, too.

        Args:
            here, there: phrases for this tokenizer and the other one.
        """
        names = [
            name
            for name in self.parts | other.parts
            if self.parts.get(name) != other.parts.get(name)
        ]
        if not names:
            return ""
        common = [text for text in self.probes if text in other.probes]
        # Different ids of any text are a difference, whatever the parts say.
        texts = [text for text in common if self.probes[text] != other.probes[text]]
        if texts:
            return ", and ".join(
                describe_difference(text, self.probes[text], here, other.probes[text], there)
                for text in texts[:_SHOWN_TEXTS]
            )
        same_added_tokens = "added_tokens" not in names or self.probes.keys() == other.probes.keys()
        if self.versions != other.versions and "vocabulary" not in names and same_added_tokens:
            return ""
        return (
            f"its {' and '.join(names)} differ, though {len(common)} example texts have the same "
            "ids"
        )

    def require_same(
        self, other: TokenizerFingerprint, name: str, other_name: str, remedy: str
    ) -> None:
        """Check that another tokenizer gives the same ids. UserError: it does not, with two texts.

        Args:
            name, other_name: phrases for the two tokenizers, such as "the tokenizer of data/train".
        """
        if problem := self.difference(other, "with the former", "with the latter"):
            raise UserError(f"{name} differs from {other_name}: {problem}; {remedy}")

    def check(self, tokenizer: PreTrainedTokenizerBase, name: str, owner: str, remedy: str) -> None:
        """Check that a tokenizer gives the ids of this fingerprint, as `require_same` does.

        Args:
            name: a phrase for the tokenizer.
            owner: a phrase for the tokenizer of this fingerprint.
        """
        # With this fingerprint's texts, so that all of its probes are common.
        type(self).of(tokenizer, self.probes).require_same(self, name, owner, remedy)


def read_fingerprint(weights: Path) -> TokenizerFingerprint | None:
    """Return the fingerprint of an export's tokenizer; None: the files record none.

    Args:
        weights: a file of weights, or an index of several.
    """
    recorded = safetensors_metadata(weights).get(FINGERPRINT)
    if recorded is None:
        return None
    try:
        return validate(
            TokenizerFingerprint, parse_object(recorded.encode()), f"{weights}: {FINGERPRINT}"
        )
    except InvalidJson as error:
        raise UserError(
            f"{weights}: {FINGERPRINT} in its metadata is {error}; export the model again"
        ) from error


def _parts_of(serialized: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of a serialised tokenizer that decide ids.

    They are without defaults and in one form.
    """
    model = dict(serialized["model"])
    vocabulary = model.pop("vocab", None)
    merges = model.pop("merges", None)
    # Older versions of tokenizers write a merge as one string.
    pairs = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in merges or ()]
    return {
        "normalizer": _without_defaults(serialized.get("normalizer")),
        "pre_tokenizer": _without_defaults(serialized.get("pre_tokenizer")),
        "model": [_without_defaults(model), pairs],
        "vocabulary": vocabulary,
        "added_tokens": [
            _without_defaults(token)
            for token in sorted(serialized["added_tokens"], key=lambda token: token["id"])
        ],
    }


def _without_defaults(value: Any) -> Any:
    """Drop null, false and empty values: a later version of the library may write more of them."""
    if isinstance(value, list):
        return [_without_defaults(item) for item in value]
    if not isinstance(value, dict):
        return value
    items = ((key, _without_defaults(item)) for key, item in value.items())
    return {
        key: item
        for key, item in items
        if item is not None and item is not False and item not in ("", [], {})
    }


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def probe_ids(tokenizer: PreTrainedTokenizerBase, text: str, *, around: bool = False) -> str:
    """Return the ids of a text, joined by spaces, or a phrase if the tokenizer can't encode it.

    Args:
        around: with the tokens around the text.
    """
    try:
        return " ".join(map(str, tokenizer.encode(text, add_special_tokens=around, verbose=False)))
    except (
        Exception
    ):  # tokenizers raises no other type, if a character has no token and there is no unknown token
        return _NOT_ENCODABLE


def describe_difference(text: str, ids: str, here: str, other_ids: str, there: str) -> str:
    """Describe two values of `probe_ids` for a text; see `TokenizerFingerprint.difference`."""
    return f"{shown(text)} is {_describe(ids)} {here} but {_describe(other_ids)} {there}"


def _describe(ids: str) -> str:
    if not ids or ids == _NOT_ENCODABLE:
        return ids or "no tokens"
    numbers = ids.split()
    more = " …" if len(numbers) > _SHOWN_IDS else ""
    return f"{len(numbers)} tokens ({' '.join(numbers[:_SHOWN_IDS])}{more})"
