"""Stores of activation checkpoints keep them where the config says, and change no bit.

The accelerator is a simulated one with values (tests/support/streams.py).
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.compare import check_close, gradient_of, grid
from tests.support.pools import Pool
from tests.support.store_runs import LAYERS, LENGTH, Run, run_simulated
from tests.support.streams import (
    BATCH,
    HIDDEN,
    VOCABULARY,
    computing_accelerator,
    config_of,
    tensor_there,
)
from tests.tiers import THOROUGH
from zero_tp.base.errors import UserError
from zero_tp.base.settings.recompute import RecomputePolicy
from zero_tp.model.huggingface import ZeroTPForCausalLM
from zero_tp.model.recompute.stores import (
    MAX_COPIES_OUT,
    ContiguousBuffer,
    HostStore,
    InPlaceStore,
    PartitionedStore,
    Store,
)

WORLD = 2
P_A, HOST, BUFFER = "partition_activations", "cpu_checkpointing", "contiguous_memory_optimization"
SCHEDULES = ["late", "early"]
"""When unordered copies run: as late, or as early, as they can."""


# ---- a model -------------------------------------------------------------------------------------


def plain(model: ZeroTPForCausalLM, tokens: Tensor) -> dict[str, Tensor]:
    """What the model computes on the CPU, where nothing is simulated."""
    losses = []
    for one in tokens:
        losses.append(model(one, shift_labels=one).loss)
        losses[-1].backward()
    gradients = {name: gradient_of(each) for name, each in model.named_parameters()}
    return {"losses": torch.stack(losses).detach(), **gradients}


def compared(
    model_type: str,
    tensor: int,
    sequence: bool,
    cases: list[dict[str, Any]],
    policy: dict[str, Any],
    micro_batches: int = 2,
) -> None:
    """Each case's losses and gradients equal, bit for bit, those of a run that keeps everything
    where it is.
    """
    tokens = torch.randint(
        VOCABULARY, (micro_batches, BATCH, LENGTH), generator=torch.Generator().manual_seed(1)
    )
    config = config_of(model_type, LAYERS, LENGTH, kv_heads=2)
    model = ZeroTPForCausalLM(config, grid(tensor, sequence), seed=1).train()
    expected = run_simulated(model, tokens, "late", {}, {"mode": "none"})
    in_place = run_simulated(model, tokens, "late", {}, policy)
    check_close(expected.values, plain(model, tokens))  # the CPU adds in another order
    assert not any(expected.moved) and not any(in_place.moved)
    same_values(in_place, expected, "in place")
    leave = len(RecomputePolicy(**policy).recomputed_layers(LAYERS))
    for settings, copies in itertools.product(cases, SCHEDULES):
        found = run_simulated(model, tokens, copies, settings, policy)
        same_values(found, expected, (settings, copies))
        # Late: forward waits for all copies but two. Early: all have left when it ends.
        out = max(0, leave - 2) if copies == "late" else leave
        passes = [
            2 * leave * done + part for done in range(micro_batches) for part in (out, 2 * leave)
        ]
        assert found.moved == [one * (HOST in settings) for one in passes], (settings, copies)
        both = zip(found.alive, in_place.alive, strict=True)
        more = [
            (device - plain_device, host - plain_host)
            for (device, host), (plain_device, plain_host) in both
        ]
        assert more == expected_bytes(settings, leave, tensor, sequence) * micro_batches, (
            settings,
            copies,
        )


def same_values(found: Run, expected: Run, case: object) -> None:
    for name, values in expected.values.items():
        assert torch.equal(found.values[name], values), (case, name)


def expected_bytes(
    settings: dict[str, Any], leave: int, tensor: int, sequence: bool
) -> list[tuple[int, int]]:
    """Bytes more than in place, on the device and on the host, after a forward and after its
    backward.
    """
    numel = LENGTH * BATCH * HIDDEN // (tensor if sequence else 1)
    piece = -(-numel // tensor) if P_A in settings and not sequence else numel
    buffer = (settings.get("number_checkpoints") or leave) * piece if BUFFER in settings else 0
    kept, whole = buffer or leave * piece, leave * numel
    if HOST in settings:
        return [(4 * (min(MAX_COPIES_OUT, leave) * piece - whole), 4 * kept), (0, 4 * buffer)]
    return [(4 * (kept - whole), 0), (4 * buffer, 0)]


FULL = {"mode": "full"}
ALL = {P_A: True, BUFFER: True, HOST: True}
OTHERS: list[dict[str, Any]] = [
    {HOST: True},
    {P_A: True},
    {BUFFER: True},
    {P_A: True, HOST: True},
    {P_A: True, BUFFER: True},
    {HOST: True, BUFFER: True},
]


@THOROUGH
@pytest.mark.parametrize(
    ("model_type", "sequence", "cases", "micro_batches"),
    [
        pytest.param("gpt2", False, [ALL], 1, id="composed"),
        pytest.param("gpt2", False, OTHERS, 2, id="others", marks=THOROUGH),
        pytest.param("llama", False, [ALL], 2, id="llama", marks=THOROUGH),
        pytest.param("gpt2", True, [*OTHERS, ALL], 2, id="SP", marks=THOROUGH),
    ],
)
def test_two_ranks_compute_the_same(
    own_ranks: Pool,
    model_type: str,
    sequence: bool,
    cases: list[dict[str, Any]],
    micro_batches: int,
) -> None:
    own_ranks.run(compared, model_type, 2, sequence, cases, FULL, micro_batches)


@pytest.mark.thorough
def test_one_rank_computes_the_same_without_a_buffer_for_every_other_layer() -> None:
    compared(
        "gpt2",
        1,
        False,
        [{HOST: True}, ALL | {"number_checkpoints": 4}],
        {"mode": "full", "every": 2},
    )


@THOROUGH
@pytest.mark.parametrize(
    ("policy", "slots"),
    [
        pytest.param(FULL, None, id="all"),
        pytest.param({"mode": "full", "every": 2}, 4, id="every-other"),
        pytest.param({"mode": "full", "layers": 1}, 3, id="first"),
    ],
)
def test_one_rank_computes_the_same(policy: dict[str, Any], slots: int | None) -> None:
    buffer = {BUFFER: True, "number_checkpoints": slots}
    cases: list[dict[str, Any]] = [
        {HOST: True},
        buffer,
        {HOST: True, **buffer},
        {P_A: True},
        {P_A: True, HOST: True, **buffer},
    ]
    compared("gpt2", 1, False, cases, policy)


# ---- tensors -------------------------------------------------------------------------------------

# Of which two do not divide by 2; the largest first makes the buffer.
SHAPES = [(4, 3, 6), (5, 7), (3, 2), (1,)]


def round_trips(tensor: int, copies: str) -> int:
    """Compare shapes and bits of tensors from every store, while other tensors reuse their
    memory.
    """
    same = 0
    group = grid(tensor, False).tensor_group
    on_host = torch.device("cpu")
    for dtype in (torch.float32, torch.bfloat16):
        given = [torch.randn(shape).to(dtype) for shape in SHAPES]
        expected = [(each * 3).transpose(0, -1) for each in given]
        stores: dict[str, Store] = {
            "in place": InPlaceStore(),
            "partitioned": PartitionedStore(group, InPlaceStore()),
            "contiguous": PartitionedStore(group, ContiguousBuffer(len(SHAPES))),
            "host": HostStore(),
            "partitioned on the host": PartitionedStore(group, HostStore()),
            "contiguous on the host": PartitionedStore(
                group, HostStore(ContiguousBuffer(len(SHAPES), on_host, pinned=True))
            ),
        }
        for name, store in stores.items():
            with computing_accelerator(copies) as computing:
                tokens, found = [], []
                for each in [tensor_there(values, computing) for values in given]:
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
def test_stores_return_their_tensors(own_ranks: Pool, copies: str) -> None:
    each = 6 * 2 * len(SHAPES)  # stores, dtypes
    assert round_trips(1, copies) == each
    assert own_ranks.run(round_trips, 2, copies) == [each, each]


@pytest.mark.parametrize("copies", SCHEDULES)
def test_device_memory_of_the_host_store_is_bounded(copies: str) -> None:
    """However late copies run, and however far the host runs ahead of the device.

    Forward: two tensors that are being copied out, and the next. Backward: one tensor in use, one
    being copied back, the last result and the next.
    """
    count, numel = 12, 100
    with computing_accelerator(copies) as computing:
        store, tokens = HostStore(), []
        tensor = torch.zeros(numel, device=computing.device)
        for _ in range(count):
            tokens.append(store.put(tensor))
            tensor = tensor + 1
        assert computing.most_reserved <= 3 * 4 * numel
        while tokens:
            tensor = store.take(tokens[-1]) + 0
            del tokens[-1]
            if copies == "early":
                assert computing.moved == 2 * count - max(0, len(tokens) - 1), (
                    "one tensor ahead comes back"
                )
        assert computing.most_reserved <= 4 * 4 * numel
        found = computing.read(tensor)
    assert not found.any()


def test_memory_of_a_prefetched_tensor_is_freed() -> None:
    """After an error in backward a prefetched checkpoint is dropped."""
    with computing_accelerator("late") as computing:
        store = HostStore()
        tokens = [store.put(torch.zeros(4, device=computing.device)) for _ in range(2)]
        store.take(tokens[1])
        assert computing.moved == 3, "two out, one back"
        tokens.clear()
        assert computing.moved == 4


def test_a_buffer_without_a_free_slot_refuses() -> None:
    """Two forwards before a backward do this; the second may have longer sequences."""
    buffer = ContiguousBuffer(1)
    handle = buffer.put(torch.ones(4))
    with pytest.raises(
        UserError, match=r"^activation_checkpointing\.number_checkpoints: all 1 slots are taken"
    ):
        buffer.put(torch.ones(4))
    with pytest.raises(
        UserError, match=r"a checkpoint of 5 torch\.float32 elements does not fit the slots of 4"
    ):
        buffer.put(torch.ones(5))
    del handle
    buffer.put(torch.ones(5))


def test_a_buffer_is_made_once() -> None:
    buffer, addresses = ContiguousBuffer(2), set()
    for _ in range(3):
        slots = [buffer.put(torch.ones(4)) for _ in range(2)]
        addresses.add(buffer.take(slots[0]).untyped_storage().data_ptr())
        del slots
    assert len(addresses) == 1


def test_a_deep_copy_of_a_store_has_no_streams() -> None:
    """It could not have the original's: a model with checkpoints on the host may be copied after
    a step.
    """
    store = HostStore(ContiguousBuffer(2, torch.device("cpu")))
    store._streams = (torch.Stream(device="cpu"), torch.Stream(device="cpu"))
    copied = copy.deepcopy(store)
    assert copied._streams is None and copied.buffer is not store.buffer
    assert copied.buffer is not None and copied.buffer.slots == 2
