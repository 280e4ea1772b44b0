"""Check each key of a config file by itself: all that are wrong, before any combination."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from zero_tp.base.constants import MODEL_KEY
from zero_tp.base.errors import ConfigError
from zero_tp.base.settings.keys import look_up
from zero_tp.base.settings.resolve import (
    BATCH_FIELDS,
    BatchSizes,
    SavedStart,
    check_token_lengths,
    pop_token_lengths,
    resolve_batch,
    token_arguments,
    unresolvable_autos,
)
from zero_tp.base.settings.schema import ZeroTP
from zero_tp.base.settings.timeline import Timeline
from zero_tp.base.validation import ErrorCollector, validate
from zero_tp.base.weight_files import is_hub_name, pin_commit, pin_to_first_start
from zero_tp.engine.settings.parse import parse_settings
from zero_tp.parallel.topology import check_expert_size, data_parallel_size
from zero_tp.run.config.model_block import FROM_PRETRAINED, check_model, model_config
from zero_tp.run.config.stage_lengths import make_timeline
from zero_tp.run.config.stages import RunStage, name_stages, resolve_stages, schedule_stages

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


TOKENIZER_KEY = "zero_tp.tokenizer"


class CheckedKeys(NamedTuple):
    """The parts of a file whose keys are valid by themselves.

    `timeline` is None if the global batch is not known. `token_lengths`: see `pop_token_lengths`.
    """

    zero_tp: ZeroTP
    hf_config: PreTrainedConfig
    batch: BatchSizes
    stages: tuple[RunStage, ...]
    timeline: Timeline | None
    token_lengths: dict[str, Any]


def check_keys(
    values: dict[str, Any],
    block: Any,
    auto_keys: Sequence[str],
    world_size: int | None,
    saved: SavedStart | None,
) -> CheckedKeys:
    """Check every key by itself.

    Args:
        values: DeepSpeed's part.
        block: the `zero_tp` block.
    """
    collector = ErrorCollector()
    zero_tp = None
    hf_config = None
    batch = None
    data = None
    stages: tuple[RunStage, ...] = ()
    timeline = None
    lengths = pop_token_lengths(values)
    with collector:
        check_token_lengths(values, lengths)
    with collector:
        # Each block of this function adds its errors to the collector, so that one start shows all
        # wrong keys. This one parses for its errors only: the sections are made after `fill`.
        parse_settings(values, auto_keys=(*auto_keys, *token_arguments(values, lengths)))
    with collector:
        zero_tp = _check_block(block)
    if zero_tp is not None and world_size is not None:
        with collector:
            data = data_parallel_size(world_size, zero_tp.parallel.tensor)
            check_expert_size(zero_tp.parallel.expert, data)
    # A sum of batch sizes that are wrong by themselves would only repeat their errors.
    if not any(error.key.partition(".")[0] in BATCH_FIELDS for error in collector.errors):
        with collector:
            batch = resolve_batch(values, data)
    if zero_tp is not None and batch is not None:
        with collector:
            rate = look_up(values, "optimizer.params.lr")
            zero_tp, stages, timeline = _plan_stages(zero_tp, batch, rate)
    model = look_up(block, "model")
    from_hub = isinstance(model, dict) and is_hub_name(model.get(FROM_PRETRAINED, ""))
    if not (collector.errors and from_hub):  # with other errors, a download would be in vain
        with collector:
            if zero_tp is not None:
                zero_tp, hf_config = _pin_and_check_model(zero_tp, saved, data)
            # The rest of the block is wrong. Errors of the model are shown nevertheless.
            elif isinstance(model, dict):
                model_config(model)
    collector.raise_all()
    assert zero_tp is not None and hf_config is not None and batch is not None
    return CheckedKeys(zero_tp, hf_config, batch, stages, timeline, lengths)


def _plan_stages(
    zero_tp: ZeroTP, batch: BatchSizes, rate: Any
) -> tuple[ZeroTP, tuple[RunStage, ...], Timeline | None]:
    """Return the block with the number of steps, its stages, and their timeline.

    Args:
        rate: `optimizer.params.lr`.
    """
    stages = resolve_stages(zero_tp, batch)
    training = zero_tp.training
    if batch.total is None:
        for name in ("tokens", "batch_size_rampup"):
            if getattr(training, name) is not None:
                problem = "needs the global batch, which the number of ranks decides"
                remedy = "give --world-size N, or train_batch_size"
                raise ConfigError(f"zero_tp.training.{name}", problem, remedy)
        return zero_tp, stages, None
    timeline = make_timeline(zero_tp, stages)
    steps = training.model_copy(update={"steps": timeline.steps, "tokens": None})
    return (
        zero_tp.model_copy(update={"training": steps}),
        schedule_stages(zero_tp, stages, timeline, rate),
        timeline,
    )


def _check_block(block: Any) -> ZeroTP:
    """Return the `zero_tp` block of a file, typed."""
    if block is None:
        raise ConfigError(
            "zero_tp", "required, but not given", "add the block that docs/config.md describes"
        )
    try:
        zero_tp = validate(ZeroTP, block, "zero_tp", unresolvable_autos(block, "zero_tp"))
    except ConfigError as error:
        raise name_stages(error) from None
    steps = zero_tp.training.steps
    tokens = zero_tp.training.tokens
    # Stages may have lengths of their own.
    if (steps, tokens) == (None, None) and zero_tp.training.stages:
        return zero_tp
    if (steps is None) == (tokens is None):
        problem = (
            "required, but not given" if steps is None else "given with zero_tp.training.tokens"
        )
        raise ConfigError(
            "zero_tp.training.steps", problem, "give the steps or the tokens of the whole run"
        )
    return zero_tp


def _pin_and_check_model(
    zero_tp: ZeroTP, saved: SavedStart | None, data: int | None
) -> tuple[ZeroTP, PreTrainedConfig]:
    """Pin hub names to the commits of the run's first start.

    Returns the block and the model's config.

    Args:
        data: DP degree, if it is known.
    """
    model = zero_tp.model
    key = f"{MODEL_KEY}.{FROM_PRETRAINED}"
    earlier = None if saved is None else saved.config
    if FROM_PRETRAINED in model:
        # The commit of the first start: a name without one follows the hub's branch, and a resumed
        # run would change its model.
        model[FROM_PRETRAINED] = pin_to_first_start(model[FROM_PRETRAINED], look_up(earlier, key))
    hf_config = check_model(zero_tp, None if saved is None else saved.model, data)
    if FROM_PRETRAINED in model:
        model[FROM_PRETRAINED] = pin_commit(model[FROM_PRETRAINED], key)
    if zero_tp.tokenizer is not None:
        tokenizer = pin_to_first_start(zero_tp.tokenizer, look_up(earlier, TOKENIZER_KEY))
        zero_tp = zero_tp.model_copy(update={"tokenizer": tokenizer})
    return zero_tp, hf_config
