"""Run a function of the planner in a process of its own, beside a run that has an accelerator.

A dry run for an accelerator registers a simulated device, which torch then takes for the process's accelerator
(`at::getAccelerator` prefers PrivateUse1), and replaces functions of torch meanwhile.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

SECONDS = 300.0
WITHOUT_DEVICES = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}


def run_isolated(function: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """Return what `function` of a module returns in a new Python process that sees no devices.

    Raises:
        Exception: what the function raised.
        multiprocessing.TimeoutError: it took more than SECONDS.
    """
    with multiprocessing.get_context("spawn").Pool(1, initializer=_hide_devices) as pool:
        return pool.apply_async(function, arguments, options).get(SECONDS)


def _hide_devices() -> None:
    os.environ.update(WITHOUT_DEVICES)
