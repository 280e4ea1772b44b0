"""A parallel run, from its JSON config through `RunConfig` to `TrainingEngine` as
launch/pretrain.py makes it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.compare import norm, partition_group, unshard
from tests.support.native import draw_biases
from tests.support.plain_run import BETAS, DEFAULT_EPS, MOMENTS, STEPS, Trace, batch_of, masked_rows
from tests.support.settings import engine_of
from zero_tp.data.batch import MaskedBatch, as_batch
from zero_tp.run.config import RunConfig


def train(path: Path, more_steps: int = 0, *, from_corpus: bool = False, **options: Any) -> Trace:
    """The run of a config file on this pool's ranks. On every rank; only rank 0's trace has
    tensors.

    Args:
        more_steps: at the default eps, whose losses are added.
        from_corpus: on the samples of the config's own data, instead of `batch_of`.
        options: of the engine.
    """
    import torch.distributed as dist

    config = RunConfig.load(path, world_size=dist.get_world_size())
    engine = engine_of(config, recompute=config.zero_tp.recompute_policy, **options)
    draw_biases(engine.model)
    topology, seed = engine.topology, config.zero_tp.training.seed
    trace = Trace()
    record_gradients(engine, trace.gradients)
    for step in range(STEPS + more_steps):
        if step == STEPS:
            for group in engine.zero.optimizer.param_groups:
                group["eps"] = DEFAULT_EPS
        if from_corpus:
            micro = corpus_batches(config, topology, step)
        else:
            micro = drawn_batches(engine.model, topology, seed, step, config.accumulation)
        assert len(micro) == config.accumulation
        assert all(len(as_batch(batch).input_ids) == config.micro_batch for batch in micro)
        trace.losses.append(
            engine.train_step([batch.to(engine.device) for batch in map(as_batch, micro)])
        )
        trace.norms.append(engine.gradient_norm)
        trace.balances += [value for name, value in engine.figures.items() if name == "aux_loss"]
        if step == 0:
            trace.clipped = norm(*optimizer_tensors(engine, "exp_avg").values()) / (1 - BETAS[0])
        if step == STEPS - 1:
            trace.weights = optimizer_tensors(engine)
            trace.first, trace.second = (optimizer_tensors(engine, key) for key in MOMENTS)
            trace.stale = stale_weights(engine, trace.weights)
    if topology.rank > 0:
        return Trace(trace.losses, trace.norms, trace.balances, trace.clipped, stale=trace.stale)
    return trace


def record_gradients(engine: Any, gradients: dict[str, Tensor]) -> None:
    """Fill in the whole gradients of the engine's next step, before clipping, by Hugging Face's
    names.
    """
    from deepspeed.utils import safe_get_full_grad

    named = dict(engine.model.named_parameters())
    end_micro_batch = engine.zero.step

    def record_gradients_first(loss: Tensor | None = None) -> None:
        # Gradients are whole and unclipped between the last backward and the step.
        if engine.deepspeed_engine.is_gradient_accumulation_boundary():
            local = {name: safe_get_full_grad(weight) for name, weight in named.items()}
            gradients.update(whole_tensors(engine, local))
            engine.zero.step = end_micro_batch
        end_micro_batch(loss)

    engine.zero.step = record_gradients_first


def drawn_batches(model: Any, topology: Any, seed: int, step: int, accumulation: int) -> list[Any]:
    """This rank's micro-batches of what a plain run sees."""

    def own(rows: Tensor) -> tuple[Tensor, ...]:
        return rows.chunk(topology.data)[topology.data_rank].chunk(accumulation)

    if model.causal:
        return [
            (rows[:, :-1], rows[:, 1:])
            for rows in own(batch_of(seed, step, model.config.vocab_size))
        ]
    parts = {name: own(rows) for name, rows in masked_rows(seed, step, model.config).items()}
    return [
        MaskedBatch({name: part[number] for name, part in parts.items()})
        for number in range(accumulation)
    ]


def corpus_batches(config: RunConfig, topology: Any, step: int) -> list[Any]:
    """What `launch/pretrain.py` trains this rank on at step `step`, counted from 0."""
    from zero_tp.run.run_inputs import RunInputs

    run = RunInputs(config, Path("no-such-run"))
    first = step * config.global_batch
    sizes = config.micro_batch, config.accumulation
    return run.samples.batches_from(first, *sizes, topology.data_rank, topology.data)


def whole_tensors(engine: Any, local: dict[str, Tensor]) -> dict[str, Tensor]:
    """TP-local tensors by our names → whole fp32 copies by Hugging Face's. Collective over the
    TP group.
    """
    from tests.support.native import to_theirs

    topology = engine.topology
    found = {
        name: unshard(local[name].detach().float(), parameter, topology)
        for name, parameter in engine.model.named_parameters()
    }
    return {
        name: tensor.cpu().clone() for name, tensor in to_theirs(engine.model.config, found).items()
    }


def optimizer_tensors(engine: Any, key: str | None = None) -> dict[str, Tensor]:
    """The whole fp32 weights, or with `key` one of Adam's moments, from what the optimizer
    holds. Collective.
    """
    from zero_tp.engine.zero.states import MASTER, local_shape
    from zero_tp.parallel.collectives import all_reduce

    states = engine.zero.states()
    local = {
        name: torch.zeros(local_shape(weight)) for name, weight in engine.model.named_parameters()
    }
    for fragment in states.fragments:
        shard = local[fragment.name].view(-1)
        shard[fragment.span.whole] = states.get(fragment, key or MASTER)
    # Each data-parallel rank holds its own run.
    if engine.deepspeed_engine.zero_optimization_stage() > 0:
        local = {
            name: all_reduce(tensor, partition_group(weight, engine.topology))
            for (name, weight), tensor in zip(
                engine.model.named_parameters(), local.values(), strict=True
            )
        }
    return whole_tensors(engine, local)


def stale_weights(engine: Any, masters: dict[str, Tensor]) -> list[str]:
    """Names of the module's weights that differ from the fp32 weights in its dtype. Collective."""
    from tests.support.native import native_tensors
    from zero_tp.model.architectures import file_tensors, weights_of

    stored = file_tensors(weights_of(engine.model.config), masters)
    return [
        name
        for name, tensor in native_tensors(engine.model)
        # Buffers have no masters.
        if name in stored and not torch.equal(tensor.cpu(), stored[name].to(tensor.dtype))
    ]
