"""The updates by AdamW against DeepSpeed's own steps, and their kernel against torch's AdamW."""

from __future__ import annotations

import contextlib
import random
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.support.allocations import largest_allocation
from tests.support.compare import grid
from tests.support.pools import Pools
from tests.support.settings import fp16_supported
from tests.support.small_engine import ACCUMULATION, DECAY, build, tokens_of_step
from tests.tiers import in_tiers
from zero_tp.engine.zero import adamw, adamw_update, zero_stages
from zero_tp.engine.zero.adamw import (
    FlatAdamW,
    adamw_scalars,
    update_adamw_compiled,
    update_and_round_compiled,
)
from zero_tp.engine.zero.adamw_update import (
    AdamWUpdate,
    UnpartitionedAdamWUpdate,
    UpdateBlock,
    update_blocks,
)
from zero_tp.model.causal_lm import next_tokens
from zero_tp.parallel.elementwise import COMPILED

FAULTS = {"nan": float("nan"), "infinite": float("inf"), "large": 1e25}
"""What a gradient is filled with; the squares of the last overflow fp32."""
STEPS = 4


class Step(NamedTuple):
    """What a step leaves: norm, whether it was skipped, and the rank's tensors."""

    norm: float
    is_skipped: bool
    counters: tuple[int, int]
    tensors: dict[str, Tensor]


def steps_of(
    tensor: int, stage: int, dtype: str, fault: tuple[str, int, str], is_fused: bool
) -> list[Step]:
    """Run a few steps.

    Args:
        fault: in the second step, the name of a parameter, the rank, and how its gradient is wrong.
        is_fused: by our step; else by DeepSpeed's.
    """
    topology = grid(tensor, tensor > 1)
    adamw = {"lr": 1e-2, "weight_decay": DECAY, "torch_adam": True, "fused": True}
    precisions: dict[str, dict[str, Any]] = {
        "bf16": {"bf16": {"enabled": True}},
        "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}},
        "fp32": {},
    }
    update: Any = AdamWUpdate if stage else UnpartitionedAdamWUpdate
    supports = (
        contextlib.nullcontext()
        if is_fused
        else mock.patch.object(update, "is_supported", lambda _: False)
    )
    supported = fp16_supported() if dtype == "fp16" else contextlib.nullcontext()
    # Of 16-bit gradients, which would be rounded once more.
    scaling = mock.patch.object(zero_stages, "scale_gradients", lambda *_: None)
    with supports, supported, contextlib.nullcontext() if stage or is_fused else scaling:
        engine = build(
            topology,
            stage,
            optimizer={"type": "AdamW", "params": adamw},
            gradient_clipping=0.5,
            **precisions[dtype],
        )
        assert (engine.zero.optimizer.step.__func__ is update.step) == is_fused
        if not stage and not is_fused:
            _clip_masters(engine.zero, 0.5)
        number = 0

        def damage(gradient: Tensor) -> Tensor:
            is_here = number == 1 and topology.rank == fault[1]
            return torch.full_like(gradient, FAULTS[fault[2]]) if is_here else gradient

        engine.model.get_parameter(fault[0]).register_hook(damage)
        return [_step(engine, number := step) for step in range(STEPS)]


def _clip_masters(zero: Any, limit: float) -> None:
    """Let DeepSpeed's wrapper without ZeRO clip its fp32 gradients, by the exact norm."""
    wrapper = zero.optimizer
    wrapper.clip_grad = limit
    clip = wrapper.unscale_and_clip_grads

    def clip_by_exact_norm(_: float) -> Any:
        scale = 1.0 if zero.loss_scale is None else zero.loss_scale.value
        return clip(zero.norm_and_skipped()[0] * scale)

    wrapper.unscale_and_clip_grads = clip_by_exact_norm


def _step(engine: Any, number: int) -> Step:
    topology = engine.topology
    own = tokens_of_step(number).chunk(topology.data)[topology.data_rank]
    engine.train_step([(part, next_tokens(part)) for part in own.chunk(ACCUMULATION)])
    states = engine.zero.states()
    tensors = {name: weight.detach().clone() for name, weight in engine.model.named_parameters()}
    for kind in states.kinds():
        for fragment in states.fragments:
            tensors[f"{fragment.name} {kind}"] = states.get(fragment, kind).clone()
    deepspeed_engine = engine.deepspeed_engine
    counters = (deepspeed_engine.global_steps, deepspeed_engine.skipped_steps)
    return Step(engine.gradient_norm, engine.skipped, counters, tensors)


def both(
    tensor: int, stage: int, dtype: str, fault: tuple[str, int, str]
) -> tuple[list[Step], list[Step]]:
    with mock.patch.object(adamw_update, "SMALL", 100):  # the model's matrices are large then
        ours = steps_of(tensor, stage, dtype, fault, True)
    return ours, steps_of(tensor, stage, dtype, fault, False)


PARAMETERS = (
    "transformer.final_norm.weight",
    "transformer.layers.0.mlp.up.weight",
    "transformer.layers.1.attention.output.bias",
)


CASES: list[tuple[int, int, str]] = [
    (tensor, stage, dtype)
    for tensor in (1, 2, 4)
    for stage in (0, 1, 2)
    for dtype in ("fp32", "bf16", "fp16")
    if stage or dtype != "fp32"
]


@pytest.mark.parametrize(
    ("tensor", "stage", "dtype"), in_tiers(CASES, [(2, 0, "bf16"), (2, 2, "fp16")])
)
def test_every_step_is_that_of_deepspeed(
    ranks: Pools, run_seed: int, tensor: int, stage: int, dtype: str
) -> None:
    """Norms, skips, counters, masters, moments and weights, of steps around a wrong gradient."""
    draw = random.Random(run_seed)
    name, kind = draw.choice(PARAMETERS), draw.choice(sorted(FAULTS))
    if kind == "large" and (dtype == "fp16" or stage == 0):
        # At stage 0 DeepSpeed squares before it clips, in fp32: the test below.
        kind = "infinite"
    # In fp32 DeepSpeed looks for such gradients in the norm alone, which counts a replicated one on
    # the first TP rank: on another it would be applied.
    rank = draw.randrange(4)
    if dtype == "fp32":
        rank -= rank % tensor
    fault = (name, rank, kind)
    for number, (ours, theirs) in enumerate(ranks(4).run(both, tensor, stage, dtype, fault)):
        where = f"{fault}, rank {number}"
        assert [step.is_skipped for step in ours] == [step.is_skipped for step in theirs], where
        # On a CPU neither sees a large number on a rank that does not count it. On CUDA its
        # square is infinite in fp32, and the step is skipped.
        if kind != "large":
            assert [step.is_skipped for step in ours] == [False, True, False, False], where
        for own, other in zip(ours, theirs, strict=True):
            assert own.counters == other.counters
            assert own.norm == pytest.approx(other.norm, rel=1e-7, nan_ok=True), where
            assert own.tensors.keys() == other.tensors.keys()
            for key, tensor_of_ours in own.tensors.items():
                if dtype == "fp32" and "qkv.bias" in key:
                    continue  # its gradient of keys is rounding alone, which Adam scales
                # A last bit of the norm is one of the clip factor. A weight of 0.03 that the rate
                # of 0.01 brings near 0 keeps last bits of 0.03, which are 2e-9.
                torch.testing.assert_close(
                    tensor_of_ours,
                    other.tensors[key],
                    rtol=1e-6,
                    atol=4e-9 if dtype == "fp32" else 1e-9,
                    msg=key,
                )


def large_step(clips: bool) -> tuple[Step, bool]:
    """A step of ZeRO-0 in bf16 with a large gradient, and whether all moments are finite."""
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True, "fused": True}}
    engine = build(
        grid(1, False),
        0,
        optimizer=optimizer,
        gradient_clipping=0.5 if clips else 0.0,
        bf16={"enabled": True},
    )
    engine.model.get_parameter(PARAMETERS[1]).register_hook(
        lambda gradient: torch.full_like(gradient, FAULTS["large"])
    )
    step = _step(engine, 0)
    moments = [tensor for name, tensor in step.tensors.items() if "exp_avg" in name]
    return step, all(tensor.isfinite().all() for tensor in moments)


@pytest.mark.parametrize("clips", [False, True])
def test_a_large_gradient_makes_no_moment_infinite(ranks: Pools, clips: bool) -> None:
    """Its square overflows fp32: without clipping the step is skipped."""
    ((step, is_finite),) = ranks(1).run(large_step, clips)
    assert is_finite and step.is_skipped == (not clips)
    assert step.counters == (1, int(not clips))


def skips(stage: int, optimizer: str, name: str) -> list[tuple[bool, bool]]:
    """Whether each step in fp32 was skipped, and whether the weights stayed: one step for each
    rank and kind of a wrong gradient.
    """
    topology = grid(2, True)
    params = {"lr": 1e-2} | ({"torch_adam": True, "fused": True} if optimizer == "AdamW" else {})
    block = {"type": optimizer, "params": params}
    engine = build(topology, stage, optimizer=block, zero_allow_untested_optimizer=True)
    before = {name: weight.detach().clone() for name, weight in engine.model.named_parameters()}
    wrong = [(rank, kind) for rank in (0, 1) for kind in ("nan", "infinite")]
    number = 0

    def damage(gradient: Tensor) -> Tensor:
        rank, kind = wrong[number]
        return torch.full_like(gradient, FAULTS[kind]) if topology.rank == rank else gradient

    engine.model.get_parameter(name).register_hook(damage)
    skipped = []
    for number in range(len(wrong)):  # `damage` reads it, too
        step = _step(engine, number)
        stayed = all(torch.equal(step.tensors[name], before[name]) for name in before)
        skipped.append((step.is_skipped, stayed))
    return skipped


@pytest.mark.parametrize(
    ("stage", "optimizer"),
    in_tiers(
        [(0, "AdamW"), (1, "AdamW"), (1, "SGD"), (2, "SGD"), (3, "AdamW")],
        [(0, "AdamW"), (1, "AdamW"), (2, "SGD"), (3, "AdamW")],
    ),
)
@pytest.mark.parametrize("name", in_tiers(PARAMETERS[:2], PARAMETERS[:1]))
def test_a_gradient_that_is_wrong_on_one_rank_alone_skips_the_step_of_all(
    ranks: Pools, name: str, stage: int, optimizer: str
) -> None:
    """Of a replicated parameter only the first TP rank counts in the norm."""
    assert ranks(2).run(skips, stage, optimizer, name) == [[(True, True)] * 4] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_in_chunks_is_torchs_step(
    dtype: torch.dtype, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a matrix and with a factor; no copy has the size of the whole gradient."""
    torch.manual_seed(seed)
    monkeypatch.setattr(adamw, "UPDATE_ELEMENTS", 2**14)
    master = torch.randn(123, 1001)
    expected = master.clone()
    options: dict[str, Any] = {"lr": 3e-3, "weight_decay": 0.1, "fused": True}
    reference = torch.optim.AdamW([expected], **options)
    optimizer = torch.optim.AdamW([master], **options)
    flat_adamw = FlatAdamW(optimizer, None)
    weight = master.to(dtype).flatten()
    for _ in range(3):
        gradient = torch.randn(123, 1001).to(dtype)
        expected.grad = gradient.float() * 0.37
        reference.step()
        update = flat_adamw.begin(master, optimizer.param_groups[0], 0.37)
        for elements in (slice(0, 70_000), slice(70_000, master.numel())):
            part = None if dtype == torch.float32 else weight[elements]
            block = gradient.flatten()[elements]
            assert largest_allocation(partial(update, block, elements, part)) <= 4 * 2**14
        torch.testing.assert_close(master, expected, rtol=2.4e-7, atol=1.2e-7)
        assert dtype == torch.float32 or torch.equal(weight, master.to(dtype).flatten())
    for kind in ("exp_avg", "exp_avg_sq", "step"):
        torch.testing.assert_close(
            optimizer.state[master][kind], reference.state[expected][kind], rtol=2.4e-7, atol=1.2e-7
        )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", in_tiers([torch.float32, torch.bfloat16], [torch.bfloat16]))
def test_the_compiled_update_is_torchs_fused_adamw(dtype: torch.dtype, seed: int) -> None:
    """On sizes that are compiled once; the rate, the factor and the count change each step."""
    torch.manual_seed(seed)
    for count in (1, 2, 70):
        for size in (24, 1000, 4099):
            gradient = torch.randn(size).to(dtype)
            master, first, second = torch.randn(size), torch.randn(size) / 9, torch.rand(size) / 9
            settings = {
                "lr": 3e-3 / count,
                "betas": (0.9, 0.95),
                "weight_decay": 0.1,
                "eps": 1e-8,
            }
            expected = [tensor.clone() for tensor in (master, first, second)]
            wide = gradient.float() * 0.37
            torch._fused_adamw_(
                expected[:1],
                [wide],
                expected[1:2],
                expected[2:],
                [],
                [torch.tensor(float(count))],
                lr=3e-3 / count,
                beta1=0.9,
                beta2=0.95,
                weight_decay=0.1,
                eps=1e-8,
                amsgrad=False,
                maximize=False,
            )
            weight = torch.empty(size, dtype=dtype)
            scalars = torch.tensor(adamw_scalars(settings, count, 0.37))
            block = (gradient, master, first, second)
            if dtype == torch.float32:
                COMPILED.map_rows(update_adamw_compiled, block, scalars)
                weight = master
            else:
                COMPILED.map_rows(update_and_round_compiled, (*block, weight), scalars)
            # Sums are rounded in another order: the last bit of the larger operand.
            for own, other in zip((master, first, second), expected, strict=True):
                torch.testing.assert_close(own, other, rtol=2.4e-7, atol=1.2e-7)
            assert torch.equal(weight, master.to(dtype))
            rounded = expected[0].to(dtype)
            assert (weight != rounded).double().mean() <= (1e-3 if dtype != torch.float32 else 1)


def test_small_neighbours_share_a_call() -> None:
    sizes = [70_000, 10, 20, 30, 65_536, 5, 8]
    counted = [True, True, True, False, True, True, None]
    bounds = [(0, 1), (1, 3), (3, 4), (4, 5), (5, 6)]
    starts = [0, 70_000, 70_010, 70_030, 70_060, 135_596, 135_601]
    blocks = update_blocks(sizes, counted)
    assert [(block.gradients.start, block.gradients.stop) for block in blocks] == bounds
    assert [(block.elements.start, block.elements.stop) for block in blocks] == [
        (starts[begin], starts[end]) for begin, end in bounds
    ]
    assert [block.is_counted for block in blocks] == [True, True, False, True, True]


def test_shared_blocks_end_at_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw_update, "SHARED", 30)
    blocks = update_blocks([10] * 7, [True] * 7)
    assert blocks == [
        UpdateBlock(slice(0, 3), slice(0, 30), True, True),
        UpdateBlock(slice(3, 6), slice(30, 60), True, True),
        UpdateBlock(slice(6, 7), slice(60, 70), True, True),
    ]
