"""fp16 where the accelerator says that it has no fast kernels for it: torch has slow ones, which compute the same."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock


@contextlib.contextmanager
def fp16_supported() -> Iterator[None]:
    """While the block runs, DeepSpeed is told that this accelerator trains in fp16."""
    from deepspeed.accelerator import get_accelerator

    with mock.patch.object(type(get_accelerator()), "is_fp16_supported", lambda self: True):
        yield
