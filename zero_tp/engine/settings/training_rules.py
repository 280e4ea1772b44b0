"""Rules about dtypes, the optimizer, its schedule, a run's own block and recomputation."""

from __future__ import annotations

from collections.abc import Iterator

from zero_tp.base.constants import MODEL_KEY
from zero_tp.base.settings.deepspeed import DeepSpeedSettings
from zero_tp.base.settings.optimizer import SGD, Muon, TorchAdam
from zero_tp.base.settings.schedule import (
    LENGTHS,
    TRANSFORMERS_SCHEDULES,
    WARMUPS,
    OneCycle,
    WarmupLR,
)
from zero_tp.base.settings.schema import ZeroTP
from zero_tp.engine.settings.rule import Combination, Rule, no_effect, note, refused
from zero_tp.engine.settings.zero_rules import average_rules, qk_clip_rules

ACTIVATIONS = "activation_checkpointing"
OPTIMIZER = "optimizer.params"
SCHEDULER = "scheduler.params"


def gradient_rules(settings: DeepSpeedSettings) -> Iterator[Rule]:
    """Yield rules about dtypes and the reduction of gradients."""
    dtype = settings.dtype
    stage = settings.zero_optimization.stage
    types = settings.data_types
    yield refused(
        "fp16.enabled",
        settings.fp16.enabled and settings.bf16.enabled,
        "with bf16.enabled: a model has one dtype; enable one of them",
    )
    yield refused(
        "data_types.param_dtype",
        types.param_dtype not in (None, dtype),
        "when it is not the dtype of bf16 or fp16: the model is built in one dtype",
    )
    # In fp32 a 16-bit gradient is exact; the other 16-bit dtype would round it.
    for key, value, process in (
        (
            "communication_data_type",
            settings.communication_data_type,
            "on their way between replicas",
        ),
        ("data_types.grad_accum_dtype", types.grad_accum_dtype, "as they are added up"),
    ):
        yield refused(
            key,
            value not in (None, dtype, "fp32"),
            "when it is neither the dtype of bf16 or fp16 nor fp32: gradients would be rounded "
            f'{process}; leave it out, or use "fp32"',
        )
        yield refused(
            key,
            dtype == "fp16" and value == "fp32",
            'as "fp32" with fp16: no run with it was compared with the plain model; leave it out, '
            "or use bf16",
        )
    yield refused(
        "data_types.grad_accum_dtype",
        stage == 0 and types.grad_accum_dtype not in (None, dtype),
        "at stage 0 when it is not the dtype of bf16 or fp16: DeepSpeed has no optimizer for that "
        "mix; leave it out, or use ZeRO",
    )
    for key, is_scaled in (
        ("prescale_gradients", settings.prescale_gradients),
        ("gradient_predivide_factor", settings.gradient_predivide_factor != 1.0),
    ):
        with_zero = stage > 0 and is_scaled
        yield refused(key, with_zero, "with ZeRO: DeepSpeed supports it at stage 0 only")
    yield no_effect(
        "gradient_predivide_factor",
        settings.prescale_gradients,
        "prescale_gradients divides by the number of replicas",
    )
    yield no_effect(
        "fp16.initial_scale_power fp16.loss_scale_window fp16.*hysteresis fp16.min_loss_scale",
        settings.fp16.loss_scale > 0,
        "fp16.loss_scale is fixed",
    )


def optimizer_rules(config: Combination) -> Iterator[Rule]:
    """Yield rules about the optimizer's arguments."""
    settings = config.settings
    optimizer = config.settings.optimizer
    stage = settings.zero_optimization.stage
    allowed = settings.zero_allow_untested_optimizer
    params = None if optimizer is None else optimizer.params
    sgd = params if isinstance(params, SGD) else None
    yield refused(
        "zero_allow_untested_optimizer",
        stage > 0 and sgd is not None and not allowed,
        "as false with ZeRO and SGD: DeepSpeed has not tested SGD under ZeRO; set it to true, or "
        "use AdamW",
    )
    yield refused(
        f"{OPTIMIZER}.nesterov",
        sgd is not None and sgd.nesterov and (sgd.momentum <= 0 or sgd.dampening != 0),
        "without momentum, or with dampening: torch's SGD has no such step; give a momentum and no "
        "dampening",
    )
    yield refused(
        f"{OPTIMIZER}.foreach",
        isinstance(params, (SGD, TorchAdam)) and bool(params.foreach and params.fused),
        "with fused: they are two implementations of one step; give one of them",
    )
    muon = params if isinstance(params, Muon) else None
    yield refused(
        "optimizer.type",
        muon is not None and config.is_trainer,
        'as "Muon" in ZeroTPTrainer, whose arguments are those of one optimizer; use '
        "launch/pretrain.py, TrainingEngine or AdamW",
    )
    yield refused(
        "zero_optimization.offload_optimizer.device",
        muon is not None and settings.zero_optimization.optimizer_device != "none",
        "with Muon: its products would run on the host; leave offload_optimizer out, or use AdamW",
    )
    yield refused(
        f"{OPTIMIZER}.adamw.lr",
        muon is not None and muon.lr == 0 and muon.adamw.lr is not None,
        f"with {OPTIMIZER}.lr 0: it moves in proportion to that rate; give that one",
    )
    no_momentum = sgd is None or sgd.momentum == 0
    yield no_effect(f"{OPTIMIZER}.dampening", no_momentum, f"{OPTIMIZER}.momentum is 0")
    # A Trainer may pass DeepSpeed an optimizer of its own; transformers then sets the first key.
    has_own_optimizer = config.is_trainer and optimizer is None
    yield no_effect(
        "zero_allow_untested_optimizer",
        not has_own_optimizer and (stage == 0 or sgd is None),
        "only SGD under ZeRO is untested",
    )
    yield no_effect(
        "zero_force_ds_cpu_optimizer",
        not config.is_trainer,
        "it concerns an optimizer that a script creates",
    )


def schedule_rules(config: Combination) -> Iterator[Rule]:
    """Yield rules about learning rates and phases. A Trainer's config may have no rate."""
    optimizer = config.settings.optimizer
    schedule = config.settings.scheduler
    rate = None if optimizer is None else optimizer.params.lr
    params = None if schedule is None else schedule.params
    cycle = params if isinstance(params, OneCycle) else None
    is_sgd = optimizer is not None and isinstance(optimizer.params, SGD)
    yield refused(
        "scheduler.type",
        config.is_trainer and schedule is not None and schedule.type in TRANSFORMERS_SCHEDULES,
        "as a schedule of transformers in ZeroTPTrainer: Trainer reads DeepSpeed's schedules here; "
        "leave the block out, and use lr_scheduler_type",
    )
    yield no_effect(f"{SCHEDULER}.cycle_*mom*", is_sgd, "the optimizer has no betas")
    yield no_effect(
        f"{SCHEDULER}.cycle_m??_mom",
        cycle is not None and not cycle.cycle_momentum,
        f"{SCHEDULER}.cycle_momentum is false",
    )
    yield no_effect(
        f"{SCHEDULER}.decay_lr_rate {SCHEDULER}.decay_step_size",
        cycle is None or not (cycle.decay_lr_rate and cycle.decay_step_size),
        "the rate falls after the cycle only if decay_lr_rate and decay_step_size are both above 0",
    )
    peak = params.warmup_max_lr if isinstance(params, WarmupLR) else None
    own = None if optimizer is None else optimizer.params
    # AdamW's rate moves in proportion to it.
    divides_adamw_rate = isinstance(own, Muon) and own.adamw.lr is not None
    has_own_rates = schedule is not None and schedule.type in ("OneCycle", "LRRangeTest")
    yield note(
        f"{OPTIMIZER}.lr",
        (has_own_rates or peak not in (None, rate)) and not divides_adamw_rate,
        "the schedule has rates of its own, and this one is not used",
    )
    yield note(
        "scheduler.type",
        cycle is not None and cycle.cycle_momentum and not is_sgd,
        "OneCycle sets the betas, the first between cycle_min_mom and cycle_max_mom, the second to "
        "0.99; cycle_momentum false leaves them",
    )
    numbers = {} if params is None else params.model_dump()
    # DeepSpeed and transformers name the same phases differently; a schedule has one name of each.
    phases = sum(numbers.get(name) or 0 for name in (*WARMUPS, "num_decay_steps"))
    for name in LENGTHS:
        yield refused(
            f"{SCHEDULER}.{name}",
            0 < (numbers.get(name) or 0) < phases,
            "below the steps of warm-up and decay: the rate would jump; shorten these phases "
            "(scheduler.params), or train longer (zero_tp.training.steps)",
        )
    for name in ("lr_end", "min_lr"):
        last = numbers.get(name)
        yield refused(
            f"{SCHEDULER}.{name}",
            last is not None and rate is not None and last >= rate,
            "when it is not below the rate: the decay would raise the rate; use a smaller one",
        )


def run_rules(settings: DeepSpeedSettings, zero_tp: ZeroTP) -> Iterator[Rule]:
    """Yield rules about the `zero_tp` block, which only a run's file has."""
    evaluation = zero_tp.evaluation
    steps = zero_tp.training.steps
    no_corpus = not zero_tp.data.validation
    clips_qk = zero_tp.training.qk_clip_threshold is not None
    yield from qk_clip_rules(settings, is_used=clips_qk)
    yield from average_rules(settings, is_used=zero_tp.training.ema is not None)
    yield no_effect(
        "zero_tp.training.qk_clip_alpha", not clips_qk, "there is no qk_clip_threshold beside it"
    )
    yield refused(
        "zero_tp.evaluation.tasks",
        zero_tp.masked is not None and bool(evaluation.tasks),
        'with zero_tp.objective "masked": the tasks score what a causal model predicts',
    )
    yield no_effect(
        "zero_tp.evaluation.interval zero_tp.training.ema.evaluate",
        no_corpus and not evaluation.tasks,
        "there is neither zero_tp.data.validation nor a task to evaluate",
    )
    yield no_effect("zero_tp.evaluation.batches", no_corpus, "there is no zero_tp.data.validation")
    yield no_effect(
        "zero_tp.evaluation.task_limit zero_tp.evaluation.task_include_path",
        not evaluation.tasks,
        "there is no task",
    )
    for task in evaluation.task_data:
        yield no_effect(
            f"zero_tp.evaluation.task_data.{task}",
            task not in evaluation.tasks,
            "zero_tp.evaluation.tasks has no such task",
        )
    yield no_effect(
        "zero_tp.data.document_attention",
        zero_tp.masked is not None,
        "a sample of the masked objective is of one document",
    )
    yield note(
        f"{MODEL_KEY}.model_type",
        # By the type itself, because True is an int to `isinstance`, and a flag is no size.
        not any(type(value) is int for value in zero_tp.model.values()),
        "no size is written, so that all are the defaults of transformers' class",
    )
    schedule = settings.scheduler
    numbers = {} if schedule is None else schedule.params.model_dump()
    # Step k trains at the schedule's value at k: a schedule of as many steps as the run ends it at
    # the last value, often 0.
    length = max(numbers.get(name) or 0 for name in LENGTHS)
    yield note(
        " ".join(f"{SCHEDULER}.{name}" for name in LENGTHS),
        0 < length <= steps,
        'the schedule ends before the run does, and its last rate may be 0; "auto" is '
        "zero_tp.training.steps + 1",
    )
    warmup = max(numbers.get(name) or 0 for name in WARMUPS)
    yield note(
        " ".join([*(f"{SCHEDULER}.{name}" for name in WARMUPS), "scheduler.type"]),
        warmup > steps,
        "the run ends during the warm-up (1,000 steps if warmup_num_steps is not written)",
    )


def activation_rules(config: Combination) -> Iterator[Rule]:
    """Yield rules about recomputation and sequence parallelism."""
    policy = config.recompute
    layers = config.layers
    block = config.settings.activation_checkpointing
    accumulation = config.settings.gradient_accumulation_steps
    yield refused(
        ACTIVATIONS,
        config.is_trainer and any(block.model_dump(exclude_unset=True).values()),
        "in ZeroTPTrainer: a Trainer recomputes by gradient_checkpointing of its TrainingArguments",
    )
    moves_inputs = config.is_trainer or policy.mode == "full"
    # The three keys move or pack the inputs of recomputed layers; other modes keep other tensors.
    for name, is_set in (
        ("partition_activations", block.partition_activations),
        ("cpu_checkpointing", block.cpu_checkpointing),
        ("contiguous_memory_optimization", block.contiguous_memory_optimization),
    ):
        yield refused(
            f"{ACTIVATIONS}.{name}",
            is_set and not moves_inputs,
            "with zero_tp.recompute none or selective: only full recomputation keeps layer inputs "
            "that could be moved",
        )
    for name, number in (("layers", policy.layers), ("every", policy.every)):
        yield refused(
            f"zero_tp.recompute.{name}",
            layers is not None and (number or 0) > layers,
            "above the model's layers: there are no more; use a smaller one",
        )
    yield refused(
        "zero_tp.recompute.keep_micro_batches",
        accumulation is not None and 0 < policy.keep_micro_batches >= accumulation,
        "from a step's micro-batches on: nothing would be recomputed; use fewer, or leave it out",
    )
    # One preallocated slot for each checkpoint.
    slots = block.number_checkpoints if block.contiguous_memory_optimization else None
    yield refused(
        f"{ACTIVATIONS}.number_checkpoints",
        slots is not None and slots < len(policy.recomputed_layers(layers or 0)),
        "below the recomputed layers: each has a checkpoint; use as many as layers, or leave it "
        "out",
    )
    yield no_effect(
        f"{ACTIVATIONS}.number_checkpoints",
        not block.contiguous_memory_optimization,
        "only contiguous_memory_optimization has slots",
    )
