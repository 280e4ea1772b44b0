"""Check DeepSpeed's `optimizer` and `scheduler` blocks, whose `params` DeepSpeed hands to a constructor unread.

The constructors' signatures say which there are, so that a mistyped one is named here instead of ending as a TypeError
on every rank, or as nothing at all.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, create_model

from zero_tp.errors import ConfigError, did_you_mean, shown
from zero_tp.validation import Block, Count, NonNegative, Positive, validate

Below1 = Annotated[float, Field(ge=0, lt=1)]


class TypedBlock(Block):
    type: str
    params: dict[str, Any] = Field(default_factory=dict)


class OptimizerBlock(TypedBlock):
    legacy_fusion: bool = False


OPTIMIZERS = ("Adam", "AdamW", "SGD")
"""Element-wise optimizers: on a shard of a tensor, or of ZeRO's flat buffer, they do what they do on the whole."""

REFUSED_OPTIMIZERS = {
    "Lamb": "its trust ratio needs the norm of a whole tensor, and a rank holds a shard",
    "Muon": "it orthogonalises a whole matrix, and a TP rank holds a shard of it",
    "Lion": "DeepSpeed's moves weights whose gradient is zero, as those of a token that no batch has",
    "Adagrad": "torch's makes its states for the model's own tensors, which DeepSpeed replaces",
    "Adafactor": "it factors the moments of a whole matrix, and a rank holds a shard",
    **dict.fromkeys(("MuAdam", "MuAdamW", "MuSGD"), "muP needs base shapes, which the model does not set"),
    **dict.fromkeys(("OneBitAdam", "ZeroOneAdam", "OneBitLamb"), "DeepSpeed removed the 1-bit optimizers"),
}

SCHEDULERS = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")

TYPES: dict[str, Any] = {
    **dict.fromkeys(("lr", "weight_decay"), NonNegative),
    "eps": Annotated[float, Field(gt=0)],
    "betas": tuple[Below1, Below1],
    **dict.fromkeys(("momentum", "dampening"), Below1),
    **dict.fromkeys(("foreach", "fused"), bool | None),
    **dict.fromkeys(
        ("lr_range_test_min_lr", "lr_range_test_step_rate", "cycle_min_lr", "cycle_max_lr", "decay_lr_rate"),
        NonNegative,
    ),
    **dict.fromkeys(("decay_mom_rate", "warmup_min_lr", "warmup_max_lr"), NonNegative),
    **dict.fromkeys(("lr_range_test_step_size", "cycle_first_step_size"), Positive),
    **dict.fromkeys(("warmup_num_steps", "total_num_steps"), Positive),
    "cycle_second_step_size": Positive | None,
    **dict.fromkeys(("cycle_first_stair_count", "decay_step_size"), Count),
    "cycle_second_stair_count": Count | None,
    **dict.fromkeys(("cycle_min_mom", "cycle_max_mom", "warmup_min_ratio"), Below1),
    "cos_min_ratio": Annotated[float, Field(ge=0, le=1)],
    "warmup_type": Literal["log", "linear"],
}
"""The ranges of arguments. The others are as their defaults: true or false, or a number."""

REFUSED_ARGUMENTS = {
    "torch": {"capturable", "differentiable", "decoupled_weight_decay"},
    "deepspeed": {"amsgrad"},  # raises in FusedAdam, and DeepSpeed's CPU optimizers ignore it
}
"""Arguments that can't be given, by the library that has the constructor."""

NO_DECAY = (NonNegative, 0.0)
"""Type and default of `weight_decay`: the engine gives every constructor a decay of its own, 0 unless it is written."""

IMPLEMENTATION = ("torch_adam", "fused", "foreach")
"""Arguments that say by which code an Adam is computed, and not what."""

FUSED_ADAM = "FusedAdamBuilder"

ENGINE_ARGUMENTS = {"params", "model_params", "adam_w_mode", "adamw_mode", "optimizer", "last_batch_iteration"}
"""Arguments that DeepSpeed gives itself."""


def _params(constructor: Callable[..., Any], required: str, **more: Any) -> type[BaseModel]:
    """Return the model of what `params` may hold for a constructor, `required` among them whatever the default."""
    excluded = ENGINE_ARGUMENTS | REFUSED_ARGUMENTS[constructor.__module__.partition(".")[0]]
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(constructor).parameters.items():
        if name not in excluded:
            needed = name == required or parameter.default is parameter.empty
            usual = bool if isinstance(parameter.default, bool) else float
            fields[name] = (TYPES.get(name, usual), ... if needed else parameter.default)
    return create_model("Params", __base__=Block, **{**fields, **more})


@functools.cache
def optimizer_params(name: str, torch_adam: bool, offload: bool) -> type[BaseModel]:
    """Return the arguments of the class that DeepSpeed builds (`DeepSpeedEngine._configure_basic_optimizer`).

    Args:
        name: in lower case, one of OPTIMIZERS.
        torch_adam: of the block's `params`.
        offload: see `check_optimizer`.
    """
    import torch.optim
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

    if name in ("adam", "adamw"):
        adam: Any = torch.optim.AdamW if torch_adam else DeepSpeedCPUAdam if offload else FusedAdam
        return _params(adam, "lr", weight_decay=NO_DECAY, torch_adam=(bool, False), adam_w_mode=(bool, True))
    return _params(torch.optim.SGD, "lr", weight_decay=NO_DECAY)


@functools.cache
def scheduler_params(name: str) -> type[BaseModel]:
    """Return the arguments of a scheduler of DeepSpeed."""
    from deepspeed.runtime import lr_schedules

    # WarmupDecayLR's own maximum is 0.001, whatever `optimizer.params.lr` says; WarmupLR's is that rate.
    optional = name == "WarmupLR"
    more = {"warmup_max_lr": (NonNegative | None, None)} if optional else {}
    required = "" if optional else "warmup_max_lr"
    return _params(getattr(lr_schedules, name), required, **more)


def check_optimizer(block: OptimizerBlock, offload: bool) -> BaseModel:
    """Return the `params` of the `optimizer` block, typed.

    Args:
        offload: the optimizer's states live on the CPU, which selects other classes.

    Raises:
        ConfigError: see `validate`; a type that is unknown, removed, or not element-wise.
    """
    name, lower = block.type, block.type.lower()
    refused = {other.lower(): reason for other, reason in REFUSED_OPTIMIZERS.items()}
    if lower in refused:
        use = f"use one of {', '.join(OPTIMIZERS)}"
        raise ConfigError("optimizer.type", f"{shown(name)} is refused: {refused[lower]}", use)
    if lower not in ("adam", "adamw") and name != "SGD":
        raise ConfigError("optimizer.type", f"{shown(name)} is unknown", did_you_mean(name, OPTIMIZERS))
    model = optimizer_params(lower, bool(block.params.get("torch_adam")), offload)
    params = validate(model, block.params, "optimizer.params")
    if lower == "adamw" and block.params.get("adam_w_mode") is False:
        problem = 'false is ignored by DeepSpeed when type is "AdamW"'
        raise ConfigError("optimizer.params.adam_w_mode", problem, 'use "Adam" with it, or drop it')
    return params


def check_scheduler(block: TypedBlock) -> BaseModel:
    """Return the `params` of the `scheduler` block, typed.

    Raises:
        ConfigError: see `validate`; an unknown type; fewer steps in total than in the warm-up.
    """
    if block.type not in SCHEDULERS:
        raise ConfigError("scheduler.type", f"{shown(block.type)} is unknown", did_you_mean(block.type, SCHEDULERS))
    params = validate(scheduler_params(block.type), block.params, "scheduler.params")
    total, warmup = getattr(params, "total_num_steps", None), getattr(params, "warmup_num_steps", None)
    if total is not None and warmup is not None and total < warmup:
        problem = f"{total} steps in total, but warmup_num_steps is {warmup}"
        raise ConfigError("scheduler.params.total_num_steps", problem, "warm up for fewer steps, or train longer")
    return params


def choose_implementation(values: dict[str, Any]) -> None:
    """Write into the `optimizer` block what computes an Adam, where it leaves that open: torch's fused kernel.

    It needs no compiler and takes one pass over memory. DeepSpeed's own default is built by a compiler at the first
    start; it stays where an argument is given that it alone has. Offloaded states are updated by DeepSpeed's CPUAdam.
    """
    block = values.get("optimizer", {})
    name, params = block.get("type", "").lower(), block.get("params")
    if name not in ("adam", "adamw") or params is None or _offloads_optimizer(values):
        return
    torch_fields, deepspeed_fields = (
        optimizer_params(name, torch, False).model_fields.keys() for torch in (True, False)
    )
    if params.keys() & (deepspeed_fields - torch_fields):
        return
    if params.setdefault("torch_adam", True) is True and "foreach" not in params:
        params.setdefault("fused", True)


def builder_name(values: dict[str, Any]) -> str | None:
    """Return the builder of the op that the optimizer of DeepSpeed's config needs; None where torch has it."""
    optimizer = values["optimizer"]
    if optimizer["type"].lower() not in ("adam", "adamw") or optimizer.get("params", {}).get("torch_adam"):
        return None
    return "CPUAdamBuilder" if _offloads_optimizer(values) else FUSED_ADAM


def _offloads_optimizer(values: dict[str, Any]) -> bool:
    offload = values.get("zero_optimization", {}).get("offload_optimizer") or {}
    return bool(offload.get("device", "none") != "none")
