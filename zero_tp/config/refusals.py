"""Every combination of keys that zero_tp refuses is here with its reason, one row each. docs/config.md lists them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from zero_tp.config.resolve import dtype_name, look_up
from zero_tp.config.schema import ZeroTP
from zero_tp.errors import ConfigError, shown


@dataclasses.dataclass(frozen=True)
class View:
    """A view is a config whose types are right and whose "auto" values are resolved."""

    config: dict[str, Any]
    zero_tp: ZeroTP

    def get(self, path: str, default: Any = None) -> Any:
        """Return the value at a dotted path of DeepSpeed's part, or the default."""
        value = look_up(self.config, path)
        return default if value is None else value

    @property
    def stage(self) -> int:
        return int(self.get("zero_optimization.stage", 0))

    @property
    def tensor(self) -> int:
        return self.zero_tp.parallel.tensor


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A refusal is one combination of keys that zero_tp refuses.

    Attributes:
        key: the key that the message names.
        when: the combination in words, after "refused".
        test: whether a config has it.
        reason: what would go wrong.
        remedy: what to write instead.
    """

    key: str
    when: str
    test: Callable[[View], bool]
    reason: str
    remedy: str = "leave it out"


def _other(key: str, usual: Any) -> Callable[[View], bool]:
    """Return the test for any value but the usual one."""
    return lambda view: view.get(key, usual) != usual


def _both(first: Callable[[View], bool], second: Callable[[View], bool]) -> Callable[[View], bool]:
    return lambda view: first(view) and second(view)


def _as(value: bool, key: str, reason: str) -> Refusal:
    """Return the refusal of a switch in one position."""
    return Refusal(key, f"as {shown(value)}", _other(key, not value), reason)


ZERO = "zero_optimization"
ACTIVATIONS = "activation_checkpointing"
CONTIGUOUS = f"{ACTIVATIONS}.contiguous_memory_optimization"

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
        Refusal(
            f"{ZERO}.{key}",
            "with zero_tp.parallel.tensor above 1",
            _both(lambda view: view.tensor > 1, _other(f"{ZERO}.{key}", off)),
            "ZeRO++ makes its groups from the whole world, so they would mix the shards of different TP ranks",
            "leave it out, or use tensor 1",
        )
        for key, off in (
            ("zero_hpz_partition_size", 1),
            ("zero_quantized_weights", False),
            ("zero_quantized_nontrainable_weights", False),
            ("zero_quantized_gradients", False),
        )
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
    *(
        Refusal(
            f"{ACTIVATIONS}.{key}",
            "with zero_tp.recompute none or selective",
            _both(lambda view: view.zero_tp.recompute_policy.mode != "full", _other(f"{ACTIVATIONS}.{key}", False)),
            "only full recomputation keeps layer inputs that could be moved",
        )
        for key in ("partition_activations", "cpu_checkpointing")
    ),
    Refusal(
        CONTIGUOUS,
        "without partition_activations",
        _both(_other(CONTIGUOUS, False), lambda view: not view.get(f"{ACTIVATIONS}.partition_activations", False)),
        "it arranges the partitions",
    ),
    Refusal(
        CONTIGUOUS,
        "with zero_tp.parallel.sequence",
        _both(_other(CONTIGUOUS, False), lambda view: view.zero_tp.parallel.sequence),
        "there is nothing to partition under sequence parallelism",
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


WITHOUT_EFFECT: tuple[tuple[str, Callable[[View], bool], str], ...] = (
    (
        "zero_tp.evaluation.interval",
        lambda view: not view.zero_tp.data.validation and not view.zero_tp.evaluation.tasks,
        "there is neither zero_tp.data.validation nor a task to evaluate",
    ),
    (
        "zero_tp.evaluation.batches",
        lambda view: not view.zero_tp.data.validation,
        "there is no zero_tp.data.validation",
    ),
    *(
        (f"zero_tp.evaluation.{key}", lambda view: not view.zero_tp.evaluation.tasks, "there is no task")
        for key in ("task_limit", "task_include_path")
    ),
    (
        "zero_tp.data.document_attention",
        lambda view: view.zero_tp.masked is not None,
        "a sample of the masked objective is of one document",
    ),
    (
        "aio",
        lambda view: (
            not any(view.get(f"{ZERO}.{block}.device") == "nvme" for block in ("offload_optimizer", "offload_param"))
        ),
        "nothing is offloaded to NVMe",
    ),
)
"""Keys that may be given where they change nothing: when that is so, and why."""


def without_effect(config: dict[str, Any], zero_tp: ZeroTP) -> list[str]:
    """Return a line for each key that was given and changes nothing."""
    view = View(config, zero_tp)
    given = {**config, "zero_tp": zero_tp.model_dump(by_alias=True, exclude_unset=True)}
    found = [
        f"{key}: {reason}" for key, test, reason in WITHOUT_EFFECT if look_up(given, key) is not None and test(view)
    ]
    tasks = zero_tp.evaluation.tasks
    absent = [task for task in zero_tp.evaluation.task_data if task not in tasks]
    return found + [
        f"zero_tp.evaluation.task_data.{task}: zero_tp.evaluation.tasks has no such task" for task in absent
    ]


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


def check_refusals(config: dict[str, Any], zero_tp: ZeroTP) -> None:
    """Raise a ConfigError for the first refused combination, then for the first value that is not built yet."""
    view = View(config, zero_tp)
    for row in REFUSALS:
        if row.test(view):
            raise ConfigError(row.key, f"refused {row.when}: {row.reason}", row.remedy)
    block = {**config, "zero_tp": zero_tp.model_dump(by_alias=True)}
    for path, built in NOT_BUILT.items():
        value = look_up(block, path)
        if value is not None and value not in built:
            now = " or ".join(shown(option) for option in built)
            raise ConfigError(
                path, f"{shown(value)} is not built yet", f"use {now}" if now != "null" else "leave it out"
            )


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
