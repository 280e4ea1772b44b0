"""Small random models with experts, of transformers' own classes, with every kind of routing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from tests.decoders import decoder
from zero_tp.architectures import ARCHITECTURES, mixtral

TABLES = {"mixtral": mixtral.TABLE}
ROUTINGS = ("random", "ties", "one expert", "unused expert")
LENGTH = 16


@contextmanager
def tables() -> Iterator[None]:
    """Tables that no command reaches yet."""
    with patch.dict(ARCHITECTURES, TABLES):
        yield


def fields(**changes: Any) -> dict[str, Any]:
    """A config of a small Mixtral; E divides by nothing else here."""
    return {
        "model_type": "mixtral",
        "vocab_size": 61,
        "hidden_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 20,
        "max_position_embeddings": 32,
        "num_local_experts": 7,
        "num_experts_per_tok": 2,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.7,
        "bos_token_id": 0,
        "eos_token_id": 0,
        **changes,
    }


def reference_model(config: dict[str, Any], seed: int, routing: str = "random", attention: str = "sdpa") -> Any:
    """transformers' class with random weights, whose routers choose as `routing` says."""
    model = decoder(config, seed, attention)
    with torch.no_grad():
        for layer in model.model.layers:
            gate = layer.mlp.gate.weight
            if routing == "ties":  # all probabilities are equal
                gate.zero_()
            elif routing != "random":
                # Positive inputs, so a row of large numbers has the largest logit of every token, or the smallest.
                layer.post_attention_layernorm.weight.zero_()
                layer.post_attention_layernorm.weight[0] = 1.0
                model.model.embed_tokens.weight[:, 0] = 50.0
                gate[3, 0] = 5.0 if routing == "one expert" else -5.0
    return model


def inputs(vocabulary: int, *, padded: bool, batch: int = 3, seed: int = 2) -> dict[str, torch.Tensor]:
    """Tokens and labels, and with `padded` a mask of rows that end early."""
    tokens = torch.randint(vocabulary, (batch, LENGTH), generator=torch.Generator().manual_seed(seed))
    if not padded:
        return {"input_ids": tokens, "labels": tokens}
    mask, labels = torch.ones_like(tokens), tokens.clone()
    for row in range(batch):
        mask[row, LENGTH - 3 * row :] = mask[row, LENGTH - 3 * row :] * (row == 0)
    labels[mask == 0] = -100
    return {"input_ids": tokens, "labels": labels, "attention_mask": mask}
