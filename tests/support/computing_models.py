"""Small models on the simulated accelerator that computes (tests/support/streams.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from tests.support.streams import Computing
from zero_tp.huggingface import ZeroTPForCausalLM
from zero_tp.planning.dryrun import UninitializedSource

BATCH, HIDDEN, VOCABULARY = 2, 24, 50


def config_of(model_type: str, layers: int, length: int, kv_heads: int) -> Any:
    sizes: dict[str, Any] = {"hidden_size": HIDDEN, "num_attention_heads": 4, "num_hidden_layers": layers}
    sizes |= {"vocab_size": VOCABULARY, "max_position_embeddings": length}
    sizes |= {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    if model_type == "gpt2":
        sizes |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    else:
        sizes |= {"intermediate_size": 32, "num_key_value_heads": kv_heads}
    config = AutoConfig.for_model(model_type, **sizes)
    config._attn_implementation = "eager"  # the simulated accelerator's fused kernel has no values
    return config


def tensor_there(tensor: Tensor, computing: Computing) -> Tensor:
    """Copy a tensor to the accelerator."""
    there = torch.empty(tensor.shape, dtype=tensor.dtype, device=computing.device)
    computing.write(there, tensor)
    return there


def model_there(model: ZeroTPForCausalLM, computing: Computing) -> ZeroTPForCausalLM:
    """Copy a model to the accelerator, for training."""
    there = ZeroTPForCausalLM(
        model.config, model.topology, source=UninitializedSource(), device=computing.device
    ).train()
    for its, ours in zip(there.parameters(), model.parameters(), strict=True):
        computing.write(its, ours)
    return there


def gradient_of(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
