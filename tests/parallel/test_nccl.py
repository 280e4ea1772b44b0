"""A step's collectives are waited for where NCCL needs it, in one order on all ranks: no value
changes on any schedule.

On the simulated accelerator of tests/support/streams.py, with the collectives of
tests/support/nccl.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.compare import check_close, gradient_of, grid
from tests.support.pools import Pool, RankError
from tests.support.streams import (
    BATCH,
    VOCABULARY,
    computing_accelerator,
    config_of,
    model_there,
    tensor_there,
)
from tests.tiers import THOROUGH
from zero_tp.base.errors import UserError
from zero_tp.base.settings.deepspeed import ActivationCheckpointing
from zero_tp.base.settings.recompute import RecomputePolicy
from zero_tp.model.huggingface import ZeroTPForCausalLM
from zero_tp.model.recompute.activation_memory import ActivationMemory
from zero_tp.parallel.collectives import all_gather, start_all_gather, start_all_reduce
from zero_tp.parallel.gradients import GradientHooks
from zero_tp.parallel.host_copy import HostCopy
from zero_tp.parallel.topology import Topology
from zero_tp.tools.planning.dryrun import UninitializedSource
from zero_tp.tools.trainer.batches import SampleComparison

WORLD = 4
LAYERS, LENGTH = 2, 8
SCHEDULES = ["late", "early"]
"""When unordered collectives run: as late, or as early, as they can."""


# ---- a step --------------------------------------------------------------------------------------


class GradientReduction:
    """DeepSpeed's ZeRO-2 with `overlap_comm`, whose engine does not run on fake tensors.

    Once a gradient is accumulated, its hook copies it into a bucket and reduces that over DP, on a
    stream of its own that waits for the compute stream (`grad_handling_hook` and `average_tensor`
    of deepspeed/runtime/zero/stage_1_and_2.py).

    Attributes:
        reduced: the sums over DP by the parameters' names, valid once `wait` was called.
    """

    def __init__(self, model: nn.Module, topology: Topology, device: torch.device) -> None:
        self.group, self.runtime = topology.data_group, torch.get_device_module(device)
        self.stream = self.runtime.Stream(device)
        self.reduced: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda parameter, name=name: self._reduce(name, parameter)
            )

    def _reduce(self, name: str, parameter: nn.Parameter) -> None:
        bucket = gradient_of(parameter).clone()
        self.stream.wait_stream(self.runtime.current_stream())
        with self.runtime.stream(self.stream):
            dist.all_reduce(bucket, group=self.group)
        bucket.record_stream(self.stream)
        self.reduced[name] = bucket

    def wait(self) -> None:
        self.runtime.current_stream().wait_stream(self.stream)


def on_cpu(model: ZeroTPForCausalLM, tokens: Tensor) -> dict[str, Tensor]:
    """The loss and the gradients' sums over DP, by gloo alone."""
    GradientHooks(model, model.topology.tensor_group)
    loss = model(tokens, shift_labels=tokens).loss
    loss.backward()
    gradients = {name: gradient_of(parameter) for name, parameter in model.named_parameters()}
    for gradient in gradients.values():
        dist.all_reduce(gradient, group=model.topology.data_group)
    return {"loss": loss.detach(), **gradients}


def on_accelerator(
    model: ZeroTPForCausalLM, tokens: Tensor, schedule: str, mode: str
) -> tuple[dict[str, Tensor], tuple[int, int]]:
    """The same of a copy of the model there; and how many collectives that takes, how many of
    them asynchronous.
    """
    with computing_accelerator(schedule) as computing:
        copy = model_there(model, computing)
        ActivationMemory(
            copy, RecomputePolicy(mode=mode), ActivationCheckpointing(), computing.device
        )
        GradientHooks(copy, copy.topology.tensor_group)
        reduction = GradientReduction(copy, copy.topology, computing.device)
        batch = tensor_there(tokens, computing)
        loss = copy(batch, shift_labels=batch).loss
        loss.backward()
        reduction.wait()
        found = {"loss": computing.read(loss.detach())}
        found |= {name: computing.read(gradient) for name, gradient in reduction.reduced.items()}
        computing.collectives.end_step()
        return found, computing.collectives.count()


def compared(model_type: str, sequence: bool, mode: str) -> tuple[int, int]:
    topology = grid(2, sequence)
    generator = torch.Generator().manual_seed(topology.data_rank)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
    # Each rank has it: a hook sums its gradients.
    config = config_of(model_type, LAYERS, LENGTH, kv_heads=1)
    model = ZeroTPForCausalLM(config, topology, seed=1).train()
    late, count = on_accelerator(model, tokens, "late", mode)
    early, same_count = on_accelerator(model, tokens, "early", mode)
    assert count == same_count
    for name, values in late.items():
        assert torch.equal(values, early[name]), name
    expected = on_cpu(model, tokens)
    if model_type == "gpt2":
        for name, values in late.items():
            assert torch.equal(values, expected[name]), name
    # SiLU's backward is a kernel on the CPU and torch's composite formula elsewhere.
    check_close(late, expected)
    return count


LINEAR_FORWARD, LINEAR_BACKWARD = 2, 2 * (2 + 1)
"""Asynchronous collectives of a layer under SP: two column layers gather; backward gathers twice
and scatters once for each pair of a column and a row layer.
"""
CASES = [
    pytest.param(
        "gpt2",
        True,
        "full",
        2 * LINEAR_FORWARD + LINEAR_BACKWARD,
        id="gpt2-SP-full",
        marks=THOROUGH,
    ),
    pytest.param(
        "gpt2", True, "none", LINEAR_FORWARD + LINEAR_BACKWARD, id="gpt2-SP", marks=THOROUGH
    ),
    pytest.param(
        "llama",
        True,
        "full",
        2 * LINEAR_FORWARD + LINEAR_BACKWARD,
        id="llama-SP-full",
        marks=THOROUGH,
    ),
    pytest.param("gpt2", False, "full", 2, id="gpt2-full", marks=THOROUGH),
    pytest.param("llama", False, "full", 2, id="llama-full", marks=THOROUGH),
]


@pytest.mark.parametrize(("model_type", "sequence", "mode", "linear"), CASES)
def test_a_step_computes_the_same_on_every_schedule(
    own_ranks: Pool, model_type: str, sequence: bool, mode: str, linear: int
) -> None:
    """`linear`: asynchronous collectives of a layer's products; blocking ones are not counted."""
    norms = (2 * LAYERS + 1) * sequence
    for total, asynchronous in own_ranks.run(compared, model_type, sequence, mode):
        assert asynchronous == LAYERS * linear + norms
        assert total > asynchronous


# ---- collectives ---------------------------------------------------------------------------------


def gathered(does: str, schedule: str) -> tuple[Tensor, int]:
    """Return the all-gather of the ranks' numbers over TP, and the number of asynchronous
    collectives.
    """
    group = grid(2, False).tensor_group
    with computing_accelerator(schedule) as computing:
        shard = torch.full((2,), float(dist.get_rank()), device=computing.device)
        if does == "blocks":
            whole = all_gather(shard, group)
        else:
            pending = start_all_gather(shard, group)
            if does == "changes the input":
                shard.add_(1)
            if does == "frees the input":
                del shard
            whole = (
                pending._tensor if does in ("does not wait", "waits too late") else pending.wait()
            )
        found = whole + 0
        if does == "waits too late":
            pending.wait()
        return computing.read(found), computing.collectives.count()[1]


@pytest.mark.parametrize(
    ("does", "schedule"),
    [
        *itertools.product(("blocks", "waits", "frees the input"), SCHEDULES),
        *(
            (mistake, "late")
            for mistake in ("does not wait", "waits too late", "changes the input")
        ),
    ],
)
def test_a_result_is_right_only_after_its_wait(own_ranks: Pool, does: str, schedule: str) -> None:
    for rank, (found, asynchronous) in enumerate(own_ranks.run(gathered, does, schedule)):
        first = rank // 2 * 2 + (does == "changes the input")
        if does in ("does not wait", "waits too late"):
            assert found.isnan().all()
        else:
            assert found.tolist() == [first, first, first + 1, first + 1]
            assert asynchronous == (does != "blocks")


def swapped(schedule: str) -> None:
    """Issue two collectives, in another order on the second rank of each TP group."""
    topology = grid(2, False)
    with computing_accelerator(schedule) as computing:
        tensor = torch.zeros(2, device=computing.device)
        starts = [start_all_gather, start_all_reduce][:: 1 if topology.tensor_rank == 0 else -1]
        for pending in [start(tensor, topology.tensor_group) for start in starts]:
            pending.wait()
        computing.read(tensor)


def left_out(schedule: str) -> None:
    """Issue a collective, which nobody waits for, on all ranks but the last."""
    topology = grid(2, False)  # every rank makes the groups
    with computing_accelerator(schedule) as computing:
        if topology.rank < 3:
            start_all_reduce(torch.zeros(2, device=computing.device), topology.tensor_group)
        computing.collectives.end_step()


@pytest.mark.parametrize(
    ("does", "schedule", "words"),
    [
        (
            swapped,
            "late",
            "collective 1 of a group differs between ranks: rank .: "
            "c10d::_allgather_base_.*allreduce_",
        ),
        (
            swapped,
            "early",
            "collective 1 of a group differs between ranks: rank .: "
            "c10d::_allgather_base_.*allreduce_",
        ),
        (left_out, "late", "rank 2: c10d::allreduce_.* rank 3: none"),
    ],
)
def test_ranks_that_differ_are_named(
    own_ranks: Pool, does: Callable[[str], None], schedule: str, words: str
) -> None:
    with pytest.raises(RankError, match=words) as error:
        own_ranks.run(does, schedule)
    assert error.value.kind == "AssertionError"


# ---- samples -------------------------------------------------------------------------------------


def longer_on_one_rank(schedule: str, length: int) -> str:
    """Return the error of a rank of a TP group whose second rank has rows of another length."""
    topology = grid(2, False)
    rows = torch.zeros(BATCH, length if topology.tensor_rank == 1 else LENGTH, dtype=torch.long)
    with computing_accelerator(schedule) as computing:
        model = ZeroTPForCausalLM(
            config_of("gpt2", LAYERS, LENGTH, kv_heads=1),
            topology,
            source=UninitializedSource(),
            device=computing.device,
            random_device="cpu",
        )
        tokens = tensor_there(rows, computing)
        comparison = SampleComparison({"input_ids": tokens}, topology)
        model(tokens)
        issued, _ = computing.collectives.count()
        assert issued > 2, "the forward's collectives are enqueued before the result is read"
        try:
            with mock.patch.object(
                HostCopy, "read", lambda result: computing.read_on_host(result.wait())
            ):
                comparison.require_same()
        except UserError as error:
            return str(error)
        computing.collectives.end_step()
        return ""


@THOROUGH
def test_different_shapes_are_refused_before_the_forward_has_run(own_ranks: Pool) -> None:
    """The forward's collectives of different sizes would hang; here they would fail if they were
    run.
    """
    assert own_ranks.run(longer_on_one_rank, "early", LENGTH) == [""] * WORLD
    for error in own_ranks.run(longer_on_one_rank, "early", LENGTH - 2):
        assert error.startswith(
            "input_ids: the samples differ between the ranks of a tensor parallel group"
        )
    with pytest.raises(RankError, match="differs between ranks"):
        # This schedule computes the forward at once.
        own_ranks.run(longer_on_one_rank, "late", LENGTH - 2)
