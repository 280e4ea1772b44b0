"""A checkpoint as the source of a new model's weights: its fp32 masters, cut for any TP size."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from zero_tp.checkpoint.reader import CheckpointReader, Described
from zero_tp.errors import UserError
from zero_tp.parallel.layout import Layout
from zero_tp.parallel.parameter import Init
from zero_tp.topology import Topology
from zero_tp.zero.states import MASTER


class CheckpointSource:
    """A `WeightSource`: each rank reads what it holds, when the parameter is made.

    Raises:
        UserError: the checkpoint lacks a parameter, or has it in another shape.
    """

    def __init__(self, reader: CheckpointReader):
        self.reader = reader

    def fill(
        self, local: Tensor, name: str, whole: Sequence[int], layout: Layout, init: Init, topology: Topology
    ) -> None:
        wanted = Described(layout, tuple(whole))
        saved = self.reader.parameters.get(name)
        if saved is None or saved.shape != wanted.shape:
            there = "no such parameter" if saved is None else f"{saved.shape}"
            raise UserError(f"{self.reader.directory}: {name}: expected shape {wanted.shape}, found {there}")
        piece = self.reader.piece(name, MASTER, wanted, topology.tensor_rank, topology.tensor)
        local.copy_(piece.view(local.shape))
