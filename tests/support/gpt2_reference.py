"""transformers' GPT-2 of a few layers, and the comparison of a parallel model with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from tests.support.compare import check_close, grid
from tests.support.native import check_gradients, parallel_model, perturbed
from zero_tp.parallel.layout import audit

LENGTH, BATCH = 16, 3
SIZES: dict[str, Any] = {
    "n_layer": 2,
    "n_head": 4,
    "n_embd": 24,
    "n_positions": 24,
    "vocab_size": 61,
}
NO_DROPOUT: dict[str, Any] = {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}


def reference_model(attention: str = "sdpa", **changes: Any) -> Any:
    config = GPT2Config(**{**SIZES, **NO_DROPOUT, "bos_token_id": 0, "eos_token_id": 0, **changes})
    config._attn_implementation = attention
    torch.manual_seed(1)
    return perturbed(GPT2LMHeadModel(config).eval())


def batch(vocabulary: int, padding: str) -> dict[str, Tensor]:
    torch.manual_seed(2)
    tokens = torch.randint(vocabulary, (BATCH, LENGTH))
    if not padding:
        return {"input_ids": tokens, "labels": tokens}
    mask, labels = torch.ones_like(tokens), tokens.clone()
    for row, count in enumerate((0, 3, 9)):
        where = slice(LENGTH - count, LENGTH) if padding.startswith("right") else slice(0, count)
        mask[row, where] = 0
    if padding != "right, labels kept":
        labels[mask == 0] = -100
    return {"input_ids": tokens, "labels": labels, "attention_mask": mask}


def same_as_native(world: int, sequence: bool, padding: str, changes: dict[str, Any]) -> int:
    topology = grid(world, sequence)
    reference = reference_model(**changes)
    model = parallel_model(reference, topology).train()
    audit(model, topology)
    inputs = batch(reference.config.vocab_size, padding)
    expected, found = reference(**inputs), model(**inputs, return_logits=True)
    check_close({"logits": found.logits}, {"logits": expected.logits.detach()})
    assert found.logits.shape == expected.logits.shape and not found.logits.requires_grad
    assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    assert model(inputs["input_ids"], inputs.get("attention_mask"), inputs["labels"]).logits is None

    expected.loss.backward()
    found.loss.backward()
    sums = model.gradient_hooks.sums
    assert all(gradient_sum.fired == 1 for gradient_sum in sums.values()) and bool(sums) == sequence
    compared = check_gradients(model, reference)

    with torch.no_grad():
        losses = model(**inputs, reduction="none").loss
        shifted = inputs["labels"][:, 1:]
        each = torch.nn.functional.cross_entropy(
            expected.logits[:, :-1].flatten(0, 1), shifted.flatten(), reduction="none"
        ).view(shifted.shape)
    assert losses.shape == (BATCH, LENGTH) and not losses[:, -1].any()
    check_close({"token losses": losses[:, :-1]}, {"token losses": each.detach()})
    return compared
