"""Small models of each family that the parity proofs train, their sizes drawn from a seed.

12 heads divide by every TP size here, the vocabulary by none; every other one of 3 layers is not
all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

SEQUENCE = 24

Pick = Callable[[int, int], int]


def _decoder(pick: Pick) -> dict[str, Any]:
    return {
        "num_hidden_layers": 3,
        "hidden_size": 12 * pick(2, 6),
        "num_attention_heads": 12,
        "intermediate_size": 12 * pick(4, 12),
        "vocab_size": 12 * pick(7, 12) + (1, 2, 5, 7, 10, 11)[pick(0, 6)],
        "max_position_embeddings": SEQUENCE + pick(0, 4),
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def _gpt2(pick: Pick) -> dict[str, Any]:
    names = {
        "num_hidden_layers": "n_layer",
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
    }
    names |= {"intermediate_size": "n_inner", "max_position_embeddings": "n_positions"}
    sizes = {names.get(name, name): value for name, value in _decoder(pick).items()}
    return {
        "model_type": "gpt2",
        **sizes,
        **dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), 0.0),
    }


def _grouped(pick: Pick) -> dict[str, Any]:
    """As many KV heads as the largest TP size: each rank has its own."""
    return {
        "model_type": "llama",
        **_decoder(pick),
        "num_key_value_heads": 4,
        "head_dim": 2 * pick(1, 4),
    }


def _fewer_kv_heads(pick: Pick) -> dict[str, Any]:
    """Replicated at TP 2 and 4, serving unevenly many queries a rank; with biases, a norm of each
    head, a window, a padding token, tied."""
    return {
        "model_type": "qwen3",
        **_decoder(pick),
        "num_key_value_heads": 3,
        # The norm of few features is ill-conditioned: over 220 models, Hugging Face's two fp32
        # kernels were apart by up to 0.48 of what closeness.py allows with 4 or 6 features, up to
        # 0.12 with 8 to 14.
        "head_dim": 2 * pick(4, 8),
        "attention_bias": True,
        "pad_token_id": 1,
        "tie_word_embeddings": True,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "use_sliding_window": True,
        "sliding_window": pick(4, SEQUENCE),
    }


def _parallel_residual(pick: Pick) -> dict[str, Any]:
    sizes = _decoder(pick)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    return {
        "model_type": "gpt_neox",
        **sizes,
        "hidden_size": 2 * sizes["hidden_size"],
        "rope_parameters": rope,
    }


def _output_norms(pick: Pick) -> dict[str, Any]:
    """OLMo 3: norms after the branches and of all heads, windows, two rotations."""
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}
    return {
        "model_type": "olmo3",
        **_decoder(pick),
        "hidden_size": 48 * pick(1, 2),
        "num_key_value_heads": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": pick(4, SEQUENCE),
        "rope_parameters": {
            "full_attention": {**yarn, "rope_theta": 10000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    }


def _norms_around(pick: Pick) -> dict[str, Any]:
    """Gemma 3: norms of 1 + w around the branches and of heads, scaled embeddings, a soft cap."""
    return {
        "model_type": "gemma3_text",
        **_decoder(pick),
        "num_key_value_heads": 4,
        "head_dim": 2 * pick(4, 8),  # see _fewer_kv_heads
        "query_pre_attn_scalar": 5,
        "final_logit_softcapping": 3.0,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": pick(4, SEQUENCE),
    }


def _encoder(model_type: str, pick: Pick) -> dict[str, Any]:
    """Trained on masked tokens and on the order of segments, with padding."""
    dropouts = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    return {"model_type": model_type, **_decoder(pick), **dropouts, "pad_token_id": 1}


def _experts(model_type: str, pick: Pick) -> dict[str, Any]:
    """Each token has 2 of 8 experts, and their loss is a large part of the whole."""
    return {
        **_grouped(pick),
        "model_type": model_type,
        # transformers' product of groups takes rows of multiples of 16 bytes.
        "hidden_size": 24 * pick(1, 4),
        "intermediate_size": 24 * pick(2, 7),
        "num_local_experts" if model_type in ("mixtral", "gpt_oss") else "num_experts": 8,
        "num_experts_per_tok": 2,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.5,
    }


def _shared_experts(pick: Pick) -> dict[str, Any]:
    """One expert of a layer computes every token, and one of 3 layers is dense."""
    sizes = {
        "moe_intermediate_size": 24 * pick(1, 4),
        "shared_expert_intermediate_size": 12 * pick(1, 4),
    }
    return {**_experts("qwen2_moe", pick), **sizes, "mlp_only_layers": [1]}


def _normed_experts(pick: Pick) -> dict[str, Any]:
    # See _fewer_kv_heads.
    sizes = {"moe_intermediate_size": 24 * pick(1, 4), "head_dim": 2 * pick(4, 8)}
    return {**_experts("qwen3_moe", pick), **sizes, "norm_topk_prob": True}


def _whole_norms(pick: Pick) -> dict[str, Any]:
    """The norm of all keys spans ranks that share KV heads, and some queries, keys and values
    are clipped.
    """
    sizes = {
        **_experts("olmoe", pick),
        "hidden_size": 48 * pick(1, 2),
        "num_key_value_heads": 3,
        "clip_qkv": 2.0,
    }
    del sizes["head_dim"]
    return sizes


def _grouped_experts(pick: Pick) -> dict[str, Any]:
    """Each token has 3 experts in 2 of 3 groups, chosen with a bias, and a shared one; the first
    layer is dense.
    """
    sizes = {
        **_experts("glm4_moe", pick),
        "head_dim": 4 * pick(1, 3),
        "attention_bias": True,
        "moe_intermediate_size": 24 * pick(1, 4),
        "n_routed_experts": 12,
        "n_group": 3,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "routed_scaling_factor": 2.0,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    }
    for name in ("num_experts", "router_aux_loss_coef"):
        del sizes[name]
    return sizes


def _sinks_and_clamps(pick: Pick) -> dict[str, Any]:
    """gpt-oss: sinks, windows, biases of experts and routers, limits that act, fewer KV heads than
    TP.
    """
    return {
        **_experts("gpt_oss", pick),
        "num_key_value_heads": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": pick(4, SEQUENCE),
        # A few in a hundred are clamped; more, and rounding would decide some (`clamp_margins`).
        "intermediate_size": 24 * pick(1, 3),
        "swiglu_limit": 0.25,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "original_max_position_embeddings": 16,
            "truncate": False,
        },
    }


def _latents(pick: Pick) -> dict[str, Any]:
    """DeepSeek-V3: queries, keys and values of latents, values of their own width, experts in
    groups; the first layer is dense.
    """
    return {
        **_grouped_experts(pick),
        "model_type": "deepseek_v3",
        "num_key_value_heads": 12,
        # The norm of few features is ill-conditioned, see _fewer_kv_heads.
        "q_lora_rank": pick(8, 14),
        "kv_lora_rank": pick(8, 14),
        "qk_nope_head_dim": pick(2, 8),
        "qk_rope_head_dim": 4,
        "v_head_dim": pick(4, 12),
        "head_dim": 4,
        "first_k_dense_replace": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }


def _linear_attention(pick: Pick) -> dict[str, Any]:
    """Qwen3-Next: the gated delta rule in 2 of 3 layers, a gate of attention's output, a shared
    expert with a gate; one layer is dense.
    """
    sizes = _shared_experts(pick)
    return {
        **sizes,
        "model_type": "qwen3_next",
        "num_key_value_heads": 3,
        "head_dim": 4 * pick(2, 5),
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4 * pick(1, 4),
        "linear_key_head_dim": pick(3, 8),
        "linear_value_head_dim": pick(3, 8),
        "linear_conv_kernel_dim": pick(2, 5),
        "norm_topk_prob": True,
        # A head's output is normed, and near 0 where a query and a key are orthogonal by chance.
        "rms_norm_eps": 0.01,
        "initializer_range": 0.1,  # with 0.02 this epsilon leaves too little to clip
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    }


ENCODERS: dict[str, Callable[[Pick], dict[str, Any]]] = {
    "encoder, norms after the sums": partial(_encoder, "bert"),
    "encoder, norms before": partial(_encoder, "megatron-bert"),
}
EXPERTS: dict[str, Callable[[Pick], dict[str, Any]]] = {
    "experts": partial(_experts, "mixtral"),
    "shared experts": _shared_experts,
    "experts, norm of each head": _normed_experts,
    "experts, norm of all heads": _whole_norms,
    "experts in groups": _grouped_experts,
    "sinks and clamps": _sinks_and_clamps,
    "latents": _latents,
    "linear attention": _linear_attention,
}
"""They train the cells in turn. Most losses depend on how rows are split into micro-batches."""
FAMILIES: dict[str, Callable[[Pick], dict[str, Any]]] = {
    "gpt2": _gpt2,
    "grouped queries": _grouped,
    "fewer KV heads than TP": _fewer_kv_heads,
    "parallel residual": _parallel_residual,
    "output norms": _output_norms,
    "norms around branches": _norms_around,
    **ENCODERS,
}


def model_sizes(seed: int, family: str = "gpt2") -> dict[str, Any]:
    """`zero_tp.model` of a small model of the family."""
    generator = torch.Generator().manual_seed(seed)

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    return {**FAMILIES, **EXPERTS}[family](pick)
