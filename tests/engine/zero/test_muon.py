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
from torch import Tensor

from tests.support.compare import check_close, grid
from tests.support.decoders import LENGTH, MODEL_TYPES, decoder, decoder_fields
from tests.support.native import Native, native_tensors
from tests.support.pools import Pools
from tests.tiers import examples, in_tiers
from zero_tp.model.architectures import architecture_of, file_tensors, weights_of
from zero_tp.parallel.layout import layout_of

STEPS, ROWS = 5, 8
PARAMS: dict[str, Any] = {"lr": 1e-2, "adamw": {"lr": 4e-3, "eps": 1e-3}}
BY_ADAMW = re.compile(
    r"(wte|wpe|embed_tokens|embed_in|embed_out|lm_head|mlp\.gate|block_sparse_moe\.gate"
    r"|shared_expert_gate)\.weight$"
)


QKV = re.compile(r"(q_proj|k_proj|v_proj|qkv_proj|c_attn|query_key_value)\.weight$")


class TorchOptimizers:
    """`torch.optim.Muon` and `torch.optim.AdamW` on the tensors of a model's files.

    Muon takes matrices only: the experts' are views of the class's stacked tensors, and heads views
    of Q, K and V.
    """

    def __init__(self, model: Any, params: dict[str, Any], clip: float):
        self.model, self.clip = model, clip
        self.weights = weights_of(model.config)
        self.head_size = (
            architecture_of(model.config).spec(model.config).head_size
            if params.get("per_head")
            else None
        )
        values = {name: value.detach() for name, value in model.named_parameters()}
        self.leaves = {
            name: torch.nn.Parameter(value) for name, value in self.matrices(values).items()
        }
        groups: list[list[torch.nn.Parameter]] = [[], [], []]
        for name, leaf in self.leaves.items():
            kind = 2 if leaf.dim() < 2 else 1 if BY_ADAMW.search(name) else 0
            groups[kind].append(leaf)
        muon = {name: value for name, value in params.items() if name not in ("adamw", "per_head")}
        adamw = {"lr": params["lr"], "weight_decay": 0.1, **params["adamw"]}
        decayed = {"params": groups[1], "weight_decay": adamw.pop("weight_decay")}
        self.muon = torch.optim.Muon(groups[0], **muon)
        self.adamw = torch.optim.AdamW(
            [decayed, {"params": groups[2], "weight_decay": 0.0}], **adamw
        )

    def matrices(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """A model's tensors as its files have them, and with `per_head` each head's, as views."""
        tensors = file_tensors(self.weights, values)
        if self.head_size is None:
            return tensors
        split: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            # GPT-2's Conv1D has a head's outputs in columns.
            dim = 1 if "c_attn" in name else 0
            heads = tensor.split(self.head_size, dim) if QKV.search(name) else [tensor]
            split |= {f"{name}{number or ''}": head for number, head in enumerate(heads)}
        return split

    def states(self) -> dict[str, dict[str, Tensor]]:
        """Kind of state → the states of parameters that have it, by our names."""
        kinds: dict[str, dict[str, Tensor]] = {}
        for name, leaf in self.leaves.items():
            state = self.muon.state.get(leaf) or self.adamw.state[leaf]
            for kind in state.keys() - {"step"}:
                kinds.setdefault(kind, {})[name] = state[kind]
        return {
            kind: {
                weight.our_name: weight.from_hf(tensors)
                for weight in self.weights
                if all(name in tensors for name in weight.names)
            }
            for kind, tensors in kinds.items()
        }

    def step(self) -> None:
        gradients = {
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for name, parameter in self.model.named_parameters()
        }
        for name, gradient in self.matrices(gradients).items():
            self.leaves[name].grad = gradient.clone()
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self.leaves.values(), self.clip)
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
        count = 2 * topology.data
        pieces = list(zip(tokens.chunk(count), targets.chunk(count), strict=True))
        own = pieces[2 * topology.data_rank : 2 * topology.data_rank + 2]
        losses.append(engine.train_step(own))
        reference.zero_grad()
        loss = torch.stack(
            [reference(input_ids=piece, labels=piece).loss for piece, _ in pieces]
        ).mean()
        loss.backward()
        optimizers.step()
        assert losses[-1] == pytest.approx(loss.item(), rel=1e-5)
    ours = dict(native_tensors(engine.model))
    theirs = {name: value.detach() for name, value in reference.named_parameters()}
    check_close(ours, file_tensors(optimizers.weights, theirs))
    if not params.get("per_head"):
        check_states(engine, optimizers.states())
    return losses


def check_states(engine: Any, expected: dict[str, dict[str, Tensor]]) -> None:
    """Each of this rank's fragments has the states of its kind of optimizer, and torch's values."""
    states, topology = engine.zero.states(), engine.topology
    parameters = dict(engine.model.named_parameters())
    assert states.kinds() == ["master", "momentum_buffer", "exp_avg", "exp_avg_sq"]
    for fragment in states.fragments:
        layout = layout_of(parameters[fragment.name])
        for kind, tensors in expected.items():
            assert states.has(fragment, kind) == (fragment.name in tensors), fragment.name
            if fragment.name not in tensors:
                continue
            whole = tensors[fragment.name]
            shard = layout.shard(whole, topology.tensor_rank, topology.tensor).flatten()
            allowed = 1e-5 * whole.norm() / whole.numel() ** 0.5 + 1e-9
            error = states.get(fragment, kind) - shard[fragment.span.whole]
            assert error.norm() <= allowed * max(whole.numel(), 1) ** 0.5, (fragment.name, kind)


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
        "per_head": data.draw(st.booleans(), label="each head"),
        "nesterov": data.draw(st.booleans(), label="Nesterov"),
        "adjust_lr_fn": data.draw(
            st.sampled_from([None, "original", "match_rms_adamw"]), label="rate"
        ),
    }
    found = ranks(4).run(compared, fields, seed, tensor, sequence, stage, params, clip)
    assert found == found[:1] * 4
