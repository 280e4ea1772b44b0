"""`workplace`: where launched commands run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launched import furnish


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a prepared corpus and a small config; its runs stay for the tests after."""
    return furnish(tmp_path_factory.mktemp("workplace"))
