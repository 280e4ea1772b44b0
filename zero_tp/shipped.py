"""Find the shipped files that are not code: configs, the corpus, and the scripts that launchers start."""

from __future__ import annotations

from pathlib import Path

CONFIGS = "ds_configs"
PACKED = "_shipped"
"""The directory of the package in which a wheel has them (setup.py); a checkout has them beside the package."""


def shipped(name: str) -> Path:
    """Return where a file or directory of the repository is, in a wheel or in a checkout. It need not exist."""
    package = Path(__file__).resolve().parent
    packed = package / PACKED
    return (packed if packed.is_dir() else package.parent) / name


def config_names() -> list[str]:
    """Return the names of the configs that are shipped."""
    return sorted(path.stem for path in shipped(CONFIGS).glob("*.json"))


def config_file(name: str | Path) -> Path:
    """Return the file of this path; if there is none, the shipped config of this name."""
    file = Path(name)
    if not file.exists() and str(name) in config_names():
        return shipped(CONFIGS) / f"{name}.json"
    return file
