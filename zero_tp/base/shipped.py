"""Find shipped files: configs, the corpus, and scripts for launchers."""

from __future__ import annotations

from pathlib import Path

import zero_tp

CONFIGS = "ds_configs"
PACKED = "_shipped"
"""The directory of shipped files in a wheel (setup.py). In a checkout they are in the
repository's root.
"""


def shipped_path(name: str) -> Path:
    """Return the path of a file of the repository, in a wheel or a checkout. It need not exist."""
    package = Path(zero_tp.__file__).resolve().parent
    packed = package / PACKED
    return (packed if packed.is_dir() else package.parent) / name


def config_names() -> list[str]:
    """Return the names of the shipped configs; those of papers start with `papers/`."""
    folder = shipped_path(CONFIGS)
    return sorted(str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.json"))


def find_config(name: str | Path) -> Path:
    """Return the shipped config called `name`, or `name` if it is a file or unknown.

    `papers/` may be left out.
    """
    file = Path(name)
    named = [known for known in config_names() if str(name) in (known, Path(known).name)]
    return shipped_path(CONFIGS) / f"{named[0]}.json" if named and not file.is_file() else file
