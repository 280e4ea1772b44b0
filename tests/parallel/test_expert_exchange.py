"""Rows that travel to their experts and back, and layers of experts over expert ranks against
transformers' own classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.compare import check_close, gradient_of, grid, partition_group, unshard
from tests.support.corrected_routers import OWN as WITH_BIASES
from tests.support.corrected_routers import reference_model as reference_with_biases
from tests.support.experts import fields, inputs, reference_model
from tests.support.native import gradients_to_ours, parallel_model
from tests.support.pools import Pools
from tests.support.tiny_configs import general_fields
from tests.tiers import in_tiers
from zero_tp.base.settings.deepspeed import ActivationCheckpointing
from zero_tp.base.settings.recompute import RecomputePolicy
from zero_tp.model.architectures.configs import config_from_block
from zero_tp.model.huggingface import ZeroTPForCausalLM
from zero_tp.model.recompute.activation_memory import ActivationMemory
from zero_tp.parallel.collectives import all_reduce
from zero_tp.parallel.expert_exchange import AllToAllExperts
from zero_tp.parallel.layout import layout_of
from zero_tp.parallel.topology import Topology

EXPERTS = 6
WORLD = 3

Sizes = list[list[int]]
"""Rows that each rank has for each expert."""


def dispatched(sizes: Sizes) -> tuple[list[int], list[list[int]], list[list[int]], list[float]]:
    """Where the rows of each expert of this rank end, the rows of (sender, expert, number), what
    comes back of them, and their sum with weights that only this rank knows.
    """
    rank = dist.get_rank()
    rows = [(rank, expert, number) for expert, n in enumerate(sizes[rank]) for number in range(n)]
    own = torch.tensor(rows, dtype=torch.int64).view(-1, 3)
    ends = torch.tensor(sizes[rank]).cumsum(0, dtype=torch.int32)
    exchange = AllToAllExperts(ends, dist.group.WORLD)
    arrived = exchange.start_dispatch(own).wait()
    back = exchange.start_combine(arrived).wait()
    halves = exchange.start_combine(exchange.start_dispatch(own.bfloat16() / 2).wait()).wait()
    assert torch.equal(halves, own.bfloat16() / 2)
    return exchange.ends.tolist(), arrived.tolist(), back.tolist(), own.tolist()


@pytest.mark.parametrize(
    "sizes",
    [
        [[2, 0, 1, 3, 0, 1], [0, 0, 0, 0, 0, 2], [1, 1, 1, 1, 1, 1]],
        # An expert without rows, a rank that sends none, and one that gets none.
        [[0, 0, 3, 1, 0, 0], [0, 0, 0, 0, 0, 0], [0, 0, 0, 2, 0, 0]],
        # Every row of every rank is for one expert.
        [[0, 0, 0, 0, 4, 0], [0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 3, 0]],
        [[0] * EXPERTS] * WORLD,
    ],
)
def test_rows_reach_their_experts_and_come_back(ranks: Pools, sizes: Sizes) -> None:
    found = ranks(WORLD).run(dispatched, sizes, timeout=20)
    local = EXPERTS // WORLD
    for rank, (ends, arrived, back, own) in enumerate(found):
        experts = range(rank * local, (rank + 1) * local)
        expected = [
            [sender, expert, number]
            for expert in experts
            for sender in range(WORLD)
            for number in range(sizes[sender][expert])
        ]
        assert arrived == expected and back == own
        counts = [sum(of_rank[expert] for of_rank in sizes) for expert in experts]
        assert ends == torch.tensor(counts).cumsum(0).tolist()


@contextmanager
def recorded_exchanges(group: Any, seen: list[tuple[torch.dtype, int]]) -> Iterator[None]:
    """Record the dtype and the rows of each all-to-all over a group."""
    original = dist.all_to_all_single

    def record(output: Tensor, sent: Tensor, *arguments: Any, **options: Any) -> Any:
        if options["group"] is group:
            seen.append((sent.dtype, len(sent)))
        return original(output, sent, *arguments, **options)

    with patch.object(dist, "all_to_all_single", record):
        yield


def compare(
    model_type: str,
    tensor: int,
    sequence: bool,
    expert: int,
    routing: str,
    recompute: str,
    changes: dict[str, Any],
) -> list[tuple[torch.dtype, int]]:
    """Both losses and every gradient of all data ranks' rows against transformers' class; the
    all-to-alls of this rank.
    """
    topology = grid(tensor, sequence, expert)
    if model_type in WITH_BIASES:
        reference = reference_with_biases(1, model_type=model_type, **changes)
    else:
        of_linear = general_fields(model_type) if model_type in LINEAR else fields(model_type)
        reference = reference_model({**of_linear, **changes}, 1, routing)
    batch = inputs(61, padded=False, batch=2 * topology.data)
    parts = [
        {name: rows.chunk(topology.data)[rank] for name, rows in batch.items()}
        for rank in range(topology.data)
    ]
    model = parallel_model(reference, topology).train()
    policy = RecomputePolicy(mode=recompute)
    ActivationMemory(model, policy, ActivationCheckpointing(), torch.device("cpu"))
    seen: list[tuple[torch.dtype, int]] = []
    with recorded_exchanges(topology.expert_group, seen):
        found = model(**parts[topology.data_rank])
        found.loss.backward()
    losses = [reference(**part) for part in parts]
    expected = losses[topology.data_rank]
    assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-5)
    if expected.aux_loss is not None:
        assert found.aux_loss.item() == pytest.approx(expected.aux_loss.item(), rel=1e-5)
    # Each rank's loss is the mean over its rows: the mean over ranks is that of all.
    torch.stack([output.loss for output in losses]).mean().backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        # Of an expert, this rank has what the tokens of its whole expert group add.
        total = all_reduce(gradient_of(parameter).clone(), partition_group(parameter, topology))
        gradients[name] = unshard(total / topology.data, parameter, topology)
    check_close(gradients, gradients_to_ours(model.config, reference))
    experts = [layer.mlp for layer in model.transformer.layers if hasattr(layer.mlp, "router")]
    count = model.spec.experts.count
    assert all(len(layer.down.weight) == count // expert for layer in experts)
    return seen


def with_experts(count: int, model_type: str) -> dict[str, Any]:
    is_local = model_type in ("mixtral", "granitemoeshared", "gpt_oss")
    return {"num_local_experts" if is_local else "num_experts": count}


LINEAR = ("qwen3_next", "qwen3_5_moe_text")
"""Model types with experts, most of whose layers have linear attention."""
CASES = [
    # model type, TP, SP, E, routing, recomputation
    ("mixtral", 1, False, 2, "random", "none"),
    ("qwen2_moe", 2, True, 2, "random", "full"),
    ("olmoe", 1, False, 4, "one expert", "none"),
    ("qwen3_moe", 2, False, 2, "unused expert", "selective"),
    ("granitemoeshared", 1, False, 4, "random", "full"),
    ("qwen2_moe", 2, True, 2, "one expert", "none"),
    ("mixtral", 1, False, 4, "ties", "full"),
    ("olmoe", 2, True, 2, "random", "selective"),
    ("qwen3_moe", 1, False, 2, "one expert", "full"),
    ("glm4_moe", 2, True, 2, "random", "full"),
    ("dots1", 1, False, 2, "random", "none"),
    ("deepseek_v3", 2, True, 2, "random", "selective"),
    ("ernie4_5_moe", 2, False, 2, "random", "selective"),
    ("qwen3_next", 2, True, 2, "random", "full"),
    ("qwen3_5_moe_text", 1, False, 2, "random", "none"),
    ("gpt_oss", 2, True, 2, "random", "full"),
    ("gpt_oss", 1, False, 4, "unused expert", "selective"),
]


@pytest.mark.parametrize(
    ("model_type", "tensor", "sequence", "expert", "routing", "recompute"),
    in_tiers(CASES, CASES[:3]),
)
def test_both_losses_and_every_gradient(
    ranks: Pools,
    model_type: str,
    tensor: int,
    sequence: bool,
    expert: int,
    routing: str,
    recompute: str,
) -> None:
    """Of 4 ranks. If all tokens choose one expert, the other ranks of a group have no row."""
    one = {"num_experts_per_tok": 1} if routing == "one expert" else {}
    changes = {} if model_type in WITH_BIASES else with_experts(8, model_type) | one
    if model_type == "qwen3_next":
        changes["mlp_only_layers"] = []
    arguments = (model_type, tensor, sequence, expert, routing, recompute, changes)
    found = ranks(4).run(compare, *arguments)
    layers = 2 if model_type in (*WITH_BIASES, "qwen2_moe") else 3
    for seen in found:
        # A layer exchanges counts once, also if backward runs its forward again. Rows travel twice
        # in each forward; in backward, for the weights' gradients, the tokens once more.
        counts = [rows for dtype, rows in seen if dtype == torch.int64]
        assert len(counts) == layers
        forwards = 2 if recompute == "full" else 1
        assert len(seen) - len(counts) == layers * (2 * forwards + 5)
    if routing == "one expert":
        # Every row goes to the first expert rank, which alone sends some back.
        assert any(rows == 0 for seen in found for _, rows in seen)


def initial(expert: int, rank: int) -> dict[str, Tensor]:
    config = config_from_block(fields(num_local_experts=8))
    topology = Topology(2, expert=expert, world=2 * expert, rank=rank)
    return dict(ZeroTPForCausalLM(config, topology, seed=5).named_parameters())


@pytest.mark.parametrize("expert", in_tiers([2, 4], [2]))
def test_initial_weights_are_the_same_for_every_expert_size(expert: int) -> None:
    whole = [initial(1, rank) for rank in range(2)]
    split = [initial(expert, rank) for rank in range(2 * expert)]
    divided = 0
    for name, first in whole[0].items():
        before = layout_of(first).unshard([of_rank[name].detach() for of_rank in whole])
        layout = layout_of(split[0][name])
        pieces = [of_rank[name].detach() for of_rank in split[: 2 * layout.experts]]
        assert torch.equal(layout.unshard(pieces), before), name
        divided += layout.experts == expert
    assert divided == 2 * 3


@pytest.mark.parametrize("model_type", ["mixtral", "granitemoeshared"])
def test_a_rank_reads_its_own_experts(tmp_path: Path, model_type: str) -> None:
    """Of files with a tensor for each expert, and with all of a layer in one."""
    reference_model(fields(model_type, num_local_experts=8), 1).save_pretrained(tmp_path)
    opened = ZeroTPForCausalLM.from_pretrained
    whole = dict(opened(tmp_path, Topology(world=1)).named_parameters())
    ranks = [opened(tmp_path, Topology(2, expert=2, world=4, rank=rank)) for rank in range(4)]
    split = [dict(model.named_parameters()) for model in ranks]
    for name, expected in whole.items():
        layout = layout_of(split[0][name])
        pieces = [of_rank[name].detach() for of_rank in split[: 2 * layout.experts]]
        assert torch.equal(layout.unshard(pieces), expected.detach()), name
    assert len(split[0]["transformer.layers.0.mlp.down.weight"]) == 4
