"""A layout describes how one parameter is distributed over the TP group.

The layer that makes a parameter sets its layout. Initialisation, gradient hooks, the marks that
DeepSpeed's norm needs, import, export, resharding and memory estimates all read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import ClassVar, Literal

from torch import Tensor, nn

from zero_tp.base.errors import UserError
from zero_tp.parallel.spans import Span, Spans, blocks, zero_padding
from zero_tp.parallel.topology import Topology


@dataclass(frozen=True)
class Sharded:
    """Split along `dim`, each of the `parts` by itself.

    `parts` are the whole sizes of fused pieces: Q, K and V, or gate and up. With parts (4, 2, 2),
    heads of Q, K and V, TP 2 gives each rank a half of every part:

        rank 0    q0 q1 k0 v0      one cut through the middle would give it q0 q1 q2 q3,
        rank 1    q2 q3 k1 v1      queries without their keys and values

    `padded` parts (the vocabulary) need not divide by the TP size: each rank holds ⌈part / t⌉, and
    the last ranks' surplus is zeros.

    The `experts` of dimension 0 are divided over so many expert ranks, too. Of 4 experts, with 2:

        expert rank 0    experts 0 and 1, of each this TP rank's piece
        expert rank 1    experts 2 and 3
    """

    dim: int
    parts: tuple[int, ...]
    padded: bool = False
    experts: int = 1

    def piece_sizes(self, size: int) -> tuple[int, ...]:
        """Return the length of each part on one of `size` ranks.

        Raises:
            ValueError: a part that is not padded does not divide.
        """
        for part in self.parts:
            if part % size and not self.padded:
                raise ValueError(f"{part} does not divide by tensor parallel size {size}")
        return tuple(-(-part // size) for part in self.parts)

    def spans(
        self, whole: Sequence[int], rank: int, size: int, expert_rank: int = 0
    ) -> tuple[Spans, ...]:
        """Return the map between the whole tensor and this rank's shard, along each dimension."""
        if whole[self.dim] != sum(self.parts):
            problem = f"not the sum of its parts {self.parts}"
            raise ValueError(f"dimension {self.dim} is {whole[self.dim]}, {problem}")
        spans = [Spans.identity(length) for length in whole]
        if self.experts > 1:
            count = whole[0] // self.experts
            spans[0] = Spans((Span.block(expert_rank, count, whole[0]),), whole[0], count)
        spans[self.dim] = Spans.concatenate(
            Spans((Span.block(rank, length, part),), part, length)
            for part, length in zip(self.parts, self.piece_sizes(size), strict=True)
        )
        return tuple(spans)

    def shard(self, whole: Tensor, rank: int, size: int, expert_rank: int = 0) -> Tensor:
        """Return this rank's piece of the whole tensor, zero-padded where `padded`."""
        spans = self.spans(whole.shape, rank, size, expert_rank)
        shard = whole.new_empty(self.local_shape(whole.shape, size))
        zero_padding(shard, spans)
        for whole_index, local_index in blocks(spans):
            shard[local_index] = whole[whole_index]
        return shard

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """Return the whole tensor from every rank's piece, in TP order for each expert rank;
        padding is dropped.
        """
        shape = list(shards[0].shape)
        shape[0] *= self.experts
        # Of the parts, not of the shards, which may be padded.
        shape[self.dim] = sum(self.parts)
        whole = shards[0].new_empty(shape)
        size = len(shards) // self.experts
        for number, shard in enumerate(shards):
            expert_rank, rank = divmod(number, size)
            for whole_index, local_index in blocks(self.spans(shape, rank, size, expert_rank)):
                whole[whole_index] = shard[local_index]
        return whole

    def local_shape(self, whole: Sequence[int], size: int) -> tuple[int, ...]:
        shape = list(whole)
        shape[0] //= self.experts
        shape[self.dim] = sum(self.piece_sizes(size))
        return tuple(shape)


@dataclass(frozen=True)
class Replicated:
    """The same on every TP rank.

    `identical`: each rank computes the whole gradient. `partial`: each computes the part of its
    sequence shard or its heads, and a GradientSum adds the parts over TP.

        a norm without SP     both ranks see tokens 0 to 7: each gradient is whole (identical)
        a norm under SP       rank 0 sees tokens 0 to 3, rank 1 4 to 7: a part each (partial)
    """

    gradient: Literal["identical", "partial"] = "identical"

    dim: ClassVar[int] = 0  # SeededInit draws blocks of rows along it
    experts: ClassVar[int] = 1

    def spans(
        self, whole: Sequence[int], rank: int, size: int, expert_rank: int = 0
    ) -> tuple[Spans, ...]:
        return tuple(Spans.identity(length) for length in whole)

    def shard(self, whole: Tensor, rank: int, size: int, expert_rank: int = 0) -> Tensor:
        return whole

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        return shards[0]

    def local_shape(self, whole: Sequence[int], size: int) -> tuple[int, ...]:
        return tuple(whole)


Layout = Sharded | Replicated


def split_vocabulary(size: int) -> Sharded:
    """Return the layout of a weight with one row per token."""
    # Padded, because a vocabulary need not divide: GPT-2's 50,257 tokens are an odd number.
    return Sharded(0, (size,), padded=True)


def vocab_shard_range(size: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return (first, count) of the tokens whose rows rank `rank` of `ranks` holds, without
    padding.
    """
    (length,) = split_vocabulary(size).piece_sizes(ranks)
    span = Span.block(rank, length, size)
    return span.whole_start, span.length


# DeepSpeed's gradient norm counts a parameter with one of these attributes on every TP rank; others
# on rank 0 only.
MARKS = ("tensor_model_parallel", "model_parallel")


def set_layout(
    parameter: Tensor, name: str, layout: Layout, whole_shape: Sequence[int], tensor_size: int
) -> None:
    """Set the parameter's layout, and on a shard the MARKS, without which gradients are clipped
    wrongly.

    Args:
        name: the name with which the parameter was initialised.
    """
    parameter.init_name = name  # type: ignore[attr-defined]
    parameter.tensor_layout = layout  # type: ignore[attr-defined]
    parameter.whole_shape = tuple(whole_shape)  # type: ignore[attr-defined]
    if isinstance(layout, Sharded) and tensor_size > 1:
        for mark in MARKS:
            setattr(parameter, mark, True)


def copy_layout(parameter: Tensor, other: Tensor) -> None:
    """Give `other`, a copy of the parameter, its layout, name and marks. torch copies no
    attributes of a parameter.
    """
    for attribute in ("init_name", "tensor_layout", "whole_shape", *MARKS):
        if hasattr(parameter, attribute):
            setattr(other, attribute, getattr(parameter, attribute))


def layout_of(parameter: Tensor, name: str = "the parameter") -> Layout:
    """Return the parameter's layout. Raises UserError, naming `name`, if it has none."""
    layout: Layout | None = getattr(parameter, "tensor_layout", None)
    if layout is None:
        raise UserError(
            f"{name} has no layout, so its split over TP ranks is unknown; change values of a "
            "parameter in place, or "
            "make it with ParameterMaker"
        )
    return layout


def whole_shape(parameter: Tensor) -> tuple[int, ...]:
    """Return the shape of the whole parameter, without vocabulary padding."""
    shape: tuple[int, ...] = parameter.whole_shape  # type: ignore[attr-defined]
    return shape


def has_layout(tensor: Tensor) -> bool:
    """Return whether it is a part of the weights."""
    return hasattr(tensor, "tensor_layout")


def stored_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, buffer) of those that are a part of the weights: `ParameterMaker.buffer` made
    them. Files and checkpoints have them, gradients and optimizers do not.
    """
    for name, buffer in model.named_buffers():
        if has_layout(buffer):
            yield name, buffer


def stored_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of all that a file of weights has: parameters, then `stored_buffers`."""
    yield from model.named_parameters()
    yield from stored_buffers(model)


def audit(
    model: nn.Module,
    topology: Topology,
    local_shape: Callable[[Tensor], Sequence[int]] = attrgetter("shape"),
) -> None:
    """Check the layout, name, shape, marks and kind of gradient of all parameters, and of the
    buffers that files have.

    Args:
        local_shape: returns the shape of a parameter's TP shard; under ZeRO-3 the parameter itself
            may be empty.
    """
    for name, parameter in stored_tensors(model):
        layout = layout_of(parameter, f"parameter {name}")
        init_name = getattr(parameter, "init_name", None)
        # The maker's name seeds the initial values and finds them in files; checkpoints use the
        # module's. The two have to agree.
        if init_name != name:
            raise ValueError(f"parameter {name}: it was initialised as {init_name}")
        expected = layout.local_shape(whole_shape(parameter), topology.tensor)
        shape = tuple(local_shape(parameter))
        if shape != expected:
            raise ValueError(
                f"parameter {name}: shape {shape}, its layout {layout} gives {expected}"
            )
        for mark in MARKS:
            marked = bool(getattr(parameter, mark, False))
            if marked != (isinstance(layout, Sharded) and topology.tensor > 1):
                raise ValueError(f"parameter {name}: {layout} but {mark}={marked}")
        if isinstance(layout, Replicated) and layout.gradient == "partial" and topology.tensor == 1:
            raise ValueError(f"parameter {name}: a partial gradient without tensor parallelism")
