"""Compare a config that the user gives with what the trainer recorded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from transformers import PretrainedConfig

from zero_tp.base.errors import UserError
from zero_tp.model.architectures import architecture_of
from zero_tp.model.architectures.spec import Rotary, TransformerSpec

CPU = torch.device("cpu")


def choose_config(
    config: PretrainedConfig | None, derive: Callable[[], PretrainedConfig], path: Path
) -> tuple[PretrainedConfig, tuple[str, ...]]:
    """Return the given config, else that which the trainer's own settings describe.

    Args:
        derive: returns the latter.
        path: of those settings.

    Returns:
        The config, and a line for the user if no family has the settings, so that a given config
        was not compared with them.

    Raises:
        UserError: both compute something else with weights of the same shapes.
    """
    if config is None:
        return derive(), ()
    try:
        recorded = derive()
    except UserError as error:
        reason = str(error).partition("; ")[0]
        return config, (f"the config is not compared with recorded settings: {reason}",)
    specs = [architecture_of(one).spec(one) for one in (recorded, config)]
    for name, theirs, ours in differences(*specs):
        raise UserError(
            f"{path}: recorded {name} {theirs}, and the config that was given has {ours}; give the "
            "--config that the model was trained with"
        )
    return config, ()


def differences(
    recorded: TransformerSpec, other: TransformerSpec
) -> Iterator[tuple[str, object, object]]:
    """Yield (name, recorded value, other value) of what models of the same shapes differ in."""
    for name, theirs, ours in (
        ("attention heads", recorded.heads, other.heads),
        ("key heads", recorded.kv_heads, other.kv_heads),
        ("features of a head", recorded.head_size, other.head_size),
        ("positions", recorded.position, other.position),
    ):
        if theirs != ours:
            yield name, theirs, ours
    if not math.isclose(recorded.norm_epsilon, other.norm_epsilon):
        yield "epsilon of norms", recorded.norm_epsilon, other.norm_epsilon
    points = torch.linspace(-4, 4, 33)
    if not torch.allclose(recorded.activation(points), other.activation(points), atol=1e-5):
        yield "activation", recorded.activation, other.activation
    longest = recorded.positions
    windows, other_windows = (
        [min(window or longest, longest) for window in spec.windows] for spec in (recorded, other)
    )
    if windows != other_windows:
        yield "windows of attention", windows, other_windows
    for layer, rotaries in enumerate(zip(recorded.rotaries, other.rotaries, strict=False)):
        turns, other_turns = (_turns(rotary, longest) for rotary in rotaries)
        if not torch.equal(turns, other_turns):
            name = f"rotary frequencies of layer {layer}"
            yield name, _described(turns), _described(other_turns)
            break
    if recorded.experts is not None and other.experts is not None:
        for name in ("per_token", "normalised", "router", "scale"):
            theirs, ours = (getattr(spec.experts, name) for spec in (recorded, other))
            if theirs != ours:
                yield f"experts' {name}", theirs, ours


def _turns(rotary: Rotary | None, length: int) -> torch.Tensor:
    """Return the radians per position of each pair of features; empty if none rotates."""
    if rotary is None:
        return torch.empty(0)
    frequencies, scale = rotary.frequencies(length, CPU)
    return frequencies * scale


def _described(turns: torch.Tensor) -> str:
    return f"1 to {float(turns[-1]):.3g}, {len(turns)} pairs," if len(turns) else "none"
