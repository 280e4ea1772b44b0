"""Open a Hugging Face directory's tokenizer, and make transformers open it with the same ids."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_tp.base.errors import UserError, first_line
from zero_tp.base.strict_json import read_json
from zero_tp.base.weight_files import ID_FILES, TOKENIZER_FILES, is_regular
from zero_tp.data.tokenizer_fingerprint import (
    PROBES,
    TokenizerFingerprint,
    describe_difference,
    probe_ids,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_ID = 2**24 - 1  # larger ids would need tables of GiB
SETTINGS = "tokenizer_config.json"
GENERIC_CLASS = "PreTrainedTokenizerFast"
"""The class that reads tokenizer.json as it is, by the name that transformers 4 and 5 know."""
_FORMS: tuple[dict[str, Any], ...] = (
    {"tokenizer_class": GENERIC_CLASS},
    # For some model types (qwen2) transformers 5 uses its own class whatever the settings name, and
    # that class builds its own normalizer and pre-tokenizer. With this setting it reads
    # tokenizer.json. There is no code to trust: neither the settings nor the config of the
    # directory names any.
    {"tokenizer_class": GENERIC_CLASS, "trust_remote_code": True},
)
"""Settings by which transformers may open a tokenizer as it was, in the order in which they are
tried.
"""
_DROPPED = ("auto_map", "is_local", "local_files_only")
"""Settings that name code, or say how this process opened the tokenizer."""


def open_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Open the tokenizer of a Hugging Face directory, without running code from it.

    Raises:
        UserError: it can't be read.
    """
    for name in TOKENIZER_FILES:
        is_regular(directory / name)  # raises for a pipe, on which reading would wait
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Neither code of the directory nor the network: the ids must not depend on either.
            tokenizer: PreTrainedTokenizerBase = _opener(directory).from_pretrained(
                str(directory), local_files_only=True, trust_remote_code=False
            )
            tokenizer.decode(tokenizer.encode("a"))  # checks settings that from_pretrained does not
    except (KeyboardInterrupt, SystemExit):
        raise
    # transformers raises anything from KeyError to its own types, and tokenizers panics
    except BaseException as error:
        raise UserError(f"{directory}: its tokenizer can't be read: {first_line(error)}") from error
    if (largest := max(tokenizer.get_vocab().values(), default=0)) > MAX_ID:
        raise UserError(
            f"{directory}: the tokenizer's id {largest:,} is too large; ids go up to {MAX_ID:,}"
        )
    return tokenizer


def _opener(directory: Path) -> Any:
    """Return AutoTokenizer, or the class that it would choose.

    AutoTokenizer imports torch, which takes a second.
    """
    from transformers import PreTrainedTokenizerFast

    if is_regular(directory / SETTINGS) and not (directory / "config.json").exists():
        config = read_json(directory / SETTINGS)
        if (
            config.get("tokenizer_class") == PreTrainedTokenizerFast.__name__
            and "auto_map" not in config
        ):
            return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def copy_tokenizer(source: Path, directory: Path, positions: int | None) -> None:
    """Copy a tokenizer's files and no others.

    Its `model_max_length` becomes the model's number of positions.
    """
    for name in TOKENIZER_FILES:
        if is_regular(source / name):
            shutil.copyfile(source / name, directory / name)
    if positions is not None:
        _write_settings(directory, _read_settings(source) | {"model_max_length": positions})


def match_tokenizer(directory: Path, tokenizer: PreTrainedTokenizerBase) -> str:
    """Make transformers open the tokenizer files of `directory` with the ids of `tokenizer`.

    Files that already do stay. Otherwise they are written again, with settings that make
    transformers read tokenizer.json as it is. If none do, the tokenizer files are removed.

    Returns:
        The difference that remains, or "".
    """
    # The reference, before anything is written.
    fingerprint = TokenizerFingerprint.of(tokenizer)
    problem = _difference(directory, tokenizer, fingerprint)
    if not problem:
        return ""
    old = _read_settings(directory)
    for form in _FORMS if tokenizer.is_fast else ():
        # Files of another form would be read beside the new ones.
        _remove(directory)
        tokenizer.save_pretrained(str(directory))
        settings = {
            name: value
            for name, value in read_json(directory / SETTINGS).items()
            if name not in _DROPPED
        }
        settings |= {name: value for name, value in old.items() if name == "model_max_length"}
        # A special token that is not set must be written as null: a class would add its own.
        _write_settings(
            directory, dict.fromkeys(tokenizer.SPECIAL_TOKENS_ATTRIBUTES) | settings | form
        )
        if not _difference(directory, tokenizer, fingerprint):
            return ""
    _remove(directory)
    return problem


def _difference(
    directory: Path, tokenizer: PreTrainedTokenizerBase, fingerprint: TokenizerFingerprint
) -> str:
    """Describe how transformers opens a directory's tokenizer.

    "" if it opens it as `tokenizer`.
    """
    try:
        opened = open_tokenizer(directory)
    except UserError as error:
        return f"transformers can't open it ({error})"
    there = f"as transformers opens it ({type(opened).__name__})"
    if problem := fingerprint.difference(
        TokenizerFingerprint.of(opened, fingerprint.probes), "here", there
    ):
        return problem
    # The fingerprint is of the text alone; models also depend on the tokens around it, such as
    # [CLS].
    for text in PROBES:
        before, after = (probe_ids(one, text, around=True) for one in (tokenizer, opened))
        if before != after:
            return describe_difference(text, before, "with the tokens around it here", after, there)
    for name in tokenizer.SPECIAL_TOKENS_ATTRIBUTES:
        ours, theirs = (getattr(one, f"{name}_id") for one in (tokenizer, opened))
        if ours != theirs:
            return f"its {name} is {ours} here, {theirs} {there}"
    return ""


def _read_settings(directory: Path) -> dict[str, Any]:
    return read_json(directory / SETTINGS) if is_regular(directory / SETTINGS) else {}


def _write_settings(directory: Path, settings: dict[str, Any]) -> None:
    (directory / SETTINGS).write_text(
        json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def _remove(directory: Path) -> None:
    for name in ID_FILES:
        (directory / name).unlink(missing_ok=True)
