"""Task files of lm-eval and a small model, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.lm_eval_tasks import write_tasks
from tests.support.tiny_models import tiny_gpt2


@pytest.fixture(scope="session")
def tasks(tmp_path_factory: pytest.TempPathFactory, shared_file: Callable[[str], Path]) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"), shared_file)


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gpt2(
        tmp_path_factory.mktemp("models") / "tiny", ["some words of a text, and more of them"] * 3
    )


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory, shared_file: Callable[[str], Path]) -> Path:
    """A GPT-2 with a vocabulary of 503."""
    text = shared_file("data/lambada_openai_first1000.jsonl").read_text()[:20_000]
    return tiny_gpt2(tmp_path_factory.mktemp("models") / "tiny", [text])
