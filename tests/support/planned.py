"""Steps of a real DeepSpeed engine with real tensors, as one rank of a world whose other ranks do
not exist.

    DS_ACCELERATOR=cpu python -m tests.support.planned 8 0 < configs.json        # rank 0 of 8

Reads a list of lists of `--set` overrides on top of BASE; prints one JSON object a line: the peak
that torch's MemTracker counts in the first and the second step, the bytes of the optimizer's
moments before and after the first, and beside each what planning gives. A process of its own,
because DeepSpeed keeps its process groups in module globals.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import warnings
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
import torch.distributed as dist
from torch.distributed._tools.mem_tracker import MemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.papers.steps import first_step
from tests.support.plan_configs import BASE, FILE
from tests.support.settings import engine_of
from zero_tp.data.batch import AnyBatch, Batch, MaskedBatch
from zero_tp.engine.engine import TrainingEngine
from zero_tp.engine.param_groups import trainable_of
from zero_tp.engine.zero import matrix_optimizer
from zero_tp.engine.zero.matrix_optimizer import MatrixOptimizer
from zero_tp.engine.zero.ops import disable_shared_memory_collectives
from zero_tp.engine.zero.zero_engine import ZeroEngine
from zero_tp.model.moe import Router
from zero_tp.model.parallel_model import ParallelModel
from zero_tp.parallel.parameter import SeededInit
from zero_tp.parallel.spans import Span
from zero_tp.run.config import RunConfig
from zero_tp.tools.planning.memory import rank_memory
from zero_tp.tools.planning.plan_settings import workload_of


def bind_alone(optimizer: MatrixOptimizer, model: ParallelModel, zero: ZeroEngine) -> None:
    """Bind an optimizer in a world whose other ranks do not answer: their fragments are computed
    from the sizes of DeepSpeed's groups and partitions.
    """
    topology = zero.topology
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    spans: dict[str, list[Span]] = {}
    calls: dict[str, int] = {}

    def add(parameter: Any, call: int, by_replica: list[Span]) -> None:
        name = names[id(parameter)]
        spans[name] = [span for span in by_replica for _ in range(topology.tensor)]
        calls[name] = call

    replicas = range(topology.data)
    stage = zero.settings.stage
    if stage == 0:
        for name, tensors in ((each.name, each.span) for each in zero.fragments()):
            add(model.get_parameter(name), 0, [tensors] * topology.data)
        numbers = {
            id(flat): call for call, flats in enumerate(zero.updated_tensors()) for flat in flats
        }
        calls.update({each.name: numbers[id(each.flat)] for each in zero.fragments()})
    elif stage == 3:
        for parameter in model.parameters():
            call, _, length = zero.optimizer.grad_position[zero.optimizer.get_param_id(parameter)]
            numel = parameter.ds_numel  # type: ignore[attr-defined]
            add(parameter, call, [Span.block(replica, length, numel) for replica in replicas])
    else:
        for call, parameters in enumerate(zero.optimizer.bit16_groups):
            length = zero.optimizer.single_partition_of_fp32_groups[call].numel()
            offset = 0
            for parameter in parameters:
                end = offset + parameter.numel()
                bounds = [
                    (max(offset, replica * length), min(end, (replica + 1) * length))
                    for replica in replicas
                ]
                add(
                    parameter,
                    call,
                    [
                        Span(begin - offset, begin % length, stop - begin)
                        if begin < stop
                        else Span(0, 0, 0)
                        for begin, stop in bounds
                    ],
                )
                offset = end
    for own in zero.fragments():
        ours = spans[own.name][topology.rank]
        assert (ours.whole_start, ours.length) == (own.span.whole_start, own.span.length)
    with patch.object(matrix_optimizer, "_gather", lambda *_: (spans, calls)):
        optimizer.bind(model, zero.fragments(), zero.updated_tensors())


def initialize_alone(engine: Any, param_groups: Any) -> None:
    """`TrainingEngine._initialize_deepspeed` in such a world."""
    optimizer = engine.zero.settings.optimizer
    trainable = trainable_of(engine.model, param_groups, optimizer, engine.dtype)
    engine.zero.initialize(engine.model, trainable)
    if isinstance(trainable, MatrixOptimizer):
        bind_alone(trainable, engine.model, engine.zero)


def choose_experts_in_turn(model: ParallelModel) -> None:
    """Make a rank of an expert group send as many rows to each of its ranks."""

    def choose_in_turn(router: Router, logits: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        number = len(logits) * router.experts.per_token
        return torch.arange(number).remainder(router.experts.count).view(len(logits), -1)

    for module in model.modules():
        if isinstance(module, Router):
            module.choose = partial(choose_in_turn, module)  # type: ignore[method-assign]


def echo(output: torch.Tensor, rows: torch.Tensor, *_: Any, **__: Any) -> None:
    """From each rank comes what was sent to it: `dist.all_to_all_single` of ranks with the same
    tokens.
    """
    output.copy_(rows)


def tensors_alive() -> list[torch.Tensor]:
    return [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor)]


def moments(trainer: Any) -> int:
    states = trainer.zero.states().optimizer.state.values()
    return sum(value.nbytes for state in states for name, value in state.items() if name != "step")


def peak_of_step(trainer: Any, batches: list[Any], before: set[int]) -> int:
    """Return the peak bytes of tensors in one step, without storages that existed `before` the
    engine.
    """
    gc.collect()
    tracker = MemTracker()
    # Engines before this one leave some of their tensors behind.
    tracker.track_external(
        *(each for each in tensors_alive() if each.untyped_storage()._cdata not in before)
    )
    begin = trainer.activations.begin_micro_batch

    def begin_micro_batch(index: int) -> None:
        tracker.reset_mod_stats()  # it keeps statistics of one forward only
        begin(index)

    trainer.activations.begin_micro_batch = begin_micro_batch
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with tracker:
            trainer.train_step(batches)
    trainer.activations.begin_micro_batch = begin
    return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


def measure(overrides: list[str], world: int) -> dict[str, Any]:
    config = RunConfig.load(FILE, BASE + overrides, world)
    memory = rank_memory(config, workload_of(config, cpu=True))
    memory = replace(memory, zero=replace(memory.zero, owner=dist.get_rank()))
    # Kept, so that no new storage reuses an address.
    earlier = [each.untyped_storage() for each in tensors_alive()]
    before = {each._cdata for each in earlier}
    block = config.zero_tp
    # No other rank exists, so each weight is drawn whole.
    trainer = engine_of(config, seed=1, source=SeededInit(1), recompute=block.recompute_policy)
    tokens = torch.randint(1000, (config.micro_batch, block.data.sequence_length))
    resets = block.data.document_attention == "reset"
    batch: AnyBatch = Batch(tokens, tokens, *([torch.zeros_like(tokens)] * 2 if resets else []))
    if block.masked is not None:
        masked = (
            torch.arange(block.data.sequence_length)
            < config.label_fraction * block.data.sequence_length
        )
        ones = torch.ones_like(tokens)
        names = {
            "token_type_ids": ones,
            "attention_mask": ones,
            "labels": tokens.masked_fill(~masked, -100),
        }
        batch = MaskedBatch({"input_ids": tokens, **names, "next_sentence_label": ones[:, 0]}).to(
            trainer.device
        )
    batches = [batch] * config.accumulation
    if block.parallel.expert > 1:
        choose_experts_in_turn(trainer.model)
    before_first = moments(trainer)
    first_peak = peak_of_step(trainer, batches, before)
    after_first = moments(trainer)
    peak = peak_of_step(trainer, batches, before)
    parameters = sum(
        int(getattr(each, "ds_numel", each.numel())) for each in trainer.model.parameters()
    )
    trainer.deepspeed_engine.destroy()
    del trainer
    gc.collect()
    point = memory.peak
    first_points = first_step(memory)
    first, later = first_points[0], memory.points[0]
    first_planned = max(each.total + each.host for each in first_points)
    return {
        "moments": [before_first, after_first],
        "planned_moments": later.bytes["optimizer"]
        + later.host
        - first.bytes["optimizer"]
        - first.host,
        "overrides": overrides,
        "parameters": parameters,
        "first": [first_peak, first_planned],
        "measured": peak,
        "planned": point.total + point.host,
    }


def main() -> None:
    world, rank = map(int, sys.argv[1:])
    os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(world))
    warnings.simplefilter("ignore")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    disable_shared_memory_collectives()
    deepspeed.init_distributed("fake", verbose=False)
    TrainingEngine._initialize_deepspeed = initialize_alone  # type: ignore[method-assign,assignment]
    for overrides in json.load(sys.stdin):
        has_experts = RunConfig.load(FILE, BASE + overrides, world).zero_tp.parallel.expert > 1
        answering = patch.object(dist, "all_to_all_single", echo) if has_experts else nullcontext()
        with answering:
            print("RESULT", json.dumps(measure(overrides, world)), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
