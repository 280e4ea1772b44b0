"""Checkpoints that leave an accelerator come back in time, whatever its streams do first: no bit changes.

The accelerator is a simulated one with values (tests/support/streams.py). test_store_moments.py counts the bytes.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig

from tests.support.compare import check_close, grid
from tests.support.pools import Pool
from tests.support.streams import computing_accelerator
from tests.tiers import THOROUGH
from zero_tp.activations.activation_memory import ActivationMemory
from zero_tp.activations.policy import RecomputePolicy
from zero_tp.activations.stores import ContiguousBuffer, Host, InPlace, Partitioned, Store
from zero_tp.huggingface import ZeroTPForCausalLM
from zero_tp.planning.dryrun import Unfilled

WORLD = 2
LAYERS, BATCH, LENGTH, VOCABULARY = 3, 2, 10, 50
P_A, HOST, BUFFER = "partition_activations", "cpu_checkpointing", "contiguous_memory_optimization"
SCHEDULES = ["late", "early"]
"""When copies run where nothing orders them."""


# ---- a model -------------------------------------------------------------------------------------------------------


def config_of(model_type: str) -> Any:
    sizes: dict[str, Any] = {"hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": LAYERS}
    sizes |= {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH}
    sizes |= {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    if model_type == "gpt2":
        sizes |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    else:
        sizes |= {"intermediate_size": 32, "num_key_value_heads": 2}
    config = AutoConfig.for_model(model_type, **sizes)
    config._attn_implementation = "eager"  # the simulated accelerator's fused kernel has no values
    return config


Found = dict[str, Tensor]
"""By name: the gradients, summed over the micro-batches, and under "losses" their losses."""


def plain(model: ZeroTPForCausalLM, tokens: Tensor) -> Found:
    """What the model computes on the CPU, where nothing is simulated."""
    losses = []
    for one in tokens:
        losses.append(model(one, shift_labels=one).loss)
        losses[-1].backward()
    gradients = {name: gradient_of(each) for name, each in model.named_parameters()}
    return {"losses": torch.stack(losses).detach(), **gradients}


def simulated(
    model: ZeroTPForCausalLM, tokens: Tensor, copies: str, settings: dict[str, Any], policy: dict[str, Any]
) -> tuple[Found, list[int]]:
    """What its copy on the accelerator computes; and how many copies have moved after each forward and backward."""
    with computing_accelerator(copies) as computing:
        there = ZeroTPForCausalLM(model.config, model.topology, source=Unfilled(), device=computing.device).train()
        for its, ours in zip(there.parameters(), model.parameters(), strict=True):
            computing.write(its, ours)
        ActivationMemory(there, RecomputePolicy(**policy), settings, computing.device)
        batches = torch.empty(tokens.shape, dtype=torch.long, device=computing.device)
        computing.write(batches, tokens)
        losses, moved = [], []
        for one in batches:
            loss = there(one, shift_labels=one).loss
            moved.append(computing.moved)
            loss.backward()
            moved.append(computing.moved)
            losses.append(loss.detach())
        values = [computing.read(loss) for loss in losses]
        gradients = {name: computing.read(gradient_of(each)) for name, each in there.named_parameters()}
    return {"losses": torch.stack(values), **gradients}, moved


def gradient_of(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def compared(
    model_type: str,
    tensor: int,
    sequence: bool,
    cases: list[dict[str, Any]],
    policy: dict[str, Any],
    micro_batches: int = 2,
) -> None:
    """Each case's losses and gradients equal, bit for bit, those of a run that keeps everything where it is."""
    tokens = torch.randint(VOCABULARY, (micro_batches, BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    model = ZeroTPForCausalLM(config_of(model_type), grid(tensor, sequence), seed=1).train()
    expected, moved = simulated(model, tokens, "late", {}, {"mode": "none"})
    assert not any(moved)
    check_close(expected, plain(model, tokens))  # the CPU adds in another order
    leave = len(RecomputePolicy(**policy).recomputed_layers(LAYERS))
    for settings, copies in itertools.product(cases, SCHEDULES):
        found, moved = simulated(model, tokens, copies, settings, policy)
        for name, values in expected.items():
            assert torch.equal(found[name], values), (settings, copies, name)
        # Late: forward waits for all copies but two. Early: all have left when it ends.
        out = max(0, leave - 2) if copies == "late" else leave
        passes = [2 * leave * done + part for done in range(micro_batches) for part in (out, 2 * leave)]
        assert moved == [one * (HOST in settings) for one in passes], (settings, copies)


FULL = {"mode": "full"}
ALL = {P_A: True, BUFFER: True, HOST: True}
OTHERS: list[dict[str, Any]] = [{}, {HOST: True}, {P_A: True}, {P_A: True, HOST: True}, {P_A: True, BUFFER: True}]
UNDER_SP: list[dict[str, Any]] = [{}, {HOST: True}, {BUFFER: True}, {BUFFER: True, HOST: True}, ALL]


@pytest.mark.parametrize(
    ("model_type", "sequence", "cases", "micro_batches"),
    [
        pytest.param("gpt2", False, [ALL], 1, id="composed"),
        pytest.param("gpt2", False, OTHERS, 2, id="others", marks=THOROUGH),
        pytest.param("llama", False, [ALL], 2, id="llama", marks=THOROUGH),
        pytest.param("gpt2", True, UNDER_SP, 2, id="SP", marks=THOROUGH),
    ],
)
def test_two_ranks_compute_the_same(
    own_ranks: Pool, model_type: str, sequence: bool, cases: list[dict[str, Any]], micro_batches: int
) -> None:
    own_ranks.run(compared, model_type, 2, sequence, cases, FULL, micro_batches)


@pytest.mark.parametrize(
    ("policy", "slots"),
    [
        pytest.param(FULL, None, id="all", marks=THOROUGH),
        pytest.param({"mode": "full", "every": 2}, 4, id="every-other", marks=THOROUGH),
    ],
)
def test_one_rank_computes_the_same(policy: dict[str, Any], slots: int | None) -> None:
    compared("gpt2", 1, False, [{HOST: True}, {HOST: True, BUFFER: True, "number_checkpoints": slots}], policy)


# ---- tensors -------------------------------------------------------------------------------------------------------

SHAPES = [(4, 3, 6), (5, 7), (3, 2), (1,)]  # of which two do not divide by 2; the largest first makes the buffer


def round_trips(tensor: int, copies: str) -> int:
    """Tensors come back from every store with their shapes and bits, while others take the memory that they had."""
    same = 0
    group = grid(tensor, False).tensor_group
    on_host = torch.device("cpu")
    for dtype in (torch.float32, torch.bfloat16):
        given = [torch.randn(shape).to(dtype) for shape in SHAPES]
        expected = [(each * 3).transpose(0, -1) for each in given]
        stores: dict[str, Store] = {
            "in place": InPlace(),
            "partitioned": Partitioned(group, InPlace()),
            "contiguous": Partitioned(group, ContiguousBuffer(len(SHAPES))),
            "host": Host(),
            "partitioned on the host": Partitioned(group, Host()),
            "contiguous on the host": Partitioned(group, Host(ContiguousBuffer(len(SHAPES), on_host, pinned=True))),
        }
        for name, store in stores.items():
            with computing_accelerator(copies) as computing:
                device, tokens, found = computing.device, [], []
                inputs = [torch.empty(shape, dtype=dtype, device=device) for shape in SHAPES]
                for its, ours in zip(inputs, given, strict=True):
                    computing.write(its, ours)
                for each in inputs:
                    tokens.append(store.put((each * 3).transpose(0, -1)))
                while tokens:
                    found.append(store.take(tokens[-1]) + 0)
                    del tokens[-1]
                values = [computing.read(each) for each in reversed(found)]
            for value, want in zip(values, expected, strict=True):
                assert value.shape == want.shape, name
                assert torch.equal(value, want), (name, want.shape, dtype)
                same += 1
    return same


@pytest.mark.parametrize("copies", SCHEDULES)
def test_tensors_come_back(own_ranks: Pool, copies: str) -> None:
    each = 6 * 2 * len(SHAPES)  # stores, dtypes
    assert round_trips(1, copies) == each
    assert own_ranks.run(round_trips, 2, copies) == [each, each]


@pytest.mark.parametrize("copies", SCHEDULES)
def test_the_device_has_memory_for_what_is_on_its_way(copies: str) -> None:
    """However late copies run, and however far the host is ahead of computation.

    Forward: two tensors on their way out and the one that comes of them. Backward: one is used, one comes, and what was
    and is computed.
    """
    count, numel = 12, 100
    with computing_accelerator(copies) as computing:
        store, tokens = Host(), []
        tensor = torch.zeros(numel, device=computing.device)
        for _ in range(count):
            tokens.append(store.put(tensor))
            tensor = tensor + 1
        assert computing.most_reserved <= 3 * 4 * numel
        while tokens:
            tensor = store.take(tokens[-1]) + 0
            del tokens[-1]
        assert computing.most_reserved <= 4 * 4 * numel
        found = computing.read(tensor)
    assert not found.any()


def test_memory_is_free_after_a_copy_that_nobody_takes() -> None:
    """As after an error in backward: a checkpoint has been fetched and is dropped."""
    with computing_accelerator("late") as computing:
        store = Host()
        tokens = [store.put(torch.zeros(4, device=computing.device)) for _ in range(2)]
        store.take(tokens[1])
        assert computing.moved == 3, "two out, one back"
        tokens.clear()
        assert computing.moved == 4
