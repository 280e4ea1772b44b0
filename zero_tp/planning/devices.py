"""The device of a name, or of a person's own JSON file."""

from __future__ import annotations

from pathlib import Path

from zero_tp.devices import Device, named_device
from zero_tp.files import read_json
from zero_tp.validation import validate


def device(name: str, ranks: int = 1) -> Device:
    """Return the device of a name in `zero_tp.devices.NAMES`, or that of a JSON file.

    Args:
        ranks: of the run; CPU ranks share one machine's memory and cores.

    Raises:
        ConfigError: an unknown name, or a file that does not describe a device.
    """
    if name.endswith(".json"):
        return validate(Device, read_json(Path(name)), name)
    return named_device(name, ranks)
