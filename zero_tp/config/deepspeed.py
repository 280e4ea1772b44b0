"""DeepSpeed's own keys: those that it reads without a type, and the names that zero_tp refuses.

DeepSpeed reads these keys with `dict.get`, so that a mistyped one does nothing. Here they have types, and a test
compares them with the keys that DeepSpeed reads. `config_file.py` adds the blocks that DeepSpeed types itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from zero_tp.errors import ConfigError, shown
from zero_tp.validation import ConfigModel, NonNegative, Positive

Dtype = Literal["fp32", "fp16", "bf16"]


class Scalars(ConfigModel):
    """The keys at the top level whose values are not objects."""

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
    log_level: Literal["debug", "info", "warning", "error", "critical"] | None = None


class ActivationCheckpointing(ConfigModel):
    partition_activations: bool = False
    number_checkpoints: Positive | None = None
    contiguous_memory_optimization: bool = False
    cpu_checkpointing: bool = False
    profile: bool = False
    synchronize_checkpoint_boundary: bool = False


class DataTypes(ConfigModel):
    grad_accum_dtype: Dtype | None = None
    param_dtype: Dtype | None = None
    buffer_dtype: Dtype | None = None
    keep_in_fp32_modules: Literal["auto"] | list[str] = "auto"


class Aio(ConfigModel):
    block_size: Positive = 1048576
    queue_depth: Positive = 8
    intra_op_parallelism: Positive = 1
    single_submit: bool = False
    overlap_events: bool = True
    use_gds: bool = False


class FlopsProfiler(ConfigModel):
    enabled: bool = False
    recompute_fwd_factor: NonNegative = 0.0
    profile_step: Positive = 1
    module_depth: int = -1
    top_modules: Positive = 1
    detailed: bool = True
    output_file: str | None = None


MONITORS = ("tensorboard", "wandb", "comet", "csv_monitor")
"""Blocks that zero_tp obeys itself, with DeepSpeed's keys: its engine would write the learning rate beside us."""


class OffBlock(ConfigModel):
    """The switches of a block that has to stay off, in the positions that they may have."""

    enabled: Literal[False] = False
    autotp_size: Literal[0, 1] = 0
    deepcompile: Literal[False] = False


Off = OffBlock | Literal[False] | None


def _off(reason: str) -> Any:
    """Return a field that may be left out; a ";" in the reason separates it from the remedy."""
    return Field(None, description=reason)


class OffBlocks(ConfigModel):
    """Blocks that zero_tp has to keep switched off."""

    tensor_parallel: Off = _off(
        "DeepSpeed's AutoTP replaces zero_tp's TP groups by its own; use zero_tp.parallel.tensor"
    )
    autotuning: Off = _off("it starts the script many times over with configs of its own; tune by --set")
    pipeline: Off = _off("zero_tp has no pipeline parallelism")
    hybrid_engine: Off = _off("it swaps the layers for inference kernels; zero_tp's layers are trained")
    expert_parallel: Off = _off("experts are split over TP ranks, not spread over replicas")
    weight_quantization: Off = _off("it quantizes the weights and so changes the model")
    torch_autocast: Off = _off(
        "the layers compute in one dtype, and recomputation doesn't restore autocast; use bf16 or fp16"
    )
    compile: Off = _off("DeepCompile rewrites the backward graph, collectives included; use zero_tp.compile")
    data_efficiency: Off = _off(
        "curriculum, dynamic batching and random-LTD change which tokens a step sees; zero_tp.data decides that"
    )
    checkpoint: Off = _off("checkpoints are written and verified by zero_tp; use zero_tp.checkpoint")
    datastates_ckpt: Off = _off("checkpoints are written and verified by zero_tp; use zero_tp.checkpoint")


OFF_BLOCKS = {name: str(field.description) for name, field in OffBlocks.model_fields.items()}

REMOVED: dict[str, str] = {
    "nebula": "checkpoints are zero_tp.checkpoint",
    "amp": "use bf16 or fp16",
    "sparse_gradients": "delete it: gradients are dense",
    "elasticity": "set the batch size itself",
    "zero_optimization.mics_shard_size": "use plain ZeRO-3",
    "zero_optimization.mics_hierarchical_params_gather": "use plain ZeRO-3",
    **dict.fromkeys(("compression_training", "quantize_training", "eigenvalue", "sparse_attention"), "delete it"),
    **dict.fromkeys(("graph_harvesting", "curriculum_learning", "progressive_layer_drop"), "delete it"),
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


def wrong_names(values: dict[str, Any]) -> Iterator[ConfigError]:
    """Yield an error for each key that DeepSpeed removed or renamed, or of a block that has to stay off."""
    zero = values.get("zero_optimization")
    for key in (*values, *(f"zero_optimization.{name}" for name in (zero if isinstance(zero, dict) else ()))):
        if key in REMOVED:
            yield ConfigError(key, "was removed from DeepSpeed", REMOVED[key])
        elif key in RENAMED:
            yield ConfigError(key, "is not the documented name", f"use {RENAMED[key]}")
    for name, block in values.items():
        if name in OFF_BLOCKS and block is not None and block is not False:
            yield from _switched_on(name, block)


def _switched_on(name: str, block: Any) -> Iterator[ConfigError]:
    if not isinstance(block, dict):
        yield ConfigError(name, f"expected an object, got {shown(block)}", "leave the block out")
        return
    for key, value in block.items():
        if key not in OffBlock.model_fields or value not in get_args(OffBlock.model_fields[key].annotation):
            reason, _, remedy = OFF_BLOCKS[name].partition("; ")
            problem = f"{shown(value)} is refused: {reason}"
            yield ConfigError(f"{name}.{key}", problem, remedy or "leave the block out")
