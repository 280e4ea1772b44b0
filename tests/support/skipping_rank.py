"""A pretraining rank with non-finite gradients in every fifth step; the run skips those steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

EVERY = 5


def skip_steps(skips: Callable[[int], bool]) -> None:
    """Make the gradients of this process non-finite in each step for which `skips` is true."""
    from zero_tp.engine.engine import TrainingEngine

    run_step = TrainingEngine.run_step

    def step_with_overflow(engine: Any, *arguments: Any, **options: Any) -> None:
        parameters = (
            engine.model.parameters() if skips(engine.deepspeed_engine.global_steps + 1) else ()
        )
        hooks = [
            parameter.register_hook(lambda gradient: gradient * float("nan"))
            for parameter in parameters
        ]
        run_step(engine, *arguments, **options)
        for hook in hooks:
            hook.remove()

    TrainingEngine.run_step = step_with_overflow  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    skip_steps(lambda step: step % EVERY == 0)

    from zero_tp.commands import start

    start("pretrain", prog="python -m zero_tp.pretrain")
