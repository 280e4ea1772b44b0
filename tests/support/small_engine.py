"""A training engine of the small GPT-2, and the batches of its steps."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from tests.support.gpt2_reference import SIZES, reference_model
from tests.support.native import Native
from tests.support.settings import deepspeed_settings
from zero_tp.engine.engine import TrainingEngine

LEARNING_RATE, DECAY, ACCUMULATION, BATCH, LENGTH = 1e-2, 0.1, 2, 8, 16


def build(topology: Any, stage: int, *, dropout: float = 0.0, **changes: Any) -> Any:
    """An engine that starts with the reference's weights."""
    dropouts: dict[str, Any] = dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), dropout)
    reference = reference_model(**dropouts)
    micro_batch = BATCH // topology.data // ACCUMULATION
    adamw = {
        "type": "AdamW",
        "params": {"lr": LEARNING_RATE, "weight_decay": DECAY, "torch_adam": True},
    }
    changes.setdefault("optimizer", adamw)
    settings = deepspeed_settings(
        stage, micro_batch=micro_batch, accumulation=ACCUMULATION, **changes
    )
    config = copy.deepcopy(reference.config)
    return TrainingEngine.from_dict(config, topology, settings, seed=0, source=Native(reference))


def tokens_of_step(step: int) -> Tensor:
    return torch.randint(
        SIZES["vocab_size"], (BATCH, LENGTH), generator=torch.Generator().manual_seed(step)
    )
