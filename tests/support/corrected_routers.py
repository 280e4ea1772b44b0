"""Small models whose routers choose with a bias, and the update of the biases in one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tests.support.decoders import decoder

VOCABULARY, LENGTH = 61, 16


IN_GROUPS: dict[str, Any] = {
    "n_routed_experts": 6,
    "n_group": 3,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
"""6 experts in 3 groups, of which a token has 3 in 2 groups."""
OWN: dict[str, dict[str, Any]] = {
    "glm4_moe": {**IN_GROUPS, "attention_bias": True},
    "dots1": IN_GROUPS,
    "deepseek_v3": {
        **IN_GROUPS,
        **{"num_key_value_heads": 4, "head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 6},
        **{"q_lora_rank": 10, "kv_lora_rank": 12, "qk_nope_head_dim": 5},
    },
    "ernie4_5_moe": {
        "moe_num_experts": 6,
        "moe_k": 3,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "tie_word_embeddings": False,
    },
}
"""What the config of each model_type has besides."""


def corrected_fields(model_type: str = "glm4_moe", **changes: Any) -> dict[str, Any]:
    """A dense layer and two of 6 experts."""
    return {
        "model_type": model_type,
        "vocab_size": VOCABULARY,
        "hidden_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 20,
        "max_position_embeddings": 64,
        "moe_intermediate_size": 12,
        "bos_token_id": 0,
        "eos_token_id": 0,
        **OWN[model_type],
        **changes,
    }


def reference_model(seed: int, **changes: Any) -> Any:
    """transformers' class with random weights and biases."""
    return decoder(corrected_fields(**changes), seed)


def gates(model: Any) -> list[Any]:
    """The routers of a transformers model."""
    return [module for name, module in model.named_modules() if name.endswith("mlp.gate")]


def bias_of(gate: Any) -> Tensor:
    """The bias of a router of transformers; ERNIE's is in a module of its own."""
    bias: Tensor = getattr(gate, "moe_statics", gate).e_score_correction_bias
    return bias


def biases(model: Any) -> Tensor:
    """Of all routers of a transformers model, [layers, E]."""
    return torch.stack([bias_of(gate).detach().flatten() for gate in gates(model)])


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
        bias_of(gate).add_(rate * torch.sign(count.mean() - count).float())
