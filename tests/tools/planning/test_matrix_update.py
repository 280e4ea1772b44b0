"""The planned messages and temporaries of Muon's update against those of `MatrixExchange`."""

from __future__ import annotations

import itertools
import json
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from tests.support.plan_configs import FILE, MUON, family
from tests.support.plans import GPT2, plan_gpt2
from tests.tiers import THOROUGH, in_tiers
from zero_tp.engine.zero import matrix_exchange
from zero_tp.engine.zero.matrix_exchange import MatrixExchange, assign_owners
from zero_tp.parallel.devices import named_device
from zero_tp.parallel.spans import Span
from zero_tp.parallel.topology import Topology
from zero_tp.run.config import RunConfig
from zero_tp.tools.planning import plan_report
from zero_tp.tools.planning.matrix_update import MatrixGroup, MatrixUpdate
from zero_tp.tools.planning.memory import run_model_size
from zero_tp.tools.planning.plan import plan
from zero_tp.tools.planning.plan_settings import ZeroSettings
from zero_tp.tools.planning.rates import BASE_LATENCY, FAR_HOP, NEAR_HOP, Rates
from zero_tp.tools.planning.search import Search
from zero_tp.tools.planning.zero import ZeroMemory

WORLD = 4


def planned(config: RunConfig) -> tuple[MatrixGroup, MatrixUpdate, int]:
    """Return the group of matrices, its update, and the elements of a partition."""
    zero = ZeroMemory(run_model_size(config).parameters, ZeroSettings.of(config, cpu=False))
    ((number, group),) = (
        (number, group) for number, group in enumerate(zero.parameters.matrices) if group
    )
    update = zero.matrix_updates[number]
    assert update is not None
    return group, update, zero.partition_sizes[number]


def fragments_of(
    group: MatrixGroup, stage: int, data: int, partition: int
) -> dict[str, list[Span]]:
    """Return the elements of each parameter on each rank, element by element."""
    spans = {}
    start = 0
    for name, size in zip(group.names, group.sizes, strict=True):
        length, first = (partition, start) if stage in (1, 2) else (-(-size // data), 0)
        of_replicas: list[Span] = []
        for replica in range(data):
            own = [
                element
                for element in range(size)
                if stage == 0 or (first + element) // length == replica
            ]
            local = (first + own[0]) % length if own and stage else 0
            of_replicas.append(Span(own[0], local, len(own)) if own else Span(0, 0, 0))
        spans[name] = [span for span in of_replicas for _ in range(group.tensor)]
        start += size
    return spans


def exchanged(
    group: MatrixGroup, update: MatrixUpdate, spans: dict[str, list[Span]], rank: int
) -> tuple[list[tuple[int, int]], int]:
    """Return the elements that a rank sends and receives in each message, and its most bytes."""
    messages = []

    def all_to_all(received: Tensor, sent: Tensor, *sizes: list[int]) -> None:
        assert sum(sizes[0]) == len(received) and sum(sizes[1]) == len(sent)
        messages.append((len(sent), len(received)))

    topology = Topology(group.tensor, world=WORLD, rank=rank)
    costs = [update.iteration.flops(*matrix.shape) for matrix in group.matrices]
    exchange = MatrixExchange(group.matrices, costs, spans, topology)
    with FakeTensorMode():
        directions = {name: torch.empty(each[rank].length) for name, each in spans.items()}
        sample = torch.empty(0, dtype=update.iteration.dtype)
        tracker = MemTracker()
        tracker.track_external(*directions.values())
        with tracker, patch("torch.distributed.all_to_all_single", all_to_all):
            exchange.exchange(
                directions,
                lambda _, whole: update.iteration.orthogonalize(whole),
                lambda *_: None,
                sample,
            )
    before = sum(direction.nbytes for direction in directions.values())
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    return messages, peak - before


@pytest.mark.slow
@pytest.mark.parametrize("dtype", in_tiers(["bf16", "fp32"], ["bf16"]))
@pytest.mark.parametrize(
    ("model_type", "stage", "tensor"),
    in_tiers(
        list(itertools.product(["llama", "qwen2_moe"], range(4), (1, 2, 4))),
        [("llama", 1, 2), ("qwen2_moe", 3, 2)],
    ),
)
def test_messages_and_temporaries_of_every_rank(
    model_type: str, stage: int, tensor: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several rounds; with more TP ranks than KV heads, keys are replicated."""
    monkeypatch.setattr(matrix_exchange, "ROUND_ELEMENTS", 2500)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_key_value_heads": 2, "num_attention_heads": 4}
    if model_type == "qwen2_moe":
        sizes |= {"moe_intermediate_size": 16, "num_experts": 3}
    overrides = family(model_type, MUON, model=sizes)
    overrides += [f"zero_optimization.stage={stage}", f"zero_tp.parallel.tensor={tensor}"]
    overrides += [f"bf16.enabled={json.dumps(dtype == 'bf16')}", "train_batch_size=auto"]
    group, update, partition = planned(RunConfig.load(FILE, overrides, WORLD))
    spans = fragments_of(group, stage, WORLD // tensor, partition)
    (call,) = update.exchanges
    assert update.rounds > 1 and update.matrices == len(group.matrices)
    for rank in range(WORLD):
        messages, most = exchanged(group, update, spans, rank)
        to_owners = zip(call.sent[:, rank], call.received[:, rank], strict=True)
        back = zip(call.returned[:, rank], call.delivered[:, rank], strict=True)
        assert messages == [pair for both in zip(to_owners, back, strict=True) for pair in both]
        # The norms, numbers of 4 bytes at most.
        assert 0 <= most - update.temporaries[rank] <= 16, (most, update.temporaries)


def test_operations_are_those_of_the_owner_with_the_most() -> None:
    """GPT-2 of 24 layers, [3h, h], [h, h], [4h, h] and [h, 4h]; per file Q, K and V are one."""
    at_gpt2 = plan_gpt2(MUON)
    (update,) = at_gpt2.muon
    hidden = 1024
    shapes = [(3 * hidden, hidden), (hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden)]
    costs = [5 * (4 * hidden * m * n + 2 * hidden**3) for m, n in shapes * 24]
    loads = [0] * 8
    for owner, cost in zip(assign_owners(costs, 8), costs, strict=True):
        loads[owner] += cost
    assert update.flops.tolist() == loads
    assert update.sent_bytes.sum() < 2 * 2 * 24 * 12 * hidden**2
    json_of_plan = at_gpt2.as_json()
    assert json_of_plan["muon"][0]["flops_of_rank"] == max(loads)
    assert json_of_plan["step_seconds"]["Newton-Schulz"] > 0
    text = plan_report.describe(at_gpt2)
    assert "Muon: 96 matrices in 1 round; a rank owns 12 (" in text and "matrix exchange" in text


@THOROUGH
def test_a_search_weighs_muon() -> None:
    config = RunConfig.load(GPT2, [MUON], 4)
    search = Search(config, named_device("h100"))
    assert search.fitting and all(one.muon for one in search.ranked)
    adam = plan_gpt2()
    assert adam.as_json()["muon"] == [] and "Muon" not in plan_report.describe(adam)
    fastest = search.fastest([MUON], 1)[0][0]
    assert fastest.time.newton_schulz > 0
    present = plan(config, named_device("h100"))
    same = next(one for one in search.ranked if one.describe() == present.describe())
    assert same.time.newton_schulz == present.time.newton_schulz


def test_an_all_to_all_uses_both_links_at_once() -> None:
    rates = Rates(named_device("h100"), 2, 989e12)
    assert rates.all_to_all_seconds(1e9, 1) == 0
    inside, outside = 450e9 * 0.75, 50e9 * 0.5
    assert rates.all_to_all_seconds(1e9, 8) == pytest.approx(BASE_LATENCY + NEAR_HOP + 1e9 / inside)
    assert rates.all_to_all_seconds(1e9, 16) == pytest.approx(
        BASE_LATENCY + FAR_HOP + 1e9 * 8 / 15 / outside
    )
