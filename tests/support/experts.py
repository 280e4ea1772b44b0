"""Small random models with experts, of transformers' own classes, with every kind of routing."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.decoders import decoder

ROUTINGS = ("random", "ties", "one expert", "unused expert")
LENGTH = 16


OF_QWEN = {"num_experts": 7, "moe_intermediate_size": 20, "intermediate_size": 28, "head_dim": 8}
OWN: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 7, "head_dim": 8},
    "qwen2_moe": {**OF_QWEN, "shared_expert_intermediate_size": 12, "mlp_only_layers": [1]},
    "qwen3_moe": {**OF_QWEN, "norm_topk_prob": True},
    "granitemoeshared": {
        "num_local_experts": 7,
        "head_dim": 8,
        "shared_intermediate_size": 12,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.4,
    },
    "olmoe": {"num_experts": 7, "clip_qkv": 1.5, "pad_token_id": None},
    "gpt_oss": {
        "num_local_experts": 7,
        "head_dim": 8,
        "swiglu_limit": 0.4,
        "sliding_window": 5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 100.0,
            "factor": 4.0,
            "original_max_position_embeddings": 8,
            "truncate": False,
        },
    },
}
"""What the config of each model_type with experts has besides."""


def fields(model_type: str = "mixtral", **changes: Any) -> dict[str, Any]:
    """A small config whose number of experts shares no divisor with its other sizes."""
    return {
        "model_type": model_type,
        "vocab_size": 61,
        "hidden_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 20,
        "max_position_embeddings": 32,
        "num_experts_per_tok": 2,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.7,
        "bos_token_id": 0,
        "eos_token_id": 0,
        **OWN[model_type],
        **changes,
    }


def reference_model(
    config: dict[str, Any], seed: int, routing: str = "random", attention: str = "sdpa"
) -> Any:
    """transformers' class with random weights, whose routers choose as `routing` says."""
    model = decoder(config, seed, attention)
    with torch.no_grad():
        for layer in model.model.layers:
            router = router_of(layer)
            if router is None:  # dense
                continue
            gate = router.weight
            if routing == "ties":  # all probabilities are equal
                gate.zero_()
                if hasattr(router, "bias"):
                    router.bias.zero_()
            elif routing != "random":
                # Positive inputs, so a row of large numbers has the largest logit of every token,
                # or the smallest.
                layer.post_attention_layernorm.weight.zero_()
                layer.post_attention_layernorm.weight[0] = 1.0
                model.model.embed_tokens.weight[:, 0] = 50.0
                gate[3, 0] = 5.0 if routing == "one expert" else -5.0
    return model


def router_of(layer: Any) -> Any:
    """The router of a layer of transformers' classes, or None."""
    if hasattr(layer, "block_sparse_moe"):  # Granite
        return layer.block_sparse_moe.router
    return getattr(layer.mlp, "router", None) or getattr(layer.mlp, "gate", None)


def inputs(vocabulary: int, *, padded: bool, batch: int = 3) -> dict[str, torch.Tensor]:
    """Tokens and labels, and with `padded` a mask of rows that end early."""
    tokens = torch.randint(vocabulary, (batch, LENGTH), generator=torch.Generator().manual_seed(2))
    if not padded:
        return {"input_ids": tokens, "labels": tokens}
    mask = (torch.arange(LENGTH) < LENGTH - 3 * torch.arange(batch)[:, None]).long()
    return {
        "input_ids": tokens,
        "labels": tokens.masked_fill(mask == 0, -100),
        "attention_mask": mask,
    }
