"""Keys that may be written and change nothing, do less than they say, or are unusual: one row each, with the reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase

from zero_tp.config.resolve import leaves
from zero_tp.config.schedule import LENGTHS, WARMUPS
from zero_tp.config.typed import ACTIVATIONS, OPTIMIZER, SCHEDULER, ZERO, Door, TypedConfig
from zero_tp.constants import MODEL_KEY

USUAL_RATE = 1.0
SWITCHED = ("bf16", "fp16", "flops_profiler", "comms_logger", "tensorboard", "wandb", "csv_monitor", "comet")
"""Blocks whose other keys mean nothing while `enabled` is false."""
NVME = {"offload_optimizer": ("buffer_count", "pipeline_*", "fast_init"), "offload_param": ("buffer_*", "max_in_cpu")}
"""Keys of the offload blocks that DeepSpeed reads for NVMe."""


@dataclasses.dataclass(frozen=True)
class Note:
    """What a person should know of keys that are written.

    Attributes:
        keys: dotted keys, or patterns of them (`fnmatch`), separated by blanks.
        applies: whether it is true of the config.
        reason: why the keys change nothing, or what they do.
    """

    keys: str
    applies: bool
    reason: str


def without_effect_rows(config: TypedConfig) -> list[Note]:
    """Return every note on keys that change nothing, whether it is true of this config or not."""
    return [*_zero_tp_notes(config), *_optimization_notes(config), *_zero_notes(config)]


def _zero_tp_notes(config: TypedConfig) -> Iterator[Note]:
    if config.door is not Door.RUN:  # there is no such block
        return
    data, tasks = config.zero_tp.data, config.zero_tp.evaluation.tasks
    no_data = not data.validation
    nothing_to_evaluate = "there is neither zero_tp.data.validation nor a task to evaluate"
    yield Note("zero_tp.evaluation.interval", no_data and not tasks, nothing_to_evaluate)
    yield Note("zero_tp.evaluation.batches", no_data, "there is no zero_tp.data.validation")
    yield Note("zero_tp.evaluation.task_limit zero_tp.evaluation.task_include_path", not tasks, "there is no task")
    one_document = "a sample of the masked objective is of one document"
    yield Note("zero_tp.data.document_attention", config.zero_tp.masked is not None, one_document)


def _optimization_notes(config: TypedConfig) -> Iterator[Note]:
    """Yield what switches, optimizers and DeepSpeed itself leave unread."""
    for block in SWITCHED:
        keys = f"{block}.[!e]* {block}.e[!n]*"
        yield Note(keys, not config[f"{block}.enabled"], f"{block}.enabled is not true")
    yield Note("comet.samples_log_interval", True, "zero_tp.logging.interval says which steps are logged")
    timed = config["timers.throughput.enabled"]
    yield Note("timers.throughput.synchronized", not timed, "timers.throughput.enabled is not true")
    slots = config[f"{ACTIVATIONS}.contiguous_memory_optimization"]
    yield Note(f"{ACTIVATIONS}.number_checkpoints", not slots, "only contiguous_memory_optimization has slots")
    scaling = "fp16.initial_scale_power fp16.loss_scale_window fp16.*hysteresis fp16.min_loss_scale"
    yield Note(scaling, config["fp16.loss_scale"] > 0, "fp16.loss_scale is fixed")
    is_sgd = config["optimizer.type"] == "SGD"
    yield Note(f"{SCHEDULER}.cycle_*mom*", is_sgd, "the optimizer has no betas")
    no_momentum = config[f"{SCHEDULER}.cycle_momentum"] is False
    yield Note(f"{SCHEDULER}.cycle_m??_mom", no_momentum, f"{SCHEDULER}.cycle_momentum is false")
    yield Note(
        f"{SCHEDULER}.decay_lr_rate {SCHEDULER}.decay_step_size",
        not (config[f"{SCHEDULER}.decay_lr_rate"] and config[f"{SCHEDULER}.decay_step_size"]),
        "the rate falls after the cycle only if decay_lr_rate and decay_step_size are both above 0",
    )
    yield Note(f"{OPTIMIZER}.dampening", not config[f"{OPTIMIZER}.momentum"], f"{OPTIMIZER}.momentum is 0")
    yield Note("zero_allow_untested_optimizer", config.stage == 0 or not is_sgd, "only SGD under ZeRO is one")
    prescaled = "prescale_gradients divides by the number of replicas"
    yield Note("gradient_predivide_factor", config["prescale_gradients"], prescaled)
    script_only = "it is about an optimizer that a script makes itself"
    yield Note("zero_force_ds_cpu_optimizer", config.door is not Door.TRAINER, script_only)
    unread = f"disable_allgather {_zero_keys('allgather_partitions', 'allgather_bucket_size')}"
    checkpoints = _zero_keys("load_from_fp32_weights", "stage3_gather_16bit_*")
    yield Note(unread, True, "DeepSpeed 0.19.8 on torch 2.13 does not read it")
    yield Note("vocabulary_size", True, "DeepSpeed only warns of a size that is no multiple of 8")
    yield Note("data_types.buffer_dtype data_types.keep_in_fp32_modules", True, "the models have no buffers to cast")
    yield Note(checkpoints, True, "zero_tp writes and reads its checkpoints itself")
    yield Note(_zero_keys("save_muon_momentum_buffer_in_memory"), True, "Muon is refused")


def _zero_notes(config: TypedConfig) -> Iterator[Note]:
    """Yield what ZeRO's stages and its offloading leave unread."""
    in_fp32 = config.dtype == "bf16" and config["data_types.grad_accum_dtype"] == "fp32"
    # DeepSpeed takes its BF16_Optimizer (`DeepSpeedEngine._do_optimizer_sanity_check`).
    uses_bf16_optimizer = config.stage == 1 and in_fp32 and not config.offloads("offload_optimizer")
    flat = config.stage in (1, 2)
    yield Note(
        "bf16.immediate_grad_update",
        not uses_bf16_optimizer,
        "only ZeRO-1 with data_types.grad_accum_dtype fp32 reads it",
    )
    yield Note(
        _zero_keys(
            *("stage3_*", "sub_group_size", "enable_sanity_checks", "memory_efficient_linear"),
            *("override_module_apply", "log_trace_cache_warnings"),
        ),
        config.stage < 3,
        "only ZeRO-3 reads it",
    )
    yield Note(
        _zero_keys("use_multi_rank_*", "parameter_alignment", "contiguous_gradients", "reduce_scatter", "overlap_*"),
        uses_bf16_optimizer,
        "DeepSpeed's optimizer of ZeRO-1 in bf16 with fp32 accumulation does not read it",
    )
    yield Note(_zero_keys("use_multi_rank_*", "parameter_alignment"), not flat, "only ZeRO-1 and ZeRO-2 read it")
    scattered = not config[f"{ZERO}.contiguous_gradients"]
    yield Note(_zero_keys("use_multi_rank_*"), scattered, "it is for contiguous_gradients")
    yield Note(
        _zero_keys("ignore_unused_parameters"),
        not (flat and config.offloads("offload_optimizer")),
        "only ZeRO-1 and ZeRO-2 with an offloaded optimizer read it",
    )
    reduction = _zero_keys("contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "overlap_*")
    yield Note(reduction, config.stage == 0, "ZeRO-0 does not read it")
    for block, keys in NVME.items():
        yield Note(_zero_keys(f"{block}.[!d]*"), not config.offloads(block), f"{block}.device is none")
        for_nvme = _zero_keys(*(f"{block}.{key}" for key in ("nvme_path", *keys)))
        yield Note(for_nvme, not config.on_nvme(block), f"{block}.device is not nvme")
    yield Note("aio.*", not any(map(config.on_nvme, NVME)), "nothing is offloaded to NVMe")
    super_offload = "SuperOffload reads it, which is not built"
    yield Note(_zero_keys("offload_optimizer.cpuadam_cores_perc"), True, super_offload)


def caution_rows(config: TypedConfig) -> Iterator[Note]:
    """Yield every note on keys that do less than they say, or have an unusual value, true of this config or not."""
    in_run = config.door is Door.RUN  # only a run's file has a model, and says how long it is
    yield Note(
        f"{MODEL_KEY}.model_type",
        in_run and not any(type(value) is int for value in config.zero_tp.model.values()),
        "no size is written, so that all are the defaults of transformers' class",
    )
    yield Note(
        "comms_logger.enabled",
        config["comms_logger.enabled"],
        "it counts what DeepSpeed sends for ZeRO, and nothing of tensor and sequence parallelism or of checkpoints",
    )
    yield Note(
        "flops_profiler.enabled",
        config["flops_profiler.enabled"],
        "it counts the forward of one rank's shard; backward, recomputation and collectives are not counted, and "
        "--profile-steps times all of them",
    )
    rate, highest, schedule = config.number(f"{OPTIMIZER}.lr"), config.highest_rate, config["scheduler.type"]
    is_sgd = config["optimizer.type"] == "SGD"
    has_own_rates = schedule in ("OneCycle", "LRRangeTest") or highest != rate
    yield Note(f"{OPTIMIZER}.lr", rate == 0, "at rate 0 nothing is trained")
    yield Note(f"{OPTIMIZER}.lr", has_own_rates, "the schedule has rates of its own, and this one is not used")
    yield Note(
        f"{OPTIMIZER}.lr {SCHEDULER}.*max_lr",
        highest > USUAL_RATE and not is_sgd,
        "a rate above 1 is unusual for Adam, whose steps are about as long",
    )
    yield Note(
        "scheduler.type",
        bool(config[f"{SCHEDULER}.cycle_momentum"]) and not is_sgd,
        "OneCycle sets the betas, the first between cycle_min_mom and cycle_max_mom, the second to 0.99; "
        "cycle_momentum false leaves them",
    )
    steps = config.zero_tp.training.steps if in_run else None
    lengths, warmups = ([f"{SCHEDULER}.{name}" for name in names] for names in (LENGTHS, WARMUPS))
    yield Note(
        " ".join(lengths),
        steps is not None and 0 < max(map(config.number, lengths)) <= steps,
        'the schedule ends before the run does, and its last rate may be 0; "auto" is zero_tp.training.steps + 1',
    )
    yield Note(
        f"{' '.join(warmups)} scheduler.type",
        steps is not None and max(map(config.number, warmups)) > steps,
        "the run ends before the warm-up, of 1,000 steps unless warmup_num_steps says it, does",
    )


def without_effect(config: TypedConfig) -> list[str]:
    """Return a line for each reason why keys that are written change nothing."""
    lines = _lines(without_effect_rows(config), config)
    if config.door is Door.RUN:
        evaluation = config.zero_tp.evaluation
        absent = [task for task in evaluation.task_data if task not in evaluation.tasks]
        lines += [f"zero_tp.evaluation.task_data.{task}: zero_tp.evaluation.tasks has no such task" for task in absent]
    return lines


def cautions(config: TypedConfig) -> list[str]:
    """Return a line for each key that does less than it says, or has an unusual value."""
    return _lines(caution_rows(config), config)


def _lines(rows: Iterable[Note], config: TypedConfig) -> list[str]:
    settings = {**config.values, "zero_tp": config.zero_tp.model_dump(by_alias=True, exclude_unset=True)}
    keys = [key for key, value in leaves(settings) if value is not None]
    lines: dict[str, list[str]] = {}
    for row in rows:
        patterns = row.keys.split() if row.applies else ()
        named = [key for key in keys if any(fnmatchcase(key, pattern) for pattern in patterns)]
        if named:
            lines.setdefault(row.reason, []).extend(named)
            keys = [key for key in keys if key not in named]
    return [f"{', '.join(named)}: {reason}" for reason, named in lines.items()]


def _zero_keys(*names: str) -> str:
    return " ".join(f"{ZERO}.{name}" for name in names)
