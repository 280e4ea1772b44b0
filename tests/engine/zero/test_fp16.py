"""fp16 against transformers in fp16 with fp32 masters and torch's own GradScaler, in one
process.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.compare import grid, norm
from tests.support.gpt2_reference import reference_model
from tests.support.pools import Pools
from tests.support.settings import fp16_supported
from tests.support.small_engine import ACCUMULATION, build, tokens_of_step
from tests.tiers import THOROUGH, in_tiers
from zero_tp.model.causal_lm import next_tokens

POWER, WINDOW, STEPS, CLIP, RATE = 12, 2, 9, 1.0, 0.05
FP16 = {"enabled": True, "initial_scale_power": POWER, "loss_scale_window": WINDOW, "hysteresis": 1}
# SGD: its updates are as large as the gradients, so that a gradient divided by another scale shows
# in the weights.
SGD = {"type": "SGD", "params": {"lr": RATE, "momentum": 0.9}}


class Run(NamedTuple):
    """Losses, norms before clipping (nan: skipped) and the scales after every step; the fp32
    masters at the end.
    """

    losses: list[float]
    norms: list[float]
    scales: list[float]
    masters: dict[str, Tensor]


def parallel(
    tensor: int,
    stage: int,
    overflows: Sequence[int],
    zero: dict[str, Any],
    steps: int = STEPS,
    **changes: Any,
) -> Run:
    """A run whose gradients overflow on one rank at the steps `overflows`."""
    from tests.support.parallel_run import optimizer_tensors

    topology = grid(tensor, tensor > 1)
    with fp16_supported():
        settings = {
            "fp16": FP16,
            "gradient_clipping": CLIP,
            "optimizer": SGD,
            "zero_allow_untested_optimizer": True,
            **changes,
        }
        engine = build(topology, stage, zero_optimization={"stage": stage, **zero}, **settings)
        step = 0

        def overflow(gradient: Tensor) -> Tensor:
            there = step in overflows and topology.rank == topology.world - 1
            return gradient * float("inf") if there else gradient

        engine.model.get_parameter("transformer.final_norm.weight").register_hook(overflow)
        run = Run([], [], [], {})
        for step in range(steps):
            own = tokens_of_step(step).chunk(topology.data)[topology.data_rank]
            run.losses.append(
                engine.train_step([(part, next_tokens(part)) for part in own.chunk(ACCUMULATION)])
            )
            run.norms.append(engine.gradient_norm)
            run.scales.append(engine.zero.loss_scale.value)
        return run._replace(masters=optimizer_tensors(engine))


def plain(overflows: Sequence[int]) -> Run:
    model = reference_model().half()
    named = dict(model.named_parameters())
    masters = {name: nn.Parameter(weight.detach().float()) for name, weight in named.items()}
    optimizer = torch.optim.SGD(masters.values(), **SGD["params"])  # type: ignore[arg-type]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**POWER)
    # Its own rule doubles one step earlier after an overflow than DeepSpeed's.
    scales = expected_scales([step in overflows for step in range(STEPS)], POWER, WINDOW, 1, 1.0)
    run = Run([], [], scales, {})
    for step in range(STEPS):
        model.zero_grad()
        losses = []
        for part in tokens_of_step(step).chunk(ACCUMULATION):
            logits = model(part).logits.float()
            loss = F.cross_entropy(logits.flatten(0, 1), next_tokens(part).flatten()) / ACCUMULATION
            scaler.scale(loss).backward()
            losses.append(loss.item())
        for name, master in masters.items():
            gradient = named[name].grad
            assert gradient is not None
            master.grad = gradient.float() * (float("inf") if step in overflows else 1.0)
        scaler.unscale_(optimizer)
        total = nn.utils.clip_grad_norm_(masters.values(), CLIP).item()
        scaler.step(optimizer)
        scaler.update(scales[step])
        with torch.no_grad():
            for name, weight in named.items():
                weight.copy_(masters[name])
        run.losses.append(sum(losses))
        run.norms.append(float("nan") if step in overflows else total)
    return run._replace(masters={name: master.detach() for name, master in masters.items()})


CPU = {"device": "cpu"}
FIRST: list[tuple[int, int, dict[str, Any]]] = [(2, 0, {}), (2, 3, {})]
CASES = [
    *FIRST,
    *(
        (tensor, stage, {})
        for tensor in (1, 2, 4)
        for stage in (0, 1, 2, 3)
        if (tensor, stage, {}) not in FIRST
    ),
    *((2, stage, {"offload_optimizer": CPU}) for stage in (1, 2, 3)),
    (2, 3, {"offload_optimizer": CPU, "offload_param": CPU}),
]


@THOROUGH
@pytest.mark.parametrize(("tensor", "stage", "zero"), in_tiers(CASES, FIRST[1:]))
def test_a_run_in_fp16_is_that_of_torchs_scaler(
    ranks: Pools, run_seed: int, tensor: int, stage: int, zero: dict[str, Any]
) -> None:
    overflows = sorted(random.Random(run_seed).sample(range(STEPS), 2))
    expected = plain(overflows)
    assert max(expected.scales) > 2.0**POWER or min(expected.scales) < 2.0**POWER
    start = {name: weight.half().float() for name, weight in reference_model().named_parameters()}
    moved = norm(*(master - start[name] for name, master in expected.masters.items()))
    for run in ranks(4).run(parallel, tensor, stage, overflows, zero):
        assert run.scales == expected.scales
        assert [value != value for value in run.norms] == [
            value != value for value in expected.norms
        ], "skipped steps"
        assert run.losses == pytest.approx(expected.losses, rel=2e-3)
        assert run.norms == pytest.approx(expected.norms, rel=1e-2, nan_ok=True)
        apart = norm(*(run.masters[name] - master for name, master in expected.masters.items()))
        assert apart < 0.02 * moved, f"{apart / moved:.4f} of what the run has moved"


def expected_scales(
    overflows: Sequence[bool],
    power: int,
    window: int,
    hysteresis: int,
    smallest: float,
    consecutive: bool = False,
) -> list[float]:
    """Return the scales by DeepSpeed's rule.

    An overflow halves the scale, not below `smallest`, once `hysteresis` - 1 spare overflows are
    used. After every `window` further good steps it doubles, and spares are restored; with
    `consecutive` each good step restores them.
    """
    scale, spare, good, scales = 2.0**power, hysteresis - 1, 0, []
    for overflow in overflows:
        if overflow:
            good = 0
            if spare:
                spare -= 1
            else:
                scale = max(scale / 2, smallest)
        else:
            good += 1
            if consecutive:
                spare = hysteresis - 1
            if good > 1 and (good - 1) % window == 0:
                scale, spare = scale * 2, hysteresis - 1
        scales.append(scale)
    return scales


@pytest.mark.thorough
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_hysteresis_and_the_smallest_scale_hold_under_every_stage(
    ranks: Pools, run_seed: int, stage: int
) -> None:
    chance = random.Random(run_seed)
    hysteresis, window, consecutive = (
        chance.randint(2, 3),
        chance.randint(1, 3),
        chance.random() < 0.5,
    )
    overflows = [chance.random() < 0.6 for _ in range(16)]
    settings = {**FP16, "initial_scale_power": 3, "min_loss_scale": 2.0}
    fp16 = {
        **settings,
        "hysteresis": hysteresis,
        "loss_scale_window": window,
        "consecutive_hysteresis": consecutive,
    }
    at = [step for step, overflow in enumerate(overflows) if overflow]
    expected = expected_scales(overflows, 3, window, hysteresis, 2.0, consecutive)
    for run in ranks(2).run(parallel, 2, stage, at, {}, len(overflows), fp16=fp16):
        assert run.scales == expected
        assert [value != value for value in run.norms] == overflows


def test_a_fixed_scale_stays(ranks: Pools) -> None:
    for run in ranks(2).run(parallel, 2, 1, [1], {}, 4, fp16={"enabled": True, "loss_scale": 64.0}):
        assert run.scales == [64.0] * 4
        assert [value != value for value in run.norms] == [False, True, False, False]
