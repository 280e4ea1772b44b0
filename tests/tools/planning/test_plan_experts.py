"""Plans of expert parallelism: what a rank keeps, what expert ranks exchange, and a search of its
degree.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.support.compare import grid
from tests.support.plan_configs import BASE, FILE, MUON, family
from tests.support.planned import choose_experts_in_turn
from tests.support.plans import CONFIGS
from tests.support.pools import Pools
from tests.tiers import THOROUGH
from zero_tp.base.constants import GIB
from zero_tp.base.errors import UserError
from zero_tp.base.settings.keys import apply_overrides
from zero_tp.base.strict_json import read_json
from zero_tp.commands.plan import add_arguments, check, main
from zero_tp.model.huggingface import ZeroTPForCausalLM
from zero_tp.model.recompute.activation_memory import ActivationMemory
from zero_tp.parallel.devices import named_device
from zero_tp.run.config import RunConfig
from zero_tp.tools.planning import plan_report as report
from zero_tp.tools.planning.dryrun import dry_run, even_parts
from zero_tp.tools.planning.exchange_time import HOST_READ_SECONDS, ExchangeTraffic
from zero_tp.tools.planning.memory import run_model_size
from zero_tp.tools.planning.plan import plan
from zero_tp.tools.planning.plan_settings import ZeroSettings, workload_of
from zero_tp.tools.planning.rates import BASE_LATENCY, FAR_HOP, NEAR_HOP, Rates
from zero_tp.tools.planning.search import Search, candidate_config, load_error
from zero_tp.tools.planning.zero import ZeroMemory

H100 = Rates(named_device("h100"), 2, 989e12)
ALONE = "zero_tp.parallel.tensor=1"
EXPERTS_16 = {"num_local_experts": 16}


def load(world: int, *overrides: str, model: dict[str, Any] | None = None) -> RunConfig:
    """Return the config of a small Mixtral: 3 layers, hidden 256, 1024 tokens a rank, 2 experts of
    4 a token.
    """
    changes = {"num_local_experts": 4, **(model or {})}
    return RunConfig.load(FILE, BASE + family("mixtral", *overrides, model=changes), world)


# ---- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2])
def test_experts_of_4_ranks_are_a_quarter_of_all(stage: int) -> None:
    """Of 8 replicas. Weights in the flat groups, with their padding; masters and moments stay."""

    def zero_memory(expert: int) -> ZeroMemory:
        settings = [f"zero_optimization.stage={stage}", f"zero_tp.parallel.expert={expert}"]
        config = load(8, ALONE, *settings, model=EXPERTS_16)
        return ZeroMemory(run_model_size(config).parameters, ZeroSettings.of(config, cpu=False))

    whole, divided = zero_memory(1), zero_memory(4)
    weights = 2 * 3 * 16 * (3 * 256 * 704)  # 3 layers, bf16
    groups = list(zip(divided.partition_sizes, divided.replicas, strict=True))
    (of_experts,) = (2 * length * ranks for length, ranks in groups if ranks == 2)
    assert weights / 4 <= of_experts <= 0.27 * weights
    saved = whole.states.parameters - divided.states.parameters
    assert saved == pytest.approx(0.75 * weights, rel=1e-4)
    assert divided.states.optimizer == pytest.approx(whole.states.optimizer, rel=1e-4)


@THOROUGH
def test_a_rank_with_more_rows_keeps_more() -> None:
    """Rows of experts, their outputs before the activation and after it, and its gate's product."""
    config = load(4, ALONE, "zero_tp.parallel.expert=2")
    balanced = workload_of(config, cpu=True)
    hf_config = config.hf_config()
    kept = [
        max(sample.activations for sample in dry_run(hf_config, workload))
        for workload in (balanced, replace(balanced, expert_imbalance=1.5))
    ]
    rows = 0.5 * 1024 * 2
    # Gate and up, and what the second matrix reads: 2 and 1 widths of 704 in bf16; its order.
    assert kept[1] - kept[0] == pytest.approx(3 * rows * (3 * 704 * 2), rel=0.02)
    assert replace(balanced, expert_imbalance=9.0).imbalance == 2, "one rank has all rows"
    assert replace(balanced, expert_imbalance=9.0, expert=1).imbalance == 1


# ---- what expert ranks exchange ------------------------------------------------------------------


def bytes_sent(overrides: list[str]) -> int:
    """Return the bytes that this rank of two sends to the other in one micro-batch."""
    config = RunConfig.load(FILE, BASE + overrides, 2)
    hf_config = config.hf_config()
    model = ZeroTPForCausalLM(hf_config, grid(1, False, 2), dtype=torch.bfloat16).train()
    choose_experts_in_turn(model)
    policy = config.zero_tp.recompute_policy
    layers = tuple(policy.recomputed_layers(hf_config.num_hidden_layers))
    checkpointing = config.settings.activation_checkpointing
    ActivationMemory(model, policy, checkpointing, torch.device("cpu"), layers)
    tokens = torch.zeros(config.micro_batch, config.zero_tp.data.sequence_length).long()
    exchange = dist.all_to_all_single
    sent = 0

    def counting(
        output: torch.Tensor,
        rows: torch.Tensor,
        received: list[int] | None = None,
        lengths: list[int] | None = None,
        **options: Any,
    ) -> Any:
        nonlocal sent
        other = (lengths or even_parts(len(rows), 2))[1 - dist.get_rank()]
        sent += rows.element_size() * rows[0].numel() * other
        return exchange(output, rows, received, lengths, **options)

    with patch.object(dist, "all_to_all_single", counting):
        model(tokens, shift_labels=tokens).loss.backward()
    return sent


@THOROUGH
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_bytes_are_those_of_the_formula_and_of_a_real_exchange(
    recompute: str, ranks: Pools
) -> None:
    overrides = family(
        "mixtral",
        ALONE,
        "zero_tp.parallel.expert=2",
        f"zero_tp.recompute={recompute}",
        model={"num_local_experts": 4},
    )
    config = RunConfig.load(FILE, BASE + overrides, 2)
    rows = 4 * 256 * 2  # samples, tokens, experts of each
    times = 5 if recompute == "none" else 7
    # Of bf16 rows of 256; int64 numbers of 4 experts; two fp32 numbers a row. Half stays.
    by_hand = 3 * (times * rows * 256 * 2 + 4 * 8 + 2 * rows * 4) / 2
    spec = run_model_size(config).spec
    exchange = ExchangeTraffic(spec, workload_of(config, cpu=True))
    assert 3 * exchange.sent(recomputed=recompute == "full") == by_hand
    assert ranks(2).run(bytes_sent, overrides) == [by_hand, by_hand]


@pytest.mark.parametrize(
    ("tensor", "expert", "far"), [(1, 8, 0), (2, 4, 0), (2, 8, 4), (8, 2, 1), (8, 4, 3)]
)
def test_links_of_an_expert_group_follow_from_the_grid(tensor: int, expert: int, far: int) -> None:
    """Nodes of 8. `far` of the other ranks of a group are in other nodes."""
    size = 1e9
    near = expert - 1 - far
    inside = size * near / (expert - 1) / (450e9 * 0.75)
    outside = size * far / (expert - 1) / (50e9 * 0.5)
    hop = FAR_HOP if far else NEAR_HOP
    assert H100.all_to_all_seconds(size, expert, tensor) == pytest.approx(
        BASE_LATENCY + hop + max(inside, outside)
    )


def test_products_hide_two_of_backwards_exchanges() -> None:
    config = load(16, ALONE, "zero_tp.parallel.expert=8", model=EXPERTS_16)
    spec = run_model_size(config).spec
    workload = workload_of(config, cpu=False)
    exchange = ExchangeTraffic(spec, workload)
    time = exchange.seconds(H100)
    rows, numbers, weights = (
        H100.all_to_all_seconds(size, 8)
        for size in (exchange.rows, exchange.numbers, exchange.weights)
    )
    assert time.numbers == numbers + HOST_READ_SECONDS
    assert time.forward == pytest.approx(2 * rows)
    assert time.backward + time.hidden == pytest.approx(3 * rows + 2 * weights)
    assert 0 < time.hidden <= 2 * rows
    busier = ExchangeTraffic(spec, replace(workload, expert_imbalance=2.0))
    assert busier.rows == 2 * exchange.rows
    assert ExchangeTraffic(spec, replace(workload, expert=1)).seconds(H100).forward == 0


def test_gradients_of_experts_are_reduced_over_the_ranks_that_have_the_same() -> None:
    """64 ranks in nodes of 8: with EP 8, rings of 8 for experts, one of each node."""
    overrides = ["zero_tp.parallel.tensor=1", "zero_tp.recompute=full"]
    mixtral = CONFIGS / "mixtral_8x7b.json"
    device = named_device("h100")
    small = ["zero_tp.model.num_hidden_layers=2", *overrides]
    config = RunConfig.load(mixtral, [*small, "zero_tp.parallel.expert=8"], 64)
    made = plan(config, device)
    parameters = made.model.parameters
    assert parameters.experts == 2 * 3 * 4096 * 14336  # one of 8 experts in each layer
    calls = -(-parameters.total // 500_000_000)
    everywhere = parameters.total - parameters.experts
    seconds = sum(
        H100.collective_seconds(2 * size, ranks, stride)
        + 2 * H100.collective_seconds(2 * size, ranks, stride, calls)
        for size, ranks, stride in ((everywhere, 64, 1), (parameters.experts, 8, 8))
    )
    assert made.time.dp_communication == pytest.approx(seconds)
    assert made.communicators == 3, "the world, expert groups, and ranks with the same experts"
    text = report.describe(made)
    assert "= TP 1 × DP 64, EP 8, ZeRO-1" in text and "expert exchange" in text
    rows = "1 of 8 experts of a layer, which get 8,192 rows of tokens in a micro-batch, 8,192 each"
    assert rows in text
    sent = made.as_json()["paper_elements_sent"]["expert"]
    assert sent == pytest.approx(8 * 2 * 7 * 7 / 8 * 8192 * 4096, rel=0.001)
    uneven = plan(config, device, expert_imbalance=2.0)
    assert "the busiest expert rank gets 2 times the mean" in report.describe(uneven)
    for term in ("matrix products", "expert exchange"):
        assert uneven.time.terms()[term] > 1.3 * made.time.terms()[term]
    assert uneven.needed > made.needed


# ---- search --------------------------------------------------------------------------------------


def search(world: int, memory_gib: float, *overrides: str) -> tuple[Search, list[str]]:
    sets = ["zero_tp.model.num_hidden_layers=8", "train_batch_size=128", *overrides]
    device = named_device("h100").model_copy(update={"memory_gib": memory_gib})
    return Search(RunConfig.load(CONFIGS / "mixtral_8x7b.json", sets, world), device), sets


@THOROUGH
def test_search_divides_experts_where_memory_demands_it() -> None:
    found, sets = search(16, 52)
    shown, written = found.fastest(sets, 1)
    first = shown[0]
    assert first.workload.expert > 1 and first.needed < 52 * GIB
    assert written["zero_tp"]["parallel"]["expert"] == first.workload.expert
    assert f"EP {first.workload.expert}" in first.describe()
    (whole,) = (
        one
        for one in found.ranked
        if one.workload == replace(first.workload, expert=1)
        and one.settings == replace(first.settings, expert=1)
    )
    assert whole.needed > 52 * GIB and not whole.fits


@THOROUGH
def test_search_weighs_only_what_a_run_accepts() -> None:
    found, _ = search(8, 80)
    assert {one.workload.expert for one in found.ranked} == {1, 2, 4, 8}
    for one in found.ranked:
        assert one.workload.expert == 1 or one.settings.stage in (1, 2)
        assert one.settings.data % one.workload.expert == 0
        assert one.settings.expert == one.workload.expert
    found, _ = search(8, 80, MUON)
    assert {one.workload.expert for one in found.ranked} == {1}
    dense = Search(RunConfig.load(CONFIGS / "llama_135m.json", (), 8), named_device("h100"))
    assert {one.workload.expert for one in dense.ranked} == {1}


@pytest.mark.parametrize(
    ("world", "expert", "stage", "reason"),
    [
        (8, 8, 3, "zero_tp.parallel.expert: refused at stage 3"),
        (8, 8, 0, "zero_tp.parallel.expert: refused at stage 0"),
        (8, 3, 1, "expert 3 does not divide data 8"),
        (16, 16, 1, "8 experts do not divide over 16 ranks"),
    ],
)
def test_a_candidate_that_a_run_refuses_is_refused_by_name(
    world: int, expert: int, stage: int, reason: str
) -> None:
    raw = read_json(CONFIGS / "mixtral_8x7b.json")
    apply_overrides(raw, ["zero_tp.parallel.tensor=1", "zero_tp.parallel.sequence=false"])
    config = RunConfig.load(CONFIGS / "mixtral_8x7b.json", [ALONE], world)
    workload = replace(workload_of(config, cpu=False), expert=expert)
    settings = ZeroSettings.of(config, cpu=False).with_stage(stage, expert=expert)
    error = load_error(candidate_config(raw, workload, settings), world)
    assert error is not None and error.key == "zero_tp.parallel.expert"
    assert reason in str(error)


@THOROUGH
def test_of_equals_no_expert_parallelism_is_first() -> None:
    found, _ = search(8, 80)
    keys = [
        (max(0.0, one.shortage), one.time.total, one.needed, one.workload.expert)
        for one in found.ranked
    ]
    assert keys == sorted(keys)


@pytest.mark.parametrize("given", ["0.5", "nan", "inf", "-1"])
def test_an_imbalance_below_the_mean_is_refused(given: str) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = parser.parse_args(
        ["quickstart", "--world-size", "8", "--device", "h100", f"--expert-imbalance={given}"]
    )
    with pytest.raises(UserError, match=r"--expert-imbalance: .* give 1 or more"):
        check(options)


def test_an_imbalance_without_expert_ranks_is_refused() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = ["quickstart", "--world-size", "8", "--device", "h100", "--expert-imbalance=2"]
    with pytest.raises(UserError, match=r"--expert-imbalance: no rank .* zero_tp.parallel.expert"):
        main(parser.parse_args(words))


def test_the_json_names_the_degree() -> None:
    made = plan(load(4, ALONE, "zero_tp.parallel.expert=2"), named_device("cpu"))
    result = json.loads(json.dumps(made.as_json()))
    assert result["parallel"]["expert"] == 2 and result["paper_elements_sent"]["expert"] > 0
