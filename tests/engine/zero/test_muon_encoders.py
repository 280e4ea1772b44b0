"""Muon on encoders under TP, SP and ZeRO against `torch.optim.Muon` and `torch.optim.AdamW` on
transformers' classes, in one process: padded rows, masked tokens and the order of segments.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from tests.support.compare import check_close
from tests.support.encoders import MODEL_TYPES, encoder, fields_of, rows_for
from tests.support.native import native_tensors
from tests.support.pools import Pools
from tests.support.torch_optimizers import ROWS, STEPS, TorchOptimizers, engine_of
from tests.tiers import THOROUGH, in_tiers
from zero_tp.data.batch import MaskedBatch
from zero_tp.parallel.topology import Topology

PARAMS: dict[str, Any] = {"lr": 1e-2, "adamw": {"lr": 4e-3, "betas": (0.8, 0.9), "eps": 1e-3}}


def own_pieces(rows: dict[str, Tensor], topology: Topology) -> list[MaskedBatch]:
    """The two micro-batches of this replica."""
    count = 2 * topology.data
    pieces = [
        MaskedBatch({name: value.chunk(count)[number] for name, value in rows.items()})
        for number in range(count)
    ]
    return pieces[2 * topology.data_rank : 2 * topology.data_rank + 2]


def compared(model_type: str, tensor: int, stage: int, clip: float) -> list[float]:
    """Losses and weights after five steps of both; the losses."""
    fields = fields_of(model_type, num_hidden_layers=2)
    reference = encoder(fields, 1)
    engine = engine_of(reference, tensor, tensor > 1, stage, PARAMS, clip)
    optimizers = TorchOptimizers(reference, PARAMS, clip)
    losses = []
    for step in range(STEPS):
        rows = rows_for(fields, step, ROWS)
        losses.append(engine.train_step(own_pieces(rows, engine.topology)))
        reference.zero_grad()
        loss = reference(**rows).loss
        loss.backward()
        optimizers.step()
        assert losses[-1] == pytest.approx(loss.item(), rel=1e-5)
    theirs = {name: value.detach() for name, value in reference.named_parameters()}
    check_close(dict(native_tensors(engine.model)), theirs)
    return losses


@THOROUGH
@pytest.mark.parametrize(
    ("model_type", "tensor", "stage"),
    in_tiers(
        [(name, *grid) for name in MODEL_TYPES for grid in ((1, 3), (2, 1), (2, 2), (4, 0))],
        [("bert", 2, 1)],
    ),
)
@pytest.mark.parametrize("clip", in_tiers([0.0, 0.3], [0.3]))
def test_muon_on_encoders_equals_torchs(
    ranks: Pools, model_type: str, tensor: int, stage: int, clip: float
) -> None:
    found = ranks(4).run(compared, model_type, tensor, stage, clip)
    assert found == found[:1] * 4
