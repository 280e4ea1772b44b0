"""DeepSpeed's `optimizer` and `scheduler` blocks, whose `params` DeepSpeed hands to a constructor unread.

Each class holds the keyword arguments of one constructor (or of the part that DeepSpeed lets through), so that a
mistyped one is named here instead of ending as a TypeError on every rank, or as nothing at all.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from zero_tp.config.schema import Block
from zero_tp.config.validation import validate
from zero_tp.errors import ConfigError, did_you_mean, shown

Rate = Annotated[float, Field(ge=0)]
Below1 = Annotated[float, Field(ge=0, lt=1)]
Steps = Annotated[int, Field(gt=0)]


class OptimizerBlock(Block):
    type: str
    params: dict[str, Any] = Field(default_factory=dict)
    legacy_fusion: bool = False


class SchedulerBlock(Block):
    type: str
    params: dict[str, Any] = Field(default_factory=dict)


class _Lr(Block):
    lr: Rate
    weight_decay: Rate = 0.0


class _Adam(_Lr):
    betas: tuple[Below1, Below1] = (0.9, 0.999)
    eps: Rate = 1e-8
    torch_adam: bool = False
    adam_w_mode: bool = True


class TorchAdam(_Adam):
    """torch.optim.Adam and AdamW (`torch_adam: true`)."""

    amsgrad: bool = False
    maximize: bool = False
    foreach: bool | None = None
    fused: bool | None = None


class FusedAdam(_Adam):
    """deepspeed.ops.adam.FusedAdam. Its `amsgrad` raises."""

    bias_correction: bool = True
    set_grad_none: bool = True


class CpuAdam(_Adam):
    """deepspeed.ops.adam.DeepSpeedCPUAdam, used with optimizer offload. It ignores `amsgrad`."""

    bias_correction: bool = True
    fp32_optimizer_states: bool = True


class TorchAdagrad(_Lr):
    lr_decay: Rate = 0.0
    initial_accumulator_value: Rate = 0.0
    eps: Rate = 1e-10
    foreach: bool | None = None
    maximize: bool = False
    fused: bool | None = None


class CpuAdagrad(_Lr):
    """deepspeed.ops.adagrad.DeepSpeedCPUAdagrad. It ignores `amsgrad`."""

    eps: Rate = 1e-10
    fp32_optimizer_states: bool = True


class FusedLion(_Lr):
    betas: tuple[Below1, Below1] = (0.9, 0.999)
    set_grad_none: bool = True


class CpuLion(_Lr):
    betas: tuple[Below1, Below1] = (0.9, 0.999)
    fp32_optimizer_states: bool = True


class TorchSgd(_Lr):
    momentum: Rate = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    maximize: bool = False
    foreach: bool | None = None
    fused: bool | None = None


OPTIMIZERS = ("Adam", "AdamW", "Adagrad", "Lion", "SGD")
"""Element-wise optimizers: on a shard of a tensor, or of ZeRO's flat buffer, they do what they do on the whole."""

REFUSED_OPTIMIZERS = {
    "Lamb": "its trust ratio needs the norm of a whole tensor, and a rank holds a shard",
    "Muon": "it orthogonalises a whole matrix, and a TP rank holds a shard of it",
    "Adafactor": "it factors the moments of a whole matrix, and a rank holds a shard",
    "MuAdam": "muP needs base shapes, which the model does not set",
    "MuAdamW": "muP needs base shapes, which the model does not set",
    "MuSGD": "muP needs base shapes, which the model does not set",
    "OneBitAdam": "DeepSpeed removed the 1-bit optimizers",
    "ZeroOneAdam": "DeepSpeed removed the 1-bit optimizers",
    "OneBitLamb": "DeepSpeed removed the 1-bit optimizers",
}


class LRRangeTest(Block):
    lr_range_test_min_lr: Rate = 1e-3
    lr_range_test_step_size: Steps = 2000
    lr_range_test_step_rate: float = 1.0
    lr_range_test_staircase: bool = False


class OneCycle(Block):
    cycle_min_lr: Rate
    cycle_max_lr: Rate
    decay_lr_rate: Rate = 0.0
    cycle_first_step_size: Steps = 2000
    cycle_second_step_size: Steps | None = None
    cycle_first_stair_count: Annotated[int, Field(ge=0)] = 0
    cycle_second_stair_count: Annotated[int, Field(ge=0)] | None = None
    decay_step_size: Annotated[int, Field(ge=0)] = 0
    cycle_momentum: bool = True
    cycle_min_mom: Below1 = 0.8
    cycle_max_mom: Below1 = 0.9
    decay_mom_rate: Rate = 0.0


class _Warmup(Block):
    warmup_num_steps: Steps = 1000
    warmup_type: Literal["log", "linear"] = "log"


class WarmupLR(_Warmup):
    warmup_min_lr: Rate = 0.0
    warmup_max_lr: Rate | None = None


class WarmupDecayLR(_Warmup):
    """`warmup_max_lr` is required here: DeepSpeed's default is 0.001, whatever `optimizer.params.lr` says."""

    total_num_steps: Steps
    warmup_min_lr: Rate = 0.0
    warmup_max_lr: Rate


class WarmupCosineLR(_Warmup):
    total_num_steps: Steps
    warmup_min_ratio: Below1 = 0.0
    cos_min_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0001


SCHEDULERS: dict[str, type[Block]] = {
    scheduler.__name__: scheduler for scheduler in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}


def check_optimizer(raw: Any, offload: bool) -> None:
    """Check the `optimizer` block. `offload`: the optimizer's states live on the CPU, which selects other classes.

    Raises:
        ConfigError: see `validate`; a type that is unknown, removed, or not element-wise.
    """
    block = validate(OptimizerBlock, raw, "optimizer")
    accepted = {name.lower(): name for name in OPTIMIZERS}
    refused = {name.lower(): reason for name, reason in REFUSED_OPTIMIZERS.items()}
    lower = block.type.lower()
    if lower in refused:
        use = f"use one of {', '.join(OPTIMIZERS)}"
        raise ConfigError("optimizer.type", f"{shown(block.type)} is refused: {refused[lower]}", use)
    if lower not in accepted or (lower == "sgd" and block.type != "SGD"):
        raise ConfigError("optimizer.type", f"{shown(block.type)} is unknown", did_you_mean(block.type, OPTIMIZERS))
    validate(_params_class(lower, bool(block.params.get("torch_adam")), offload), block.params, "optimizer.params")
    if lower == "adamw" and block.params.get("adam_w_mode") is False:
        problem = 'false is ignored by DeepSpeed when type is "AdamW"'
        raise ConfigError("optimizer.params.adam_w_mode", problem, 'use "Adam" with it, or drop it')


def _params_class(name: str, torch_adam: bool, offload: bool) -> type[BaseModel]:
    """The class that DeepSpeed 0.19 builds (`DeepSpeedEngine._configure_basic_optimizer`)."""
    if name in ("adam", "adamw"):
        return TorchAdam if torch_adam else CpuAdam if offload else FusedAdam
    if name == "adagrad":
        return CpuAdagrad if offload else TorchAdagrad
    if name == "lion":
        return CpuLion if offload else FusedLion
    return TorchSgd


def check_scheduler(raw: Any) -> None:
    """Check the `scheduler` block.

    Raises:
        ConfigError: see `validate`; an unknown type; fewer steps in total than in the warm-up.
    """
    block = validate(SchedulerBlock, raw, "scheduler")
    if block.type not in SCHEDULERS:
        raise ConfigError("scheduler.type", f"{shown(block.type)} is unknown", did_you_mean(block.type, SCHEDULERS))
    params = validate(SCHEDULERS[block.type], block.params, "scheduler.params")
    total, warmup = getattr(params, "total_num_steps", None), getattr(params, "warmup_num_steps", None)
    if total is not None and warmup is not None and total < warmup:
        problem = f"{total} steps in total, but warmup_num_steps is {warmup}"
        raise ConfigError("scheduler.params.total_num_steps", problem, "warm up for fewer steps, or train longer")
