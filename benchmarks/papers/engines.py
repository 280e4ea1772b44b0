"""Configs, engines and batches of the runs that are measured at small size and planned at full
size.
"""

from __future__ import annotations

import torch

from zero_tp.base.constants import DTYPES
from zero_tp.base.settings.deepspeed import ActivationCheckpointing
from zero_tp.base.shipped import CONFIGS, shipped_path
from zero_tp.data.batch import Batch
from zero_tp.engine.engine import TrainingEngine
from zero_tp.model.huggingface import ZeroTPForCausalLM
from zero_tp.model.recompute.activation_memory import ActivationMemory
from zero_tp.parallel.topology import Topology
from zero_tp.run.config import RunConfig
from zero_tp.tools.planning.dryrun import dry_run
from zero_tp.tools.planning.memory import PaperMemory, run_model_size
from zero_tp.tools.planning.plan_settings import Layer, workload_of

CPU = torch.device("cpu")
ONE_MICRO_BATCH = ("train_batch_size=auto", "gradient_accumulation_steps=1")
"""Overrides with which a large run's config loads for any number of devices."""
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
    # With ZeRO-3's defaults a small model would not be partitioned.
    "zero_optimization.stage3_param_persistence_threshold=0",
    "zero_optimization.stage3_prefetch_bucket_size=1000000",
    "zero_optimization.stage3_max_live_parameters=1000000",
    "zero_optimization.stage3_max_reuse_distance=1000000",
    "zero_optimization.reduce_bucket_size=1000000",
)


def small_config(ranks: int, *changes: str) -> RunConfig:
    """Return the config of a small GPT-2 in bf16, with overrides."""
    return RunConfig.load(shipped_path(CONFIGS) / "gpt2_124m_zero1.json", [*SMALL, *changes], ranks)


def of_layers(layer: Layer, ranks: int, *changes: str) -> RunConfig:
    """Return the config of a GPT-2 with the papers' layers (dropout, eager attention), with TP
    over all ranks.
    """
    model = {"n_layer": 4, "n_embd": layer.h, "n_head": layer.a, "n_positions": layer.s}
    shape = (f"zero_tp.data.sequence_length={layer.s}", f"train_micro_batch_size_per_gpu={layer.b}")
    own = (
        *(f"zero_tp.model.{key}={value}" for key, value in model.items()),
        *shape,
        "zero_tp.attention=eager",
    )
    return small_config(ranks, *own, f"zero_tp.parallel.tensor={ranks}", *changes)


def large_config(name: str, devices: int, *changes: str) -> RunConfig:
    """Return one of ds_configs/papers, with one micro-batch on each device."""
    return RunConfig.load(
        shipped_path(CONFIGS) / "papers" / f"{name}.json", [*ONE_MICRO_BATCH, *changes], devices
    )


def view_of(config: RunConfig) -> PaperMemory:
    """Return the papers' formulas for one rank of a run on accelerators."""
    return PaperMemory(
        run_model_size(config),
        workload_of(config, cpu=False),
        config.zero_stage,
        config.data_parallel,
    )


def kept_by_formula(config: RunConfig) -> float:
    """Return the bytes of activations by the papers' formulas."""
    view = view_of(config)
    return view.all_layers_bytes() + view.outside_bytes()


def left_by_forward(config: RunConfig, *, cpu: bool) -> float:
    """Return the bytes that backward needs after forward, in a dry run of a micro-batch."""
    moments = dry_run(config.hf_config(), workload_of(config, cpu=cpu))
    return [moment.activations for moment in moments if moment.phase == "forward"][-1]


def topology_of(config: RunConfig) -> Topology:
    """Create the process groups of a run. Collective over all ranks."""
    return Topology(config.zero_tp.parallel.tensor, config.zero_tp.parallel.sequence)


def built(
    config: RunConfig, topology: Topology, device: torch.device = CPU
) -> tuple[ZeroTPForCausalLM, ActivationMemory]:
    """Build a run's model with its recomputation on this rank, without an engine. Collective."""
    dtype = getattr(torch, DTYPES[config.dtype])
    model = ZeroTPForCausalLM(config.hf_config(), topology, dtype=dtype, device=device).train()
    return model, ActivationMemory(
        model, config.zero_tp.recompute_policy, ActivationCheckpointing(), device
    )


def engine_of(config: RunConfig, topology: Topology | None = None) -> TrainingEngine:
    """Build a run's engine on this rank, without its data. Collective over all ranks.

    Args:
        topology: the run's, if its process groups exist.
    """
    return TrainingEngine(
        config.hf_config(),
        topology or topology_of(config),
        config.engine_settings,
        seed=config.zero_tp.training.seed,
        recompute=config.zero_tp.recompute_policy,
    )


def drawn(config: RunConfig) -> list[Batch]:
    """Return the micro-batches of one step, of random tokens that are equal on all ranks."""
    generator = torch.Generator().manual_seed(config.zero_tp.training.seed)
    shape = (config.accumulation, config.micro_batch, config.zero_tp.data.sequence_length)
    tokens = torch.randint(config.hf_config().vocab_size, shape, generator=generator)
    return [Batch(rows, rows) for rows in tokens]
