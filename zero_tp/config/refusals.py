"""Every combination of keys that zero_tp refuses is here with its reason, one row each. docs/config.md lists them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zero_tp.config.deepspeed import check_names, check_values
from zero_tp.config.hyperparameters import MISTAKES
from zero_tp.config.resolve import dtype_name, look_up
from zero_tp.config.view import Door, Refusal, View
from zero_tp.errors import ConfigError, shown


def _other(key: str, usual: Any) -> Callable[[View], bool]:
    """Return the test for any value but the usual one."""
    return lambda view: view.get(key, usual) != usual


def _both(first: Callable[[View], bool], second: Callable[[View], bool]) -> Callable[[View], bool]:
    return lambda view: first(view) and second(view)


def _as(value: bool, key: str, reason: str) -> Refusal:
    """Return the refusal of a switch in one position."""
    return Refusal(key, f"as {shown(value)}", _other(key, not value), reason)


def _keeps_activations(view: View) -> bool:
    return view.door is not Door.TRAINER and view.zero_tp.recompute_policy.mode != "full"


ZERO = "zero_optimization"
ACTIVATIONS = "activation_checkpointing"

REFUSALS: tuple[Refusal, ...] = (
    # What is computed
    Refusal(
        "fp16.enabled",
        "with bf16.enabled",
        lambda view: bool(view.get("fp16.enabled") and view.get("bf16.enabled")),
        "a model has one dtype",
        "enable one of them",
    ),
    Refusal(
        "data_types.param_dtype",
        "when it is not the dtype of bf16 or fp16",
        lambda view: _other("data_types.param_dtype", dtype_name(view.config))(view),
        "the model is built in one dtype",
    ),
    Refusal(
        "gradient_allreduce_op",
        'as "sum"',
        _other("gradient_allreduce_op", "mean"),
        "gradients would grow with the number of replicas, and the loss is a mean over the global batch",
        'use "mean"',
    ),
    Refusal(
        "communication_data_type",
        "when it is neither the dtype of bf16 or fp16 nor fp32",
        lambda view: view.get("communication_data_type", "fp32") not in (view.dtype, "fp32"),
        "gradients would be rounded on their way between replicas",
        'leave it out, or use "fp32"',
    ),
    _as(False, "managed_gradient_accumulation", "every micro-step would then be an optimizer step"),
    *(
        Refusal(
            key,
            "with ZeRO",
            _both(lambda view: view.stage > 0, _other(key, off)),
            "DeepSpeed supports it at stage 0 only",
        )
        for key, off in (("prescale_gradients", False), ("gradient_predivide_factor", 1.0))
    ),
    Refusal(
        "data_types.grad_accum_dtype",
        "when it is neither the dtype of bf16 or fp16 nor fp32",
        lambda view: view.get("data_types.grad_accum_dtype", "fp32") not in (view.dtype, "fp32"),
        "gradients would be rounded as they are added up",
        'leave it out, or use "fp32"',
    ),
    *(
        Refusal(
            key,
            'as "fp32" with fp16',
            lambda view, key=key: view.dtype == "fp16" and view.get(key) == "fp32",  # type: ignore[misc]
            "no run with it was compared with the plain model",
            "leave it out, or use bf16",
        )
        for key in ("data_types.grad_accum_dtype", "communication_data_type")
    ),
    Refusal(
        f"{ZERO}.allgather_bucket_size",
        "when it is odd",
        lambda view: view.get(f"{ZERO}.allgather_bucket_size", 0) % 2 == 1,
        "DeepSpeed splits it by 2",
        "use an even one",
    ),
    Refusal(
        "data_types.grad_accum_dtype",
        "at stage 0 when it is not the dtype of bf16 or fp16",
        lambda view: view.stage == 0 and _other("data_types.grad_accum_dtype", dtype_name(view.config))(view),
        "DeepSpeed has no optimizer for that mix",
        "leave it out, or use ZeRO",
    ),
    _as(False, f"{ZERO}.compute_grad_norm", "non-finite gradients are found by the norm, and would be applied"),
    _as(
        False,
        "bf16.check_grad_overflow",
        "non-finite gradients would be applied, and zero_tp.training.on_nonfinite would not see them",
    ),
    Refusal(
        "zero_allow_untested_optimizer",
        "as false with ZeRO and the SGD optimizer",
        lambda view: (
            view.stage > 0
            and view.get("optimizer.type") == "SGD"
            and not view.get("zero_allow_untested_optimizer", False)
        ),
        "DeepSpeed has not tested SGD under ZeRO",
        "set it to true, or use AdamW",
    ),
    _as(True, "optimizer.legacy_fusion", "DeepSpeed's older step of fp16 was never compared with the plain one"),
    _as(False, "optimizer.params.bias_correction", "an Adam without it was never compared with a plain one"),
    _as(False, "optimizer.params.fp32_optimizer_states", "the optimizer's states would be rounded to 16 bit"),
    *MISTAKES,
    Refusal(
        "zero_tp.evaluation.tasks",
        'with zero_tp.objective "masked"',
        lambda view: view.zero_tp.masked is not None and bool(view.zero_tp.evaluation.tasks),
        "the tasks score what a causal model predicts",
    ),
    # Who holds what
    Refusal(
        "sequence_parallel_size",
        "above 1",
        _other("sequence_parallel_size", 1),
        "it is Ulysses, which changes ZeRO's groups and not the TP region",
        "use zero_tp.parallel.sequence",
    ),
    Refusal(
        "seq_parallel_communication_data_type",
        "at all",
        _other("seq_parallel_communication_data_type", None),
        "it belongs to Ulysses and would do nothing",
    ),
    _as(True, "use_data_before_expert_parallelism", "there are no experts"),
    *(
        _as(True, f"{ZERO}.{key}", "ZeRO++ rounds what ranks exchange, so the model trains differently")
        for key in ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
    ),
    Refusal(
        f"{ZERO}.zero_hpz_partition_size",
        "above 1",
        _other(f"{ZERO}.zero_hpz_partition_size", 1),
        "ZeRO++ makes its groups of neighbouring ranks, and no run with them was compared with the plain model",
    ),
    _as(True, f"{ZERO}.round_robin_gradients", "its order of gradients was never compared with the plain model"),
    Refusal(
        f"{ZERO}.stage3_module_granularity_threshold",
        "above 0",
        _other(f"{ZERO}.stage3_module_granularity_threshold", 0),
        "modules that are gathered as one were never compared with the plain model",
    ),
    Refusal(
        f"{ZERO}.leaf_module",
        "at all",
        _other(f"{ZERO}.leaf_module", None),
        "modules that are gathered as one were never compared with the plain model",
    ),
    Refusal(
        f"{ZERO}.offload_optimizer.ratio",
        "below 1",
        _other(f"{ZERO}.offload_optimizer.ratio", 1.0),
        "an update that is half on the host was never compared with the plain one",
    ),
    Refusal(
        f"{ZERO}.offload_param",
        "below stage 3",
        _both(lambda view: view.stage < 3, _other(f"{ZERO}.offload_param.device", "none")),
        "parameters are whole on every rank there, and DeepSpeed would ignore it",
        "use stage 3, or leave it out",
    ),
    Refusal(
        f"{ZERO}.offload_optimizer",
        "at stage 0",
        _both(lambda view: view.stage == 0, _other(f"{ZERO}.offload_optimizer.device", "none")),
        "the optimizer's states are not partitioned there, and DeepSpeed would ignore it",
        "use stage 1, 2 or 3, or leave it out",
    ),
    Refusal(
        f"{ZERO}.offload_optimizer.device",
        'as "nvme" below stage 3',
        lambda view: view.stage < 3 and view.get(f"{ZERO}.offload_optimizer.device") == "nvme",
        "DeepSpeed swaps the optimizer's states to NVMe at stage 3 only",
        'use stage 3, or "cpu"',
    ),
    Refusal(
        f"{ZERO}.offload_optimizer.device",
        'as "nvme" in ZeroTPTrainer',
        lambda view: view.door is Door.TRAINER and view.get(f"{ZERO}.offload_optimizer.device") == "nvme",
        "its checkpoints could not hold the optimizer's states",
        'use "cpu"',
    ),
    *(
        Refusal(
            f"{ZERO}.{block}.nvme_path",
            'when it is missing with device "nvme"',
            lambda view, block=block: (  # type: ignore[misc]
                view.get(f"{ZERO}.{block}.device") == "nvme" and view.get(f"{ZERO}.{block}.nvme_path") is None
            ),
            "DeepSpeed needs a directory to swap to",
            "give a directory on the NVMe device",
        )
        for block in ("offload_optimizer", "offload_param")
    ),
    _as(True, f"{ZERO}.elastic_checkpoint", "it changes the layout of checkpoints that zero_tp reads"),
    _as(True, f"{ZERO}.legacy_stage1", "the old implementation is not what the parity proofs run"),
    _as(True, f"{ZERO}.pipeline_loading_checkpoint", "zero_tp has no pipeline parallelism"),
    Refusal(
        f"{ZERO}.zenflow",
        "at all",
        _other(f"{ZERO}.zenflow", None),
        "it steps on stale gradients, so the model trains differently",
    ),
    # What is kept for backward
    Refusal(
        ACTIVATIONS,
        "in ZeroTPTrainer",
        lambda view: view.door is Door.TRAINER and any(view.get(ACTIVATIONS, {}).values()),
        "a Trainer recomputes by gradient_checkpointing of its TrainingArguments",
    ),
    *(
        Refusal(
            f"{ACTIVATIONS}.{key}",
            "with zero_tp.recompute none or selective",
            _both(_keeps_activations, _other(f"{ACTIVATIONS}.{key}", False)),
            "only full recomputation keeps layer inputs that could be moved",
        )
        for key in ("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization")
    ),
    Refusal(
        "zero_tp.parallel.fused_products",
        "without sequence parallelism",
        lambda view: view.zero_tp.parallel.fused_products and not view.zero_tp.parallel.sequence,
        "it fuses the gathers and scatters of sequence shards",
    ),
    # What zero_tp does itself
    _as(True, "dataloader_drop_last", "zero_tp.data decides what a step reads, and DeepSpeed's loader is not used"),
    *(
        Refusal(f"checkpoint.{key}", "unless it keeps its default", _other(f"checkpoint.{key}", default), reason)
        for key, default, reason in (
            ("load_universal", False, "zero_tp finds out itself what a checkpoint is"),
            ("use_node_local_storage", False, "a checkpoint is complete in one directory, where it is verified"),
            ("writer", None, "checkpoints are written and verified by zero_tp"),
            ("checkpoint_serialization", True, "it belongs to DeepSpeed's fast writer, which is not used"),
            ("parallel_write.pipeline_stage", False, "zero_tp has no pipeline parallelism"),
        )
    ),
)


NOT_BUILT: dict[str, tuple[Any, ...]] = {
    f"{ACTIVATIONS}.profile": (False,),
    f"{ACTIVATIONS}.synchronize_checkpoint_boundary": (False,),
    f"{ZERO}.offload_optimizer.super_offload": (False,),
    "bf16.bf16_master_weights_and_grads": (False,),
    "bf16.bf16_optimizer_states": (False,),
    "fp16.fp16_master_weights_and_grads": (False,),
    "aio.use_gds": (False,),
}
"""Keys that are known but can't take another value yet: the values that they can take."""


def check_deepspeed(view: View) -> None:
    """Check DeepSpeed's part of a config: names, types, then every row of `REFUSALS` and `NOT_BUILT`.

    Raises:
        ConfigError: the first key that has an unknown name, a wrong value, or a combination that is refused.
    """
    check_names(view.config)
    check_values(view.config, needs_optimizer=view.door is not Door.TRAINER)
    for row in REFUSALS:
        if row.test(view):
            raise ConfigError(row.key, f"refused {row.when}: {row.reason}", row.remedy)
    for path, built in NOT_BUILT.items():
        value = look_up(view.config, path)
        if value is not None and value not in built:
            now = " or ".join(shown(option) for option in built)
            raise ConfigError(path, f"{shown(value)} is not built yet", f"use {now}")


def check_accelerator(config: dict[str, Any], supports: Callable[[str], bool]) -> None:
    """Check that this machine's accelerator computes in the config's dtype.

    Args:
        config: DeepSpeed's part of a resolved config.
        supports: says whether the accelerator supports "bf16" or "fp16".

    Raises:
        ConfigError: it doesn't.
    """
    name = dtype_name(config)
    if name != "fp32" and not supports(name):
        others = " or ".join(other for other in ("bf16", "fp16") if other != name and supports(other))
        raise ConfigError(f"{name}.enabled", f"this accelerator does not support {name}", f"use {others or 'fp32'}")
