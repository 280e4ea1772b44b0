"""Keys that may be given and change nothing, or less than they say: one row each, with the reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

from zero_tp.config.hyperparameters import ODD
from zero_tp.config.resolve import leaves
from zero_tp.config.view import Door, Note, View


def _always(_: View) -> bool:
    return True


def _off(block: str) -> Callable[[View], bool]:
    return lambda view: not view.get(f"{block}.enabled", False)


def _by_bf16_optimizer(view: View) -> bool:
    """Tell whether DeepSpeed takes its BF16_Optimizer (`DeepSpeedEngine._do_optimizer_sanity_check`)."""
    accumulated = view.get("data_types.grad_accum_dtype")
    offloaded = view.offloaded("offload_optimizer")
    return view.stage == 1 and (view.dtype, accumulated, offloaded) == ("bf16", "fp32", False)


ZERO = "zero_optimization"
BY_ZERO_OPTIMIZERS = ("use_multi_rank_*", "parameter_alignment", "contiguous_gradients", "reduce_scatter", "overlap_*")
SWITCHED = ("bf16", "fp16", "flops_profiler", "comms_logger", "tensorboard", "wandb", "csv_monitor", "comet")
"""Blocks whose other keys mean nothing while `enabled` is false."""
NVME = {"offload_optimizer": ("buffer_count", "pipeline_*", "fast_init"), "offload_param": ("buffer_*", "max_in_cpu")}
"""Keys of the offload blocks that DeepSpeed reads for NVMe."""
WITH_OFFLOAD_PARAM = ("memory_efficient_linear", "override_module_apply", "log_trace_cache_warnings")

WITHOUT_EFFECT: tuple[Note, ...] = (
    Note(
        ("zero_tp.evaluation.interval",),
        lambda view: not view.zero_tp.data.validation and not view.zero_tp.evaluation.tasks,
        "there is neither zero_tp.data.validation nor a task to evaluate",
    ),
    Note(
        ("zero_tp.evaluation.batches",),
        lambda view: not view.zero_tp.data.validation,
        "there is no zero_tp.data.validation",
    ),
    Note(
        ("zero_tp.evaluation.task_limit", "zero_tp.evaluation.task_include_path"),
        lambda view: not view.zero_tp.evaluation.tasks,
        "there is no task",
    ),
    Note(
        ("zero_tp.data.document_attention",),
        lambda view: view.zero_tp.masked is not None,
        "a sample of the masked objective is of one document",
    ),
    Note(
        ("activation_checkpointing.number_checkpoints",),
        lambda view: not view.get("activation_checkpointing.contiguous_memory_optimization"),
        "only contiguous_memory_optimization has slots",
    ),
    Note(
        ("aio.*",),
        lambda view: (
            not any(view.get(f"{ZERO}.{block}.device") == "nvme" for block in ("offload_optimizer", "offload_param"))
        ),
        "nothing is offloaded to NVMe",
    ),
    *(Note((f"{block}.[!e]*", f"{block}.e[!n]*"), _off(block), f"{block}.enabled is not true") for block in SWITCHED),
    Note(("timers.throughput.synchronized",), _off("timers.throughput"), "timers.throughput.enabled is not true"),
    Note(
        tuple(f"fp16.{key}" for key in ("initial_scale_power", "loss_scale_window", "*hysteresis", "min_loss_scale")),
        lambda view: view.get("fp16.loss_scale", 0) > 0,
        "fp16.loss_scale is fixed",
    ),
    Note(
        ("bf16.immediate_grad_update",),
        lambda view: not _by_bf16_optimizer(view),
        "only ZeRO-1 with data_types.grad_accum_dtype fp32 reads it",
    ),
    Note(
        ("scheduler.params.cycle_*mom*",),
        lambda view: view.get("optimizer.type") == "SGD",
        "the optimizer has no betas",
    ),
    Note(
        ("scheduler.params.cycle_m??_mom",),
        lambda view: view.get("scheduler.params.cycle_momentum") is False,
        "scheduler.params.cycle_momentum is false",
    ),
    Note(
        ("scheduler.params.decay_lr_rate", "scheduler.params.decay_step_size"),
        lambda view: not all(view.get(f"scheduler.params.{key}", 0) for key in ("decay_step_size", "decay_lr_rate")),
        "the rate falls after the cycle only if decay_lr_rate and decay_step_size are both above 0",
    ),
    Note(
        ("optimizer.params.dampening",),
        lambda view: not view.get("optimizer.params.momentum", 0),
        "optimizer.params.momentum is 0",
    ),
    Note(
        ("zero_allow_untested_optimizer",),
        lambda view: view.stage == 0 or view.get("optimizer.type") != "SGD",
        "only SGD under ZeRO is one",
    ),
    Note(
        ("gradient_predivide_factor",),
        lambda view: bool(view.get("prescale_gradients", False)),
        "prescale_gradients divides by the number of replicas",
    ),
    Note(
        ("disable_allgather", f"{ZERO}.allgather_partitions", f"{ZERO}.allgather_bucket_size"),
        _always,
        "DeepSpeed 0.19.8 on torch 2.13 does not read it",
    ),
    Note(("vocabulary_size",), _always, "DeepSpeed only warns of a size that is no multiple of 8"),
    Note(
        ("zero_force_ds_cpu_optimizer",),
        lambda view: view.door is not Door.TRAINER,
        "it is about an optimizer that a script makes itself",
    ),
    Note(("data_types.buffer_dtype", "data_types.keep_in_fp32_modules"), _always, "the models have no buffers to cast"),
    Note(
        ("checkpoint.tag_validation", f"{ZERO}.load_from_fp32_weights", f"{ZERO}.stage3_gather_16bit_*"),
        _always,
        "zero_tp writes and reads its checkpoints itself",
    ),
    Note((f"{ZERO}.save_muon_momentum_buffer_in_memory",), _always, "Muon is refused"),
    Note(
        tuple(f"{ZERO}.{key}" for key in ("stage3_*", "sub_group_size", "enable_sanity_checks", *WITH_OFFLOAD_PARAM)),
        lambda view: view.stage < 3,
        "only ZeRO-3 reads it",
    ),
    Note(
        tuple(f"{ZERO}.{key}" for key in BY_ZERO_OPTIMIZERS),
        _by_bf16_optimizer,
        "DeepSpeed's optimizer of ZeRO-1 in bf16 with fp32 accumulation does not read it",
    ),
    Note(
        (f"{ZERO}.use_multi_rank_*", f"{ZERO}.parameter_alignment"),
        lambda view: view.stage not in (1, 2),
        "only ZeRO-1 and ZeRO-2 read it",
    ),
    Note(
        (f"{ZERO}.use_multi_rank_*",),
        lambda view: view.get(f"{ZERO}.contiguous_gradients") is False,
        "it is for contiguous_gradients",
    ),
    Note(
        (f"{ZERO}.ignore_unused_parameters",),
        lambda view: view.stage not in (1, 2) or not view.offloaded("offload_optimizer"),
        "only ZeRO-1 and ZeRO-2 with an offloaded optimizer read it",
    ),
    Note(
        tuple(f"{ZERO}.{key}" for key in ("contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "overlap_*")),
        lambda view: view.stage == 0,
        "ZeRO-0 does not read it",
    ),
    *(
        Note(
            (f"{ZERO}.{block}.[!d]*",),
            lambda view, block=block: not view.offloaded(block),  # type: ignore[misc]
            f"{block}.device is none",
        )
        for block in NVME
    ),
    *(
        Note(
            tuple(f"{ZERO}.{block}.{key}" for key in ("nvme_path", *keys)),
            lambda view, block=block: view.get(f"{ZERO}.{block}.device") != "nvme",  # type: ignore[misc]
            f"{block}.device is not nvme",
        )
        for block, keys in NVME.items()
    ),
    Note((f"{ZERO}.offload_optimizer.cpuadam_cores_perc",), _always, "SuperOffload reads it, which is not built"),
)


PARTIAL: tuple[Note, ...] = (
    Note(
        ("comms_logger.enabled",),
        lambda view: bool(view.get("comms_logger.enabled")),
        "it counts what DeepSpeed sends for ZeRO, and nothing of tensor and sequence parallelism or of checkpoints",
    ),
    Note(
        ("flops_profiler.enabled",),
        lambda view: bool(view.get("flops_profiler.enabled")),
        "it counts the forward of one rank's shard; backward, recomputation and collectives are not counted, and "
        "--profile-steps times all of them",
    ),
)
"""Keys that do less than their names say, and what they leave out."""


def _lines(rows: Sequence[Note], view: View) -> list[str]:
    settings = {**view.config, "zero_tp": view.zero_tp.model_dump(by_alias=True, exclude_unset=True)}
    keys = [key for key, value in leaves(settings) if value is not None]
    lines: dict[str, list[str]] = {}
    for row in rows:
        ours = view.door is not Door.RUN and row.keys[0].startswith("zero_tp.")  # a block that such a config lacks
        if not ours and row.test(view):
            named = [key for key in keys if any(fnmatchcase(key, pattern) for pattern in row.keys)]
            if named:
                lines.setdefault(row.reason, []).extend(named)
                keys = [key for key in keys if key not in named]
    return [f"{', '.join(named)}: {reason}" for reason, named in lines.items()]


def without_effect(view: View) -> list[str]:
    """Return a line for each reason why keys that were given change nothing."""
    if view.door is not Door.RUN:
        return _lines(WITHOUT_EFFECT, view)
    tasks = view.zero_tp.evaluation.tasks
    absent = [task for task in view.zero_tp.evaluation.task_data if task not in tasks]
    return _lines(WITHOUT_EFFECT, view) + [
        f"zero_tp.evaluation.task_data.{task}: zero_tp.evaluation.tasks has no such task" for task in absent
    ]


def cautions(view: View) -> list[str]:
    """Return a line for each key that does less than it says, or has an unusual value."""
    return _lines((*PARTIAL, *ODD), view)
