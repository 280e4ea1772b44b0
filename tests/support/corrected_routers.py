"""Small models whose routers choose with a bias, and the update of the biases in one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tests.support.decoders import decoder

VOCABULARY, LENGTH = 61, 16


def corrected_fields(model_type: str = "glm4_moe", **changes: Any) -> dict[str, Any]:
    """A dense layer and two of 6 experts in 3 groups, of which a token has 3 in 2 groups."""
    return {
        "model_type": model_type,
        "vocab_size": VOCABULARY,
        "hidden_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 20,
        "max_position_embeddings": 32,
        "n_routed_experts": 6,
        "n_group": 3,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "moe_intermediate_size": 12,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "bos_token_id": 0,
        "eos_token_id": 0,
        **changes,
    }


def reference_model(seed: int, **changes: Any) -> Any:
    """transformers' class with random weights and biases."""
    return decoder(corrected_fields(**changes), seed)


def gates(model: Any) -> list[Any]:
    """The routers of a transformers model."""
    return [module for module in model.modules() if hasattr(module, "e_score_correction_bias")]


def biases(model: Any) -> Tensor:
    """Of all routers of a transformers model, [layers, E]."""
    return torch.stack([gate.e_score_correction_bias for gate in gates(model)]).clone()


@contextmanager
def counted_choices(model: Any, mask: Tensor | None = None) -> Iterator[Tensor]:
    """How often each expert is chosen in the forwards of this block, int64 [layers, E].

    Args:
        mask: [b, s], 1 for a token and 0 for padding.
    """
    routers = gates(model)
    counts = torch.zeros(len(routers), len(routers[0].weight), dtype=torch.int64)

    def count(number: int, output: Any) -> None:
        chosen = output[2] if mask is None else output[2][mask.flatten().bool()]
        counts[number] += chosen.flatten().bincount(minlength=counts.shape[1])

    hooks = [
        gate.register_forward_hook(lambda _, __, output, number=number: count(number, output))
        for number, gate in enumerate(routers)
    ]
    yield counts
    for hook in hooks:
        hook.remove()


@torch.no_grad()
def move_biases(model: Any, counts: Tensor, rate: float) -> None:
    """An expert's bias rises by the rate if fewer tokens than the mean chose it, or falls."""
    for gate, count in zip(gates(model), counts.double(), strict=True):
        gate.e_score_correction_bias += rate * torch.sign(count.mean() - count).float()
