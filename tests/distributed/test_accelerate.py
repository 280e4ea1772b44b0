"""Hugging Face's own trainers around the model: they know no topology, so a model that is split is refused by name."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from tests.compare import grid
from tests.decoders import decoder
from tests.native import parallel_model
from tests.pools import Pools
from tests.tiers import in_tiers
from zero_tp.errors import UserError

FIELDS: dict[str, Any] = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}
SETTINGS: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}


def prepared(tensor: int, through: str) -> tuple[str, float]:
    """What is said, and the loss of a step."""
    import deepspeed
    from accelerate.state import AcceleratorState

    model = parallel_model(
        decoder({**FIELDS, "vocab_size": 31, "bos_token_id": 0, "eos_token_id": 0}, 0), grid(tensor, False)
    )
    tokens = torch.arange(12).view(1, 12)
    try:
        if through == "accelerate":
            from accelerate import Accelerator, DeepSpeedPlugin

            os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"  # as `accelerate launch` does
            AcceleratorState._reset_state(reset_partial_state=True)
            accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=dict(SETTINGS)))
            engine = accelerator.prepare(model)
        elif through == "ddp":
            engine = torch.nn.parallel.DistributedDataParallel(model)
        else:
            mpu = model.topology if through == "deepspeed, mpu" else None
            engine = deepspeed.initialize(model=model, config=dict(SETTINGS), mpu=mpu)[0]
    except UserError as error:
        return str(error), 0.0
    finally:  # the ranks run other tests after this one
        if os.environ.pop("ACCELERATE_USE_DEEPSPEED", None):
            AcceleratorState._reset_state(reset_partial_state=True)
    loss = engine(tokens, labels=tokens).loss
    if through == "ddp":
        loss.backward()
    else:
        engine.backward(loss)
        engine.step()
    return "", loss.item()


CASES = [
    (2, "accelerate", True),
    (2, "deepspeed", True),
    (2, "deepspeed, mpu", False),
    (1, "accelerate", False),
    (1, "deepspeed", False),
    (2, "ddp", True),
    (1, "ddp", False),
]


@pytest.mark.parametrize(("tensor", "through", "refused"), in_tiers(CASES, [CASES[0]]))
def test_a_model_that_is_split_needs_its_topology(ranks: Pools, tensor: int, through: str, refused: bool) -> None:
    for said, loss in ranks(2).run(prepared, tensor, through):
        assert ("does not know its topology" in said) == refused
        assert (loss > 0) == (not refused)
