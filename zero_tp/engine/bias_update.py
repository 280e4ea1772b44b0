"""Balance experts without a loss: move the biases of routers after each step (arXiv 2408.15664,
algorithm 1).

The counts are of the step's whole global batch. Of 3 experts, that 8 tokens chose 2 each:

    choices         rank 0: 4 1 3    rank 1: 4 0 4    all: 8 1 7      mean 16 / 3
    bias moves by   -rate  +rate  -rate
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from zero_tp.base.errors import UserError, shown
from zero_tp.engine.zero.zero_engine import ZeroEngine
from zero_tp.model.moe import CorrectedRouter
from zero_tp.model.parallel_model import ParallelModel
from zero_tp.parallel.collectives import all_reduce
from zero_tp.parallel.topology import Topology


class BiasUpdate:
    """Counts which experts the tokens of a step choose, and moves each layer's correction bias by
    rate · sign(mean - count).

    All ranks hold the same biases, and change them by the same bits.

    Args:
        rate: 0 counts and moves nothing, as in transformers' classes.

    Raises:
        UserError: a rate, and a model without such biases.
    """

    def __init__(self, model: ParallelModel, topology: Topology, rate: float):
        if rate and not model.spec.has_correction_bias:
            raise UserError(
                f"router_bias_update_rate: {shown(rate)}, but no router of a "
                f"{model.config.model_type} has a bias; leave it out"
            )
        self.model = model
        self.topology = topology
        self.rate = rate

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the choices of the forwards in this block: those of training, each once."""
        self.model.counts_choices = self.rate > 0
        try:
            yield
        finally:
            self.model.counts_choices = False

    @torch.no_grad()
    def apply(self, zero: ZeroEngine) -> None:
        """End a step: move the biases, unless the step was skipped, and start the next count.

        One all-reduce over DP of the counts of all layers. TP ranks have counted the same tokens.
        """
        if not self.rate:
            return
        routers = [item for item in self.model.modules() if isinstance(item, CorrectedRouter)]
        choices = all_reduce(
            torch.stack([router.choices for router in routers]), self.topology.data_group
        )
        is_skipped = zero.norm_and_skipped()[1] or bool(zero.veto.spike)
        # In integers: the mean of E counts has no exact binary fraction.
        directions = (choices.sum(-1, keepdim=True) - choices.shape[-1] * choices).sign()
        for router, direction in zip(routers, directions, strict=True):
            router.choices.zero_()
            if not is_skipped:
                router.correction_bias.add_(direction, alpha=self.rate)
