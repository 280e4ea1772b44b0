"""Which devices the tests see: none, unless `-m` selects those that need CUDA."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence

from _pytest.mark.expression import Expression


def device_variables(arguments: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return what the environment of the tests, and of all that they start, needs before anything
    imports torch.

    Args:
        arguments: pytest's own, without the program's name.
    """
    if "PYTEST_XDIST_WORKER" in environment:  # has the variables of the process that started it
        return {}
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-m", default="not cuda")  # setup.cfg's own is no such selection
    selected = parser.parse_known_args(
        [*shlex.split(environment.get("PYTEST_ADDOPTS", "")), *arguments]
    )[0].m
    if not selected or Expression.compile(selected).evaluate(_is_cuda):
        # Deterministic products, which torch asks for once CUDA has begun.
        return {"CUBLAS_WORKSPACE_CONFIG": environment.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8")}
    return {"CUDA_VISIBLE_DEVICES": ""}


def _is_cuda(marker: str, /, **_: object) -> bool:
    return marker == "cuda"
