"""Small GPT-2s are trained for a few steps on the ranks of `on_ranks`, to count and time what a real step does."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from zero_tp.config import RunConfig
from zero_tp.data.batch import Batch
from zero_tp.planning.memory import Model, model_of
from zero_tp.shipped import CONFIGS, shipped
from zero_tp.topology import Topology
from zero_tp.training.engine import TrainingEngine

ONE_MICRO_BATCH = ("train_batch_size=auto", "gradient_accumulation_steps=1")
"""What makes a large run's config load on any number of devices."""
SMALL = (
    "zero_tp.model.n_layer=6",
    "zero_tp.model.n_embd=256",
    "zero_tp.model.n_head=8",
    "zero_tp.model.vocab_size=2048",
    "zero_tp.model.n_positions=512",
    "zero_tp.data.sequence_length=128",
    "zero_tp.parallel.tensor=1",
    "train_micro_batch_size_per_gpu=2",
    "train_batch_size=auto",
    "gradient_accumulation_steps=1",
    "optimizer.params.torch_adam=true",
    # Of ZeRO-3, whose defaults would leave a small model whole.
    "zero_optimization.stage3_param_persistence_threshold=0",
    "zero_optimization.stage3_prefetch_bucket_size=1000000",
    "zero_optimization.stage3_max_live_parameters=1000000",
    "zero_optimization.stage3_max_reuse_distance=1000000",
    "zero_optimization.reduce_bucket_size=1000000",
)


def small_config(ranks: int, *changes: str) -> RunConfig:
    """Return the config of a small GPT-2 in bf16, with keys changed."""
    return RunConfig.load(shipped(CONFIGS) / "gpt2_124m_zero1.json", [*SMALL, *changes], ranks)


def large_config(name: str, devices: int, *changes: str) -> RunConfig:
    """Return one of ds_configs/papers, with one micro-batch on each device."""
    return RunConfig.load(shipped(CONFIGS) / "papers" / f"{name}.json", [*ONE_MICRO_BATCH, *changes], devices)


def model_in(config: RunConfig) -> Model:
    parallel = config.zero_tp.parallel
    return model_of(config.hf_config(), parallel.tensor, parallel.sequence)


def engine_of(config: RunConfig, topology: Topology | None = None) -> TrainingEngine:
    """Build a run's engine on this rank, without its data. Collective over all ranks.

    Args:
        topology: the run's, if its groups are there already.
    """
    parallel = config.zero_tp.parallel
    return TrainingEngine(
        config.hf_config(),
        topology or Topology(parallel.tensor, parallel.sequence),
        config.deepspeed_config(),
        seed=config.zero_tp.training.seed,
        recompute=config.zero_tp.recompute_policy,
    )


def drawn(config: RunConfig) -> list[Batch]:
    """Return the micro-batches of one step, of random tokens, alike on all ranks."""
    generator = torch.Generator().manual_seed(config.zero_tp.training.seed)
    shape = (config.accumulation, config.micro_batch, config.zero_tp.data.sequence_length)
    tokens = torch.randint(config.hf_config().vocab_size, shape, generator=generator)
    return [Batch(rows, rows) for rows in tokens]


def seconds_of_a_step(*changes: str) -> float:
    """Return the fastest of five steps on this rank, after two: what else the machine does makes them slower."""
    config = small_config(dist.get_world_size(), *changes)
    engine, batches, seconds = engine_of(config), drawn(config), []
    for _ in range(7):
        dist.barrier()
        begun = time.perf_counter()
        engine.train_step(batches)
        seconds.append(time.perf_counter() - begun)
    return min(seconds[2:])
