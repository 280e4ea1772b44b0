"""Rules about combinations of keys that are refused, have no effect or deserve a note; docs/config.md lists them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Literal

from zero_tp.base.constants import MODEL_KEY
from zero_tp.base.errors import ConfigError
from zero_tp.base.settings.deepspeed import ZERO, refusal
from zero_tp.base.settings.schedule import LENGTHS, TRANSFORMERS_SCHEDULES, WARMUPS
from zero_tp.engine.settings.typed import EntryPoint, TypedConfig

ACTIVATIONS, OPTIMIZER, SCHEDULER = "activation_checkpointing", "optimizer.params", "scheduler.params"
SWITCHED_BLOCKS = ("bf16", "fp16", "flops_profiler", "comms_logger", "tensorboard", "wandb", "csv_monitor", "comet")
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
    f"{ZERO}.load_from_fp32_weights {ZERO}.stage3_gather_16bit_*": "zero_tp writes and reads its checkpoints itself",
    f"{ZERO}.offload_optimizer.cpuadam_cores_perc": "SuperOffload reads it, which is not built",
    f"{ZERO}.save_muon_momentum_buffer_in_memory": "Muon is refused",
}
"""Keys that are never read, and why."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule about keys that are set.

    Attributes:
        kind: the config is refused, the keys have no effect, or they do something unusual.
        keys: dotted keys or patterns of them (`fnmatch`), separated by blanks; a refusal has one key.
        applies: whether the config matches the rule.
        reason: why the keys have no effect, or what they do. A refusal's is "CASE: WHY; REMEDY", as in "with ZeRO: it
            is not tested; use stage 0". The default remedy is to leave the key out.
    """

    kind: Literal["refused", "no effect", "note"]
    keys: str
    applies: bool
    reason: str

    @property
    def error(self) -> ConfigError:
        return refusal(self.keys, f"refused {self.reason}")


refused, no_effect, note = partial(Rule, "refused"), partial(Rule, "no effect"), partial(Rule, "note")


def rules(config: TypedConfig) -> list[Rule]:
    """Return every rule, including those that do not apply to this config."""
    return [
        *_gradient_rules(config),
        *_optimizer_rules(config),
        *_rate_rules(config),
        *(_run_rules(config) if config.entry_point is EntryPoint.RUN else ()),
        *_activation_rules(config),
        *_offload_rules(config),
        *_zero_rules(config),
        *_engine_rules(config),
    ]


def _gradient_rules(config: TypedConfig) -> Iterator[Rule]:
    """Yield rules about dtypes and the reduction of gradients."""
    dtype, grad_accum_dtype = config.dtype, config["data_types.grad_accum_dtype"]
    yield refused(
        "fp16.enabled",
        config["fp16.enabled"] and config["bf16.enabled"],
        "with bf16.enabled: a model has one dtype; enable one of them",
    )
    yield refused(
        "data_types.param_dtype",
        config["data_types.param_dtype"] not in (None, dtype),
        "when it is not the dtype of bf16 or fp16: the model is built in one dtype",
    )
    for key, process in (
        ("communication_data_type", "on their way between replicas"),
        ("data_types.grad_accum_dtype", "as they are added up"),
    ):
        yield refused(
            key,
            config[key] not in (None, dtype, "fp32"),
            "when it is neither the dtype of bf16 or fp16 nor fp32: gradients would be rounded "
            f'{process}; leave it out, or use "fp32"',
        )
        yield refused(
            key,
            dtype == "fp16" and config[key] == "fp32",
            'as "fp32" with fp16: no run with it was compared with the plain model; leave it out, or use bf16',
        )
    yield refused(
        "data_types.grad_accum_dtype",
        config.stage == 0 and grad_accum_dtype not in (None, dtype),
        "at stage 0 when it is not the dtype of bf16 or fp16: DeepSpeed has no optimizer for that mix; leave it out, "
        "or use ZeRO",
    )
    for key, off in (("prescale_gradients", False), ("gradient_predivide_factor", 1.0)):
        is_scaled = config.stage > 0 and config[key] != off
        yield refused(key, is_scaled, "with ZeRO: DeepSpeed supports it at stage 0 only")
    prescaled = config["prescale_gradients"]
    yield no_effect("gradient_predivide_factor", prescaled, "prescale_gradients divides by the number of replicas")
    fixed_scale = "fp16.initial_scale_power fp16.loss_scale_window fp16.*hysteresis fp16.min_loss_scale"
    yield no_effect(fixed_scale, config["fp16.loss_scale"] > 0, "fp16.loss_scale is fixed")


def _optimizer_rules(config: TypedConfig) -> Iterator[Rule]:
    """Yield rules about arguments of the optimizer and the schedule."""
    is_sgd, kind, rate = config["optimizer.type"] == "SGD", config["scheduler.type"], config[f"{OPTIMIZER}.lr"]
    momentum, dampening = config.number(f"{OPTIMIZER}.momentum"), config.number(f"{OPTIMIZER}.dampening")
    cycles, peak = config[f"{SCHEDULER}.cycle_momentum"], config[f"{SCHEDULER}.warmup_max_lr"]
    yield refused(
        "zero_allow_untested_optimizer",
        config.stage > 0 and is_sgd and not config["zero_allow_untested_optimizer"],
        "as false with ZeRO and SGD: DeepSpeed has not tested SGD under ZeRO; set it to true, or use AdamW",
    )
    yield refused(
        "scheduler.type",
        config.entry_point is EntryPoint.TRAINER and kind in TRANSFORMERS_SCHEDULES,
        "as a schedule of transformers in ZeroTPTrainer: Trainer reads DeepSpeed's schedules here; leave the block "
        "out, and use lr_scheduler_type",
    )
    yield refused(
        f"{OPTIMIZER}.nesterov",
        bool(config[f"{OPTIMIZER}.nesterov"]) and (momentum <= 0 or dampening != 0),
        "without momentum, or with dampening: torch's SGD has no such step; give a momentum and no dampening",
    )
    yield refused(
        f"{OPTIMIZER}.foreach",
        bool(config[f"{OPTIMIZER}.foreach"] and config[f"{OPTIMIZER}.fused"]),
        "with fused: they are two implementations of one step; give one of them",
    )
    yield no_effect(f"{OPTIMIZER}.dampening", not momentum, f"{OPTIMIZER}.momentum is 0")
    # A Trainer may pass DeepSpeed an optimizer of its own, and transformers then sets the first of these keys.
    in_trainer, tested = config.entry_point is EntryPoint.TRAINER, "only SGD under ZeRO is untested"
    has_own_optimizer = in_trainer and "optimizer" not in config.values
    yield no_effect(
        "zero_allow_untested_optimizer", not has_own_optimizer and (config.stage == 0 or not is_sgd), tested
    )
    client_only = "it concerns an optimizer that a script creates"
    yield no_effect("zero_force_ds_cpu_optimizer", not in_trainer, client_only)
    yield no_effect(f"{SCHEDULER}.cycle_*mom*", is_sgd, "the optimizer has no betas")
    yield no_effect(f"{SCHEDULER}.cycle_m??_mom", cycles is False, f"{SCHEDULER}.cycle_momentum is false")
    yield no_effect(
        f"{SCHEDULER}.decay_lr_rate {SCHEDULER}.decay_step_size",
        not (config[f"{SCHEDULER}.decay_lr_rate"] and config[f"{SCHEDULER}.decay_step_size"]),
        "the rate falls after the cycle only if decay_lr_rate and decay_step_size are both above 0",
    )
    has_own_rates = kind in ("OneCycle", "LRRangeTest") or peak not in (None, rate)
    yield note(f"{OPTIMIZER}.lr", has_own_rates, "the schedule has rates of its own, and this one is not used")
    yield note(
        "scheduler.type",
        bool(cycles) and not is_sgd,
        "OneCycle sets the betas, the first between cycle_min_mom and cycle_max_mom, the second to 0.99; "
        "cycle_momentum false leaves them",
    )


def _rate_rules(config: TypedConfig) -> Iterator[Rule]:
    """Yield rules about learning rates and phases. A Trainer's config may have no rate."""
    rate = config[f"{OPTIMIZER}.lr"]
    phases = sum(config.number(f"{SCHEDULER}.{name}") for name in (*WARMUPS, "num_decay_steps"))
    for name in LENGTHS:
        yield refused(
            f"{SCHEDULER}.{name}",
            0 < config.number(f"{SCHEDULER}.{name}") < phases,
            "below the steps of warm-up and decay: the rate would jump; shorten these phases (scheduler.params), or "
            "train longer (zero_tp.training.steps)",
        )
    for key in (f"{SCHEDULER}.lr_end", f"{SCHEDULER}.min_lr"):
        rises = None not in (config[key], rate) and config[key] >= rate
        yield refused(key, rises, "when it is not below the rate: the decay would raise the rate; use a smaller one")


def _run_rules(config: TypedConfig) -> Iterator[Rule]:
    """Yield rules about the `zero_tp` block, which only a run's file has."""
    zero_tp = config.zero_tp
    evaluation, steps, fields = zero_tp.evaluation, zero_tp.training.steps, zero_tp.model.values()
    no_corpus = not zero_tp.data.validation
    yield refused(
        "zero_tp.evaluation.tasks",
        zero_tp.masked is not None and bool(evaluation.tasks),
        'with zero_tp.objective "masked": the tasks score what a causal model predicts',
    )
    nothing = "there is neither zero_tp.data.validation nor a task to evaluate"
    yield no_effect("zero_tp.evaluation.interval", no_corpus and not evaluation.tasks, nothing)
    yield no_effect("zero_tp.evaluation.batches", no_corpus, "there is no zero_tp.data.validation")
    task_keys = "zero_tp.evaluation.task_limit zero_tp.evaluation.task_include_path"
    yield no_effect(task_keys, not evaluation.tasks, "there is no task")
    for task in evaluation.task_data:
        is_absent = task not in evaluation.tasks
        yield no_effect(f"zero_tp.evaluation.task_data.{task}", is_absent, "zero_tp.evaluation.tasks has no such task")
    one_document = "a sample of the masked objective is of one document"
    yield no_effect("zero_tp.data.document_attention", zero_tp.masked is not None, one_document)
    yield note(
        f"{MODEL_KEY}.model_type",
        not any(type(value) is int for value in fields),
        "no size is written, so that all are the defaults of transformers' class",
    )
    lengths, warmups = ([f"{SCHEDULER}.{name}" for name in names] for names in (LENGTHS, WARMUPS))
    yield note(
        " ".join(lengths),
        0 < max(map(config.number, lengths)) <= steps,
        'the schedule ends before the run does, and its last rate may be 0; "auto" is zero_tp.training.steps + 1',
    )
    yield note(
        f"{' '.join(warmups)} scheduler.type",
        max(map(config.number, warmups)) > steps,
        "the run ends during the warm-up (1,000 steps if warmup_num_steps is not written)",
    )


def _activation_rules(config: TypedConfig) -> Iterator[Rule]:
    """Yield rules about recomputation and sequence parallelism."""
    policy, layers = config.zero_tp.recompute_policy, config.layers
    slots, accumulation = config[f"{ACTIVATIONS}.number_checkpoints"], config["gradient_accumulation_steps"]
    has_slots = config[f"{ACTIVATIONS}.contiguous_memory_optimization"]  # preallocated, one for each checkpoint
    in_trainer = config.entry_point is EntryPoint.TRAINER
    yield refused(
        ACTIVATIONS,
        in_trainer and any((config.values.get(ACTIVATIONS) or {}).values()),
        "in ZeroTPTrainer: a Trainer recomputes by gradient_checkpointing of its TrainingArguments",
    )
    moves_inputs = in_trainer or policy.mode == "full"
    for key in ("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization"):
        yield refused(
            f"{ACTIVATIONS}.{key}",
            not moves_inputs and config[f"{ACTIVATIONS}.{key}"],
            "with zero_tp.recompute none or selective: only full recomputation keeps layer inputs that could be moved",
        )
    for name in ("layers", "every"):
        is_beyond = layers is not None and (getattr(policy, name) or 0) > layers
        yield refused(
            f"zero_tp.recompute.{name}", is_beyond, "above the model's layers: there are no more; use a smaller one"
        )
    yield refused(
        "zero_tp.recompute.keep_micro_batches",
        accumulation is not None and 0 < policy.keep_micro_batches >= accumulation,
        "from a step's micro-batches on: nothing would be recomputed; use fewer, or leave it out",
    )
    yield refused(
        f"{ACTIVATIONS}.number_checkpoints",
        bool(has_slots and slots) and slots < len(policy.recomputed_layers(layers or 0)),
        "below the recomputed layers: each has a checkpoint; use as many as layers, or leave it out",
    )
    no_slots = "only contiguous_memory_optimization has slots"
    yield no_effect(f"{ACTIVATIONS}.number_checkpoints", not has_slots, no_slots)


def _offload_rules(config: TypedConfig) -> Iterator[Rule]:
    """Yield rules about offloading."""
    for block, stage, reason in (
        ("offload_param", 3, "parameters are whole on every rank there"),
        ("offload_optimizer", 1, "the optimizer's states are not partitioned there"),
    ):
        yield refused(
            f"{ZERO}.{block}",
            config.stage < stage and config.offloads(block),
            f"below stage {stage}: {reason}, and DeepSpeed would ignore it; use stage {stage}, or leave it out",
        )
    on_nvme = config.on_nvme("offload_optimizer")
    yield refused(
        f"{ZERO}.offload_optimizer.device",
        config.stage < 3 and on_nvme,
        'as "nvme" below stage 3: DeepSpeed swaps the optimizer\'s states at stage 3 only; use stage 3, or "cpu"',
    )
    yield refused(
        f"{ZERO}.offload_optimizer.device",
        config.entry_point is EntryPoint.TRAINER and on_nvme,
        'as "nvme" in ZeroTPTrainer: its checkpoints could not hold the optimizer\'s states; use "cpu"',
    )
    for block, keys in NVME.items():
        yield refused(
            f"{ZERO}.{block}.nvme_path",
            config.on_nvme(block) and config[f"{ZERO}.{block}.nvme_path"] is None,
            'when it is missing with device "nvme": DeepSpeed swaps to a directory; give one on the NVMe device',
        )
        all_but_device = f"{ZERO}.{block}.[!d]*"
        yield no_effect(all_but_device, not config.offloads(block), f"{block}.device is none")
        nvme_keys = _zero_keys(*(f"{block}.{key}" for key in keys))
        yield no_effect(nvme_keys, not config.on_nvme(block), f"{block}.device is not nvme")
    yield no_effect("aio.*", not any(map(config.on_nvme, NVME)), "nothing is offloaded to NVMe")
    reads_key = config.stage in (1, 2) and config.offloads("offload_optimizer")
    reason = "only ZeRO-1 and ZeRO-2 with an offloaded optimizer read it"
    yield no_effect(_zero_keys("ignore_unused_parameters"), not reads_key, reason)


def _zero_rules(config: TypedConfig) -> Iterator[Rule]:
    """Yield rules about the stages of ZeRO."""
    in_fp32 = config.dtype == "bf16" and config["data_types.grad_accum_dtype"] == "fp32"
    # Then DeepSpeed uses its BF16_Optimizer (`DeepSpeedEngine._do_optimizer_sanity_check`).
    uses_bf16_optimizer = config.stage == 1 and in_fp32 and not config.offloads("offload_optimizer")
    bf16_optimizer_only = "only ZeRO-1 with data_types.grad_accum_dtype fp32 reads it"
    yield refused(
        f"{ZERO}.allgather_bucket_size",
        config[f"{ZERO}.allgather_bucket_size"] % 2 == 1,
        "when it is odd: DeepSpeed splits it by 2; use an even one",
    )
    yield no_effect("bf16.immediate_grad_update", not uses_bf16_optimizer, bf16_optimizer_only)
    stage_3 = "stage3_* sub_group_size enable_sanity_checks memory_efficient_linear override_module_apply"
    yield no_effect(_zero_keys(f"{stage_3} log_trace_cache_warnings"), config.stage < 3, "only ZeRO-3 reads it")
    buckets, reduction = "use_multi_rank_* parameter_alignment", "contiguous_gradients reduce_scatter overlap_*"
    yield no_effect(
        _zero_keys(f"{buckets} {reduction}"),
        uses_bf16_optimizer,
        "DeepSpeed's optimizer of ZeRO-1 in bf16 with fp32 accumulation does not read it",
    )
    yield no_effect(_zero_keys(buckets), config.stage not in (1, 2), "only ZeRO-1 and ZeRO-2 read it")
    not_contiguous = not config[f"{ZERO}.contiguous_gradients"]
    yield no_effect(_zero_keys("use_multi_rank_*"), not_contiguous, "it is for contiguous_gradients")
    yield no_effect(_zero_keys(f"{reduction} reduce_bucket_size"), config.stage == 0, "ZeRO-0 does not read it")


def _engine_rules(config: TypedConfig) -> Iterator[Rule]:
    """Yield rules about other keys of DeepSpeed's engine and its logs."""
    for keys, reason in NEVER_READ.items():
        yield no_effect(keys, True, reason)
    for block in SWITCHED_BLOCKS:
        all_but_enabled = f"{block}.[!e]* {block}.e[!n]*"
        yield no_effect(all_but_enabled, not config[f"{block}.enabled"], f"{block}.enabled is not true")
    untimed = not config["timers.throughput.enabled"]
    yield no_effect("timers.throughput.synchronized", untimed, "timers.throughput.enabled is not true")
    yield note(
        "comms_logger.enabled",
        config["comms_logger.enabled"],
        "it counts what DeepSpeed sends for ZeRO, and nothing of tensor and sequence parallelism or of checkpoints",
    )
    yield note(
        "flops_profiler.enabled",
        config["flops_profiler.enabled"],
        "it counts the forward of one rank's shard; backward, recomputation and collectives are not counted, and "
        "--profile-steps times all of them",
    )


def _zero_keys(*names: str) -> str:
    """Return the dotted keys of names in ZeRO's block, separated by blanks."""
    return " ".join(f"{ZERO}.{name}" for name in " ".join(names).split())
