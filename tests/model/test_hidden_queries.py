"""Positions that see no key, and predict a label all the same: as the attention of transformers
that is set.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.compare import check_close
from tests.support.decoders import decoder
from tests.support.encoders import encoder
from tests.support.native import check_gradients, parallel_model
from zero_tp.parallel.topology import Topology

LENGTH, VOCABULARY, WINDOW = 12, 61, 3
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
SIZES |= {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "pad_token_id": None}
DECODERS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "num_key_value_heads": 1},
    "mistral": {"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": WINDOW},
    "gpt_neox": {"model_type": "gpt_neox"},
}
MASKS = {
    "padding on the left": [0] * 4 + [1] * 8,
    "a hole at the start": [0, 1, 0] + [1] * 9,
    "padding longer than the window": [1] * 3 + [0] * 5 + [1] * 4,
    "no token": [0] * 12,
}


def rows(mask: list[int], seed: int) -> dict[str, Tensor]:
    """A row with the mask and one without padding; every position of both predicts a label."""
    tokens = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(seed))
    return {
        "input_ids": tokens,
        "labels": tokens,
        "attention_mask": torch.tensor([mask, [1] * LENGTH]),
    }


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_equals_transformers(name: str, mask: str, attention: str, seed: int) -> None:
    reference = decoder({**SIZES, **DECODERS[name]}, seed)
    reference.config._attn_implementation = attention
    batch = rows(MASKS[mask], seed)
    expected, actual = (
        reference(**batch),
        (model := parallel_model(reference, Topology()))(**batch, return_logits=True),
    )
    check_close({"logits": actual.logits}, {"logits": expected.logits.detach()})
    assert actual.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    expected.loss.backward()
    actual.loss.backward()
    check_gradients(model, reference)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_an_encoders_row_of_padding_equals_transformers(attention: str, seed: int) -> None:
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    reference = encoder({**SIZES, **dropouts, "model_type": "bert"}, seed)
    reference.config._attn_implementation = attention
    batch = rows(MASKS["no token"], seed) | {"next_sentence_label": torch.tensor([0, 1])}
    expected, actual = reference(**batch), (model := parallel_model(reference, Topology()))(**batch)
    assert actual.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    expected.loss.backward()
    actual.loss.backward()
    check_gradients(model, reference)
