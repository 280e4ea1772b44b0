"""DeepSpeed's engine on a CPU accelerator that reports itself as asynchronous.

Runs equal those on the plain CPU accelerator bit for bit. Events, waits or synchronisations order
all accesses of different streams. The host waits only where DeepSpeed does, except for the gradient
norm without ZeRO.
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.support.asynchronous_accelerator import AsynchronousAccelerator, asynchronous
from tests.support.checkpoint_runs import batch_of, build, masters_of, write_config
from tests.support.pools import Pools
from tests.support.stream_checker import READ, RecordingStream
from tests.support.trainer_scripts import on_ranks, save_model
from tests.tiers import THOROUGH, in_tiers
from zero_tp.run.checkpoint.find import find_checkpoint
from zero_tp.run.checkpoint.save import run_saver
from zero_tp.run.checkpoint.start_point import Resume

STOP, STEPS, ACCUMULATION = 3, 5, 2
SMALL = {"stage3_prefetch_bucket_size": 3000, "reduce_bucket_size": 3000}
"""Buckets smaller than the model: gathers run ahead, and several reductions are in flight."""

ZERO_12, ZERO_3 = "deepspeed/runtime/zero/stage_1_and_2.py:", "deepspeed/runtime/zero/stage3.py:"
SYNCHRONISES = {
    # With overlap_comm gradients are freed once the side stream has reduced them.
    "reduced": ZERO_12 + "independent_gradient_partition_epilogue",
    # The optimizer on the host reads gradients that the device copies.
    "copied": ZERO_12 + "_wait_for_offload_copies",
    # The main stream uses what the side stream has reduced.
    "partitioned": ZERO_3 + "independent_gradient_partition_epilogue",
    # To bound memory: at most two buckets of gradients, and two gathers of weights, are in flight.
    "two reductions": ZERO_3 + "__reduce_and_partition_ipg_grads",
    "two gathers": "deepspeed/runtime/zero/partitioned_param_coordinator.py:_fetch_sub_module_impl",
    # Resident weights are gathered after the update, by a function that blocks.
    "resident": "deepspeed/runtime/zero/partition_parameters.py:_allgather_params_coalesced",
}
"""Where DeepSpeed synchronises with the device, a stream or an event during a step, and why.

No event is done before the host waits for it, so the counts of the two bounds on memory are the
most that can be.
"""
TIMER = {f"deepspeed/utils/timer.py:{name}": ACCUMULATION for name in ("start", "stop")}

READS = {
    "deepspeed/runtime/utils.py:": (
        "is_invalid_grad_norm",
        "has_overflow",
        "has_overflow_serial",
        "get_weight_norm",
    ),
    ZERO_12: (
        "has_overflow",
        "update_offload_overflow_tracker",
        "complete_grad_norm_calculation_for_cpu_offload",
    ),
    ZERO_3: ("complete_grad_norm_calculation_for_cpu_offload",),
    "zero_tp/engine/zero/zero_stages.py:": ("_clip",),  # without ZeRO, norm and clipping are ours
    # Of a tensor on the host, which is the simulated device, too.
    "zero_tp/engine/zero/adamw_update.py:": ("_unscaling",),
}
"""Where the host reads a value during a step: norms, and whether the gradients are finite,
before the update.
"""


@dataclass(frozen=True)
class Case:
    """A run with 2 micro-batches a step.

    Attributes:
        zero: further keys of `zero_optimization`.
        synchronises: synchronisations of a step, by SYNCHRONISES; None where the count depends on
            the rank's shard.
    """

    stage: int
    dtype: str
    world: int = 4
    tensor: int = 2
    offload: str = "none"
    zero: dict[str, Any] = field(default_factory=dict)
    synchronises: dict[str, int | None] = field(default_factory=dict)

    def write(self, path: Path, **changes: Any) -> str:
        config = json.loads(
            write_config(path, self.stage, self.dtype, self.tensor, self.offload).read_text()
        )
        # The fused default does not read its step count.
        config["optimizer"]["params"].pop("torch_adam", None)
        config["zero_optimization"] |= self.zero
        path.write_text(json.dumps(config | changes))
        return str(path)


ALL_PARTED = {"stage3_param_persistence_threshold": 0}
OVERLAPPING = {"overlap_comm": True, "reduce_bucket_size": 3000}
CASES = {
    "0": Case(0, "fp32"),
    "0, DP alone": Case(0, "bf16", 2, 1),
    "1": Case(1, "fp32"),
    "1 overlapping": Case(1, "bf16", zero=OVERLAPPING, synchronises={"reduced": 1}),
    "1 offloaded": Case(1, "fp32", offload="optimizer", synchronises={"copied": 1}),
    "2, DP alone": Case(2, "bf16", 2, 1),
    "2, TP alone": Case(2, "bf16", 2, 2),
    "2 overlapping": Case(2, "fp32", zero=OVERLAPPING, synchronises={"reduced": 2}),
    "2 offloaded": Case(
        2,
        "bf16",
        offload="optimizer",
        zero={"overlap_comm": True},
        synchronises={"reduced": 2, "copied": None},
    ),
    "3": Case(
        3,
        "bf16",
        zero=ALL_PARTED | SMALL,
        synchronises={"partitioned": 2, "two reductions": 10, "two gathers": 10},
    ),
    "3, DP alone": Case(
        3, "fp32", 2, 1, zero=ALL_PARTED, synchronises={"partitioned": 2, "two gathers": 2}
    ),
    "3 with resident weights": Case(
        3,
        "fp32",
        zero={"stage3_param_persistence_threshold": 100, **SMALL},
        synchronises={"partitioned": 2, "two reductions": 10, "two gathers": 6, "resident": 1},
    ),
    "3 offloaded": Case(
        3,
        "bf16",
        offload="optimizer",
        zero=ALL_PARTED,
        synchronises={"partitioned": 2, "two gathers": 2},
    ),
    "3 with parameters offloaded": Case(
        3, "bf16", offload="parameters", synchronises={"partitioned": 2, "resident": 1}
    ),
}


@dataclass
class Seen:
    """One rank's run: loss and gradient norm by step, its masters, and what the checker found.

    Attributes:
        unjoined: streams and collectives without a wait after the last step, before the host reads
            anything.
        waits: of the last step.
    """

    steps: list[tuple[float, float]]
    masters: dict[str, Tensor]
    faults: list[str]
    unjoined: list[str]
    waits: dict[tuple[str, str], int]


def train(engine: Any, first: int, last: int, accelerator: AsynchronousAccelerator | None) -> Seen:
    """Run steps without reading anything between them, because a read would order all later
    work.
    """
    done = []
    for step in range(first, last + 1):
        if accelerator is not None:
            accelerator.checker.waits.clear()
        own = batch_of(step).chunk(engine.topology.data)[engine.topology.data_rank]
        engine.run_step([(rows[:, :-1], rows[:, 1:]) for rows in own.chunk(ACCUMULATION)])
        done.append((engine._loss_and_figures, engine._norm))
    waits = {} if accelerator is None else dict(accelerator.checker.waits)
    unjoined = [] if accelerator is None else accelerator.checker.unjoined()
    faults = [] if accelerator is None else list(accelerator.checker.faults)
    return Seen(
        [(float(loss), float(norm)) for loss, norm in done],
        masters_of(engine),
        faults,
        unjoined,
        waits,
    )


def accelerated(asynchronously: bool) -> AbstractContextManager[AsynchronousAccelerator | None]:
    return asynchronous() if asynchronously else nullcontext()


def trained(path: str, asynchronously: bool) -> Seen:
    with accelerated(asynchronously) as accelerator:
        engine, _ = build(path)
        return train(engine, 1, STEPS, accelerator)


def saved(path: str, run: str) -> list[str]:
    """Save after STOP steps on the asynchronous accelerator; return the faults."""
    with asynchronous() as accelerator:
        engine, config = build(path)
        train(engine, 1, STOP, accelerator)
        saver = run_saver(engine.zero, config, Path(run))
        saver.save(STOP)
        assert saver.outcome() == (STOP, "")
        return list(accelerator.checker.faults)


def resumed(path: str, run: str) -> Seen:
    """Resume in a fresh engine on the asynchronous accelerator."""
    with asynchronous() as accelerator:
        engine, config = build(path)
        start = Resume(find_checkpoint(Path(run)))
        start.restore(engine.zero, config.zero_tp.training.seed)
        assert start.step == STOP
        return train(engine, STOP + 1, STEPS, accelerator)


def places(seen: Seen, read: bool) -> dict[str, int]:
    """Return how often the host waited in the last step, by place: for reads, or else for
    synchronisations.
    """
    return {place: count for (what, place), count in seen.waits.items() if (what == READ) == read}


@THOROUGH
@pytest.mark.parametrize("name", in_tiers(list(CASES), ["3"], every=2))
def test_an_asynchronous_device_gives_the_same_run(ranks: Pools, tmp_path: Path, name: str) -> None:
    case = CASES[name]
    path, run, pool = case.write(tmp_path / "config.json"), str(tmp_path / "run"), ranks(case.world)
    expected = pool.run(trained, path, False)
    found = pool.run(trained, path, True)
    assert pool.run(saved, path, run) == [[]] * case.world
    again = pool.run(resumed, path, run)
    for plain, seen, later in zip(expected, found, again, strict=True):
        assert seen.steps == plain.steps and later.steps == plain.steps[STOP:]
        for each in (seen, later):
            assert not each.faults and not each.unjoined
            assert all(torch.equal(each.masters[key], plain.masters[key]) for key in plain.masters)
        synchronises = {SYNCHRONISES[what]: count for what, count in case.synchronises.items()}
        counted = places(seen, read=False)
        assert counted.keys() == synchronises.keys()
        assert all(count in (None, counted[place]) for place, count in synchronises.items())
        reads = {f"{file}{function}" for file, functions in READS.items() for function in functions}
        assert places(seen, read=True).keys() <= reads


@THOROUGH
def test_the_throughput_timer_synchronises_where_a_config_asks_for_it(
    ranks: Pools, tmp_path: Path
) -> None:
    timers = {"throughput": {"enabled": True}}
    other = {"throughput": {"synchronized": True}}  # of a timer that stays off
    for changes, expected in (({}, {}), ({"timers": other}, {}), ({"timers": timers}, TIMER)):
        path = CASES["2, DP alone"].write(tmp_path / "config.json", **changes)
        for seen in ranks(2).run(trained, path, True):
            assert places(seen, read=False) == expected


def trained_by_trainer(
    directory: str, folder: str, asynchronously: bool
) -> tuple[Any, list[str], set[str]]:
    """Return ZeroTPTrainer's history at ZeRO-3, the faults, and the places where the host
    waited.
    """
    with accelerated(asynchronously) as accelerator:
        history = on_ranks("causal", directory, folder, 2, 3, 2, 2)[0]
        if accelerator is None:
            return history, [], set()
        checker = accelerator.checker
        return (
            history,
            [*checker.faults, *checker.unjoined()],
            {place for _, place in checker.waits},
        )


@THOROUGH
def test_trainer_on_an_asynchronous_device(ranks: Pools, tmp_path: Path) -> None:
    directory = str(save_model("causal", tmp_path / "start"))
    plain = ranks(4).run(trained_by_trainer, directory, str(tmp_path / "plain"), False)
    found = ranks(4).run(trained_by_trainer, directory, str(tmp_path / "asynchronous"), True)
    for (expected, _, _), (history, faults, places) in zip(plain, found, strict=True):
        assert history == expected and not faults
        assert places and not places & TIMER.keys()


def mistaken(path: str, kind: str) -> list[str]:
    """Return the faults of a run in which one kind of ordering is missing."""
    with asynchronous() as accelerator, ExitStack() as stack:
        if kind == "stream":
            stack.enter_context(mock.patch.object(RecordingStream, "wait_stream", lambda *_: None))
        elif kind == "memory":
            stack.enter_context(mock.patch.object(Tensor, "record_stream", lambda *_: None))
        else:
            accelerator.checker.ignored_wait = kind
        return train(build(path)[0], 1, 2, accelerator).faults


GATHER = "deepspeed/runtime/zero/partition_parameters.py:wait"


@THOROUGH
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        # DeepSpeed's streams never wait.
        ("stream", "on side stream"),
        ("memory", "may get the freed memory of"),
        (GATHER, GATHER),
        ("zero_tp/parallel/collectives.py:wait", "zero_tp/parallel/linear.py"),
    ],
)
def test_a_missing_wait_is_reported(ranks: Pools, tmp_path: Path, kind: str, words: str) -> None:
    path = CASES["3"].write(tmp_path / "config.json")
    for faults in ranks(4).run(mistaken, path, kind):
        assert any(words in fault for fault in faults), faults
