"""How far a run is, in numbers that all ranks share: counts, the schedule, learning rates, the loss scale."""

from __future__ import annotations

from typing import Any

from zero_tp.zero.stages import ZeroEngine

COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def progress_of(zero: ZeroEngine) -> dict[str, Any]:
    """Return the progress as a checkpoint's manifest keeps it."""
    return {
        "optimizer_steps": zero.states().steps,
        "counters": {name: getattr(zero.engine, name) for name in COUNTERS},
        "schedule": zero.scheduler.state_dict() if zero.scheduler is not None else None,
        "learning_rates": [float(group["lr"]) for group in zero.optimizer.param_groups],
        "loss_scale": loss_scale_of(zero.optimizer),
    }


def restore_progress(zero: ZeroEngine, progress: dict[str, Any]) -> None:
    """Bring an engine to what `progress_of` gave."""
    zero.states().set_steps(progress["optimizer_steps"])
    for name, value in progress["counters"].items():
        setattr(zero.engine, name, value)
    if zero.scheduler is not None and progress["schedule"] is not None:
        zero.scheduler.load_state_dict(progress["schedule"])
    for group, rate in zip(zero.optimizer.param_groups, progress["learning_rates"], strict=True):
        group["lr"] = rate
    set_loss_scale(zero.optimizer, progress["loss_scale"])


def _loss_scaler(optimizer: Any) -> Any:
    """Return what holds the loss scale of fp16: an object of the ZeRO optimizers, or of the ones without ZeRO."""
    return getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", None)


def loss_scale_of(optimizer: Any) -> dict[str, Any]:
    """Return the loss scale, and what decides when it changes next."""
    scaler = _loss_scaler(optimizer)
    return {name: getattr(scaler, name) for name in LOSS_SCALE if hasattr(scaler, name)}


def set_loss_scale(optimizer: Any, saved: dict[str, Any]) -> None:
    """Bring the loss scale to what `loss_scale_of` gave, as far as this optimizer's has the same parts."""
    scaler = _loss_scaler(optimizer)
    for name, value in saved.items():
        if hasattr(scaler, name):
            setattr(scaler, name, value)
