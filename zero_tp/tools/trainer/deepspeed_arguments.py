"""Training arguments that DeepSpeed's config has keys for.

A key that the config leaves out counts as "auto".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from accelerate.utils.deepspeed import HfDeepSpeedConfig

from zero_tp.base.errors import UserError
from zero_tp.base.settings.keys import look_up
from zero_tp.base.settings.optimizer import ELEMENTWISE, offloads_optimizer, params_model
from zero_tp.base.settings.resolve import BATCH_FIELDS
from zero_tp.base.settings.schedule import DEEPSPEED_SCHEDULES

OPTIMIZER_ARGUMENTS = ("lr", "betas", "eps", "weight_decay")
SCHEDULER_ARGUMENTS = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
"""Keys of `params` that transformers fills in where they are "auto"."""
WITHOUT_KEY = {"optimizer": "optim_args", "scheduler": "lr_scheduler_kwargs"}
"""Block of DeepSpeed's config → the training argument that a run with the block would not read."""


def fill_left_out_keys(deepspeed_config: Any, args: Any) -> None:
    """Give each left-out key of DeepSpeed's config the value of its training argument, in place.

    transformers fills in only keys that are "auto": `weight_decay` beside an `optimizer` block
    without that key would have no effect, and DeepSpeed would use a default of its own.

    Args:
        deepspeed_config: transformers' `HfTrainerDeepSpeedConfig`.

    Raises:
        UserError: a training argument that has no key, beside the block that replaces it.
    """
    # What a key of DeepSpeed's config becomes, with `weight_decay=0.1` in TrainingArguments:
    #
    #     written          transformers     here
    #     "auto"           0.1              0.1
    #     0.05             an error         an error: they disagree
    #     left out         DeepSpeed's own  0.1
    values = deepspeed_config.config
    for block, argument in WITHOUT_KEY.items():
        if block in values and getattr(args, argument, None):
            raise UserError(
                f"TrainingArguments.{argument}: DeepSpeed's config has a block {block}, which "
                "replaces it; write the "
                "values into its params, or leave the block out"
            )
    # accelerate has set the accumulation where it was left out
    written = HfDeepSpeedConfig(args.deepspeed).config if args.deepspeed else values
    for path in _argument_keys(values):
        *blocks, key = path.split(".")
        ours = values
        theirs = written
        for block in blocks:
            ours = ours.setdefault(block, {})
            theirs = theirs.get(block, {})
        # A `params` that is no object is refused later.
        if isinstance(ours, dict) and key not in theirs:
            ours[key] = "auto"
    # it has compared the written values already, and does so again
    deepspeed_config.mismatches.clear()
    deepspeed_config.trainer_config_process(args)


def _argument_keys(values: dict[str, Any]) -> Iterator[str]:
    """Yield the dotted keys of a config that stand for training arguments, in blocks that it
    has.
    """
    yield from BATCH_FIELDS
    yield from (
        f"{dtype}.enabled" for dtype in ("bf16", "fp16") if isinstance(values.get(dtype), dict)
    )
    optimizer = look_up(values, "optimizer.type")
    scheduler = look_up(values, "scheduler.type")
    if str(optimizer).lower() in map(str.lower, ELEMENTWISE):
        torch_adam = bool(look_up(values, "optimizer.params.torch_adam"))
        model = params_model(str(optimizer).lower(), torch_adam, offloads_optimizer(values))
        yield from _fields("optimizer", OPTIMIZER_ARGUMENTS, model.model_fields)
    if scheduler in DEEPSPEED_SCHEDULES:
        yield from _fields(
            "scheduler", SCHEDULER_ARGUMENTS, DEEPSPEED_SCHEDULES[scheduler].model_fields
        )


def _fields(block: str, names: Iterable[str], fields: Iterable[str]) -> Iterator[str]:
    return (f"{block}.params.{name}" for name in names if name in fields)
