"""RunConfig is the typed, validated view of one JSON file."""

from zero_tp.base.errors import ConfigError
from zero_tp.run.config.run_config import RunConfig

__all__ = ["ConfigError", "RunConfig"]
