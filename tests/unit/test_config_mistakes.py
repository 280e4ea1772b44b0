"""Every mistake of the table ends as one line that names the key and the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mistakes import MISTAKES, WORLD_SIZE, Mistake, written
from zero_tp.config import ConfigError, RunConfig
from zero_tp.validation import ConfigErrors


def test_the_config_without_a_mistake_is_right(tmp_path: Path) -> None:
    assert RunConfig.load(written(tmp_path), world_size=WORLD_SIZE).global_batch == 16


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_one_line_names_key_and_remedy(mistake: Mistake, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig.load(written(tmp_path, mistake.config()), world_size=WORLD_SIZE)
    assert not isinstance(caught.value, ConfigErrors) or len(caught.value.errors) == 1
    line = str(caught.value)
    assert len(line.splitlines()) == 1
    assert line.startswith(mistake.key + ": ")
    assert all(words in line for words in mistake.words), line
    assert len(line) < 400
