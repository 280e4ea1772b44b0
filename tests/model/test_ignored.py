"""Micro-batches of which some, or all, have no label, in an engine against transformers' model
on all rows at once.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.compare import grid, norm
from tests.support.decoders import decoder
from tests.support.encoders import encoder
from tests.support.native import Native
from tests.support.pools import Pools
from tests.support.settings import deepspeed_settings
from tests.tiers import in_tiers
from zero_tp.base.constants import IGNORE_INDEX
from zero_tp.base.errors import UserError
from zero_tp.data.batch import MaskedBatch

ROWS, LENGTH, VOCABULARY = 4, 8, 61  # a micro-batch of 1 row, 2 of a rank of 2
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
SIZES |= {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "pad_token_id": None}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def reference_model(kind: str) -> Any:
    if kind == "causal":
        return decoder({**SIZES, "model_type": "llama", "tie_word_embeddings": False}, 1)
    return encoder({**SIZES, **NO_DROPOUT, "model_type": "bert"}, 1)


def rows_of(kind: str, labelled: list[int]) -> dict[str, Tensor]:
    """Rows of which those of `labelled` have two labels, and of an encoder their order; labels
    are shifted already.
    """
    generator = torch.Generator().manual_seed(5)
    tokens, targets = (
        torch.randint(5, VOCABULARY, (ROWS, LENGTH), generator=generator) for _ in range(2)
    )
    labels, order = torch.full_like(tokens, IGNORE_INDEX), torch.full((ROWS,), IGNORE_INDEX)
    labels[labelled, 2:4], order[labelled] = (
        targets[labelled, 2:4],
        torch.tensor(labelled, dtype=torch.long) % 2,
    )
    return {"input_ids": tokens, "labels": labels} | (
        {} if kind == "causal" else {"next_sentence_label": order}
    )


def expected(kind: str, rows: dict[str, Tensor]) -> tuple[float, float]:
    """(loss, gradient norm) of transformers' model on all rows at once."""
    model = reference_model(kind)
    output = model(rows["input_ids"])
    scores = output.logits if kind == "causal" else output.prediction_logits
    loss = F.cross_entropy(scores.flatten(0, 1), rows["labels"].flatten())
    if kind == "masked":
        loss = loss + F.cross_entropy(output.seq_relationship_logits, rows["next_sentence_label"])
    loss.backward()
    return loss.item(), norm(*(each.grad for each in model.parameters() if each.grad is not None))


def steps(
    kind: str, tensor: int, stage: int, labelled: list[list[int]]
) -> tuple[list[tuple[float, float]], float, str]:
    """[(loss, gradient norm)] of steps whose rows have such labels, then the loss of an
    evaluation, and a refusal.
    """
    from zero_tp.engine.engine import TrainingEngine

    topology, reference = grid(tensor, tensor > 1), reference_model(kind)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    settings = deepspeed_settings(
        stage, accumulation=ROWS // topology.data, lr=0.0, zero_optimization=zero
    )
    engine = TrainingEngine.from_dict(
        copy.deepcopy(reference.config), topology, settings, seed=0, source=Native(reference)
    )

    def batches(rows: dict[str, Tensor]) -> list[Any]:
        own = {name: each.chunk(topology.data)[topology.data_rank] for name, each in rows.items()}
        pieces = [
            dict(zip(own, each, strict=True))
            for each in zip(*(part.split(1) for part in own.values()), strict=True)
        ]
        if kind == "causal":
            return [(piece["input_ids"], piece["labels"]) for piece in pieces]
        return [MaskedBatch(piece).to(engine.device) for piece in pieces]

    found = [
        (engine.train_step(batches(rows_of(kind, each))), engine.gradient_norm) for each in labelled
    ]
    loss = engine.evaluate(batches(rows_of(kind, labelled[0])))["loss"]
    try:
        engine.evaluate(batches(rows_of(kind, [])))
    except UserError as error:
        return found, loss, str(error)
    return found, loss, ""


CASES = [
    (kind, tensor, stage)
    for kind in ("masked", "causal")
    for tensor in (1, 2)
    for stage in range(4)
]


@pytest.mark.parametrize(
    ("kind", "tensor", "stage"),
    in_tiers(CASES, [("masked", 1, 3), ("masked", 2, 1), ("causal", 1, 2)]),
)
def test_micro_batches_without_labels(ranks: Pools, kind: str, tensor: int, stage: int) -> None:
    """All labels on one DP rank, in one micro-batch of three rows; then none at all, which costs
    nothing.
    """
    wanted = [expected(kind, rows_of(kind, each)) for each in ([0], [1, 2, 3])]
    for found, loss, refused in ranks(2).run(steps, kind, tensor, stage, [[0], [1, 2, 3], []]):
        for (step, size), (reference, reference_norm) in zip(found, wanted, strict=False):
            assert step == pytest.approx(reference, rel=1e-5)
            assert size == pytest.approx(reference_norm, rel=1e-5)
        assert list(found[2]) == [0.0, 0.0]
        assert loss == pytest.approx(wanted[0][0], rel=1e-5)
        assert refused == "validation data holds nothing to score"
