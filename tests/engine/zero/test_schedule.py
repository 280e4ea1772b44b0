"""Step k of a run trains at its schedule's value at k, also of a run that is resumed with
another schedule.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.pools import Pools
from tests.support.settings import deepspeed_settings, gpt2_config
from tests.tiers import THOROUGH, in_tiers
from zero_tp.base.settings.schedule import SCHEDULES
from zero_tp.parallel.topology import Topology

RATE, STEPS = 0.25, 12
LOW, HIGH = 0.1, 0.5
LINEAR = {"warmup_num_steps": 4, "warmup_type": "linear"}


def cosine(part: float) -> float:
    return (1 + math.cos(math.pi * min(1.0, part))) / 2


def native(name: str, params: dict[str, Any]) -> Callable[[int], float]:
    """The rate at k of transformers' own schedule, stepped k times, or to its end."""

    def rate(k: int) -> float:
        from transformers import get_scheduler

        optimizer = torch.optim.SGD([torch.zeros(1)], lr=RATE)
        others = {key: value for key, value in params.items() if key not in WHOLE}
        warmup, length = map(params.get, WHOLE)
        schedule = get_scheduler(name, optimizer, warmup, length, others)
        for _ in range(k if length is None else min(k, length)):
            optimizer.step()
            schedule.step()
        return float(schedule.get_last_lr()[0])

    return rate


WHOLE = ("num_warmup_steps", "num_training_steps")
LENGTHS = {"num_warmup_steps": 3, "num_training_steps": 11}
OF_TRANSFORMERS: list[tuple[str, dict[str, Any]]] = [
    ("constant", {}),
    ("constant_with_warmup", {"num_warmup_steps": 4}),
    ("inverse_sqrt", {"num_warmup_steps": 3}),
    ("inverse_sqrt", {"num_warmup_steps": 2, "timescale": 7}),
    ("linear", LENGTHS),
    ("cosine", LENGTHS),
    ("cosine", {**LENGTHS, "num_cycles": 1.5}),
    ("cosine_with_restarts", {**LENGTHS, "num_cycles": 2}),
    ("cosine_with_min_lr", {**LENGTHS, "min_lr": 0.05}),
    ("cosine_with_min_lr", {**LENGTHS, "min_lr_rate": 0.1, "num_cycles": 0.5}),
    ("cosine_warmup_with_min_lr", {**LENGTHS, "min_lr_rate": 0.1, "warmup_lr_rate": 0.2}),
    ("polynomial", {**LENGTHS, "lr_end": 0.01, "power": 2.0}),
    ("warmup_stable_decay", {**LENGTHS, "num_decay_steps": 4}),
    (
        "warmup_stable_decay",
        {
            **LENGTHS,
            "num_decay_steps": 5,
            "warmup_type": "cosine",
            "decay_type": "1-sqrt",
            "min_lr_ratio": 0.1,
        },
    ),
    (
        "warmup_stable_decay",
        {**LENGTHS, "num_decay_steps": 5, "decay_type": "cosine", "num_cycles": 0.4},
    ),
]
"""Schedules of transformers, with every parameter that they have."""
CYCLE = {
    "cycle_min_lr": LOW,
    "cycle_max_lr": HIGH,
    "cycle_first_step_size": 3,
    "cycle_second_step_size": 4,
}
RANGE = {"lr_range_test_min_lr": LOW, "lr_range_test_step_size": 3, "lr_range_test_step_rate": 2.0}
FORMULAS: dict[str, tuple[str, dict[str, Any], Callable[[int], float]]] = {
    "linear warm-up": (
        "WarmupLR",
        {**LINEAR, "warmup_min_lr": LOW, "warmup_max_lr": HIGH},
        lambda k: LOW + (HIGH - LOW) * min(1.0, k / 4),
    ),
    "logarithmic warm-up": (
        "WarmupLR",
        {"warmup_num_steps": 4},
        lambda k: RATE * min(1.0, math.log(k + 1) / math.log(4)),
    ),
    "linear decay": (
        "WarmupDecayLR",
        {**LINEAR, "warmup_max_lr": HIGH, "total_num_steps": 9},
        lambda k: HIGH * min(k / 4, max(0.0, (9 - k) / 5)),
    ),
    "cosine decay": (
        "WarmupCosineLR",
        {**LINEAR, "total_num_steps": 9, "cos_min_ratio": 0.1},
        lambda k: RATE * (k / 4 if k < 4 else 0.1 + 0.9 * cosine((k - 3) / 5)),
    ),
    "cosine decay from a part of the rate": (
        "WarmupCosineLR",
        {**LINEAR, "total_num_steps": 9, "warmup_min_ratio": 0.2},
        lambda k: RATE * (0.2 + 0.8 * k / 4 if k < 4 else 1e-4 + (1 - 1e-4) * cosine((k - 3) / 5)),
    ),
    "range test": ("LRRangeTest", RANGE, lambda k: LOW * (1 + 2 * k / 3)),
    "range test in stairs": (
        "LRRangeTest",
        {**RANGE, "lr_range_test_staircase": True},
        lambda k: LOW * (1 + 2 * (k // 3)),
    ),
    "one cycle": (
        "OneCycle",
        {**CYCLE, "decay_lr_rate": 0.5, "decay_step_size": 2},
        lambda k: (
            LOW + (HIGH - LOW) * min(k / 3, (7 - k) / 4)
            if k <= 7
            else LOW / (1 + 0.5 * (k - 7) / 2)
        ),
    ),
    "one cycle in stairs": (
        "OneCycle",
        {
            **CYCLE,
            "cycle_first_step_size": 4,
            "cycle_first_stair_count": 2,
            "cycle_second_stair_count": 1,
        },
        lambda k: LOW + (HIGH - LOW) * (k // 2 / 2 if k <= 4 else max(0, (8 - k) // 4)),
    ),
    **{
        f"{name} {params}": (name, params, native(name, params)) for name, params in OF_TRANSFORMERS
    },
}
"""Schedules: type, params, and the rate at k by DeepSpeed's documentation or by transformers."""


def engine_of(
    scheduler: str | None, params: dict[str, Any], stage: int, optimizer: str = "SGD"
) -> Any:
    from zero_tp.engine.engine import TrainingEngine

    torch_adam = {} if optimizer == "SGD" else {"torch_adam": True}
    schedule: dict[str, Any] = (
        {"scheduler": {"type": scheduler, "params": params}} if scheduler else {}
    )
    settings = deepspeed_settings(
        stage,
        gradient_clipping=0.0,
        optimizer={"type": optimizer, "params": {"lr": RATE, **torch_adam}},
        zero_allow_untested_optimizer=True,
        **schedule,
    )
    return TrainingEngine.from_dict(
        gpt2_config(n_layer=1, vocab_size=50, n_positions=8), Topology(), settings, seed=1
    )


TOKENS = torch.arange(9).reshape(1, 9) * 5 % 50
ROWS = [(TOKENS[:, :-1], TOKENS[:, 1:])]


OF_EACH_TYPE = list({scheduler: name for name, (scheduler, _, _) in FORMULAS.items()}.values())
"""One schedule of every type: the last."""


def rates(stage: int, names: list[str]) -> dict[str, list[tuple[float, float]]]:
    """Return for each schedule, by step: the reported rate, and the weight's change divided by
    its gradient.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    for name in names:
        scheduler, params, _ = FORMULAS[name]
        engine = engine_of(scheduler, params, stage)
        weight = engine.model.transformer.final_norm.weight
        seen: list[torch.Tensor] = []
        weight.register_hook(seen.append)
        found[name] = []
        for _ in range(STEPS):
            before, said = weight.detach().clone(), engine.learning_rate
            engine.train_step(ROWS)
            gradient = seen.pop().double()
            moved = (before - weight.detach()).double()
            found[name].append((said, ((moved * gradient).sum() / (gradient**2).sum()).item()))
    return found


@THOROUGH
@pytest.mark.parametrize(
    ("stage", "names"),
    [
        pytest.param(0, OF_EACH_TYPE, id="one of each type"),
        pytest.param(0, list(FORMULAS), id="all"),
        pytest.param(2, list(FORMULAS), id="all at ZeRO-2"),
    ],
)
def test_step_k_trains_at_the_schedule_s_value_at_k(
    ranks: Pools, stage: int, names: list[str]
) -> None:
    assert {FORMULAS[name][0] for name in names} == set(SCHEDULES)
    found = ranks(2).run(rates, stage, names)[0]
    for name in names:
        formula = FORMULAS[name][2]
        expected = [formula(k) for k in range(1, STEPS + 1)]
        assert [said for said, _ in found[name]] == pytest.approx(expected, rel=1e-9), name
        assert [moved for _, moved in found[name]] == pytest.approx(expected, rel=1e-3, abs=1e-6), (
            name
        )


RESUMED: list[tuple[str | None, str | None]] = [
    ("cosine decay", None),
    (None, "linear warm-up"),
    ("cosine decay", "linear warm-up"),
    ("linear decay", "one cycle"),
    ("range test", "cosine decay"),
    ("one cycle", "one cycle"),
    ("linear decay", f"linear {LENGTHS}"),
    (f"cosine {LENGTHS}", "constant {}"),
]
"""The schedule of a run and of the one that goes on from it, by the names of FORMULAS."""


def resumed_rates(stage: int, skipped: int) -> list[list[float]]:
    """The rates of steps 4 to 9 of each pair; step `skipped` updates nothing."""
    found: list[list[float]] = []
    for before, after in RESUMED:
        first, resumed = (
            engine_of(FORMULAS[name][0], FORMULAS[name][1], stage)
            if name
            else engine_of(None, {}, stage)
            for name in (before, after)
        )
        for step in range(1, 4):
            parameters = first.model.parameters() if step == skipped else ()
            hooks = [
                parameter.register_hook(lambda gradient: gradient * math.nan)
                for parameter in parameters
            ]
            first.train_step(ROWS)
            for hook in hooks:
                hook.remove()
        resumed.zero.restore_progress(json.loads(json.dumps(first.zero.progress())))
        found.append([])
        for _ in range(6):
            found[-1].append(resumed.learning_rate)
            resumed.train_step(ROWS)
    return found


@pytest.mark.thorough
@pytest.mark.parametrize(("stage", "skipped"), in_tiers([(0, 0), (2, 0), (1, 2), (3, 2)], [(1, 2)]))
def test_a_resumed_run_has_the_rates_of_its_own_config(
    ranks: Pools, stage: int, skipped: int
) -> None:
    """From the step that it resumes at, whatever schedule the run had before. A skipped step
    does not advance it.
    """
    done = 3 - (skipped > 0)
    for (_, after), rates in zip(
        RESUMED, ranks(2).run(resumed_rates, stage, skipped)[0], strict=True
    ):
        formula = FORMULAS[after][2] if after else lambda _: RATE
        assert rates == pytest.approx([formula(k) for k in range(done + 1, done + 7)], rel=1e-9), (
            after
        )


MOMENTUM = {**CYCLE, "cycle_momentum": True, "cycle_min_mom": 0.5, "cycle_max_mom": 0.9}


def cycled_betas() -> list[list[tuple[float, float]]]:
    """The betas of steps 1 to 8 under OneCycle: of a run, and of one that was resumed at step 4."""
    whole, resumed = (engine_of("OneCycle", MOMENTUM, 0, "AdamW") for _ in range(2))
    betas: list[list[tuple[float, float]]] = [[], []]
    for step in range(8):
        if step == 3:
            resumed.train_step(ROWS)  # which gives its optimizer states to set
            resumed.zero.restore_progress(whole.zero.progress())
        for engine, found in zip((whole, resumed), betas, strict=True):
            if engine is whole or step >= 3:
                found.append(engine.zero.optimizer.param_groups[0]["betas"])
                engine.train_step(ROWS)
    return betas


def test_a_cycle_has_the_momentum_of_its_step(ranks: Pools) -> None:
    """The first beta falls while the rate rises; the second is DeepSpeed's default."""
    whole, resumed = ranks(2).run(cycled_betas)[0]
    expected = [0.9 - 0.4 * max(0.0, min(k / 3, (7 - k) / 4)) for k in range(1, 9)]
    assert [first for first, _ in whole] == pytest.approx(expected)
    assert {second for _, second in whole} == {0.99}
    assert resumed == whole[3:]
