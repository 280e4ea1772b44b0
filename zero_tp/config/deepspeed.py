"""This module knows DeepSpeed's own keys: which exist, and their types.

DeepSpeed checks the blocks that it has pydantic models for, and those models are used here as they are. The rest it
reads with `dict.get`, so that a mistyped key does nothing: those keys are models of ours, and a test compares them
with the keys that DeepSpeed reads.
"""

from __future__ import annotations

import contextlib
import logging
import pkgutil
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, create_model

from zero_tp.config.optimizer import check_optimizer, check_scheduler
from zero_tp.config.schema import ZeroTP
from zero_tp.errors import ConfigError, did_you_mean, shown
from zero_tp.validation import Block, NonNegative, Positive, nested_names, validate

Dtype = Literal["fp32", "fp16", "bf16"]
LOG_LEVELS = Literal["debug", "info", "warning", "error", "critical"]


class Scalars(Block):
    """These are the keys at the top level whose values are not objects."""

    train_batch_size: Positive | None = None
    train_micro_batch_size_per_gpu: Positive | None = None
    gradient_accumulation_steps: Positive | None = None
    managed_gradient_accumulation: bool = True
    gradient_clipping: NonNegative = 1.0
    communication_data_type: Dtype | None = None
    seq_parallel_communication_data_type: Dtype | None = None
    sequence_parallel_size: Positive = 1
    prescale_gradients: bool = False
    gradient_predivide_factor: Annotated[float, Field(gt=0)] = 1.0
    gradient_allreduce_op: Literal["mean", "sum"] = "mean"
    disable_allgather: bool = False
    steps_per_print: Positive | None = None
    wall_clock_breakdown: bool = False
    memory_breakdown: bool = False
    dump_state: bool = False
    disable_python_gc: bool = False
    dataloader_drop_last: bool = False
    zero_allow_untested_optimizer: bool = False
    zero_force_ds_cpu_optimizer: bool = True
    use_data_before_expert_parallelism: bool = False
    vocabulary_size: Positive | None = None
    log_level: LOG_LEVELS | None = None


class ActivationCheckpointing(Block):
    partition_activations: bool = False
    number_checkpoints: Positive | None = None
    contiguous_memory_optimization: bool = False
    cpu_checkpointing: bool = False
    profile: bool = False
    synchronize_checkpoint_boundary: bool = False


class DataTypes(Block):
    grad_accum_dtype: Dtype | None = None
    param_dtype: Dtype | None = None
    buffer_dtype: Dtype | None = None
    keep_in_fp32_modules: Literal["auto"] | list[str] = "auto"


class CheckpointWriter(Block):
    type: Literal["mock", "python", "fast", "MOCK", "PYTHON", "FAST"] = "fast"
    io_buffer_size: Positive = 64 * 1024**2
    io_buffer_double: bool = True
    show_statistics: bool = False
    data_parallel: Literal["replica", "socket", "machine", "REPLICA", "SOCKET", "MACHINE"] | None = None
    decoupled: bool = False
    io_multiplier: Positive = 1


class ParallelWrite(Block):
    pipeline_stage: bool = False


class CheckpointBlock(Block):
    tag_validation: Literal["Warn", "Ignore", "Fail", "WARN", "IGNORE", "FAIL"] = "Warn"
    load_universal: bool = False
    use_node_local_storage: bool = False
    parallel_write: ParallelWrite = Field(default_factory=ParallelWrite)
    checkpoint_serialization: bool = True
    writer: CheckpointWriter | None = None


class Aio(Block):
    block_size: Positive = 1048576
    queue_depth: Positive = 8
    intra_op_parallelism: Positive = 1
    single_submit: bool = False
    overlap_events: bool = True
    use_gds: bool = False


class FlopsProfiler(Block):
    enabled: bool = False
    recompute_fwd_factor: NonNegative = 0.0
    profile_step: Positive = 1
    module_depth: int = -1
    top_modules: Positive = 1
    detailed: bool = True
    output_file: str | None = None


OWN_BLOCKS: dict[str, type[Block]] = {
    "activation_checkpointing": ActivationCheckpointing,
    "data_types": DataTypes,
    "checkpoint": CheckpointBlock,
    "aio": Aio,
    "flops_profiler": FlopsProfiler,
}

DEEPSPEED_BLOCKS = {
    "zero_optimization": "runtime.zero.config:DeepSpeedZeroConfig",
    "bf16": "runtime.precision_config:DeepSpeedBF16Config",
    "fp16": "runtime.precision_config:DeepSpeedFP16Config",
    "tensorboard": "monitor.config:TensorBoardConfig",
    "wandb": "monitor.config:WandbConfig",
    "csv_monitor": "monitor.config:CSVConfig",
    "comet": "monitor.config:CometConfig",
    "comms_logger": "comm.config:CommsLoggerConfig",
    "timers": "utils.config:DeepSpeedThroughputTimerConfig",
}
"""Blocks of pydantic models in DeepSpeed's package; that of `timers` is the one key `throughput` in it."""
TIMERS = {"throughput": {"enabled": False}}
"""Default of `timers`: DeepSpeed's own default synchronises with the device twice a micro-batch."""


MONITORS = ("tensorboard", "wandb", "comet", "csv_monitor")
"""Blocks that zero_tp obeys itself, with DeepSpeed's keys: its engine would write the learning rate beside us."""


def deepspeed_models() -> dict[str, type[BaseModel]]:
    """Return DeepSpeed's pydantic models by block. This imports DeepSpeed: about two seconds, and quietly."""
    with _quiet():
        found = {block: pkgutil.resolve_name(f"deepspeed.{place}") for block, place in DEEPSPEED_BLOCKS.items()}
    throughput = found["timers"]
    field = throughput, throughput(**TIMERS["throughput"])
    return {**found, "timers": create_model("Timers", __base__=Block, throughput=field)}


OFF_BLOCKS: dict[str, str] = {
    "tensor_parallel": "DeepSpeed's AutoTP replaces zero_tp's TP groups by its own; use zero_tp.parallel.tensor",
    "autotuning": "it starts the script many times over with configs of its own; tune by --set",
    "pipeline": "zero_tp has no pipeline parallelism",
    "hybrid_engine": "it swaps the layers for inference kernels; zero_tp's layers are trained",
    "expert_parallel": "zero_tp's models have no experts",
    "weight_quantization": "it quantizes the weights and so changes the model",
    "torch_autocast": "the layers compute in one dtype, and recomputation doesn't restore autocast; use bf16 or fp16",
    "compile": "DeepCompile rewrites the backward graph, collectives included; use zero_tp.compile",
    "data_efficiency": "curriculum, dynamic batching and random-LTD change which tokens a step sees; "
    "zero_tp.data decides that",
    "datastates_ckpt": "checkpoints are written and verified by zero_tp; use zero_tp.checkpoint",
}
"""Blocks that zero_tp has to keep switched off, with the reason and the remedy."""

SWITCHES = {"enabled": (False,), "autotp_size": (0, 1), "deepcompile": (False,)}
"""What may stand in a block of OFF_BLOCKS: the switches, in these positions."""

REMOVED: dict[str, str] = {
    "nebula": "checkpoints are zero_tp.checkpoint",
    "compression_training": "delete it",
    "amp": "use bf16 or fp16",
    "quantize_training": "delete it",
    "sparse_gradients": "delete it: gradients are dense",
    "eigenvalue": "delete it",
    "sparse_attention": "delete it",
    "elasticity": "set the batch size itself",
    "graph_harvesting": "delete it",
    "curriculum_learning": "delete it",
    "progressive_layer_drop": "delete it",
    "zero_optimization.mics_shard_size": "use plain ZeRO-3",
    "zero_optimization.mics_hierarchical_params_gather": "use plain ZeRO-3",
    "zero_optimization.zeropp_loco_param": "delete it",
}
"""Keys that DeepSpeed has removed, with what to do instead."""

RENAMED: dict[str, str] = {
    "bfloat16": "bf16",
    "zero_optimization.cpu_offload": 'zero_optimization.offload_optimizer: {"device": "cpu"}',
    "zero_optimization.cpu_offload_param": 'zero_optimization.offload_param: {"device": "cpu"}',
    "zero_optimization.cpu_offload_use_pin_memory": "pin_memory of offload_optimizer and offload_param",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
    **{
        f"zero_optimization.{name}": f"stage3_{name}"
        for name in (
            *("prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold"),
            *("max_live_parameters", "max_reuse_distance", "gather_16bit_weights_on_model_save"),
            *("module_granularity_threshold", "use_all_reduce_for_fetch_params", "allgather_sequential"),
        )
    },
}
"""Names that DeepSpeed still takes, or takes only when the new name is absent: its own fields' names among them."""


def known_keys() -> list[str]:
    """Return every key that may stand at the top level of the file."""
    blocks = ["optimizer", "scheduler", *OWN_BLOCKS, *DEEPSPEED_BLOCKS, *OFF_BLOCKS]
    return [*Scalars.model_fields, *blocks, "zero_tp"]


def check_names(raw: dict[str, Any]) -> None:
    """Check the names at the top level, and those that were removed or renamed.

    Raises:
        ConfigError: naming the key and the nearest valid one, or its replacement.
    """
    zero = raw.get("zero_optimization")
    present = [*raw, *(f"zero_optimization.{key}" for key in (zero if isinstance(zero, dict) else ()))]
    for key in present:
        if key in REMOVED:
            raise ConfigError(key, "was removed from DeepSpeed", REMOVED[key])
        if key in RENAMED:
            raise ConfigError(key, "is not the documented name", f"use {RENAMED[key]}")
    names = known_keys()
    for key in raw:
        if key not in names:
            raise ConfigError(key, "unknown key", did_you_mean(key, [*names, *_inner_names()]))


def check_values(raw: dict[str, Any], needs_optimizer: bool = True) -> None:
    """Check DeepSpeed's part of a config whose "auto" values are resolved.

    Args:
        needs_optimizer: refuse a config without an `optimizer` block.

    Raises:
        ConfigError: see `validate`; a block that has to stay off; an "auto" that is left.
    """
    refuse_auto({key: value for key, value in raw.items() if key != "zero_tp"})
    validate(Scalars, {key: value for key, value in raw.items() if key in Scalars.model_fields}, "")
    for name, model in {**OWN_BLOCKS, **deepspeed_models()}.items():
        if name in raw:
            validate(model, raw[name], name)
    for name in OFF_BLOCKS.keys() & raw.keys():
        check_off(name, raw[name])
    offload = raw.get("zero_optimization", {}).get("offload_optimizer") or {}
    checks: dict[str, Callable[[Any], None]] = {
        "optimizer": lambda block: check_optimizer(block, offload.get("device", "none") != "none"),
        "scheduler": check_scheduler,
    }
    for name, check in checks.items():
        if name in raw:
            check(raw[name])
    if needs_optimizer and "optimizer" not in raw:
        raise ConfigError("optimizer", "required, but not given", 'as in {"type": "AdamW", "params": {"lr": 3e-4}}')


DECIDED_LATER = ("data_types.keep_in_fp32_modules", "zero_tp.compile")
"""Keys whose "auto" stays: DeepSpeed decides it, or the run's device."""


def refuse_auto(value: Any, path: str = "") -> None:
    """Raise a ConfigError naming the first "auto" in `value` that nothing resolves."""
    if value == "auto" and path not in DECIDED_LATER:
        raise ConfigError(path, '"auto" is not known for this key', "write the value")
    if isinstance(value, dict):
        for key, inner in value.items():
            refuse_auto(inner, f"{path}.{key}" if path else key)


def check_off(name: str, value: Any) -> None:
    """Raise a ConfigError if a block of OFF_BLOCKS is not switched off."""
    if value is False or value is None:
        return
    if isinstance(value, dict):
        wrong = [key for key, inner in value.items() if inner not in SWITCHES.get(key, ()) or key not in SWITCHES]
        if not wrong:
            return
        reason, _, remedy = OFF_BLOCKS[name].partition("; ")
        key = f"{name}.{wrong[0]}"
        raise ConfigError(key, f"{shown(value[wrong[0]])} is refused: {reason}", remedy or "leave the block out")
    raise ConfigError(name, f"expected an object, got {shown(value)}", "leave the block out")


def _inner_names() -> Iterator[str]:
    """Return the names inside the blocks of ours, for a right key in a wrong place."""
    yield from nested_names(ZeroTP, "zero_tp.")
    for block, model in OWN_BLOCKS.items():
        yield from nested_names(model, f"{block}.")
    yield from ("zero_optimization.stage", "optimizer.params.lr")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drop the lines that DeepSpeed logs when it is imported: the user's error has to be the only one."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
