"""Rules about ZeRO's stages, offloading, and keys of DeepSpeed's engine and its logs."""

from __future__ import annotations

from collections.abc import Iterator

from zero_tp.base.settings.deepspeed import ZERO, DeepSpeedSettings
from zero_tp.base.settings.optimizer import Muon
from zero_tp.engine.settings.rule import Combination, Rule, no_effect, note, refused
from zero_tp.engine.zero.facts import uses_bf16_optimizer

SWITCHED_BLOCKS = (
    "bf16",
    "fp16",
    "flops_profiler",
    "comms_logger",
    "tensorboard",
    "wandb",
    "csv_monitor",
    "comet",
)
"""Blocks whose other keys have no effect while `enabled` is false."""
NVME = {
    "offload_optimizer": ("nvme_path", "buffer_count", "pipeline_*", "fast_init"),
    "offload_param": ("nvme_path", "buffer_*", "max_in_cpu"),
}
"""Keys of the offload blocks that DeepSpeed reads only for NVMe."""
NEVER_READ = {
    f"disable_allgather {ZERO}.allgather_*": "DeepSpeed 0.19.8 on torch 2.13 does not read it",
    "comet.samples_log_interval": "zero_tp.logging.interval says which steps are logged",
    "data_types.buffer_dtype data_types.keep_in_fp32_modules": "the models have no buffers to cast",
    "vocabulary_size": "DeepSpeed only warns of a size that is no multiple of 8",
    f"{ZERO}.load_from_fp32_weights {ZERO}.stage3_gather_16bit_*": "zero_tp writes and reads its "
    "checkpoints itself",
    f"{ZERO}.offload_optimizer.cpuadam_cores_perc": "SuperOffload reads it, which is not built",
    f"{ZERO}.save_muon_momentum_buffer_in_memory": "DeepSpeed's own Muon is never used",
}
"""Keys that are never read, and why."""


def qk_clip_rules(settings: DeepSpeedSettings, *, is_used: bool) -> Iterator[Rule]:
    """Yield rules about QK-clip.

    Args:
        is_used: a threshold is set.
    """
    yield refused(
        "zero_tp.training.qk_clip_threshold",
        is_used and settings.zero_optimization.optimizer_device == "nvme",
        'with offload_optimizer.device "nvme": no run with it was compared; use "cpu"',
    )


def average_rules(settings: DeepSpeedSettings, *, is_used: bool) -> Iterator[Rule]:
    """Yield rules about an average of the weights.

    Args:
        is_used: one is kept.
    """
    yield refused(
        "zero_tp.training.ema",
        is_used and bool(settings.zero_optimization.nvme_paths),
        'with an offload device "nvme": the weights are in files between steps; use "cpu"',
    )


def offload_rules(config: Combination) -> Iterator[Rule]:
    """Yield rules about offloading."""
    zero = config.settings.zero_optimization
    devices = {"offload_optimizer": zero.optimizer_device, "offload_param": zero.param_device}
    for block, stage, reason in (
        ("offload_param", 3, "parameters are whole on every rank there"),
        ("offload_optimizer", 1, "the optimizer's states are not partitioned there"),
    ):
        yield refused(
            f"{ZERO}.{block}",
            zero.stage < stage and devices[block] != "none",
            f"below stage {stage}: {reason}, and DeepSpeed would ignore it; use stage {stage}, or "
            "leave it out",
        )
    yield refused(
        f"{ZERO}.offload_optimizer.device",
        zero.stage < 3 and zero.optimizer_device == "nvme",
        'as "nvme" below stage 3: DeepSpeed swaps the optimizer\'s states at stage 3 only; use '
        'stage 3, or "cpu"',
    )
    yield refused(
        f"{ZERO}.offload_optimizer.device",
        config.is_trainer and zero.optimizer_device == "nvme",
        'as "nvme" in ZeroTPTrainer: its checkpoints could not hold the optimizer\'s states; use '
        '"cpu"',
    )
    for block, keys in NVME.items():
        yield refused(
            f"{ZERO}.{block}.nvme_path",
            block in zero.nvme_paths and zero.nvme_paths[block] is None,
            'when it is missing with device "nvme": DeepSpeed swaps to a directory; give one on '
            "the NVMe device",
        )
        # Patterns of fnmatch have no "all but": `device` is the only key of these blocks that
        # begins with d.
        all_but_device = f"{ZERO}.{block}.[!d]*"
        yield no_effect(all_but_device, devices[block] == "none", f"{block}.device is none")
        nvme_keys = _zero_keys(*(f"{block}.{key}" for key in keys))
        yield no_effect(nvme_keys, devices[block] != "nvme", f"{block}.device is not nvme")
    yield no_effect("aio.*", not zero.nvme_paths, "nothing is offloaded to NVMe")
    yield no_effect(
        _zero_keys("ignore_unused_parameters"),
        zero.stage not in (1, 2) or zero.optimizer_device == "none",
        "only ZeRO-1 and ZeRO-2 with an offloaded optimizer read it",
    )


def zero_rules(settings: DeepSpeedSettings) -> Iterator[Rule]:
    """Yield rules about the stages of ZeRO."""
    zero = settings.zero_optimization
    # BF16_Optimizer reads fewer keys than DeepSpeed's other optimizers of ZeRO.
    uses_bf16 = uses_bf16_optimizer(settings)
    # DeepSpeed's check is an assertion on every rank (`nccl_start_alignment_factor`), after the
    # groups are made.
    yield refused(
        f"{ZERO}.allgather_bucket_size",
        zero.allgather_bucket_size % 2 == 1,
        "when it is odd: DeepSpeed splits it by 2; use an even one",
    )
    yield no_effect(
        "bf16.immediate_grad_update",
        not uses_bf16,
        "only ZeRO-1 with data_types.grad_accum_dtype fp32 reads it",
    )
    yield no_effect(
        _zero_keys(
            "stage3_* sub_group_size enable_sanity_checks memory_efficient_linear",
            "override_module_apply log_trace_cache_warnings",
        ),
        zero.stage < 3,
        "only ZeRO-3 reads it",
    )
    buckets = "use_multi_rank_* parameter_alignment"
    reduction = "contiguous_gradients reduce_scatter overlap_*"
    yield no_effect(
        _zero_keys(buckets, reduction),
        uses_bf16,
        "DeepSpeed's optimizer of ZeRO-1 in bf16 with fp32 accumulation does not read it",
    )
    yield no_effect(_zero_keys(buckets), zero.stage not in (1, 2), "only ZeRO-1 and ZeRO-2 read it")
    yield no_effect(
        _zero_keys("use_multi_rank_*"),
        not zero.contiguous_gradients,
        "it is for contiguous_gradients",
    )
    yield no_effect(
        _zero_keys(reduction, "reduce_bucket_size"), zero.stage == 0, "ZeRO-0 does not read it"
    )


def expert_rules(settings: DeepSpeedSettings, expert: int) -> Iterator[Rule]:
    """Yield rules about expert parallelism of a degree."""
    zero = settings.zero_optimization
    key = "zero_tp.parallel.expert"
    optimizer = settings.optimizer
    uses_muon = optimizer is not None and isinstance(optimizer.params, Muon)
    divided = expert > 1
    yield refused(
        key,
        divided and zero.stage == 0,
        "at stage 0: no gradient norm there adds up the experts of several ranks; use "
        "zero_optimization.stage 1 or 2",
    )
    yield refused(
        key,
        divided and zero.stage == 3,
        "at stage 3: DeepSpeed gathers a parameter over all replicas, and these have other "
        "experts; use zero_optimization.stage 1 or 2",
    )
    yield refused(
        key,
        divided and uses_muon,
        'with optimizer.type "Muon": no run with it was compared with the plain model; use AdamW',
    )
    yield refused(
        key,
        divided and uses_bf16_optimizer(settings),
        "at stage 1 with data_types.grad_accum_dtype fp32: no run with DeepSpeed's BF16_Optimizer "
        "was compared; use stage 2",
    )
    for name, value in (
        ("contiguous_gradients", zero.contiguous_gradients),
        ("reduce_scatter", zero.reduce_scatter),
    ):
        yield refused(
            f"{ZERO}.{name}",
            divided and not value,
            f"as false with {key}: DeepSpeed reduces experts in no other way; leave it out",
        )


def log_rules(settings: DeepSpeedSettings) -> Iterator[Rule]:
    """Yield rules about other keys of DeepSpeed's engine and its logs."""
    for keys, reason in NEVER_READ.items():
        yield no_effect(keys, True, reason)
    for name in SWITCHED_BLOCKS:
        # All keys but `enabled`: those that do not begin with e, and those like comet's
        # `experiment_name`.
        all_but_enabled = f"{name}.[!e]* {name}.e[!n]*"
        is_off = not getattr(settings, name).enabled
        yield no_effect(all_but_enabled, is_off, f"{name}.enabled is not true")
    yield no_effect(
        "timers.throughput.synchronized",
        not settings.timers.throughput.enabled,
        "timers.throughput.enabled is not true",
    )
    yield note(
        "comms_logger.enabled",
        settings.comms_logger.enabled,
        "it counts what DeepSpeed sends for ZeRO, and nothing of tensor and sequence parallelism "
        "or of checkpoints",
    )
    yield note(
        "flops_profiler.enabled",
        settings.flops_profiler.enabled,
        "it counts the forward of one rank's shard; backward, recomputation and collectives are "
        "not counted, and "
        "--profile-steps times all of them",
    )


def _zero_keys(*names: str) -> str:
    """Return the dotted keys of names in ZeRO's block, separated by blanks."""
    return " ".join(f"{ZERO}.{name}" for name in " ".join(names).split())
