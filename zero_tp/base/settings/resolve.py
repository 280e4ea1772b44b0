"""Fill in "auto", the batch sizes and keys that DeepSpeed requires.

"auto" is Hugging Face's word for a value that the run decides; DeepSpeed itself doesn't know it.
world = tensor × data, global batch = micro × accumulation × data.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from zero_tp.base.errors import ConfigError, shown
from zero_tp.base.settings.keys import leaves, look_up, parent_block
from zero_tp.base.settings.schedule import (
    LENGTHS,
    SCHEDULES,
    TOKEN_LENGTHS,
    WARMUPS,
    check_scheduler,
)
from zero_tp.base.settings.timeline import Timeline
from zero_tp.base.strict_json import parse_json
from zero_tp.base.validation import MISSING

BATCH_FIELDS = {
    "train_batch_size": "total",
    "train_micro_batch_size_per_gpu": "micro",
    "gradient_accumulation_steps": "accumulation",
}
"""DeepSpeed's keys and the fields of `BatchSizes`."""


@dataclasses.dataclass(frozen=True)
class SavedStart:
    """What the config of a resumed run takes from its checkpoint.

    Attributes:
        config: `RunConfig.resolved()` of the earlier start.
        model: the model's config, used if the directory of `from_pretrained` is gone.
        updates: steps that have updated the weights.
    """

    config: dict[str, Any]
    model: dict[str, Any]
    updates: int


# The three sizes of ZeRO are those of transformers' DeepSpeed integration
# (`trainer_config_finalize`).
AUTO: dict[str, str] = {
    "gradient_clipping": "1.0",
    "fp16.enabled": "false",
    "bf16.enabled": "true unless fp16 is enabled",
    "optimizer.params.betas": "[0.9, 0.999]",
    "optimizer.params.eps": "1e-8",
    "optimizer.params.weight_decay": "0.0",
    **{
        f"scheduler.params.{name}": "the steps that it rules + 1 (`zero_tp.training.steps` + 1 "
        "without stages)"
        for name in LENGTHS
    },
    **{
        f"scheduler.params.{name}": "1 % of the schedule's steps, at least 1, as of the first start"
        for name in WARMUPS
    },
    "scheduler.params.warmup_min_lr": "0.0",
    "scheduler.params.warmup_max_lr": "`optimizer.params.lr`",
    "zero_optimization.reduce_bucket_size": "hidden²",
    "zero_optimization.stage3_prefetch_bucket_size": "0.9 × hidden²",
    "zero_optimization.stage3_param_persistence_threshold": "10 × hidden",
}
"""Keys other than batch sizes that may be "auto", in the order of filling → the JSON value or
its description.
"""

DECIDED_LATER = (
    "data_types.keep_in_fp32_modules",
    "zero_tp.compile",
    "zero_tp.logging.interval",
    "zero_tp.training.keep_freed_memory",
)
"""Keys whose "auto" DeepSpeed or the run itself resolves."""


def pop_autos(values: dict[str, Any]) -> list[str]:
    """Remove from `values` each key whose "auto" can be resolved; return these keys."""
    keys = []
    for path in (*BATCH_FIELDS, *AUTO):
        block, name = parent_block(values, path)
        if isinstance(block, dict) and block.get(name) == "auto":
            # Removed before types are checked, because no number or list is the word "auto".
            del block[name]
            keys.append(path)
    return keys


def unresolvable_autos(value: Any, path: str = "") -> Iterator[ConfigError]:
    """Yield an error for each "auto" that cannot be resolved."""
    for key, leaf in leaves(value, path):
        if leaf == "auto" and key not in DECIDED_LATER:
            yield ConfigError(key, '"auto" is not known for this key', "write the value")


def suggest_auto(error: ConfigError) -> ConfigError:
    """Return the error, with "auto" as the remedy if it is a missing key that `fill` can
    resolve.
    """
    if error.problem != MISSING or error.key not in AUTO:
        return error
    return ConfigError(error.key, MISSING, f'write "auto" ({AUTO[error.key]}) or a value')


def fill(
    values: dict[str, Any],
    auto_keys: Sequence[str],
    batch: BatchSizes,
    steps: int,
    hidden_size: int,
    saved: SavedStart | None = None,
) -> list[str]:
    """Fill in "auto", batch sizes and required keys of DeepSpeed's part in place; return lines for
    the log.

    Args:
        values: DeepSpeed's part, types checked, without the keys that are "auto".
        auto_keys: the removed keys, in the order of `AUTO`.
        steps: those that the schedule rules: `zero_tp.training.steps`, or those of the stages
            without a schedule of their own.
        hidden_size: of the model.
        saved: the state that a resumed run continues from.
    """
    lines = []
    for path in (key for key in auto_keys if key in AUTO):
        block, name = parent_block(values, path)
        block[name] = _auto_value(path, values, steps, hidden_size)
        earlier = None if saved is None else look_up(saved.config, path)
        # A resumed run keeps its warm-up, and its schedule's length once the rate falls: both would
        # move the rate at once.
        if saved is None or earlier in (None, block[name]):
            continue
        if name in WARMUPS:
            block[name] = earlier
        elif name in LENGTHS:
            block[name], line = _schedule_length(path, block[name], earlier, saved)
            lines.append(line)
    values.setdefault("gradient_clipping", 1.0)
    sizes = {key: getattr(batch, field) for key, field in BATCH_FIELDS.items()}
    values.update({key: size for key, size in sizes.items() if size is not None})
    return lines


def _auto_value(path: str, values: dict[str, Any], steps: int, hidden_size: int) -> Any:
    """Return the value of a key of `AUTO`."""
    name = path.rpartition(".")[2]
    # Step k trains at the schedule's value at k, so the last step's rate is still above the
    # schedule's end.
    if name in LENGTHS:
        return steps + 1
    if name in WARMUPS:
        lengths = (look_up(values, f"scheduler.params.{length}") for length in LENGTHS)
        return max(1, int(next((length for length in lengths if length is not None), steps)) // 100)
    computed = {
        "bf16.enabled": look_up(values, "fp16.enabled") is not True,
        "scheduler.params.warmup_max_lr": look_up(values, "optimizer.params.lr"),
        "zero_optimization.reduce_bucket_size": hidden_size**2,
        "zero_optimization.stage3_prefetch_bucket_size": hidden_size**2 * 9 // 10,
        "zero_optimization.stage3_param_persistence_threshold": 10 * hidden_size,
    }
    return computed[path] if path in computed else parse_json(AUTO[path])


def pop_token_lengths(values: dict[str, Any]) -> dict[str, Any]:
    """Remove the lengths in tokens from the `scheduler` block of `values`, and return them."""
    params = look_up(values, "scheduler.params")
    kind = look_up(values, "scheduler.type")
    if not isinstance(params, dict) or not isinstance(kind, str) or kind not in SCHEDULES:
        return {}  # its own error comes later
    return {name: params.pop(name) for name in TOKEN_LENGTHS if name in params}


def check_token_lengths(values: dict[str, Any], lengths: dict[str, Any]) -> None:
    """Check the lengths that `pop_token_lengths` has removed.

    Raises:
        ConfigError: one is no number of tokens, its schedule has no such phase, or has it in steps.
    """
    params = look_up(values, "scheduler.params")
    kind = look_up(values, "scheduler.type")
    for name, tokens in lengths.items():
        key = f"scheduler.params.{name}"
        argument = _argument_of(name, kind)
        if argument is None:
            phase = name.removesuffix("_tokens").replace("warmup", "warm-up")
            raise ConfigError(key, f'a "{kind}" schedule has no {phase} phase', "leave it out")
        if argument in params:
            raise ConfigError(key, f"given with {argument}", "give one of them")
        if type(tokens) not in (int, float) or tokens < 1 or tokens != int(tokens):
            raise ConfigError(key, f"{shown(tokens)} is not a number of tokens", "write an integer")


def _argument_of(name: str, kind: str) -> str | None:
    """Return the argument in steps of a schedule for a length in tokens; None if it has none."""
    fields = SCHEDULES[kind].model_fields
    return next((argument for argument in TOKEN_LENGTHS[name] if argument in fields), None)


def token_arguments(values: dict[str, Any], lengths: dict[str, Any]) -> list[str]:
    """Return the dotted keys of the arguments that lengths in tokens stand for."""
    kind = look_up(values, "scheduler.type")
    return [f"scheduler.params.{_argument_of(name, kind)}" for name in lengths]


def set_token_lengths(
    values: dict[str, Any], lengths: dict[str, Any], timeline: Timeline | None, steps: range
) -> None:
    """Set the arguments in steps of a `scheduler` block that are given in tokens.

    The steps are as many as consume the tokens, rounded up: of a warm-up from the first step on, of
    a decay up to the last one.

    Args:
        timeline: of the run; None: the global batch is not known.
        steps: those that the schedule rules; its own steps count from the first of them.
    """
    for name, tokens in lengths.items():
        if timeline is None:
            problem = "needs the global batch, which the number of ranks decides"
            raise ConfigError(
                f"scheduler.params.{name}", problem, "give --world-size N, or train_batch_size"
            )
        block = values["scheduler"]
        params = block["params"]
        argument = _argument_of(name, block["type"])
        assert argument is not None
        if name == "warmup_tokens":
            params[argument] = timeline.steps_from(steps.start, int(tokens))
            continue
        length = next((params[key] for key in LENGTHS if key in params), len(steps) + 1)
        # Its length counts one step more than it rules ("auto").
        params[argument] = max(1, timeline.steps_until(steps.start + int(length) - 2, int(tokens)))


def fill_schedule(
    block: dict[str, Any], timeline: Timeline, steps: range, rate: Any
) -> dict[str, Any]:
    """Return a stage's `scheduler` block with "auto" and lengths in tokens filled in.

    Args:
        steps: those that the schedule rules.
        rate: `optimizer.params.lr`.
    """
    values = {"scheduler": copy.deepcopy(block), "optimizer": {"params": {"lr": rate}}}
    auto_keys = [key for key in pop_autos(values) if key.startswith("scheduler.")]
    for key in auto_keys:
        parent, name = parent_block(values, key)
        parent[name] = _auto_value(key, values, len(steps), 0)
    lengths = pop_token_lengths(values)
    check_token_lengths(values, lengths)
    set_token_lengths(values, lengths, timeline, steps)
    filled: dict[str, Any] = values["scheduler"]
    return filled


def _schedule_length(path: str, length: int, earlier: int, saved: SavedStart) -> tuple[int, str]:
    """Return the length of an "auto" schedule of a resumed run and a line for the log.

    It follows `training.steps` until the rate begins to fall; after that, a new length would change
    the rate.
    """
    schedule = check_scheduler(saved.config).params.model_dump()
    # The rate begins to fall after the warm-up or, if the schedule has a stable phase, after that.
    start = next(schedule[name] for name in WARMUPS if name in schedule)
    if "num_decay_steps" in schedule:
        start = schedule["num_training_steps"] - schedule["num_decay_steps"]
    if saved.updates <= start:
        return length, f"{path}: {length}, which follows zero_tp.training.steps ({earlier} before)"
    remedy = f"--set {path}={length} follows it, and moves the rate at once"
    return (
        earlier,
        f"{path}: stays {earlier}, because the rate has been falling since step {start}; {remedy}",
    )


@dataclasses.dataclass(frozen=True)
class BatchSizes:
    """Samples per optimizer step; None if the size depends on an unknown world size."""

    data_parallel: int | None
    micro: int | None
    accumulation: int | None
    total: int | None


def resolve_batch(config: dict[str, Any], data: int | None) -> BatchSizes:
    """Compute the missing batch sizes; accumulation is 1 if nothing determines it.

    With 4 replicas:

        total 64, micro 4               accumulation 64 / (4 · 4) = 4
        micro 4, accumulation 2         total 4 · 2 · 4 = 32
        total 64                        accumulation 1, micro 64 / 4 = 16

    Args:
        config: the file's object, types checked.
        data: number of data-parallel replicas, or None when it isn't known.
    """
    total, micro, accumulation = (
        None if (size := config.get(key)) is None else int(size) for key in BATCH_FIELDS
    )
    if total is None and micro is None:
        raise ConfigError("train_micro_batch_size_per_gpu", MISSING, "give it, or train_batch_size")
    # With two sizes missing, one has to be chosen: a step is then one micro-batch.
    if total is None or micro is None:
        accumulation = accumulation or 1
    factors = {"micro": micro, "accumulation": accumulation, "data": data}
    sizes = {name: size for name, size in factors.items() if size is not None}
    product = math.prod(sizes.values())
    unknown = [name for name in factors if name not in sizes]
    if total is None:
        return BatchSizes(data, micro, accumulation, None if unknown else product)
    listed = " × ".join(f"{name} {size}" for name, size in sizes.items())
    if not unknown and product != total:
        remedy = f'write {product}, or "auto" for one of the three'
        raise ConfigError("train_batch_size", f"{total} ≠ {listed} (= {product})", remedy)
    if total % product:
        problem = f"{total} ≠ {listed} × {unknown[0]} {total / product:.4g}"
        raise ConfigError("train_batch_size", problem, f"use a multiple of {product}")
    if data is not None:
        factors.update(dict.fromkeys(unknown, total // product))
    return BatchSizes(data, factors["micro"], factors["accumulation"], total)
