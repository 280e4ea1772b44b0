"""Where a recompute policy takes hold of a layer; by default backward finds everything kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Span(Protocol):
    """Runs `function(*inputs)`; a policy keeps the inputs only and runs it again in backward."""

    def __call__(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor: ...


class Link(Protocol):
    """Runs `consume(produce(source))`; a policy drops what `produce` gave and makes it again when `consume`'s backward
    wants it."""

    def __call__(
        self, produce: Callable[[Tensor], Tensor], source: Tensor, consume: Callable[[Tensor], Tensor]
    ) -> Tensor: ...


def run(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """The Span that keeps everything."""
    return function(*inputs)


def chain(produce: Callable[[Tensor], Tensor], source: Tensor, consume: Callable[[Tensor], Tensor]) -> Tensor:
    """The Link that keeps everything."""
    return consume(produce(source))


@dataclass
class LayerRegions:
    """The regions of one transformer layer.

    Attributes:
        layer: the whole layer.
        attention_core: scores, softmax, its dropout, attention over V.
        mlp_activation: the MLP's elementwise function, whose output the second weight's gradient needs.
        norm: the norms before attention and MLP, whose outputs the gradients of the weights after them need.
    """

    layer: Span = run
    attention_core: Span = run
    mlp_activation: Link = chain
    norm: Link = chain
