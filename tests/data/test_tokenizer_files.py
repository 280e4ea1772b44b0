"""transformers opens the tokenizer beside any model with the ids that it had alone."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.support.tiny_configs import MODEL_TYPES, tiny_config
from tests.support.tiny_models import speeches
from tests.support.tokenizers import MAKES, OTHER_SCRIPTS, VOCABULARY
from tests.tiers import in_tiers
from zero_tp.base.weight_files import ID_FILES
from zero_tp.data import tokenizer_files
from zero_tp.data.tokenizer_files import copy_tokenizer, match_tokenizer, open_tokenizer
from zero_tp.data.tokenizer_fingerprint import PROBES

PAGE = speeches(1, 2000)[0]
TEXTS = (
    *PROBES,
    OTHER_SCRIPTS,
    PAGE,
    "  12345 \t\n 6 7",
    "<|endoftext|>a</s><s> <|im_start|>b <|begin_of_text|>",
    "",
)
GRID = [(kind, make) for kind in MODEL_TYPES for make in MAKES]
PAIRS = [(kind, list(MAKES)[i % len(MAKES)]) for i, kind in enumerate(MODEL_TYPES)]
FIRST = [pair for pair in GRID if pair in PAIRS or pair[0] == "qwen2"]
NAMED = (None, "LlamaTokenizer", "GPT2TokenizerFast", "Qwen2Tokenizer")
CLASSES = [(make, named) for make in MAKES for named in NAMED]
FIRST_CLASSES = list(zip(("llama_3", "bpe", "deepseek", "smollm"), NAMED, strict=True))


def ids(tokenizer: Any) -> list[list[int]]:
    """The ids of all texts, with and without the tokens around them."""
    return [
        tokenizer.encode(text, add_special_tokens=around)
        for text in TEXTS
        for around in (True, False)
    ]


@pytest.mark.parametrize(("model_type", "make"), in_tiers(GRID, FIRST))
def test_each_model_opens_each_tokenizer_with_its_ids(
    tmp_path: Path, model_type: str, make: str
) -> None:
    tokenizer: Any = MAKES[make]()
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    source, export = tmp_path / "tokenizer", tmp_path / "export"
    tokenizer.save_pretrained(str(source))
    tiny_config(model_type, VOCABULARY).save_pretrained(export)
    copy_tokenizer(source, export, 64)
    assert match_tokenizer(export, open_tokenizer(source)) == ""
    opened: Any = AutoTokenizer.from_pretrained(str(export))
    assert ids(opened) == ids(tokenizer)
    assert (opened.get_vocab(), opened.model_max_length) == (tokenizer.get_vocab(), 64)
    assert opened.special_tokens_map == tokenizer.special_tokens_map
    assert opened.chat_template == tokenizer.chat_template
    assert "auto_map" not in (export / "tokenizer_config.json").read_text() and not list(
        export.glob("*.py")
    )


@pytest.mark.parametrize(("make", "named"), in_tiers(CLASSES, FIRST_CLASSES))
def test_a_directory_whose_settings_name_another_class(
    tmp_path: Path, make: str, named: str | None
) -> None:
    """What a corpus is prepared with is that class; an export has to open as it did."""
    source = tmp_path / "published"
    MAKES[make]().save_pretrained(str(source))
    settings = json.loads((source / "tokenizer_config.json").read_text()) | {
        "tokenizer_class": named
    }
    (source / "tokenizer_config.json").write_text(
        json.dumps({k: v for k, v in settings.items() if v is not None})
    )
    expected = ids(AutoTokenizer.from_pretrained(str(source)))
    for model_type in random.Random(f"{make} {named}").sample(MODEL_TYPES, 2):
        export = tmp_path / model_type
        tiny_config(model_type, VOCABULARY).save_pretrained(export)
        copy_tokenizer(source, export, None)
        assert match_tokenizer(export, open_tokenizer(source)) == ""
        assert ids(AutoTokenizer.from_pretrained(str(export))) == expected, model_type


def test_a_tokenizer_that_no_settings_open_as_it_was_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_files, "_FORMS", tokenizer_files._FORMS[:1])
    source, export = tmp_path / "tokenizer", tmp_path / "export"
    MAKES["llama_3"]().save_pretrained(str(source))
    tiny_config("qwen2", VOCABULARY).save_pretrained(export)
    copy_tokenizer(source, export, 64)
    problem = match_tokenizer(export, open_tokenizer(source))
    assert (
        "tokens (" in problem
        and "as transformers opens it (Qwen2Tokenizer)" in problem
        and "\n" not in problem
    )
    assert (
        not [name for name in ID_FILES if (export / name).exists()]
        and (export / "config.json").exists()
    )
