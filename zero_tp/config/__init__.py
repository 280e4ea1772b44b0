"""RunConfig is the typed, validated view of one JSON file."""

from zero_tp.config.run_config import RunConfig, check_accelerator
from zero_tp.errors import ConfigError

__all__ = ["ConfigError", "RunConfig", "check_accelerator"]
