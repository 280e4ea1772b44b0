"""The config.json of a Hugging Face directory, as it stands there. Imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zero_tp.config.source import read_json
from zero_tp.errors import ConfigError

CONFIG = "config.json"
GIVE = "give a Hugging Face model directory"


def read_config_json(directory: Path, key: str = "") -> dict[str, Any]:
    """
    Args:
        key: what the message starts with where the directory isn't a model's; by default the directory.

    Raises:
        ConfigError: no such directory, no config.json, not an object in JSON, a training run's, or a quantized model's.
    """
    named = f" {directory}" if key else ""
    where = key or str(directory)
    if not directory.is_dir():
        raise ConfigError(where, f"no directory{named}", GIVE)
    if not (directory / CONFIG).is_file():
        raise ConfigError(where, f"no {CONFIG} in{named or ' it'}", GIVE)
    raw = read_json(directory / CONFIG)
    if "zero_tp" in raw:
        remedy = f"export it with launch/convert.py to-hf {directory} --output DIR, and give that DIR"
        raise ConfigError(where, f"{directory} is a training run", remedy)
    if raw.get("quantization_config") is not None:
        raise ConfigError(f"{directory / CONFIG}: quantization_config", "quantized weights", "give whole ones")
    return raw
