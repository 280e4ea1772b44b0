"""Models for rows of several documents, and the losses of documents by themselves."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.native import perturbed

ROWS, LENGTH, VOCABULARY, WINDOW = 3, 16, 61, 3
OF_LLAMA: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": LENGTH,
    "pad_token_id": None,
}


def token_losses_apart(model: Any, tokens: Tensor, documents: Tensor) -> tuple[Tensor, int]:
    """Each piece of a document run by itself: the sum of its losses, of all rows, and how many
    tokens were predicted.

    A piece predicts the tokens after its own within the document, one of which may be a row's last
    target.
    """
    total, count = torch.zeros(()), 0
    for row, numbers in zip(tokens, documents, strict=True):
        for number in numbers.unique_consecutive():
            piece = row[numbers == number]
            if len(piece) > 1:
                logits = model(piece[None, :-1]).logits[0]
                total = total + F.cross_entropy(logits, piece[1:], reduction="sum")
                count += len(piece) - 1
    return total, count


def dynamic_model(seed: int = 0) -> Any:
    """A Llama whose frequencies depend on the length."""
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    config = AutoConfig.for_model(
        "llama",
        vocab_size=VOCABULARY,
        bos_token_id=0,
        eos_token_id=0,
        **OF_LLAMA,
        rope_parameters=dynamic,
    )
    torch.manual_seed(seed)
    return perturbed(AutoModelForCausalLM.from_config(config).eval())
