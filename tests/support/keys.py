"""Every key of a run's file: the run that trains it, or why it changes only costs and logs.

`tests/run/config/test_keys_classified.py` demands of every other key that it is refused or noted as
without effect; `tests/run/config/test_keys.py` trains the cells.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator
from fnmatch import fnmatchcase
from itertools import product
from typing import Any

from pydantic import BaseModel

from tests.support.matrix import FACTORS, config_of
from zero_tp.base.settings.deepspeed import ConfigFile
from zero_tp.base.settings.optimizer import OPTIMIZERS, params_model
from zero_tp.base.settings.refused import REFUSED_KEYS
from zero_tp.base.settings.schedule import SCHEDULES
from zero_tp.base.validation import fields_by_name, nested_model

Changes = dict[str, Any]
ZERO, ACTIVATIONS = "zero_optimization", "activation_checkpointing"

PLAIN = ("TP 2", "SP", "ZeRO-1", "none", "no offload", "× 3", "fp32")


def cell(**settings: str) -> tuple[str, ...]:
    """PLAIN with other settings."""
    return tuple(settings.get(factor, usual) for factor, usual in zip(FACTORS, PLAIN, strict=True))


def zero(**values: Any) -> Changes:
    return {f"{ZERO}.{key}": value for key, value in values.items()}


CELLS: dict[str, tuple[tuple[str, ...], Changes]] = {
    "ZeRO-1 in buckets": (cell(), zero(contiguous_gradients=False, overlap_comm=True)),
    "ZeRO-1 to one owner at a time": (
        cell(),
        zero(use_multi_rank_bucket_allreduce=False, parameter_alignment=True),
    ),
    "ZeRO-2 by all-reduce": (
        cell(stage="ZeRO-2"),
        zero(reduce_scatter=False, overlap_comm=True, parameter_alignment=True),
    ),
    "ZeRO-2 offloaded, each parameter used": (
        cell(stage="ZeRO-2", offload="optimizer offloaded"),
        zero(ignore_unused_parameters=False),
    ),
    "ZeRO-3, parameters alone offloaded": (
        cell(stage="ZeRO-3"),
        zero(offload_param={"device": "cpu"}),
    ),
    "everything logged": (
        cell(stage="ZeRO-2"),
        {
            **{
                f"{name}.enabled": True
                for name in ("comms_logger", "flops_profiler", "timers.throughput")
            },
            **dict.fromkeys(("wall_clock_breakdown", "memory_breakdown", "dump_state"), True),
            "steps_per_print": 1,
        },
    ),
    "ZeRO-3 with little at once": (
        cell(stage="ZeRO-3"),
        {
            **zero(stage3_model_persistence_threshold=500, stage3_max_live_parameters=1000),
            **zero(
                stage3_max_reuse_distance=100,
                memory_efficient_linear=False,
                override_module_apply=False,
            ),
            **zero(stage3_use_all_reduce_for_fetch_params=True),
        },
    ),
    "ZeRO-3 one after another": (
        cell(stage="ZeRO-3"),
        zero(
            stage3_allgather_sequential=True,
            overlap_comm=True,
            contiguous_gradients=False,
            reduce_scatter=False,
        ),
    ),
    "ZeRO-0 scaled before": (cell(stage="ZeRO-0"), {"prescale_gradients": True}),
    "ZeRO-0 divided twice": (cell(stage="ZeRO-0"), {"gradient_predivide_factor": 4.0}),
    **{
        f"bf16 that is sent in fp32, {stage}": (
            cell(stage=stage, dtype="bf16"),
            {"communication_data_type": "fp32", "data_types.param_dtype": "bf16"},
        )
        for stage in ("ZeRO-0", "ZeRO-2", "ZeRO-3")
    },
    "ZeRO-1 that adds at once": (
        cell(dtype="bf16, fp32 accumulation"),
        {"bf16.immediate_grad_update": True},
    ),
    "a place for each checkpoint": (
        cell(recompute="full, P_a, contiguous, cpu", sequence="no SP"),
        {f"{ACTIVATIONS}.number_checkpoints": 4},
    ),
}
"""Cells of the parity matrix with more keys: (settings, changes)."""

TRAINED_BY: dict[str, tuple[str, ...]] = {
    "model/recompute/test_recompute": ("zero_tp.recompute", "zero_tp.recompute.layers"),
    "run/config/test_resolve": ("zero_tp.training.tokens",),
    "model/test_compile": ("zero_tp.compile",),
    "engine/test_param_groups": ("zero_tp.param_groups",),
    "engine/zero/test_weight_average": ("zero_tp.training.ema", "zero_tp.training.ema.decay"),
    "engine/test_bias_update": ("zero_tp.training.router_bias_update_rate",),
    "engine/test_z_loss": ("zero_tp.training.z_loss", "zero_tp.training.router_z_loss"),
    "model/test_model": ("zero_tp.attention",),
    "support/matrix": ("zero_tp.objective.type",),
    "run/test_stages": (
        "zero_tp.training.stages",
        *(f"zero_tp.training.batch_size_rampup.{key}" for key in ("start", "increment", "tokens")),
    ),
    "run/test_documents_run": ("zero_tp.data.document_attention",),
    "engine/test_engine": ("train_micro_batch_size_per_gpu",),
    "run/test_masked_run_inputs": (
        *(
            f"zero_tp.objective.{key}"
            for key in ("mask_probability", "max_ngram", "sentence_order")
        ),
    ),
    "engine/zero/test_muon": (
        *(
            f"optimizer.params.{key}"
            for key in ("ns_steps", "ns_coefficients", "adjust_lr_fn", "per_head", "adamw.lr")
        ),
        *(f"optimizer.params.adamw.{key}" for key in ("betas", "eps", "weight_decay")),
    ),
    "engine/test_qk_clip": (
        *(f"zero_tp.training.qk_clip_{key}" for key in ("threshold", "alpha")),
    ),
    "run/test_spikes": (
        *(f"zero_tp.training.spike.{key}" for key in ("loss", "grad_norm", "window")),
    ),
    "engine/zero/test_fp16": (
        *(
            f"fp16.{key}"
            for key in ("enabled", "loss_scale", "initial_scale_power", "loss_scale_window")
        ),
        *(
            "fp16.hysteresis",
            "fp16.min_loss_scale",
            "fp16.consecutive_hysteresis",
            "zero_allow_untested_optimizer",
        ),
    ),
    "engine/zero/test_offload_nvme": (
        *(f"{ZERO}.{block}.nvme_path" for block in ("offload_optimizer", "offload_param")),
    ),
    "engine/zero/test_schedule": (
        "scheduler.type",
        *(f"scheduler.params.{key}" for model in SCHEDULES.values() for key in model.model_fields),
    ),
}
SET_BY_OTHER_KEYS = {key: f"tests/{test}.py" for test, keys in TRAINED_BY.items() for key in keys}
del SET_BY_OTHER_KEYS["scheduler.params.decay_mom_rate"]  # is refused
"""Keys that other tests train, by the test that names them."""

L2, SMALL = {"weight_decay": 0.1}, {"eps": 1e-3}
OPTIMIZED: dict[str, tuple[int, str, Changes]] = {
    "SGD with momentum": (0, "SGD", {"lr": 0.05, "momentum": 0.9, "dampening": 0.1}),
    "SGD of Nesterov": (2, "SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True, **L2}),
    "Adam with L2": (1, "Adam", {"lr": 1e-3, "adam_w_mode": False, **SMALL, **L2}),
    "SGD offloaded": (2, "SGD", {"lr": 0.05, "momentum": 0.9}),
    "AMSGrad": (2, "AdamW", {"lr": 1e-3, "betas": [0.5, 0.6], "amsgrad": True, **SMALL}),
}
"""Runs of other optimizers than the matrix': ZeRO's stage, type and parameters."""

TIMING: dict[str, str] = {
    "steps_per_print": "how often DeepSpeed logs",
    "log_level": "what DeepSpeed logs",
    "zero_tp.data.max_epochs": "which runs are refused",
    "wall_clock_breakdown": "DeepSpeed's timers",
    "memory_breakdown": "DeepSpeed logs memory",
    "dump_state": "DeepSpeed logs its settings",
    "disable_python_gc": "when Python collects garbage",
    "timers.*": "DeepSpeed's timers",
    "comms_logger.*": "what DeepSpeed logs of its collectives",
    "flops_profiler.*": "what DeepSpeed logs of FLOPs",
    **{
        f"{block}.*": "where metrics are written"
        for block in ("tensorboard", "wandb", "csv_monitor", "comet")
    },
    f"{ZERO}.log_trace_cache_warnings": "what DeepSpeed logs",
    f"{ZERO}.enable_sanity_checks": "checks of DeepSpeed that change no value",
    f"{ZERO}.*.pin_memory": "whether copies to the host wait",
    f"{ZERO}.*.buffer_*": "buffers between memory and NVMe",
    f"{ZERO}.offload_param.max_in_cpu": "how much stays beside NVMe",
    f"{ZERO}.offload_optimizer.pipeline_*": "whether reads and writes of NVMe run beside the "
    "update",
    f"{ZERO}.offload_optimizer.fast_init": "how states first come to NVMe",
    "aio.[!u]*": "how NVMe is read and written",
    **{
        f"optimizer.params.{key}": "which kernel computes the same step"
        for key in ("fused", "foreach")
    },
    "optimizer.params.set_grad_none": "whether gradients are freed or zeroed",
    "fp16.auto_cast": "inputs are token ids, which are not cast",
    "zero_tp.logging.*": "what is logged",
    "zero_tp.checkpoint.*": "when checkpoints are written, and which stay",
    "zero_tp.tokenizer": "what an export holds",
    "zero_tp.training.ema.evaluate": "what is measured beside training",
    "zero_tp.training.guard_*": "when ranks are compared",
    "zero_tp.training.timeout_minutes*": "how long a wait may be",
    "zero_tp.training.keep_freed_memory": "whether memory goes back to the system",
    "zero_tp.training.on_nonfinite": "whether a run goes on",
    "zero_tp.evaluation.*": "what is measured beside training",
    "zero_tp.data.validation": "what is measured beside training",
}
"""Keys that change what a run costs or says, and no value: how."""


def names(model: type[BaseModel], path: str) -> Iterator[tuple[str, Any]]:
    """(dotted key, its type) of the values of a model and of the models in it; of a key with two
    names the alias.
    """
    for name, field in fields_by_name(model).items():
        inner = nested_model(field.annotation)
        if f"{path}{name}" not in REFUSED_KEYS:
            yield from (
                [(f"{path}{name}", field.annotation)]
                if inner is None
                else names(inner, f"{path}{name}.")
            )


def all_keys() -> dict[str, Any]:
    """Every key of a run's file with its type, but for `zero_tp.model`; of `params` those of
    every class.
    """
    keys = {
        key: kind
        for key, kind in names(ConfigFile, "")
        if key.partition(".")[0] not in ("optimizer", "scheduler")
    }
    for name, *which in product(OPTIMIZERS, (True, False), (True, False)):
        keys |= dict(names(params_model(name.lower(), *which), "optimizer.params."))
    for model in SCHEDULES.values():
        keys |= dict(names(model, "scheduler.params."))
    return keys | {"optimizer.type": str, "optimizer.legacy_fusion": bool, "scheduler.type": str}


def trained() -> set[str]:
    """The keys that some run has with a value, and is compared with a plain run."""
    settings = [changes for named in FACTORS.values() for changes in named.values()]
    settings += [changes for _, changes in CELLS.values()] + [config_of(PLAIN)]
    keys = {
        key
        for changes in settings
        for path in paths(changes)
        if timing(key := ".".join(path)) is None
    }
    optimizers = {
        f"optimizer.params.{key}" for _, _, params in OPTIMIZED.values() for key in params
    }
    # tests/run/test_expert_parallel.py trains models with experts.
    with_experts = {"zero_tp.parallel.expert"}
    return keys | {*SET_BY_OTHER_KEYS} | optimizers | with_experts | {"optimizer.type"}


def paths(changes: Changes) -> Iterator[tuple[str, ...]]:
    """The keys of nested objects, and of the objects themselves."""
    for key, value in changes.items():
        yield (key,)
        if isinstance(value, dict):
            yield from ((key, *inner) for inner in paths(value))


def timing(key: str) -> str | None:
    """How a key changes what a run costs or says; None where it does more, or nothing."""
    return next((reason for pattern, reason in TIMING.items() if fnmatchcase(key, pattern)), None)


def other_values(annotation: Any) -> list[Any]:
    """Values of a type, its default most likely not the only one."""
    text = str(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        return list(typing.get_args(annotation))
    for kind, values in (
        ("bool", [True, False]),
        ("int", [1, 3]),
        ("float", [0.5, 1.0, 2.0]),
        ("list", [["x"]]),
    ):
        if kind in text:
            return list(values)
    literals = [value for part in typing.get_args(annotation) for value in typing.get_args(part)]
    return [value for value in literals if isinstance(value, str)] or ["x"]
