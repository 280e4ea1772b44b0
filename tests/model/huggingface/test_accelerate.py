"""Hugging Face's own trainers around the model: they know no topology, so a model that is split
is refused by name.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from tests.support.compare import grid
from tests.support.decoders import decoder
from tests.support.native import parallel_model
from tests.support.pools import Pools
from tests.tiers import THOROUGH
from zero_tp.base.errors import UserError

FIELDS: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 8,
    "n_layer": 1,
    "n_head": 2,
    "n_positions": 16,
}
SETTINGS: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}


def sharded(model: Any) -> Any:
    """A model in FSDP 2, each layer by itself."""
    mesh = init_device_mesh("cpu", (2,))
    for part in (*model.transformer.layers, model):
        fully_shard(part, mesh=mesh)
    return model


def prepared(tensor: int, through: str) -> tuple[str, float]:
    """What is said, and the loss of a step."""
    import deepspeed
    from accelerate.state import AcceleratorState
    from deepspeed.utils import groups

    groups.mpu = None  # DeepSpeed keeps that of an engine before
    model = parallel_model(
        decoder({**FIELDS, "vocab_size": 31, "bos_token_id": 0, "eos_token_id": 0}, 0),
        grid(tensor, False),
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
        elif through == "fsdp":
            engine = FullyShardedDataParallel(
                model, device_id=torch.device("cpu"), use_orig_params=True
            )
        elif through == "fsdp 2":
            engine = sharded(model)
        else:
            mpu = model.topology if through == "deepspeed, mpu" else None
            engine = deepspeed.initialize(model=model, config=dict(SETTINGS), mpu=mpu)[0]
    except UserError as error:
        return str(error), 0.0
    finally:  # the ranks run other tests after this one
        if os.environ.pop("ACCELERATE_USE_DEEPSPEED", None):
            AcceleratorState._reset_state(reset_partial_state=True)
    loss = engine(tokens, labels=tokens).loss
    if through in ("ddp", "fsdp", "fsdp 2"):
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
    (2, "fsdp", True),
    (2, "fsdp 2", True),
]


@THOROUGH
@pytest.mark.parametrize(("tensor", "through", "refused"), CASES)
def test_a_model_that_is_split_needs_its_topology(
    ranks: Pools, tensor: int, through: str, refused: bool
) -> None:
    for said, loss in ranks(2).run(prepared, tensor, through):
        assert ("does not know this model's topology" in said) == refused
        assert (loss > 0) == (not refused)


def losses_under_fsdp(fields: dict[str, Any], version: str) -> list[tuple[float, float]]:
    """(alone, on two ranks) of four steps of AdamW on four rows."""
    reference = decoder({**fields, "vocab_size": 31, "bos_token_id": 0, "eos_token_id": 0}, 0)
    alone, model = (parallel_model(reference, grid(1, False)).train() for _ in range(2))
    if version == "fsdp":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    else:
        model = sharded(model)
    optimizers = [torch.optim.AdamW(each.parameters(), 1e-2) for each in (alone, model)]
    tokens, first = torch.arange(48).view(4, 12) % 31, 2 * dist.get_rank()
    losses = []
    for _ in range(4):
        pair = []
        for each, optimizer, rows in zip(
            (alone, model), optimizers, (tokens, tokens[first : first + 2]), strict=True
        ):
            loss = each(rows, labels=rows).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            pair.append(loss.detach().double())
        dist.all_reduce(pair[1])
        losses.append((pair[0].item(), pair[1].item() / 2))
    return losses


LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
}
LLAMA |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16}


@pytest.mark.thorough
@pytest.mark.parametrize("version", ["fsdp", "fsdp 2"])
@pytest.mark.parametrize("fields", [{**FIELDS, "n_layer": 2}, LLAMA], ids=["gpt2", "llama"])
def test_fsdp_of_a_whole_model_trains_it(
    ranks: Pools, fields: dict[str, Any], version: str
) -> None:
    dropout = (
        {}
        if fields["model_type"] == "llama"
        else {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    )
    for losses in ranks(2).run(losses_under_fsdp, fields | dropout, version):
        assert losses[-1][0] < losses[0][0] - 0.1
        for alone, shared in losses:
            assert shared == pytest.approx(alone, rel=1e-5)
