"""A Trainer's tokenizer opens with its ids beside the model that it saves."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.support.tiny_configs import tiny_config
from tests.support.tokenizers import MAKES, OTHER_SCRIPTS, VOCABULARY
from zero_tp.data import tokenizer_files
from zero_tp.tools.trainer import ZeroTPTrainer


@pytest.mark.parametrize("attribute", ["processing_class", "data_collator"])
def test_a_saved_tokenizer_opens_as_it_was(
    tmp_path: Path, attribute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers' `_save` leaves the directory."""
    tokenizer, config = MAKES["smollm"](), tiny_config("qwen2", VOCABULARY)
    holders: dict[str, Any] = {"processing_class": None, "data_collator": SimpleNamespace()}
    holders |= {
        attribute: tokenizer
        if attribute == "processing_class"
        else SimpleNamespace(tokenizer=tokenizer)
    }
    trainer: Any = SimpleNamespace(model=SimpleNamespace(config=config), **holders)
    config.save_pretrained(tmp_path)
    tokenizer.save_pretrained(str(tmp_path))
    alone = tokenizer.encode(OTHER_SCRIPTS)
    assert AutoTokenizer.from_pretrained(str(tmp_path)).encode(OTHER_SCRIPTS) != alone, (
        "transformers' own fault"
    )
    ZeroTPTrainer._match_tokenizer(trainer, tmp_path)
    assert AutoTokenizer.from_pretrained(str(tmp_path)).encode(OTHER_SCRIPTS) == alone
    monkeypatch.setattr(tokenizer_files, "_FORMS", ())
    tokenizer.save_pretrained(str(tmp_path))
    with pytest.warns(
        UserWarning,
        match="written without a tokenizer, because transformers opens it with other ids",
    ):
        ZeroTPTrainer._match_tokenizer(trainer, tmp_path)
    assert not (tmp_path / "tokenizer.json").exists()
