"""The average of a run's weights against torch's `AveragedModel` around transformers' class with
torch's optimizers in one process.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.support.compare import check_close, grid
from tests.support.decoders import decoder
from tests.support.experts import fields
from tests.support.native import Native
from tests.support.parallel_run import optimizer_tensors, stale_weights
from tests.support.pools import Pools
from tests.support.settings import deepspeed_settings, fp16_supported
from tests.support.torch_optimizers import ROWS, TorchOptimizers, batches, loss_of, own_pieces
from tests.tiers import THOROUGH, in_tiers
from zero_tp.base.errors import ConfigError, UserError
from zero_tp.base.settings.schema import Parallel, Spike
from zero_tp.engine.engine import TrainingEngine
from zero_tp.engine.settings.parse import check_settings
from zero_tp.engine.settings.rule import EntryPoint
from zero_tp.engine.settings.rules import check_average
from zero_tp.engine.zero import weight_average
from zero_tp.engine.zero.fragments import Fragment
from zero_tp.engine.zero.states import EMA, MASTER
from zero_tp.engine.zero.weight_average import WeightAverage
from zero_tp.parallel.spans import Span

DECAY = 0.8
ADAMW: dict[str, Any] = {"lr": 4e-3, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.1}
MUON: dict[str, Any] = {"lr": 1e-2, "adamw": {"lr": 4e-3, "betas": (0.8, 0.9), "eps": 1e-3}}
GPT2 = {
    "model_type": "gpt2",
    **{"n_layer": 2, "n_embd": 24, "n_head": 4, "n_positions": 32, "vocab_size": 61},
    **dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), 0.0),
    **{"bos_token_id": 0, "eos_token_id": 0},
}
MIXTRAL = fields(num_local_experts=4)
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
ALL_OFFLOADED = {**OFFLOAD, "offload_param": {"device": "cpu"}}


def engine_with(
    reference: Any,
    tensor: int,
    stage: int,
    *,
    params: dict[str, Any] = ADAMW,
    zero: dict[str, Any] | None = None,
    expert: int = 1,
    ema: float | None = DECAY,
    options: dict[str, Any] | None = None,
    **changes: Any,
) -> Any:
    topology = grid(tensor, tensor > 1, expert)
    settings = deepspeed_settings(
        stage,
        micro_batch=ROWS // topology.data // 2,
        accumulation=2,
        **{
            "optimizer": {"type": "AdamW" if "betas" in params else "Muon", "params": params},
            "zero_optimization": {"stage": stage, **(zero or {})},
            "gradient_clipping": 0.0,
            **changes,
        },
    )
    return TrainingEngine.from_dict(
        reference.config,
        topology,
        settings,
        seed=0,
        source=Native(reference),
        ema=ema,
        **(options or {}),
    )


def check_trained(model: dict[str, Any], tensor: int, stage: int, options: dict[str, Any]) -> None:
    """Every tensor of the average, and of the weights, after each of some steps."""
    reference = decoder(model, 3)
    engine = engine_with(reference, tensor, stage, **options)
    params = {**options.get("params", ADAMW)}
    params.pop("torch_adam", None)
    optimizer = TorchOptimizers(reference, params, 0.0)
    averaged = AveragedModel(reference, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    # The first call copies: ours begins as the initial weights, too.
    averaged.update_parameters(reference)
    for tokens in batches(model, 3):
        reference.zero_grad()
        loss_of(reference, tokens, engine.topology).backward()
        optimizer.step()
        averaged.update_parameters(reference)
        engine.train_step(own_pieces(tokens, engine.topology))
        check_close(optimizer_tensors(engine, EMA), dict(averaged.module.named_parameters()))
    check_close(optimizer_tensors(engine), dict(reference.named_parameters()))


CASES: list[tuple[dict[str, Any], int, int, dict[str, Any]]] = [
    (GPT2, 2, 1, {}),
    (GPT2, 2, 2, {}),
    (GPT2, 2, 3, {}),
    (GPT2, 2, 0, {}),
    (GPT2, 1, 0, {}),
    (GPT2, 1, 3, {}),
    (GPT2, 2, 2, {"zero": OFFLOAD}),
    (GPT2, 2, 3, {"zero": ALL_OFFLOADED}),
    (GPT2, 1, 1, {"params": {**ADAMW, "torch_adam": True, "fused": False}}),
    (GPT2, 2, 2, {"params": MUON}),
    (GPT2, 1, 3, {"params": MUON}),
    (MIXTRAL, 2, 1, {}),
    (MIXTRAL, 2, 2, {"expert": 2}),
    (MIXTRAL, 1, 1, {"expert": 2}),
]


@pytest.mark.parametrize("case", in_tiers([(case,) for case in CASES], [(CASES[1],)]))
def test_the_average_is_that_of_torch(ranks: Pools, case: tuple[Any, ...]) -> None:
    ranks(4).run(check_trained, *case)


def states_of(engine: Any) -> dict[str, Tensor]:
    """This rank's masters, moments and average, by name and kind."""
    states = engine.zero.states()
    return {
        f"{fragment.name} {kind}": states.get(fragment, kind).clone()
        for fragment in states.fragments
        for kind in states.kinds()
        if states.has(fragment, kind)
    }


def check_evaluated(model: dict[str, Any], tensor: int, stage: int, options: dict[str, Any]) -> str:
    """After each step an evaluation on the average, before and after which the run is that of an
    engine without one, bit for bit; returns the names of its figures.
    """
    with fp16_supported():
        reference = decoder(model, 3)
        engine = engine_with(reference, tensor, stage, **options)
        plain = engine_with(reference, tensor, stage, **options, ema=None)
        expected = optimizer_tensors(engine)
        for number, tokens in enumerate(batches(model, 3)[:2]):
            pieces = own_pieces(tokens, engine.topology)
            assert engine.train_step(pieces) == plain.train_step(pieces)
            masters = optimizer_tensors(engine)
            update = get_ema_multi_avg_fn(DECAY)
            update([*expected.values()], [*masters.values()], number)
            check_close(optimizer_tensors(engine, EMA), expected, relative=1e-6)
            before = engine.evaluate(pieces)
            with engine.averaged_weights():
                assert stale_weights(engine, expected) == []
                found = engine.evaluate(pieces)["loss"]
            assert found != before["loss"]
            if not options.get("dtype"):
                copied = copy.deepcopy(reference)
                for name, weight in copied.named_parameters():
                    weight.data.copy_(expected[name])
                loss = loss_of(copied, tokens, engine.topology).item()
                assert found == pytest.approx(loss, rel=1e-5)
            assert stale_weights(engine, masters) == []
            assert engine.evaluate(pieces) == before == plain.evaluate(pieces)
            states = states_of(engine)
            for name, state in states_of(plain).items():
                assert torch.equal(states[name], state), name
        return " ".join(before)


EVALUATED: list[tuple[dict[str, Any], int, int, dict[str, Any]]] = [
    (GPT2, 2, 3, {}),
    (GPT2, 2, 1, {"dtype": "bf16_fp32_accumulation"}),
    (GPT2, 2, 2, {"dtype": "bf16"}),
    (GPT2, 2, 3, {"dtype": "bf16"}),
    (GPT2, 2, 0, {"dtype": "bf16"}),
    (GPT2, 1, 0, {"dtype": "fp16"}),
    (GPT2, 2, 0, {}),
    (GPT2, 1, 2, {"zero": OFFLOAD}),
    (GPT2, 2, 3, {"zero": ALL_OFFLOADED, "dtype": "bf16"}),
    (GPT2, 1, 1, {"params": MUON, "dtype": "bf16"}),
    # The loss of an evaluation is without the balancing loss.
    ({**MIXTRAL, "router_aux_loss_coef": 0.0}, 1, 2, {"expert": 2}),
]


@THOROUGH
@pytest.mark.parametrize("case", in_tiers([(case,) for case in EVALUATED], [(EVALUATED[0],)]))
def test_an_evaluation_of_the_average_leaves_no_trace(ranks: Pools, case: tuple[Any, ...]) -> None:
    assert ranks(4).run(check_evaluated, *case)[0].startswith("loss")


def moved_by_a_skipped_step(tensor: int, stage: int, why: str, options: dict[str, Any]) -> bool:
    """Whether it moved the average, which differs from the masters; the next step does."""
    with fp16_supported():
        spike = Spike(loss=1.5, window=4) if why == "spike" else None
        reference = decoder(GPT2, 3)
        engine = engine_with(reference, tensor, stage, options={"spike": spike}, **options)
        first, *others = (own_pieces(tokens, engine.topology) for tokens in batches(GPT2, 3))
        for pieces in others[:2]:
            engine.train_step(pieces)
        before = states_of(engine)
        average = [state for name, state in before.items() if name.endswith(EMA)]
        masters = [state for name, state in before.items() if name.endswith(MASTER)]
        pairs = zip(average, masters, strict=True)
        assert not any(torch.equal(*pair) for pair in pairs if pair[0].numel() > 1)
        backward = engine.zero.backward
        if why == "spike":
            engine.zero.veto.recent = [[1e-3, 1e-3], [2e-3, 1e-3]]
        else:
            factor = {"inf": math.inf, "overflow": 1e30}[why]
            engine.zero.backward = lambda loss, **others: backward(loss * factor, **others)
        engine.train_step(first)
        assert bool(engine.spike) == (why == "spike") != engine.skipped
        engine.zero.backward = backward
        engine.zero.veto.recent = []
        after = states_of(engine)
        engine.train_step(first)
        next_one = states_of(engine)
        names = [name for name in before if name.endswith(EMA)]
        assert not any(torch.equal(next_one[name], after[name]) for name in names)
        return not all(torch.equal(after[name], before[name]) for name in before)


SKIPPED: list[tuple[int, int, str, dict[str, Any]]] = [
    (2, 1, "inf", {}),
    (2, 1, "spike", {}),
    (2, 1, "inf", {"dtype": "bf16_fp32_accumulation"}),
    (2, 1, "spike", {"dtype": "bf16_fp32_accumulation"}),
    (2, 0, "inf", {}),
    (2, 0, "spike", {"dtype": "bf16"}),
    (1, 0, "overflow", {"dtype": "fp16"}),
    (2, 3, "overflow", {"dtype": "fp16"}),
    (2, 3, "spike", {}),
    (2, 2, "inf", {"zero": OFFLOAD}),
    (1, 2, "inf", {"params": MUON}),
]


@THOROUGH
@pytest.mark.parametrize("case", in_tiers([(case,) for case in SKIPPED], [(SKIPPED[0],)]))
def test_a_skipped_step_does_not_move_the_average(ranks: Pools, case: tuple[Any, ...]) -> None:
    assert ranks(2).run(moved_by_a_skipped_step, *case) == [False, False]


def test_a_swap_is_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more elements than are swapped at once, and there and back bit for bit."""
    monkeypatch.setattr(weight_average, "SWAPPED_ELEMENTS", 4)
    flats = [torch.randn(3, 5), torch.randn(2)]
    spans = [Span(0, 0, flat.numel()) for flat in flats]
    names = ("first", "second")
    fragments = [Fragment(*each) for each in zip(names, spans, flats, strict=True)]
    average = WeightAverage(fragments, DECAY)
    before = [flat.clone() for flat in flats]
    for flat in flats:
        flat += 1
    average.update()
    average.swap()
    for flat, old in zip(flats, before, strict=True):
        assert torch.equal(flat, old.lerp(old + 1, 1 - DECAY))
        assert torch.equal(average.of(flat), old + 1)
    average.swap()
    assert all(torch.equal(flat, old + 1) for flat, old in zip(flats, before, strict=True))


@pytest.mark.parametrize("decay", [0.0, 1.0, -0.5, math.nan])
def test_a_wrong_decay_is_refused(decay: float) -> None:
    settings = check_settings(deepspeed_settings(1), Parallel(), EntryPoint.ENGINE).settings
    with pytest.raises(ConfigError, match=r"^ema: .* is no decay between 0 and 1; give one"):
        check_average(settings, decay)


def failed_evaluation() -> tuple[list[str], list[str]]:
    """An error that all ranks raise inside the block leaves the run's own weights.

    Returns the names of states that have changed, and of weights that are not the masters'.
    """
    reference = decoder(GPT2, 3)
    engine = engine_with(reference, 1, 2)
    plain = engine_with(reference, 1, 2, ema=None)
    with pytest.raises(UserError, match="no average is kept; give ema="):
        plain.averaged_weights().__enter__()
    engine.train_step(own_pieces(batches(GPT2, 3)[0], engine.topology))
    before, masters = states_of(engine), optimizer_tensors(engine)
    with pytest.raises(UserError, match="nothing to score"), engine.averaged_weights():
        engine.evaluate([])
    after = states_of(engine)
    changed = [name for name, state in after.items() if not torch.equal(before[name], state)]
    return changed, stale_weights(engine, masters)


@THOROUGH
def test_a_failed_evaluation_leaves_the_weights(ranks: Pools) -> None:
    assert ranks(2).run(failed_evaluation) == [([], [])] * 2
