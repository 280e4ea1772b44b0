"""What DeepSpeed 0.19.8 does with a config: facts that its stages, the rules and the planner
share.

The class that takes the step:

    stage 0     fp32: torch's optimizer itself. 16 bit: FP16_UnfusedOptimizer, or FP16_Optimizer
                around DeepSpeed's FusedAdam.
                With torch's fused AdamW, `UnpartitionedAdamWUpdate` is the step of the first.
    stage 1     DeepSpeedZeroOptimizer; BF16_Optimizer in bf16 with fp32 accumulation and without
                offloading.
    stage 2     DeepSpeedZeroOptimizer
                With torch's fused AdamW on the device, `AdamWUpdate` is the step of this class.
    stage 3     DeepSpeedZeroOptimizer_Stage3
"""

from __future__ import annotations

from zero_tp.base.settings.deepspeed import DeepSpeedSettings
from zero_tp.base.settings.optimizer import Optimizer, TorchAdam

ALLREDUCE_BUCKET = 500_000_000
"""Elements of one all-reduce at stage 0 and in BF16_Optimizer, which have no buckets
(deepspeed/runtime/constants.py, MEMORY_OPT_ALLREDUCE_SIZE).
"""
UPDATE_ELEMENTS = 2**22
"""Elements of a chunk of zero_tp's own update by AdamW, if it is not compiled: an fp32 copy of
16 MiB. Smaller ones make more copies a step.
"""


def sums_in_fp32(settings: DeepSpeedSettings) -> bool:
    """Return whether bf16 gradients are accumulated in fp32.

    By default DeepSpeed accumulates in the dtype of the weights. In bf16 the numbers above 1 are
    1/128 apart, so adding a micro-batch's 1/512 to 1 changes nothing.
    """
    return settings.dtype == "bf16" and settings.data_types.grad_accum_dtype == "fp32"


def is_bf16_optimizer(stage: int, *, sums_in_fp32: bool, offloaded: bool) -> bool:
    """Return whether DeepSpeed takes its BF16_Optimizer (`_do_optimizer_sanity_check`)."""
    # It has other attributes than DeepSpeed's other ZeRO optimizers, reads fewer keys and takes the
    # norm inside its step: the rules, the stages and the planner each have to know.
    return stage == 1 and sums_in_fp32 and not offloaded


def uses_bf16_optimizer(settings: DeepSpeedSettings) -> bool:
    """Return `is_bf16_optimizer` of a config."""
    zero = settings.zero_optimization
    offloaded = zero.optimizer_device != "none"
    return is_bf16_optimizer(zero.stage, sums_in_fp32=sums_in_fp32(settings), offloaded=offloaded)


def is_fused_adamw(optimizer: Optimizer | None) -> bool:
    """Return whether an `optimizer` block is torch's fused AdamW, of which a part can be updated
    by itself.
    """
    if optimizer is None or not isinstance(optimizer.params, TorchAdam):
        return False
    params = optimizer.params
    # DeepSpeed's "Adam" is AdamW too, unless `adam_w_mode` is false.
    decays_weights = optimizer.type.lower() == "adamw" or params.adam_w_mode
    return bool(params.fused) and decays_weights and not (params.amsgrad or params.maximize)


def runs_adamw_update(
    stage: int, dtype: str, *, fused_adamw: bool, bf16_optimizer: bool, offloaded: bool
) -> bool:
    """Return whether `AdamWUpdate` or `UnpartitionedAdamWUpdate` replaces DeepSpeed's step (their
    `is_supported`).
    """
    # In fp32 stage 0 has no step of DeepSpeed's, but torch's.
    has_step = stage in (1, 2) or (stage == 0 and dtype != "fp32")
    return has_step and fused_adamw and not bf16_optimizer and not offloaded


def weights_are_masters(stage: int, dtype: str, *, offloaded: bool) -> bool:
    """Return whether the optimizer updates a run's weights themselves: they are fp32.

    Under ZeRO-1 and 2 DeepSpeed makes a copy, which `ZeroStage1And2` gives back.
    """
    # ZeRO-3 keeps its partitions where its gathers read them.
    return dtype == "fp32" and stage < 3 and not (stage and offloaded)


def copies_gradients(settings: DeepSpeedSettings) -> bool:
    """Return whether a key makes DeepSpeed copy gradients: contiguous (if written), or a cast."""
    zero = settings.zero_optimization
    # Only if the config has the key: with one replica `deepspeed_dict` turns DeepSpeed's default,
    # true, off.
    contiguous = "contiguous_gradients" in zero.model_fields_set and zero.contiguous_gradients
    return contiguous or settings.data_types.grad_accum_dtype not in (None, settings.dtype)


def in_place_gradients(stage: int, data: int, *, copied: bool, offloaded: bool) -> bool:
    """Return whether ZeRO-1 or 2 leaves gradients in `parameter.grad`: there is one replica."""
    # With one replica the mean over DP is the gradient itself. A cast needs a copy in any case, and
    # an offloaded optimizer takes its gradients to the host.
    return stage in (1, 2) and data == 1 and not copied and not offloaded


def keeps_gradients_in_place(settings: DeepSpeedSettings, data: int) -> bool:
    """Return `in_place_gradients` of a config with `data` replicas."""
    zero = settings.zero_optimization
    offloaded = zero.optimizer_device != "none"
    return in_place_gradients(
        zero.stage, data, copied=copies_gradients(settings), offloaded=offloaded
    )


def fills_buckets(settings: DeepSpeedSettings, data: int) -> bool:
    """Return whether ZeRO-1 or 2 copies gradients into buckets of `reduce_bucket_size`."""
    return (
        settings.zero_optimization.stage in (1, 2)
        and not uses_bf16_optimizer(settings)
        and not keeps_gradients_in_place(settings, data)
    )


def deepspeed_clips(stage: int) -> bool:
    """Return whether DeepSpeed's own clipping is exact: it computes the norm in fp64.

    Without ZeRO it has no norm in fp32 runs; in 16 bit its norm is in fp32 (inexact at 1e-4 on
    CPUs) and counts only the gradients of TP rank 0.
    """
    return stage > 0
