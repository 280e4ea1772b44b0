"""Every combination of keys that zero_tp refuses is here with its reason, for every door. docs/config.md lists them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from zero_tp.activations.policy import RecomputePolicy
from zero_tp.config.resolve import look_up
from zero_tp.config.schedule import check_phases
from zero_tp.config.schema import Parallel, ZeroTP
from zero_tp.config.typed import ACTIVATIONS, OPTIMIZER, SCHEDULER, ZERO, Door, TypedConfig
from zero_tp.errors import ConfigError, shown
from zero_tp.topology import Topology
from zero_tp.validation import Problems

MOST_EPS = 1.0

FIXED: dict[str, tuple[Any, str]] = {
    # What is computed
    "gradient_allreduce_op": ("mean", 'gradients would grow with the replicas, and the loss is a mean; use "mean"'),
    "managed_gradient_accumulation": (True, "every micro-step would then be an optimizer step"),
    f"{ZERO}.compute_grad_norm": (True, "non-finite gradients are found by the norm, and would be applied"),
    "bf16.check_grad_overflow": (True, "non-finite gradients would be applied, and on_nonfinite would not see them"),
    "optimizer.legacy_fusion": (False, "DeepSpeed's older step of fp16 was never compared with the plain one"),
    f"{OPTIMIZER}.bias_correction": (True, "an Adam without it was never compared with a plain one"),
    f"{OPTIMIZER}.fp32_optimizer_states": (True, "the optimizer's states would be rounded to 16 bit"),
    f"{OPTIMIZER}.maximize": (False, "it would train towards the greatest loss"),
    f"{SCHEDULER}.decay_mom_rate": (0, "DeepSpeed raises the momentum by it after the cycle, to 1 and beyond"),
    # Who holds what
    "sequence_parallel_size": (1, "it is Ulysses, which changes ZeRO's groups; use zero_tp.parallel.sequence"),
    "seq_parallel_communication_data_type": (None, "it belongs to Ulysses and would do nothing"),
    "use_data_before_expert_parallelism": (False, "there is no expert parallelism"),
    **dict.fromkeys(
        (f"{ZERO}.zero_quantized_{what}" for what in ("weights", "nontrainable_weights", "gradients")),
        (False, "ZeRO++ rounds what ranks exchange, so the model trains differently"),
    ),
    f"{ZERO}.zero_hpz_partition_size": (1, "no run with ZeRO++'s groups was compared with the plain model"),
    f"{ZERO}.round_robin_gradients": (False, "its order of gradients was never compared with the plain model"),
    f"{ZERO}.stage3_module_granularity_threshold": (0, "no run that gathers modules as one was compared"),
    f"{ZERO}.leaf_module": (None, "no run that gathers modules as one was compared with the plain model"),
    f"{ZERO}.offload_optimizer.ratio": (1, "an update that is half on the host was never compared with the plain one"),
    f"{ZERO}.elastic_checkpoint": (False, "it changes the layout of checkpoints that zero_tp reads"),
    f"{ZERO}.legacy_stage1": (False, "the old implementation is not what the parity proofs run"),
    f"{ZERO}.pipeline_loading_checkpoint": (False, "zero_tp has no pipeline parallelism"),
    f"{ZERO}.zenflow": (None, "it steps on stale gradients, so the model trains differently"),
    # What zero_tp does itself
    "dataloader_drop_last": (False, "zero_tp.data decides what a step reads, and DeepSpeed's loader is not used"),
    # What is known, and can't be on yet
    **dict.fromkeys(
        (
            *(f"{ACTIVATIONS}.profile", f"{ACTIVATIONS}.synchronize_checkpoint_boundary", "aio.use_gds"),
            *(f"{ZERO}.offload_optimizer.super_offload", "bf16.bf16_master_weights_and_grads"),
            *("bf16.bf16_optimizer_states", "fp16.fp16_master_weights_and_grads"),
        ),
        (False, "it is not built yet"),
    ),
}
"""Keys that may have one value: which (None: the key may not be written), and why no other; after a ";" the remedy."""


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A combination of keys that zero_tp refuses.

    Attributes:
        key: the key that the message names.
        when: the combination in words, after "refused".
        applies: whether the config has it.
        reason: what would go wrong.
        remedy: what to write instead.
    """

    key: str
    when: str
    applies: bool
    reason: str
    remedy: str = "leave it out"

    def check(self) -> None:
        """Raise a ConfigError if it applies."""
        if self.applies:
            raise ConfigError(self.key, f"refused {self.when}: {self.reason}", self.remedy)


def refusals(config: TypedConfig) -> list[Refusal]:
    """Return every combination that is refused, whether this config has it or not."""
    return [
        *(_fixed(config.values, key, value, reason) for key, (value, reason) in FIXED.items()),
        *_gradient_refusals(config),
        *_optimizer_refusals(config),
        *_zero_tp_refusals(config),
        *_offload_refusals(config),
        *_activation_refusals(config),
    ]


def _fixed(values: dict[str, Any], key: str, value: Any, reason: str) -> Refusal:
    written = look_up(values, key)
    when = f"unless it is {shown(value)}"
    if value is None or isinstance(value, bool):
        when = "at all" if value is None else f"as {shown(not value)}"
    reason, _, remedy = reason.partition("; ")
    return Refusal(key, when, written is not None and written != value, reason, remedy or "leave it out")


def _gradient_refusals(config: TypedConfig) -> Iterator[Refusal]:
    """Yield what would round gradients, or reduce them in a way that DeepSpeed does not support."""
    accumulation_dtype, param_dtype = config["data_types.grad_accum_dtype"], config["data_types.param_dtype"]
    yield Refusal(
        "fp16.enabled",
        "with bf16.enabled",
        config["fp16.enabled"] and config["bf16.enabled"],
        "a model has one dtype",
        "enable one of them",
    )
    yield Refusal(
        "data_types.param_dtype",
        "when it is not the dtype of bf16 or fp16",
        param_dtype not in (None, config.dtype),
        "the model is built in one dtype",
    )
    for key, dtype, process in (
        ("communication_data_type", config["communication_data_type"], "on their way between replicas"),
        ("data_types.grad_accum_dtype", accumulation_dtype, "as they are added up"),
    ):
        yield Refusal(
            key,
            "when it is neither the dtype of bf16 or fp16 nor fp32",
            dtype not in (None, config.dtype, "fp32"),
            f"gradients would be rounded {process}",
            'leave it out, or use "fp32"',
        )
        yield Refusal(
            key,
            'as "fp32" with fp16',
            config.dtype == "fp16" and dtype == "fp32",
            "no run with it was compared with the plain model",
            "leave it out, or use bf16",
        )
    yield Refusal(
        "data_types.grad_accum_dtype",
        "at stage 0 when it is not the dtype of bf16 or fp16",
        config.stage == 0 and accumulation_dtype not in (None, config.dtype),
        "DeepSpeed has no optimizer for that mix",
        "leave it out, or use ZeRO",
    )
    scales = {"prescale_gradients": False, "gradient_predivide_factor": 1.0}
    for key, off in scales.items():
        applies = config.stage > 0 and config[key] != off
        yield Refusal(key, "with ZeRO", applies, "DeepSpeed supports it at stage 0 only")
    yield Refusal(
        f"{ZERO}.allgather_bucket_size",
        "when it is odd",
        config[f"{ZERO}.allgather_bucket_size"] % 2 == 1,
        "DeepSpeed splits it by 2",
        "use an even one",
    )


def _optimizer_refusals(config: TypedConfig) -> Iterator[Refusal]:
    """Yield what was never compared with a plain run, and values of optimizer and schedule that no one can mean."""
    name = config["optimizer.type"]
    momentum, dampening = config.number(f"{OPTIMIZER}.momentum"), config.number(f"{OPTIMIZER}.dampening")
    decays = str(name).lower() != "adam" or config[f"{OPTIMIZER}.adam_w_mode"]  # L2 in an Adam's gradients does not
    yield Refusal(
        "zero_allow_untested_optimizer",
        "as false with ZeRO and the SGD optimizer",
        config.stage > 0 and name == "SGD" and not config["zero_allow_untested_optimizer"],
        "DeepSpeed has not tested SGD under ZeRO",
        "set it to true, or use AdamW",
    )
    yield Refusal(
        f"{OPTIMIZER}.eps",
        f"from {MOST_EPS:g} on",
        config.number(f"{OPTIMIZER}.eps") >= MOST_EPS,
        "the update is divided by it and would vanish",
        "use a small number such as 1e-8",
    )
    yield Refusal(
        f"{OPTIMIZER}.weight_decay",
        "when the highest rate × weight_decay is 1 or more",
        bool(decays) and config.highest_rate * config.number(f"{OPTIMIZER}.weight_decay") >= 1,
        "one step would take all of a weight away",
        "use a smaller one such as 0.1",
    )
    yield Refusal(
        f"{OPTIMIZER}.nesterov",
        "without momentum, or with dampening",
        bool(config[f"{OPTIMIZER}.nesterov"]) and (momentum <= 0 or dampening != 0),
        "torch's SGD has no such step",
        "give a momentum and no dampening, or leave it out",
    )
    yield Refusal(
        f"{OPTIMIZER}.foreach",
        "with fused",
        bool(config[f"{OPTIMIZER}.foreach"] and config[f"{OPTIMIZER}.fused"]),
        "they are two implementations of one step",
        "give one of them",
    )
    yield Refusal(
        f"{SCHEDULER}.warmup_min_lr",
        "above the rate at the warm-up's end",
        config.number(f"{SCHEDULER}.warmup_min_lr") > config.highest_rate,
        "the warm-up would lower the rate",
        "use a smaller one such as 0",
    )
    for lowest in ("lr_end", "min_lr"):
        rises = config.number(f"{SCHEDULER}.{lowest}") >= config.highest_rate > 0
        yield Refusal(
            f"{SCHEDULER}.{lowest}", "not below the rate", rises, "the decay would raise the rate", "use a smaller one"
        )
    for low, high in (("cycle_min_lr", "cycle_max_lr"), ("cycle_min_mom", "cycle_max_mom")):
        falls = config.number(f"{SCHEDULER}.{low}") > config.number(f"{SCHEDULER}.{high}")
        reason, remedy = "the cycle would be upside down", "exchange the two"
        yield Refusal(f"{SCHEDULER}.{low}", f"above {high}", falls, reason, remedy)


def _zero_tp_refusals(config: TypedConfig) -> Iterator[Refusal]:
    parallel = config.zero_tp.parallel
    yield Refusal(
        "zero_tp.parallel.fused_products",
        "without sequence parallelism",
        parallel.fused_products and not parallel.sequence,
        "it fuses the gathers and scatters of sequence shards",
    )
    yield Refusal(
        "zero_tp.evaluation.tasks",
        'with zero_tp.objective "masked"',
        config.zero_tp.masked is not None and bool(config.zero_tp.evaluation.tasks),
        "the tasks score what a causal model predicts",
    )


def _offload_refusals(config: TypedConfig) -> Iterator[Refusal]:
    yield Refusal(
        f"{ZERO}.offload_param",
        "below stage 3",
        config.stage < 3 and config.offloads("offload_param"),
        "parameters are whole on every rank there, and DeepSpeed would ignore it",
        "use stage 3, or leave it out",
    )
    yield Refusal(
        f"{ZERO}.offload_optimizer",
        "at stage 0",
        config.stage == 0 and config.offloads("offload_optimizer"),
        "the optimizer's states are not partitioned there, and DeepSpeed would ignore it",
        "use stage 1, 2 or 3, or leave it out",
    )
    yield Refusal(
        f"{ZERO}.offload_optimizer.device",
        'as "nvme" below stage 3',
        config.stage < 3 and config.on_nvme("offload_optimizer"),
        "DeepSpeed swaps the optimizer's states to NVMe at stage 3 only",
        'use stage 3, or "cpu"',
    )
    yield Refusal(
        f"{ZERO}.offload_optimizer.device",
        'as "nvme" in ZeroTPTrainer',
        config.door is Door.TRAINER and config.on_nvme("offload_optimizer"),
        "its checkpoints could not hold the optimizer's states",
        'use "cpu"',
    )
    for block in ("offload_optimizer", "offload_param"):
        yield Refusal(
            f"{ZERO}.{block}.nvme_path",
            'when it is missing with device "nvme"',
            config.on_nvme(block) and config[f"{ZERO}.{block}.nvme_path"] is None,
            "DeepSpeed needs a directory to swap to",
            "give a directory on the NVMe device",
        )


def _activation_refusals(config: TypedConfig) -> Iterator[Refusal]:
    in_trainer = config.door is Door.TRAINER
    yield Refusal(
        ACTIVATIONS,
        "in ZeroTPTrainer",
        in_trainer and any((config.values.get(ACTIVATIONS) or {}).values()),
        "a Trainer recomputes by gradient_checkpointing of its TrainingArguments",
    )
    moves_inputs = in_trainer or config.zero_tp.recompute_policy.mode == "full"
    for key in ("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization"):
        yield Refusal(
            f"{ACTIVATIONS}.{key}",
            "with zero_tp.recompute none or selective",
            not moves_inputs and config[f"{ACTIVATIONS}.{key}"],
            "only full recomputation keeps layer inputs that could be moved",
        )


def refuse(config: TypedConfig) -> None:
    """Refuse a config that has one of the `refusals`.

    Raises:
        ConfigErrors: one for each that it has, and for a schedule that is shorter than its phases.
    """
    problems = Problems()
    for row in refusals(config):
        with problems:
            row.check()
    with problems:
        check_phases(config[SCHEDULER] or {})
    problems.raise_all()


def check_single_keys(values: dict[str, Any]) -> None:
    """Check what needs one key alone to be known: keys that may have one value, and that there is an optimizer.

    Raises:
        ConfigErrors: one for each.
    """
    problems = Problems()
    with problems:
        require_optimizer(values)
    for key, (value, reason) in FIXED.items():
        with problems:
            _fixed(values, key, value, reason).check()
    problems.raise_all()


def require_optimizer(values: dict[str, Any]) -> None:
    """Raise a ConfigError if DeepSpeed's config has no optimizer."""
    if "optimizer" not in values:
        raise ConfigError("optimizer", "required, but not given", 'as in {"type": "AdamW", "params": {"lr": 3e-4}}')


def check_deepspeed(
    values: dict[str, Any], topology: Topology, door: Door, recompute: RecomputePolicy | None = None
) -> TypedConfig:
    """Return the typed form of a DeepSpeed config that has no `zero_tp` block, after every check.

    Raises:
        ConfigError: the first key that has an unknown name, a wrong value, or a combination that is refused.
    """
    parallel = Parallel(tensor=topology.tensor, sequence=topology.sequence)
    policy = recompute or RecomputePolicy(mode="none")
    zero_tp = ZeroTP.model_construct(parallel=parallel, recompute=policy)  # type: ignore[call-arg]
    config = TypedConfig.parse(values, zero_tp, door)
    if door is not Door.TRAINER:
        require_optimizer(values)
    refuse(config)
    return config


def check_accelerator(dtype: str, accelerator: Any) -> None:
    """Check that this machine's accelerator, DeepSpeed's object, computes in a dtype: "fp32", "bf16" or "fp16".

    Raises:
        ConfigError: it doesn't.
    """
    supported = {"fp16": accelerator.is_fp16_supported, "bf16": accelerator.is_bf16_supported}
    if dtype != "fp32" and not supported[dtype]():
        others = " or ".join(other for other in supported if other != dtype and supported[other]())
        problem = f"the accelerator of this machine ({accelerator.device_name()}) does not support {dtype}"
        raise ConfigError(f"{dtype}.enabled", problem, f"use {others or 'fp32'}, or a machine that supports it")
