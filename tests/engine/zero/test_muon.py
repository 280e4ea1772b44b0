"""Muon under TP, SP and every ZeRO stage against `torch.optim.Muon` and `torch.optim.AdamW` on
transformers' class, in one process.
"""

from __future__ import annotations

import re
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.compare import check_close, grid
from tests.support.decoders import LENGTH, MODEL_TYPES, decoder, decoder_fields
from tests.support.native import Native, native_tensors
from tests.support.pools import Pools
from tests.tiers import examples, in_tiers
from zero_tp.model.architectures import file_tensors, weights_of

STEPS, ROWS = 5, 8
PARAMS: dict[str, Any] = {"lr": 1e-2, "adamw": {"lr": 4e-3, "eps": 1e-3}}
BY_ADAMW = re.compile(
    r"(wte|wpe|embed_tokens|embed_in|embed_out|lm_head|mlp\.gate|block_sparse_moe\.gate"
    r"|shared_expert_gate)\.weight$"
)


class TorchOptimizers:
    """`torch.optim.Muon` and `torch.optim.AdamW` on the tensors of a model's files.

    The experts' tensors are views of the class's stacked ones: Muon takes matrices only.
    """

    def __init__(self, model: Any, params: dict[str, Any], clip: float):
        self.model, self.clip = model, clip
        self.weights = weights_of(model.config)
        values = {name: value.detach() for name, value in model.named_parameters()}
        self.tensors = {
            name: torch.nn.Parameter(value)
            for name, value in file_tensors(self.weights, values).items()
        }
        groups: list[list[torch.nn.Parameter]] = [[], [], []]
        for name, tensor in self.tensors.items():
            kind = 2 if tensor.dim() < 2 else 1 if BY_ADAMW.search(name) else 0
            groups[kind].append(tensor)
        muon = {name: value for name, value in params.items() if name != "adamw"}
        adamw = {"lr": params["lr"], "weight_decay": 0.1, **params["adamw"]}
        decayed = {"params": groups[1], "weight_decay": adamw.pop("weight_decay")}
        self.muon = torch.optim.Muon(groups[0], **muon)
        self.adamw = torch.optim.AdamW(
            [decayed, {"params": groups[2], "weight_decay": 0.0}], **adamw
        )

    def step(self) -> None:
        gradients = {
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for name, parameter in self.model.named_parameters()
        }
        for name, gradient in file_tensors(self.weights, gradients).items():
            self.tensors[name].grad = gradient.clone()
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self.tensors.values(), self.clip)
        # Newton-Schulz in fp32, as in our fp32 runs: torch's own, on a copy instead of a rounding.
        with patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone):
            self.muon.step()
        self.adamw.step()


def engine_of(
    reference: Any, tensor: int, sequence: bool, stage: int, params: dict[str, Any], clip: float
) -> Any:
    from zero_tp.engine.engine import TrainingEngine

    topology = grid(tensor, sequence)
    settings = {
        "train_micro_batch_size_per_gpu": ROWS // topology.data // 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": clip,
        "optimizer": {"type": "Muon", "params": params},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    return TrainingEngine.from_dict(
        reference.config, topology, settings, seed=0, source=Native(reference)
    )


def compared(
    fields: dict[str, Any],
    seed: int,
    tensor: int,
    sequence: bool,
    stage: int,
    params: dict[str, Any],
    clip: float,
) -> list[float]:
    """Losses and weights after five steps of both; the losses."""
    reference = decoder(fields, seed)
    engine = engine_of(reference, tensor, sequence, stage, params, clip)
    optimizers = TorchOptimizers(reference, params, clip)
    draw = torch.Generator().manual_seed(seed)
    topology = engine.topology
    losses = []
    for _ in range(STEPS):
        tokens = torch.randint(fields["vocab_size"], (ROWS, LENGTH), generator=draw)
        targets = torch.full_like(tokens, -100)
        targets[:, :-1] = tokens[:, 1:]
        # Of each replica two micro-batches, which each have a balancing loss of their own.
        pieces = list(zip(tokens.chunk(2 * topology.data), targets.chunk(2 * topology.data)))
        own = pieces[2 * topology.data_rank : 2 * topology.data_rank + 2]
        losses.append(engine.train_step(own))
        reference.zero_grad()
        loss = torch.stack(
            [reference(input_ids=piece, labels=piece).loss for piece, _ in pieces]
        ).mean()
        loss.backward()
        optimizers.step()
        assert losses[-1] == pytest.approx(loss.item(), rel=1e-5)
    ours = dict(native_tensors_of(engine))
    check_close(ours, {name: value.detach() for name, value in optimizers.tensors.items()})
    return losses


def native_tensors_of(engine: Any) -> Any:
    return native_tensors(engine.model)


@pytest.mark.parametrize(
    ("tensor", "sequence", "stage"),
    in_tiers(
        [(tensor, tensor > 1, stage) for tensor in (1, 2, 4) for stage in range(4)],
        [(2, True, 1)],
    ),
)
@pytest.mark.parametrize("model_type", in_tiers(MODEL_TYPES, ["gpt2", "qwen2_moe"]))
@examples(1, 2)
@given(data=st.data())
def test_muon_equals_torchs(
    ranks: Pools, model_type: str, tensor: int, sequence: bool, stage: int, data: st.DataObject
) -> None:
    fields = data.draw(decoder_fields(model_type))
    seed = data.draw(st.integers(0, 2**31), label="seed")
    clip = data.draw(st.sampled_from([0.0, 0.3]), label="clip")
    params = PARAMS | {
        "nesterov": data.draw(st.booleans(), label="Nesterov"),
        "adjust_lr_fn": data.draw(
            st.sampled_from([None, "original", "match_rms_adamw"]), label="rate"
        ),
    }
    found = ranks(4).run(compared, fields, seed, tensor, sequence, stage, params, clip)
    assert found == found[:1] * 4
