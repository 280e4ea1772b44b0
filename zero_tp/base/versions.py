"""The versions of libraries that checkpoints and results record."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version


def versions(packages: Sequence[str] = ("torch", "deepspeed", "transformers")) -> dict[str, str]:
    """Return the versions of installed packages."""
    installed = {}
    for package in packages:
        with contextlib.suppress(PackageNotFoundError):
            installed[package] = version(package)
    return installed
