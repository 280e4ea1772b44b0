"""Keys of DeepSpeed's part of a config that are refused or renamed, with the reasons."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zero_tp.base.errors import ConfigError, shown
from zero_tp.base.settings.deepspeed import ZERO
from zero_tp.base.settings.keys import look_up

REMOVED = "DeepSpeed has removed it"
RENAMED = "DeepSpeed has renamed it"
REFUSED_KEYS: dict[str, str] = {
    # Blocks that would train another model, or take over what zero_tp does
    "tensor_parallel": "DeepSpeed's AutoTP replaces zero_tp's TP groups by its own; use "
    "zero_tp.parallel.tensor",
    "autotuning": "it starts the script many times with its own configs; tune by --set",
    "pipeline": "zero_tp has no pipeline parallelism",
    "hybrid_engine": "it swaps the trained layers for inference kernels",
    "expert_parallel": "experts are split over TP ranks, not spread over replicas",
    "weight_quantization": "it quantizes the weights and so changes the model",
    "torch_autocast": "the layers compute in one dtype, and recomputation doesn't restore "
    "autocast; use bf16 or fp16",
    "compile": "DeepCompile rewrites the backward graph, collectives included; use zero_tp.compile",
    "data_efficiency": "curriculum, batching and random-LTD change a step's tokens, which "
    "zero_tp.data decides",
    "checkpoint": "checkpoints are written and verified by zero_tp; use zero_tp.checkpoint",
    "datastates_ckpt": "checkpoints are written and verified by zero_tp; use zero_tp.checkpoint",
    "seq_parallel_communication_data_type": "it belongs to Ulysses and would do nothing",
    f"{ZERO}.leaf_module": "no run that gathers modules as one was compared with the plain model",
    f"{ZERO}.zenflow": "it steps on stale gradients, so the model trains differently",
    # Keys that DeepSpeed has removed or renamed
    "nebula": f"{REMOVED}; use zero_tp.checkpoint",
    "amp": f"{REMOVED}; use bf16 or fp16",
    "elasticity": f"{REMOVED}; set the batch size itself",
    f"{ZERO}.mics_shard_size": f"{REMOVED}; use plain ZeRO-3",
    f"{ZERO}.mics_hierarchical_params_gather": f"{REMOVED}; use plain ZeRO-3",
    f"{ZERO}.zeropp_loco_param": REMOVED,
    **dict.fromkeys(
        ("compression_training", "quantize_training", "eigenvalue", "sparse_attention"), REMOVED
    ),
    **dict.fromkeys(
        ("graph_harvesting", "curriculum_learning", "progressive_layer_drop", "sparse_gradients"),
        REMOVED,
    ),
    "bfloat16": f"{RENAMED}; use bf16",
    f"{ZERO}.cpu_offload": f'{RENAMED}; use {ZERO}.offload_optimizer: {{"device": "cpu"}}',
    f"{ZERO}.cpu_offload_param": f'{RENAMED}; use {ZERO}.offload_param: {{"device": "cpu"}}',
    f"{ZERO}.cpu_offload_use_pin_memory": f"{RENAMED}; use pin_memory of offload_optimizer and "
    "offload_param",
    f"{ZERO}.stage3_gather_fp16_weights_on_model_save": f"{RENAMED}; use "
    "stage3_gather_16bit_weights_on_model_save",
}
"""Keys that no config may have → "reason; remedy"."""

NOT_IMPLEMENTED = (False, "it is not built yet")
ZERO_PLUS_PLUS = (False, "ZeRO++ rounds what ranks exchange, so the model trains differently")

FIXED: dict[str, tuple[Any, str]] = {
    # What is computed
    "gradient_allreduce_op": (
        "mean",
        'gradients would grow with the replicas, and the loss is a mean; use "mean"',
    ),
    "managed_gradient_accumulation": (True, "every micro-step would then be an optimizer step"),
    f"{ZERO}.compute_grad_norm": (
        True,
        "non-finite gradients are found by the norm, and would be applied",
    ),
    "bf16.check_grad_overflow": (
        True,
        "non-finite gradients would be applied, and on_nonfinite would not see them",
    ),
    "optimizer.legacy_fusion": (
        False,
        "DeepSpeed's older step of fp16 was never compared with the plain one",
    ),
    "optimizer.params.bias_correction": (
        True,
        "an Adam without it was never compared with a plain one",
    ),
    "optimizer.params.fp32_optimizer_states": (
        True,
        "the optimizer's states would be rounded to 16 bit",
    ),
    "optimizer.params.maximize": (False, "it would maximise the loss"),
    "scheduler.params.decay_mom_rate": (
        0,
        "DeepSpeed raises the momentum by it after the cycle, beyond 1",
    ),
    # Groups and partitions
    "sequence_parallel_size": (
        1,
        "it is Ulysses, which changes ZeRO's groups; use zero_tp.parallel.sequence",
    ),
    "use_data_before_expert_parallelism": (False, "there is no expert parallelism"),
    f"{ZERO}.zero_quantized_weights": ZERO_PLUS_PLUS,
    f"{ZERO}.zero_quantized_nontrainable_weights": ZERO_PLUS_PLUS,
    f"{ZERO}.zero_quantized_gradients": ZERO_PLUS_PLUS,
    f"{ZERO}.zero_hpz_partition_size": (
        1,
        "no run with ZeRO++'s groups was compared with the plain model",
    ),
    f"{ZERO}.round_robin_gradients": (
        False,
        "its order of gradients was never compared with the plain model",
    ),
    f"{ZERO}.stage3_module_granularity_threshold": (
        0,
        "no run that gathers modules as one was compared",
    ),
    f"{ZERO}.offload_optimizer.ratio": (
        1,
        "an update that is half on the host was never compared with the plain one",
    ),
    f"{ZERO}.elastic_checkpoint": (
        False,
        "it changes the layout of checkpoints that zero_tp reads",
    ),
    f"{ZERO}.legacy_stage1": (
        False,
        "the old implementation was never compared with the plain model",
    ),
    f"{ZERO}.pipeline_loading_checkpoint": (False, "zero_tp has no pipeline parallelism"),
    # What zero_tp does itself
    "dataloader_drop_last": (
        False,
        "zero_tp.data decides what a step reads, and DeepSpeed's loader is not used",
    ),
    # Not implemented
    "activation_checkpointing.profile": NOT_IMPLEMENTED,
    "activation_checkpointing.synchronize_checkpoint_boundary": NOT_IMPLEMENTED,
    "aio.use_gds": NOT_IMPLEMENTED,
    f"{ZERO}.offload_optimizer.super_offload": NOT_IMPLEMENTED,
    "bf16.bf16_master_weights_and_grads": NOT_IMPLEMENTED,
    "bf16.bf16_optimizer_states": NOT_IMPLEMENTED,
    "fp16.fp16_master_weights_and_grads": NOT_IMPLEMENTED,
}
"""Key → its only allowed value, and "reason; remedy"."""


CURRENT_NAMES = {
    name: f"stage3_{name}"
    for name in (
        *("prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold"),
        *("max_live_parameters", "max_reuse_distance", "module_granularity_threshold"),
        *(
            "gather_16bit_weights_on_model_save",
            "use_all_reduce_for_fetch_params",
            "allgather_sequential",
        ),
    )
}
"""Shorter names that DeepSpeed accepts in `zero_optimization` → the documented names of the same
keys.
"""


def use_current_names(values: dict[str, Any]) -> None:
    """Replace names of `CURRENT_NAMES` in place. ConfigError: a key is given under both names."""
    zero = values.get(ZERO)
    if not isinstance(zero, dict):
        return
    for name in [name for name in zero if name in CURRENT_NAMES]:
        if CURRENT_NAMES[name] in zero:
            problem = f"is another name of {CURRENT_NAMES[name]}, which is given too"
            raise ConfigError(f"{ZERO}.{name}", problem, "keep one of them")
        zero[CURRENT_NAMES[name]] = zero.pop(name)


def key_errors(values: dict[str, Any]) -> Iterator[ConfigError]:
    """Yield an error for each key of `REFUSED_KEYS`, and for each value that `FIXED` does not
    allow.
    """
    zero = values.get(ZERO)
    for key in (*values, *(f"{ZERO}.{name}" for name in (zero if isinstance(zero, dict) else ()))):
        if key in REFUSED_KEYS:
            yield refusal(key, f"refused: {REFUSED_KEYS[key]}")
    for key, (value, reason) in FIXED.items():
        # A missing key has DeepSpeed's default, which is the allowed value.
        if look_up(values, key) not in (None, value):
            yield refusal(key, f"refused unless it is {shown(value)}: {reason}")


def refusal(key: str, text: str) -> ConfigError:
    """Return the error for a text "problem; remedy". The default remedy is to leave the key out."""
    problem, _, remedy = text.partition("; ")
    return ConfigError(key, problem, remedy or "leave it out")
