"""A rank's part of one parameter: a run of its flattened TP shard, and its place in a master."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from zero_tp.parallel.spans import Span


@dataclass(frozen=True)
class Fragment:
    """This rank's consecutive elements of one parameter's flattened TP shard.

    Attributes:
        name: the parameter's.
        span: the elements' place in the flattened shard (the whole) and in `flat` (local).
        flat: the optimizer's own fp32 tensor, the key of its states.
    """

    name: str
    span: Span
    flat: Tensor

    def view(self, tensor: Tensor) -> Tensor:
        """Return the fragment's elements of `flat`, or of a state of that length. [span.length]"""
        return tensor.detach().view(-1)[self.span.local]

    @property
    def master(self) -> Tensor:
        """Return a view of its fp32 master. [span.length]"""
        return self.view(self.flat)
