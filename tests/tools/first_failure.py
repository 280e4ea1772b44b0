"""A pytest plugin for tests/tools/mutations.py: the first failure as JSON in the file that ZERO_TP_FIRST_FAILURE names.

pytest's own reports cut long messages, and what a rank raised stands at the end of one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

import zero_tp
from tests.support.pools import RankError

VARIABLE = "ZERO_TP_FIRST_FAILURE"


def pytest_configure() -> None:
    _write({"library": zero_tp.__file__, "failure": None})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, Any, Any]:
    report = yield
    if report.failed and call.excinfo is not None:
        error = call.excinfo.value
        kind, message = type(error).__name__, str(error)
        if isinstance(error, RankError) and error.kind is not None:
            kind, message = error.kind, error.message or _assertion(str(error))
        failure = {"test": item.nodeid, "phase": report.when, "kind": kind, "message": message}
        _write({"library": zero_tp.__file__, "failure": failure})
    return report


def _assertion(text: str) -> str:
    """The line of the rank's traceback that asserts; on ranks pytest doesn't write out what was compared."""
    traceback = text.partition("\n--- printed by rank")[0]
    return next((line.strip() for line in reversed(traceback.splitlines()) if line.strip().startswith("assert ")), "")


def _write(report: dict[str, Any]) -> None:
    Path(os.environ[VARIABLE]).write_text(json.dumps(report))
